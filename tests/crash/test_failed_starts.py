"""Workers that cannot start, or never get ready, and settings that name what is not there."""

import asyncio
import contextlib
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hermes_pool.errors import (
    HermesPoolError,
    TurnCancelledError,
    WorkerStartError,
    WorkerStartTimeoutError,
    WorkerUnusableError,
)
from tests.crash.outside import complaints, gone, gone_pid, hermes_of, lines, longest_stall, process_of, row_of
from tests.support import Faulty, FaultyProgram, OpenPool, quick, until

Fault = Callable[[Faulty, FaultyProgram, Path], dict[str, Any]]

LAUNCHERS = pytest.mark.parametrize("launcher", ["spawn", "portable"])
LIMIT_S = 1.5
STALL_S = 0.25
"""A loop that is held up is held up for the whole of a start; less than this is the machine's other work."""


def not_executable(faulty: Faulty, instead_of_python: FaultyProgram, folder: Path) -> dict[str, Any]:
    program = folder / "plain.txt"
    program.write_text("not a program")
    return {"worker_python": str(program)}


def no_program(faulty: Faulty, instead_of_python: FaultyProgram, folder: Path) -> dict[str, Any]:
    program = folder / "garbage"
    program.write_bytes(b"\x7fELF garbage")
    program.chmod(0o755)
    return {"worker_python": str(program)}


FAULTS: dict[str, tuple[Fault, type[WorkerStartError], str, str, int]] = {
    "missing interpreter": (
        lambda *_: {"worker_python": "/nowhere/python"}, WorkerUnusableError, "launch", "/nowhere/python", 0,
    ),
    "not executable": (not_executable, WorkerUnusableError, "launch", r"plain\.txt may not be executed", 0),
    "no program": (no_program, WorkerStartError, "launch", "garbage|Exec format", 0),
    "exits 3 at import": (
        lambda faulty, *_: faulty("exits_3_at_import"), WorkerStartError, "open", "exited with status 3", 2,
    ),
    "segfaults at import": (
        lambda faulty, *_: faulty("segfaults_at_import"), WorkerStartError, "open", "SIGSEGV", 2,
    ),
    "never says hello": (
        lambda _, raw, __: raw("never_says_hello"), WorkerStartTimeoutError, "hello", "step 'hello'", 1,
    ),
    "never opens": (
        lambda faulty, *_: faulty("never_opens"), WorkerStartTimeoutError, "open", "step 'open'.*hello took", 1,
    ),
    "ready too late": (
        lambda faulty, *_: faulty("never_opens", seconds=1.5 * LIMIT_S), WorkerStartTimeoutError, "open",
        "step 'open'", 1,
    ),
    "working folder missing": (
        lambda *_: {"worker_cwd": Path("/nowhere/folder")}, WorkerUnusableError, "launch",
        "working folder /nowhere/folder does not exist", 0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
@LAUNCHERS
async def test_a_worker_that_does_not_start_is_one_clean_error_in_time(  # noqa: PLR0917 - fixtures
    open_pool: OpenPool, faulty: Faulty, instead_of_python: FaultyProgram, tmp_path: Path, name: str, launcher: str
) -> None:
    fault, kind, step, words, starts = FAULTS[name]
    healthy = await open_pool(state_dir=tmp_path / "other")
    await healthy.send("other", "hello")
    settings = {"worker_cwd": tmp_path, "timeouts": quick(start_s=LIMIT_S), "launcher": launcher}
    pool = await open_pool(**{**settings, **fault(faulty, instead_of_python, tmp_path)})
    async with longest_stall() as stall:
        began = time.monotonic()
        sending = asyncio.create_task(pool.send("c", "hello"))
        while not sending.done():
            assert (await asyncio.wait_for(healthy.send("other", "ping"), 1)).text == "ping"
        with complaints() as complained, pytest.raises(kind, match=words) as caught:
            await sending
        assert time.monotonic() - began < LIMIT_S + 1
    assert type(caught.value) is kind
    assert caught.value.step == step
    assert caught.value.conversation_id == "c"
    assert stall.seconds < STALL_S
    row = await row_of(pool, "c")
    assert (row.state, row.pid) == ("failed", None)
    pids = [int(line) for line in lines(tmp_path / "starts")]
    assert len(pids) == starts
    assert all(gone_pid(pid) for pid in pids)
    assert complained == []


async def test_the_last_words_of_a_failed_start_are_in_its_error(
    open_pool: OpenPool, faulty: Faulty, tmp_path: Path
) -> None:
    pool = await open_pool(**faulty("exits_3_at_import"), worker_cwd=tmp_path)
    with pytest.raises(WorkerStartError, match="the licence has run out") as caught:
        await pool.send("c", "hello")
    assert caught.value.stderr_tail[-1] == "the licence has run out"
    assert str(caught.value).count("the licence has run out") == 1
    assert str(caught.value).count("conversation 'c'") == 1


@LAUNCHERS
async def test_a_working_folder_that_goes_between_two_turns_is_named_and_can_come_back(
    open_pool: OpenPool, tmp_path: Path, launcher: str
) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    pool = await open_pool(worker_cwd=folder, launcher=launcher)
    await pool.send("c", "hello")
    shutil.rmtree(folder)
    assert (await pool.send("c", "/count")).text == "2"
    await pool.stop("c")
    for _ in range(2):
        with pytest.raises(WorkerUnusableError, match=r"the working folder .*work does not exist"):
            await pool.send("c", "hello")
        assert (await row_of(pool, "c")).state == "failed"
    folder.mkdir()
    assert (await pool.send("c", "/count")).text == "3"
    assert (await row_of(pool, "c")).state == "idle"


@LAUNCHERS
async def test_stopping_a_conversation_that_is_starting_ends_the_start(
    open_pool: OpenPool, faulty: Faulty, tmp_path: Path, launcher: str
) -> None:
    pool = await open_pool(**faulty("never_opens"), worker_cwd=tmp_path, launcher=launcher)
    sending = asyncio.create_task(pool.send("c", "hello"))
    await until(lambda: lines(tmp_path / "starts"), "the start")
    assert (await row_of(pool, "c")).state == "starting"
    began = time.monotonic()
    await pool.stop("c")
    assert time.monotonic() - began < 1
    with pytest.raises(TurnCancelledError):
        await sending
    row = await row_of(pool, "c")
    assert (row.state, row.pid) == ("stopped", None)
    pids = [int(line) for line in lines(tmp_path / "starts")]
    assert len(pids) == 1
    assert gone_pid(pids[0])


async def test_closing_the_pool_ends_starts(open_pool: OpenPool, faulty: Faulty, tmp_path: Path) -> None:
    pool = await open_pool(**faulty("never_opens"), worker_cwd=tmp_path)
    sendings = [asyncio.create_task(pool.send(f"c-{number}", "hello")) for number in range(4)]
    await until(lambda: len(lines(tmp_path / "starts")) == 4, "the starts")
    began = time.monotonic()
    await pool.close()
    assert time.monotonic() - began < 2
    ends = await asyncio.gather(*sendings, return_exceptions=True)
    assert [type(end) for end in ends] == [TurnCancelledError] * 4
    assert all(gone_pid(int(pid)) for pid in lines(tmp_path / "starts"))


async def test_a_caller_that_gives_up_a_start_does_not_end_it_for_the_others(
    open_pool: OpenPool, faulty: Faulty, tmp_path: Path
) -> None:
    pool = await open_pool(**faulty("never_opens", seconds=0.3), worker_cwd=tmp_path)
    impatient = asyncio.create_task(pool.send("c", "first"))
    await until(lambda: lines(tmp_path / "starts"), "the start")
    patient = asyncio.create_task(pool.send("c", "second"))
    impatient.cancel()
    assert (await patient).text == "second"
    assert impatient.cancelled()
    assert len(lines(tmp_path / "starts")) == 1
    assert (await pool.send("c", "/count")).text == "2"


async def test_a_worker_killed_while_it_starts_is_tried_once_more(
    open_pool: OpenPool, faulty: Faulty, tmp_path: Path
) -> None:
    pool = await open_pool(**faulty("never_opens"), worker_cwd=tmp_path)
    sending = asyncio.create_task(pool.send("c", "hello"))
    for number in (1, 2):
        await until(lambda: len(lines(tmp_path / "starts")) == number, "the start")  # noqa: B023
        os.kill(int(lines(tmp_path / "starts")[-1]), signal.SIGKILL)
    with pytest.raises(WorkerStartError, match="SIGKILL"):
        await asyncio.wait_for(sending, 5)
    assert len(lines(tmp_path / "starts")) == 2


@LAUNCHERS
@pytest.mark.parametrize(
    ("agent", "words"),
    [
        ("no_such_module_at_all:Agent", "no_such_module_at_all"),
        ("waits_for_cancel:NoSuchAgent", "NoSuchAgent"),
        ("needs_what_is_not_installed:Agent", "a_package_that_nobody_has"),
    ],
)
async def test_an_agent_that_is_not_there_is_told_with_the_remedy_and_not_tried_again(
    open_pool: OpenPool, faulty: Faulty, agent: str, words: str, launcher: str
) -> None:
    pool = await open_pool(**faulty("waits_for_cancel") | {"agent": agent}, launcher=launcher)
    with pytest.raises(WorkerUnusableError, match=words) as caught:
        await pool.send("c", "hello")
    assert "agent_paths" in str(caught.value)
    assert not caught.value.retryable
    assert caught.value.step == "open"
    row = await row_of(pool, "c")
    assert (row.state, row.incarnation) == ("failed", 1)


async def test_an_agent_is_found_by_agent_paths_only(open_pool: OpenPool, faulty: Faulty, tmp_path: Path) -> None:
    without = await open_pool(agent="waits_for_cancel:Agent", state_dir=tmp_path / "other")
    with pytest.raises(WorkerUnusableError, match="waits_for_cancel"):
        await without.send("c", "hello")
    pool = await open_pool(**faulty("waits_for_cancel"))
    assert (await pool.send("c", "hello")).text == "hello"


async def test_after_a_failed_start_the_next_message_tries_again(open_pool: OpenPool, tmp_path: Path) -> None:
    program = tmp_path / "python"
    pool = await open_pool(worker_python=str(program))
    with pytest.raises(WorkerUnusableError, match="worker_python"):
        await pool.send("c", "hello")
    program.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    program.chmod(0o755)
    assert (await pool.send("c", "hello")).text == "hello"
    row = await row_of(pool, "c")
    assert (row.state, row.last_error, row.restart_count) == ("idle", None, 0)
    await until(lambda: hermes_of(tmp_path / "state", "c").get("status") == "healthy", "the row")


async def test_a_wrapper_that_stays_the_parent_is_killed_with_its_worker(open_pool: OpenPool, tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\n{sys.executable} "$@"\nexit $?\n')
    program.chmod(0o755)
    pool = await open_pool(worker_python=str(program))
    await pool.send("c", "hello")
    wrapper = await process_of(pool, "c")
    family = [wrapper, *wrapper.children(recursive=True)]
    assert len(family) == 2
    wrapper.send_signal(signal.SIGKILL)
    await until(lambda: all(gone(member) for member in family), "both to go", 5)
    assert (await pool.send("c", "/count")).text == "2"
    wrapper = await process_of(pool, "c")
    family = [wrapper, *wrapper.children(recursive=True)]
    await pool.stop("c")
    assert all(gone(member) for member in family)


@LAUNCHERS
async def test_a_start_that_runs_out_of_descriptors_at_any_point_is_clean(open_pool: OpenPool, launcher: str) -> None:
    pool = await open_pool(launcher=launcher, timeouts=quick(close_grace_s=5.0))
    await pool.send("other", "hello")
    ends: dict[int, Any] = {}
    with complaints() as complained:
        for free in range(12):
            with all_descriptors_taken() as taken:
                for _ in range(free):
                    os.close(taken.pop())
                ends[free] = (await asyncio.gather(pool.send(f"c-{free}", "hello"), return_exceptions=True))[0]
            await pool.stop(f"c-{free}")
    errors = {free: end for free, end in ends.items() if isinstance(end, BaseException)}
    assert all(isinstance(error, HermesPoolError) and error.conversation_id for error in errors.values()), errors
    assert 0 in errors
    assert 11 not in errors
    assert complained == []
    for free in errors:
        assert (await pool.send(f"c-{free}", "hello")).text == "hello"
        await pool.stop(f"c-{free}")
    assert (await pool.send("other", "/count")).text == "2"


@contextlib.contextmanager
def all_descriptors_taken() -> Iterator[list[int]]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 16, limits[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        yield taken
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for descriptor in taken:
            os.close(descriptor)
