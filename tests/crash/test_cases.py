"""Cases from public bug reports of similar systems that no other file here is about."""

import asyncio
import contextlib
import fcntl
import json
import os
import pty
import random
import signal
import subprocess
import sys
import termios
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from hermes_pool import RestartPolicy
from hermes_pool.control import client, messages
from hermes_pool.errors import (
    HermesPoolError,
    PoolClosedError,
    TurnCancelledError,
    TurnTimeoutError,
    WorkerCrashedError,
    WorkerStartError,
)
from hermes_pool_worker import wire
from tests.crash.outside import complaints, gone, hermes_of, lines, never, process_of, row_of
from tests.crash.test_kill_points import UNBOUNDED
from tests.support import FAULTY, Faulty, FaultyProgram, Obedient, OpenPool, Pool, quick, until

pytestmark = pytest.mark.timeout(60)
LAUNCHERS = pytest.mark.parametrize("launcher", ["zygote", "spawn"])
TROUBLE = ("Event loop is closed", "was destroyed", "never retrieved", "never awaited", "ResourceWarning")


# --- signals hit the wrapper, or the whole house ---


WRAPPER = """\
#!/bin/sh
"{python}" "$@"
exit $?
"""


@pytest.fixture
def wrapped(tmp_path: Path) -> dict[str, Any]:
    """Settings for a shell that runs the worker as its child, as npx and uv do."""
    program = tmp_path / "wrapper"
    program.write_text(WRAPPER.format(python=sys.executable))
    program.chmod(0o755)
    return {"worker_python": str(program)}


@pytest.mark.parametrize("end", ["stopped", "killed", "cancelled"])
@pytest.mark.parametrize("launcher", ["spawn", "portable"])
async def test_a_worker_behind_a_wrapper_goes_with_its_wrapper(
    open_pool: OpenPool, faulty: Faulty, wrapped: dict[str, Any], end: str, launcher: str
) -> None:
    pool = await open_pool(**faulty("deaf_to_cancel"), **wrapped, launcher=launcher, timeouts=quick(close_grace_s=0.3))
    await pool.send("c", "hello")
    wrapper = await process_of(pool, "c")
    (worker,) = wrapper.children()
    match end:
        case "stopped":
            assert await pool.stop("c") is not None
        case "killed":
            wrapper.kill()
        case "cancelled":
            async with pool.turn("c", "do not listen") as turn:
                await anext(turn)
    await until(lambda: gone(wrapper) and gone(worker), "both to go", 5)
    assert (await pool.send("c", "/count")).text == "2"


@LAUNCHERS
async def test_no_group_is_ever_signalled_even_if_the_worker_shares_the_host_s(
    open_pool: OpenPool, faulty: Faulty, monkeypatch: pytest.MonkeyPatch, launcher: str
) -> None:
    def never_this(*arguments: Any) -> None:
        raise AssertionError(f"a group was signalled: {arguments}")

    popen = subprocess.Popen

    def without_a_session(*arguments: Any, **more: Any) -> Any:
        return popen(*arguments, **{**more, "start_new_session": False})

    monkeypatch.setattr(os, "killpg", never_this)
    monkeypatch.setattr(os, "kill", never_this)
    monkeypatch.setattr(subprocess, "Popen", without_a_session)
    pool = await open_pool(
        **faulty("deaf_to_everything"), launcher=launcher, timeouts=quick(close_grace_s=0.2, term_grace_s=0.2)
    )
    await pool.send("c", "hello")
    worker = await process_of(pool, "c")
    if launcher == "spawn":
        assert os.getpgid(worker.pid) == os.getpgrp()
    stopped = await pool.stop("c")
    assert stopped is not None
    assert stopped.how == "killed"
    assert gone(worker)


# --- looking at processes must not break or block ---


@LAUNCHERS
async def test_looking_from_outside_all_the_time_while_workers_are_killed(
    open_pool: OpenPool, tmp_path: Path, launcher: str
) -> None:
    pool = await open_pool(**UNBOUNDED, launcher=launcher, workers_max=20)
    names = [f"c{number}" for number in range(8)]
    await asyncio.gather(*(pool.send(name, "hello") for name in names))
    chooser, over = random.Random(18), asyncio.Event()

    async def talk(name: str) -> None:
        while not over.is_set():
            with contextlib.suppress(HermesPoolError):  # what killing does to turns is tested elsewhere
                await pool.send(name, "ping")
            await asyncio.sleep(0.01)

    talking = [asyncio.create_task(talk(name)) for name in names]
    healths: set[str] = set()
    try:
        for number in range(60):
            (answer,) = await asyncio.to_thread(client.query, tmp_path / "state", messages.Ps(), 3.0)
            assert isinstance(answer.response, messages.PsReply), answer
            rows = answer.response.sessions
            assert {row.conversation_id for row in rows} >= set(names)
            healths |= {row.health for row in rows}
            alive = [row for row in rows if row.pid is not None]
            if number % 4 == 0 and alive:
                with contextlib.suppress(psutil.NoSuchProcess):
                    psutil.Process(chooser.choice(alive).pid).kill()
    finally:
        over.set()
        await asyncio.wait_for(asyncio.gather(*talking), 20)
    assert healths <= {"alive", "dead", "none", "unknown"}
    for name in names:
        assert (await pool.send(name, "/first")).text == "hello"


async def test_what_cannot_be_read_is_unknown_and_kills_nobody(
    open_pool: OpenPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = await open_pool(sample_s=0.05, launcher="zygote")
    names = "abc"
    await asyncio.gather(*(pool.send(name, "hello") for name in names))
    workers = {name: await process_of(pool, name) for name in names}
    chooser = random.Random(18)

    def at_random(plain: Callable[..., Any]) -> Callable[..., Any]:
        def read(process: psutil.Process, *arguments: Any, **more: Any) -> Any:
            match chooser.randrange(6):
                case 0:
                    raise psutil.AccessDenied(process.pid)
                case 1:
                    raise psutil.ZombieProcess(process.pid)
                case 2:
                    raise psutil.NoSuchProcess(process.pid)
            return plain(process, *arguments, **more)

        return read

    with monkeypatch.context() as patch:
        for name in ("create_time", "memory_info", "cpu_times", "status"):
            patch.setattr(psutil.Process, name, at_random(getattr(psutil.Process, name)))
        healths = set()
        for _ in range(60):
            healths |= {row.health for row in await pool.sessions()}
            assert (await pool.send(chooser.choice(names), "ping")).restarts == 0
        assert {"alive", "unknown"} <= healths
    for name in names:
        assert await process_of(pool, name) == workers[name]
        row = await row_of(pool, name)
        assert (row.health, row.restart_count) == ("alive", 0)


# --- silent and working versus silent and stuck ---


async def test_a_tool_and_a_question_may_be_silent_for_longer_than_the_limit_of_silence(
    open_pool: OpenPool, obedient: Obedient
) -> None:
    pool = await open_pool(**obedient.settings(), timeouts=quick(progress_s=0.4, turn_s=20))
    tool = asyncio.create_task(pool.send("tool", "tool_then_wait done"))
    await until(lambda: "begun tool_then_wait done" in obedient.marks(), "the tool to run")
    async with pool.turn("question", "ask whether") as turn:
        question = await anext(turn)
        assert isinstance(question, wire.Question)
        await never(lambda: tool.done() or turn.outcome is not None, 1.2)
        await turn.answer(question.question_id, "yes")
        assert (await turn.reply()).text == "answer: yes"
    obedient.allow("done")
    reply = await tool
    assert (reply.text, reply.restarts) == ("tool_then_wait done", 0)


@LAUNCHERS
async def test_a_turn_that_shows_nothing_ends_at_the_limit_of_silence_and_frees_its_conversation(
    open_pool: OpenPool, faulty: Faulty, launcher: str
) -> None:
    pool = await open_pool(
        **faulty("deaf_to_cancel"),
        timeouts=quick(progress_s=0.5, close_grace_s=0.2, term_grace_s=0.2),
        launcher=launcher,
    )
    await pool.send("c", "hello")
    worker = await process_of(pool, "c")
    began = time.monotonic()
    with pytest.raises(TurnTimeoutError) as caught:
        await pool.send("c", "do not listen")
    assert 0.5 <= time.monotonic() - began < 0.5 + 0.4 + 1
    assert caught.value.limit == "timeouts.progress_s"
    assert (await pool.send("c", "/count")).text == "2"
    assert gone(worker)


async def test_a_turn_that_talks_for_ever_ends_at_the_limit_of_the_turn(open_pool: OpenPool, faulty: Faulty) -> None:
    pool = await open_pool(**faulty("talks_for_ever"), timeouts=quick(progress_s=0.3, turn_s=1.0))
    await pool.send("c", "hello")
    worker = await process_of(pool, "c")
    began = time.monotonic()
    async with pool.turn("c", "talk") as turn:
        spoken = [event async for event in turn]
        with pytest.raises(TurnTimeoutError) as caught:
            await turn.reply()
    assert len(spoken) > 5
    assert 1.0 <= time.monotonic() - began < 2.0
    assert caught.value.limit == "timeouts.turn_s"
    assert (await pool.send("c", "/count")).text == "2"
    assert await process_of(pool, "c") == worker  # it obeyed


# --- shutdown that ends ---


HOST = """
    import asyncio, json, os, sys
    from hermes_pool import HermesSessionManager, PoolSettings, Timeouts

    async def main():
        given = json.loads(sys.argv[1])
        settings = PoolSettings(**given, timeouts=Timeouts(close_grace_s=1.0, term_grace_s=0.5))
        pool = await HermesSessionManager(settings).__aenter__()
        for name in "abc":
            await pool.send(name, "hello")
        waiting = asyncio.create_task(pool.send("a", "wait"))
        rows = await pool.sessions()
        while [row.state for row in rows if row.conversation_id == "a"] != ["busy"]:
            rows = await pool.sessions()
        print(json.dumps([row.pid for row in rows]), flush=True)
        match sys.argv[2]:
            case "interrupt":
                raise KeyboardInterrupt
            case "error":
                raise ValueError("of the host's own")
            case "leave":
                sys.exit(3)
            case "terminal":
                try:
                    await waiting
                finally:
                    await pool.close()

    asyncio.run(main())
"""


class Host:
    """A program with a pool of three, one of them in a turn, on a terminal of its own."""

    def __init__(self, folder: Path, launcher: str, end: str) -> None:
        (folder / "host.py").write_text(textwrap.dedent(HOST))
        settings = {
            "agent": "marks_signals:Agent", "agent_paths": [str(FAULTY)], "state_dir": str(folder / "state"),
            "worker_cwd": str(folder), "launcher": launcher,
        }  # fmt: skip
        self.terminal, slave = pty.openpty()
        self.popen = subprocess.Popen(
            [sys.executable, str(folder / "host.py"), json.dumps(settings), end],
            stdin=slave, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(slave)
        self.family: list[psutil.Process] = []

    async def ready(self) -> None:
        assert self.popen.stdout is not None
        line = await asyncio.wait_for(asyncio.to_thread(self.popen.stdout.readline), 30)
        self.family = [psutil.Process(pid) for pid in json.loads(line)]
        with contextlib.suppress(psutil.NoSuchProcess):
            self.family += psutil.Process(self.popen.pid).children(recursive=True)

    def press(self, key: bytes) -> None:
        os.write(self.terminal, key)

    def close_terminal(self) -> None:
        if self.terminal >= 0:
            os.close(self.terminal)
        self.terminal = -1

    async def ended(self, deadline_s: float) -> str:
        """Wait until it and all that it started have gone; return what it wrote to its stderr."""
        _, err = await asyncio.wait_for(asyncio.to_thread(self.popen.communicate), deadline_s)
        await until(lambda: all(gone(each) for each in self.family), "everything to go", 3)
        assert len(self.family) >= 3
        return err


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Callable[..., Host]]:
    started: list[Host] = []

    def start(launcher: str, end: str) -> Host:
        started.append(Host(tmp_path, launcher, end))
        return started[-1]

    yield start
    for host in started:
        host.popen.kill()
        host.popen.communicate()
        host.close_terminal()
        for each in host.family:
            if not gone(each):
                each.kill()


@pytest.mark.parametrize(("end", "status"), [("return", 0), ("interrupt", -2), ("error", 1), ("leave", 3)])
@LAUNCHERS
async def test_a_host_that_ends_without_close_leaves_nobody_and_says_nothing_odd(
    hosts: Callable[..., Host], end: str, status: int, launcher: str
) -> None:
    host = hosts(launcher, end)
    await host.ready()
    err = await host.ended(5)
    assert host.popen.returncode == status
    assert not [words for words in TROUBLE if words in err], err


@LAUNCHERS
async def test_a_worker_that_ignores_sigterm_and_keeps_a_thread_leaves_when_it_is_asked_to(
    open_pool: OpenPool, faulty: Faulty, launcher: str
) -> None:
    pool = await open_pool(**faulty("keeps_a_thread"), launcher=launcher)
    await pool.send("c", "hello")
    worker = await process_of(pool, "c")
    began = time.monotonic()
    stopped = await pool.stop("c")
    assert stopped is not None
    assert (stopped.how, stopped.exit.returncode) == ("closed", 0)
    assert time.monotonic() - began < 1.0 + 1
    assert gone(worker)


@LAUNCHERS
async def test_a_close_in_the_middle_of_a_start_is_bounded_and_told(
    open_pool: OpenPool, faulty: Faulty, tmp_path: Path, launcher: str
) -> None:
    pool = await open_pool(**faulty("never_opens"), worker_cwd=tmp_path, launcher=launcher)
    with complaints() as complained:
        sending = [asyncio.create_task(pool.send("c", "hello")) for _ in range(2)]
        await until(lambda: lines(tmp_path / "starts"), "the worker to start")
        worker = psutil.Process(int(lines(tmp_path / "starts")[0]))
        began = time.monotonic()
        await asyncio.gather(pool.close(), pool.close())
        assert time.monotonic() - began < 1.0 + 0.5 + 1
        ends = await asyncio.gather(*sending, return_exceptions=True)
    assert {type(end) for end in ends} <= {PoolClosedError, TurnCancelledError}
    assert gone(worker)
    assert complained == []


# --- Ctrl-C reaches everyone ---


@LAUNCHERS
async def test_ctrl_c_reaches_the_host_alone_and_it_saves_and_ends_its_workers_in_order(
    hosts: Callable[..., Host], tmp_path: Path, launcher: str
) -> None:
    host = hosts(launcher, "terminal")
    await host.ready()
    host.press(b"\x03")
    err = await host.ended(1.0 + 0.5 + 2)
    assert host.popen.returncode == -signal.SIGINT
    assert not [words for words in TROUBLE if words in err], err
    marks = lines(tmp_path / "marks")
    assert sorted(marks) == ["cancelled", "closed", "closed", "closed"]
    for name in "abc":
        stored = hermes_of(tmp_path / "state", name)
        assert stored["status"] == "dormant"
        assert stored["session_id"]
        assert "pid" not in stored


async def test_ctrl_z_stops_the_host_alone_and_a_turn_goes_on_after_fg(
    hosts: Callable[..., Host], tmp_path: Path
) -> None:
    host = hosts("zygote", "terminal")
    await host.ready()
    process = psutil.Process(host.popen.pid)
    # A session's leader on a terminal of its own is an orphaned group, which ^Z does not stop: so it is told to.
    host.press(b"\x1a")
    process.suspend()
    await until(lambda: process.status() == psutil.STATUS_STOPPED, "the host to be stopped")
    await never(lambda: any(each.status() == psutil.STATUS_STOPPED or gone(each) for each in host.family), 0.3)
    process.resume()
    host.press(b"\x03")
    await host.ended(1.0 + 0.5 + 2)
    assert sorted(lines(tmp_path / "marks")) == ["cancelled", "closed", "closed", "closed"]


@LAUNCHERS
async def test_when_the_terminal_is_closed_no_worker_sees_it_and_none_is_left(
    hosts: Callable[..., Host], tmp_path: Path, launcher: str
) -> None:
    host = hosts(launcher, "terminal")
    await host.ready()
    host.close_terminal()
    await host.ended(3)
    assert host.popen.returncode == -signal.SIGHUP
    assert "SIGHUP" not in lines(tmp_path / "marks")


# --- the kernel's answer to growth (the limits of memory are in test_stuck_workers) ---


@LAUNCHERS
async def test_a_worker_killed_twice_by_signal_9_is_told_as_what_it_may_be_and_restarted_once(
    open_pool: OpenPool, faulty: Faulty, tmp_path: Path, launcher: str
) -> None:
    pool = await open_pool(**faulty("dies_every_time"), worker_cwd=tmp_path, launcher=launcher)
    with pytest.raises(WorkerCrashedError, match="possibly because the machine is out of memory") as caught:
        await pool.send("c", "die by SIGKILL")
    assert "signal 9" in str(caught.value)
    assert len(lines(tmp_path / "attempts")) == 2


async def test_with_room_for_five_eight_conversations_are_served_and_the_busy_one_is_left_alone(
    open_pool: OpenPool, obedient: Obedient
) -> None:
    pool = await open_pool(**obedient.settings(), workers_max=5, launcher="zygote")
    busy = asyncio.create_task(pool.send("busy", "wait enough"))
    await until(lambda: "begun wait enough" in obedient.marks(), "the busy one to begin")
    worker = await process_of(pool, "busy")
    for _ in range(2):
        for number in range(7):
            assert (await pool.send(f"c{number}", "hello")).text == "hello"
            rows = [row for row in await pool.sessions() if row.pid is not None]
            assert len(rows) <= 5
    assert await process_of(pool, "busy") == worker
    # Whoever was talked to last has a worker still.
    assert {row.conversation_id for row in rows} >= {"busy", "c4", "c5", "c6"}
    obedient.allow("enough")
    assert (await busy).restarts == 0


# --- what other systems lack ---


async def test_a_loop_that_cannot_start_processes_is_named_with_the_remedy(
    open_pool: OpenPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()

    async def not_here(*arguments: Any, **more: Any) -> None:
        raise NotImplementedError

    monkeypatch.setattr(loop, "subprocess_exec", not_here)
    pool = await open_pool(launcher="portable")
    with pytest.raises(WorkerStartError, match=f"{type(loop).__name__}.*ProactorEventLoop"):
        await pool.send("c", "hello")


@pytest.mark.parametrize("launcher", ["zygote", "spawn", "portable"])
async def test_no_process_is_probed_with_os_kill(
    open_pool: OpenPool, monkeypatch: pytest.MonkeyPatch, launcher: str
) -> None:
    def ctrl_c_for_all(pid: int, number: int) -> None:
        raise AssertionError(f"os.kill({pid}, {number})")

    pool = await open_pool(launcher=launcher, sample_s=0.05)
    with monkeypatch.context() as patch:
        patch.setattr(os, "kill", ctrl_c_for_all)
        await pool.send("c", "hello")
        await pool.sessions()
        await _killed(pool, "c")
        assert (await pool.send("c", "/count")).text == "2"
        await pool.stop("c")
        await pool.close()


async def test_without_sigkill_a_death_is_told_and_a_worker_that_breaks_the_protocol_is_ended(
    open_pool: OpenPool, instead_of_python: FaultyProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = await open_pool(
        **instead_of_python("sends_bogus_bytes"),
        launcher="portable",
        restarts=RestartPolicy(replacements_per_turn_max=0),
    )
    with monkeypatch.context() as patch:
        patch.delattr(signal, "SIGKILL")
        with pytest.raises(WorkerCrashedError, match="broke the protocol"):
            await asyncio.wait_for(pool.send("c", "instead:ffffffffff"), 10)
        assert (await pool.send("c", "fine:")).text == "fine"
        (await process_of(pool, "c")).terminate()
        await until(lambda: _has_error(pool, "c"), "the death to be told")
        assert (await pool.send("c", "fine:")).text == "fine"


async def _killed(pool: Pool, conversation_id: str) -> None:
    worker = await process_of(pool, conversation_id)
    pidfd = os.pidfd_open(worker.pid)
    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    os.close(pidfd)
    await until(lambda: _has_error(pool, conversation_id), "the death to be told")


async def _has_error(pool: Pool, conversation_id: str) -> bool:
    row = await row_of(pool, conversation_id)
    return row.state == "stopped" and row.last_error is not None
