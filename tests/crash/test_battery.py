"""The fault battery that other pools and supervisors were measured with, row by row, on this one.

Each test is named after its row, and says what it measured (``pytest -s``), in the words of ``docs/faults.md``.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Awaitable
from pathlib import Path
from statistics import median
from typing import TypeVar

import psutil
import pytest

from hermes_pool import HermesSessionManager, RestartPolicy, Turn
from hermes_pool.errors import RestartBackoffError, TurnTimeoutError, WorkerCrashedError
from hermes_pool_worker import wire
from tests.crash.outside import gone, lines, never, process_of, row_of
from tests.support import FAULTY, Faulty, OpenPool, known, quick, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="signals and the process table as Linux has them")

T = TypeVar("T")
LAUNCHERS = pytest.mark.parametrize("launcher", ["zygote", pytest.param("spawn", marks=pytest.mark.slow)])


def told(row: str, launcher: str, what: str) -> None:
    print(f"\nbattery | {row} | {launcher} | {what}")


def ms(seconds: list[float]) -> str:
    return f"{median(seconds) * 1000:.0f} ms (at most {max(seconds) * 1000:.0f})"


async def timed(work: Awaitable[T], took: list[float]) -> T:
    began = time.monotonic()
    try:
        async with asyncio.timeout(20):
            return await work
    finally:
        took.append(time.monotonic() - began)


async def in_turn(pool: HermesSessionManager, conversation_id: str, text: str) -> Turn:
    """Begin a turn of ``waits_for_cancel`` and wait until its worker is at it."""
    turn = await pool.turn(conversation_id, text).__aenter__()
    assert isinstance(await anext(turn), wire.Status)
    return turn


# --- killed ---


@LAUNCHERS
async def test_kill_an_idle_worker_all_idle(open_pool: OpenPool, launcher: str) -> None:
    pool = await open_pool(launcher=launcher)
    await asyncio.gather(*(pool.send(name, "hello") for name in "abc"))
    others = [await process_of(pool, name) for name in "bc"]
    took: list[float] = []
    for number in range(5):
        (await process_of(pool, "a")).kill()
        reply = await timed(pool.send("a", "/count"), took)
        assert (reply.text, reply.restarts) in [(str(number + 2), 0), (str(number + 2), 1)]
        for name in "bc":
            assert (await pool.send(name, "hello")).restarts == 0
    assert [await process_of(pool, name) for name in "bc"] == others
    assert max(took) < 5
    told("kill an idle worker, all idle (n=5)", launcher, f"its next message is answered in context in {ms(took)}")


@LAUNCHERS
async def test_kill_the_worker_running_a_while_b_runs(open_pool: OpenPool, faulty: Faulty, launcher: str) -> None:
    pool = await open_pool(**faulty("waits_for_cancel"), launcher=launcher)
    b = await in_turn(pool, "b", "wait")
    worker_of_b = await process_of(pool, "b")
    took: list[float] = []
    for _ in range(5):
        a = await in_turn(pool, "a", "wait once")
        worker_of_a = await process_of(pool, "a")
        worker_of_a.kill()
        reply = await timed(a.reply(), took)
        assert (reply.text, reply.restarts) == ("wait once", 1)
        assert await process_of(pool, "a") != worker_of_a
        assert (b.outcome, b.attempt) == (None, 1)
    assert await process_of(pool, "b") == worker_of_b
    assert known(await b.cancel()).outcome == "interrupted"
    assert max(took) < 5
    told("kill the worker running A while B runs (n=5)", launcher, f"A is answered after {ms(took)}; B undisturbed")


@LAUNCHERS
async def test_kill_worker_with_a_call_in_flight(open_pool: OpenPool, faulty: Faulty, launcher: str) -> None:
    pool = await open_pool(
        **faulty("waits_for_cancel"),
        launcher=launcher,
        replay="never",
        restarts=RestartPolicy(replacements_per_turn_max=0),
    )
    errors: list[float] = []
    following: list[float] = []
    for number in range(3):
        turn = await in_turn(pool, "c", "wait")
        (await process_of(pool, "c")).kill()
        with pytest.raises(WorkerCrashedError, match="SIGKILL"):
            await timed(turn.reply(), errors)
        assert (await timed(pool.send("c", "/count"), following)).text == str(number + 1)
        pool._sessions[next(iter(pool._sessions))].quarantine.reset()
    assert max(errors) < 2
    assert max(following) < 5
    told("kill worker with a call in flight (n=3)", launcher, f"typed error {ms(errors)}; next call {ms(following)}")


@LAUNCHERS
async def test_kill_every_worker_again_and_again(
    open_pool: OpenPool, faulty: Faulty, launcher: str, tmp_path: Path
) -> None:
    pool = await open_pool(
        **faulty("waits_for_cancel"), worker_cwd=tmp_path, launcher=launcher, restarts=RestartPolicy(quarantine_after=0)
    )
    await asyncio.gather(*(pool.send(name, "hello") for name in "abc"))
    for name in "abc":
        (await process_of(pool, name)).kill()
    await until(lambda: _all_stopped(pool), "the deaths to be seen", 2)
    before = len(lines(tmp_path / "starts"))
    await never(lambda: len(lines(tmp_path / "starts")) > before)  # nobody has asked for one
    seconds = 3.0
    refusals: list[float] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            async with asyncio.timeout(10), pool.turn("a", "wait") as turn:
                while turn.outcome is None:
                    row = await row_of(pool, "a")
                    if row.pid is not None and row.state == "busy":
                        with contextlib.suppress(ProcessLookupError):  # the last kill has just been seen
                            os.kill(row.pid, signal.SIGKILL)
                    await asyncio.sleep(0.01)
        except RestartBackoffError as error:
            refusals.append(error.retry_after_s)
            await asyncio.sleep(0.01)
    starts = len(lines(tmp_path / "starts")) - before
    assert 2 <= starts <= 10
    assert 0 < max(refusals) < 5
    told(
        "kill every worker again and again",
        launcher,
        f"{starts} respawns in {seconds:.0f} s with a client that goes on",
    )
    assert (await pool.send("b", "hello")).text == "hello"


async def _all_stopped(pool: HermesSessionManager) -> bool:
    return all(row.state == "stopped" for row in await pool.sessions())


# --- stopped ---


@LAUNCHERS
async def test_sigstop_the_busy_worker_defaults(open_pool: OpenPool, faulty: Faulty, launcher: str) -> None:
    """The defaults are too long for a test: the same limit, 60 times shorter."""
    pool = await open_pool(**faulty("waits_for_cancel"), launcher=launcher, sample_s=0.1, timeouts=quick(wedged_s=1.0))
    seen: list[float] = []
    took: list[float] = []
    for _ in range(2):
        turn = await in_turn(pool, "c", "wait once")
        worker = await process_of(pool, "c")
        worker.suspend()
        shown = timed(until(lambda: _health(pool, "c", "frozen"), "ps to say that it is frozen"), seen)
        reply, _ = await asyncio.gather(timed(turn.reply(), took), shown)
        assert (reply.text, reply.restarts) == ("wait once", 1)
        assert gone(worker)
    assert max(took) < 1.0 + 5
    told("SIGSTOP the busy worker, limit 1 s instead of 60", launcher, f"ps: frozen in {ms(seen)}; reply in {ms(took)}")


async def _idle(pool: HermesSessionManager, conversation_id: str, seconds: float) -> bool:
    return ((await row_of(pool, conversation_id)).idle_s or 0.0) >= seconds


async def _health(pool: HermesSessionManager, conversation_id: str, health: str) -> bool:
    return (await row_of(pool, conversation_id)).health == health


@LAUNCHERS
async def test_sigstop_the_busy_worker_own_limit_on(open_pool: OpenPool, faulty: Faulty, launcher: str) -> None:
    pool = await open_pool(
        **faulty("waits_for_cancel"),
        launcher=launcher,
        timeouts=quick(progress_s=0.5, close_grace_s=0.2, term_grace_s=0.2),
    )
    took: list[float] = []
    for number in range(2):
        turn = await in_turn(pool, "c", "wait")
        worker = await process_of(pool, "c")
        worker.suspend()
        with pytest.raises(TurnTimeoutError) as caught:
            await timed(turn.reply(), took)
        assert caught.value.limit == "timeouts.progress_s"
        await until(lambda: gone(worker), "the worker to be killed", 2)  # noqa: B023
        assert (await pool.send("c", "/count")).text == str(number + 1)
    assert max(took) < 0.5 + 0.4 + 1.5
    told("SIGSTOP, own limit on, 0.5 s, graces 0.2 + 0.2 s", launcher, f"caller told at {ms(took)}, worker killed")


@LAUNCHERS
@pytest.mark.parametrize("idle_s", [0.0, 0.8])
async def test_sigstop_an_idle_worker_of_a_key(
    open_pool: OpenPool, faulty: Faulty, launcher: str, idle_s: float
) -> None:
    # One that was idle for a while is looked at before it is given a turn, else the monitor finds it.
    sample_s = {} if idle_s else {"sample_s": 0.5}
    pool = await open_pool(**faulty("waits_for_cancel"), launcher=launcher, **sample_s)
    await pool.send("other", "hello")
    took: list[float] = []
    for number in range(2):
        await pool.send("c", "hello")
        worker = await process_of(pool, "c")
        worker.suspend()
        await until(lambda: worker.status() == psutil.STATUS_STOPPED, "the worker to be stopped")  # noqa: B023
        await until(lambda: _idle(pool, "c", idle_s), "it to be idle for a while")
        assert (await row_of(pool, "c")).health == "frozen"
        reply = await timed(pool.send("c", "/count"), took)
        assert reply.text == str(2 * number + 2)
        assert await process_of(pool, "c") != worker
        assert gone(worker)
        assert (await pool.send("other", "hello")).restarts == 0
    assert max(took) < 0.5 + 3
    row = f"SIGSTOP an idle worker, keyed, idle for {idle_s} s"
    told(row, launcher, f"ps: frozen; never served by it: replaced, next message answered in {ms(took)}")


# --- the parent is killed ---

HOST = """
    import asyncio, json, sys
    from hermes_pool import HermesSessionManager, PoolSettings

    async def main():
        pool = await HermesSessionManager(PoolSettings(**json.loads(sys.argv[1]))).__aenter__()
        tools = [(await pool.send(name, "tool setsid")).text for name in "ab"]
        busy = await pool.turn("c", "tool stay").__aenter__()
        tools.append((await anext(busy)).text)
        print(json.dumps([row.pid for row in await pool.sessions()] + [int(tool) for tool in tools]), flush=True)
        await asyncio.Event().wait()

    asyncio.run(main())
"""


def _host(program: list[str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(program, stdout=subprocess.PIPE, text=True, start_new_session=True)


@LAUNCHERS
async def test_sigkill_the_parent(launcher: str, tmp_path: Path, nothing_left: None) -> None:
    settings = {
        "agent": "leaves_all_kinds_of_tools:Agent", "agent_paths": [str(FAULTY)], "launcher": launcher,
        "state_dir": str(tmp_path / "state"),
    }  # fmt: skip
    program = [sys.executable, "-c", textwrap.dedent(HOST), json.dumps(settings)]
    took: list[float] = []
    for _ in range(3):
        host = _host(program)
        assert host.stdout is not None
        with host, host.stdout:
            pids = json.loads(await asyncio.wait_for(asyncio.to_thread(host.stdout.readline), 30))
            family = {psutil.Process(pid) for pid in pids} | set(psutil.Process(host.pid).children(recursive=True))
            assert len(family) >= 6
            host.kill()
            await timed(until(lambda: all(gone(each) for each in family), "all to be gone", 5), took)  # noqa: B023
    assert max(took) < 2
    told("SIGKILL the parent (n=3)", launcher, f"0 of {len(family)} alive, grandchildren included, after {ms(took)}")


# --- asked to go ---


CLOSES = {
    "polite close, grandchild in group": ("leaves_all_kinds_of_tools", "tool "),
    "same, leader ignores SIGTERM": ("ignores_sigterm_beside_a_tool", "tool"),
    "grandchild with setsid": ("leaves_all_kinds_of_tools", "tool setsid"),
}


@LAUNCHERS
@pytest.mark.parametrize("row", CLOSES)
async def test_polite_close(open_pool: OpenPool, faulty: Faulty, launcher: str, row: str, tmp_path: Path) -> None:
    agent, text = CLOSES[row]
    took: list[float] = []
    for number in range(3):
        pool = await open_pool(
            **faulty(agent),
            launcher=launcher,
            timeouts=quick(close_grace_s=0.3, term_grace_s=0.3),
            state_dir=tmp_path / str(number),
        )
        tool = psutil.Process(int((await pool.send("c", text)).text))
        worker = await process_of(pool, "c")
        await timed(pool.close(), took)
        assert gone(worker)
        assert gone(tool)
    assert max(took) < 0.6 + 2
    told(f"{row} (n=3)", launcher, f"gone with its worker; close() took {ms(took)}, graces 0.3 + 0.3 s")


# --- pipes ---


@LAUNCHERS
async def test_300_kb_on_stderr(open_pool: OpenPool, faulty: Faulty, launcher: str) -> None:
    took: list[float] = []
    pool = await open_pool(**faulty("floods_stderr_in_its_start"), launcher=launcher)
    for name in "abc":
        assert (await timed(pool.send(name, "hello"), took)).text == "hello"
    assert max(took) < 10
    told("300 KB on stderr before it is ready (n=3)", launcher, f"fine: first reply after {ms(took)}")


@LAUNCHERS
async def test_child_stops_reading_200_kb_queued(open_pool: OpenPool, faulty: Faulty, launcher: str) -> None:
    pool = await open_pool(
        **faulty("reads_no_more"),
        launcher=launcher,
        timeouts=quick(progress_s=1.5, close_grace_s=0.2, term_grace_s=0.2),
    )
    await pool.send("2nd", "hello")
    async with pool.turn("3rd", "read no more and ask") as third:
        await anext(third)
        await pool.send("1st", "read no more")
        queued = asyncio.create_task(pool.send("1st", "x" * 200_000))
        submits: list[float] = []
        while not queued.done():
            assert (await timed(pool.send("2nd", "hello"), submits)).restarts == 0
            await asyncio.sleep(0.01)
        interrupts: list[float] = []
        assert (await timed(third.cancel(), interrupts)) is not None
    with pytest.raises(TurnTimeoutError):
        await queued
    assert (await pool.send("1st", "/count")).text == "1"
    assert max(submits) < 0.5
    assert max(interrupts) < 0.4 + 1
    told("child stops reading, 200 KB queued", launcher, f"2nd session {ms(submits)}, 3rd's interrupt {ms(interrupts)}")
