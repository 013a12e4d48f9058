"""Wanted ends are no crashes, deaf workers are bounded, and states are true afterwards."""

import asyncio
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from hermes_pool import HermesSessionManager, Turn
from hermes_pool.errors import TurnCancelledError, TurnTimeoutError, WorkerCrashedError
from hermes_pool_worker import wire
from tests.crash.outside import complaints, gone, hermes_of, lines, never, process_of, row_of
from tests.support import Faulty, OpenPool, known, quick, until

LAUNCHERS = pytest.mark.parametrize("launcher", ["zygote", "spawn", "portable"])


async def _is(pool: HermesSessionManager, conversation_id: str, state: str) -> bool:
    return (await row_of(pool, conversation_id)).state == state


async def _in_turn(pool: HermesSessionManager, text: str) -> Turn:
    """Begin a turn and wait until its worker is at it."""
    turn = await pool.turn("c", text).__aenter__()
    assert isinstance(await anext(turn), wire.Status)
    return turn


@LAUNCHERS
async def test_a_stop_in_a_turn_is_no_crash(open_pool: OpenPool, faulty: Faulty, tmp_path: Path, launcher: str) -> None:
    pool = await open_pool(**faulty("waits_for_cancel"), worker_cwd=tmp_path, launcher=launcher)
    await pool.send("c", "hello")
    worker = await process_of(pool, "c")
    turn = await _in_turn(pool, "wait")
    stopped = await pool.stop("c")
    assert stopped is not None
    assert (stopped.how, stopped.exit.returncode) == ("closed", 0)
    assert gone(worker)
    with pytest.raises(TurnCancelledError):
        await turn.reply()
    row = await row_of(pool, "c")
    assert (row.state, row.pid, row.restart_count) == ("stopped", None, 0)
    await never(lambda: len(lines(tmp_path / "starts")) > 1)
    await until(lambda: hermes_of(tmp_path / "state", "c").get("status") == "dormant", "the row")
    assert hermes_of(tmp_path / "state", "c")["restart_count"] == 0
    reply = await pool.send("c", "/count")
    assert (reply.text, reply.restarts) == ("2", 0)
    assert (await row_of(pool, "c")).restart_count == 0


@LAUNCHERS
async def test_a_stop_of_an_idle_conversation_is_no_crash(
    open_pool: OpenPool, faulty: Faulty, tmp_path: Path, launcher: str
) -> None:
    pool = await open_pool(**faulty("waits_for_cancel"), worker_cwd=tmp_path, launcher=launcher)
    await pool.send("c", "hello")
    stopped = await pool.stop("c")
    assert stopped is not None
    assert (stopped.how, stopped.strays) == ("closed", ())
    assert await pool.stop("c") is None
    assert await pool.stop("never heard of") is None
    await never(lambda: len(lines(tmp_path / "starts")) > 1)
    row = await row_of(pool, "c")
    assert (row.state, row.restart_count, row.last_error) == ("stopped", 0, None)


async def test_an_idle_worker_that_was_let_go_stays_away(open_pool: OpenPool, faulty: Faulty, tmp_path: Path) -> None:
    pool = await open_pool(**faulty("waits_for_cancel"), worker_cwd=tmp_path, timeouts=quick(idle_s=0.2))
    await pool.send("c", "hello")
    await until(lambda: _is(pool, "c", "stopped"), "the idle worker to go", 3)
    assert hermes_of(tmp_path / "state", "c")["status"] == "dormant"
    await never(lambda: len(lines(tmp_path / "starts")) > 1)
    reply = await pool.send("c", "/count")
    assert (reply.text, reply.restarts) == ("2", 0)


@LAUNCHERS
async def test_the_survivor_of_a_crash_is_idle_and_let_go_counted_from_its_turn_s_end(
    open_pool: OpenPool, faulty: Faulty, tmp_path: Path, launcher: str
) -> None:
    pool = await open_pool(
        **faulty("waits_for_cancel"), worker_cwd=tmp_path, timeouts=quick(idle_s=0.6), sweep_s=0.05, launcher=launcher
    )
    turn = await _in_turn(pool, "wait once")
    (await process_of(pool, "c")).send_signal(signal.SIGKILL)
    reply = await turn.reply()
    ended = time.monotonic()
    assert (reply.text, reply.restarts) == ("wait once", 1)
    assert (await row_of(pool, "c")).state == "idle"
    survivor = await process_of(pool, "c")
    await until(lambda: gone(survivor), "the survivor to be let go", 3)
    assert 0.55 < time.monotonic() - ended < 0.6 + 1
    await until(lambda: _is(pool, "c", "stopped"), "the state", 1)
    assert len(lines(tmp_path / "starts")) == 2


async def test_after_two_kills_in_one_turn_the_state_is_true(
    open_pool: OpenPool, faulty: Faulty, tmp_path: Path
) -> None:
    pool = await open_pool(**faulty("waits_for_cancel"), worker_cwd=tmp_path)
    turn = await _in_turn(pool, "wait")
    (await process_of(pool, "c")).send_signal(signal.SIGKILL)
    while not (isinstance(event := await anext(turn), wire.Status) and event.attempt == 2 and event.text == "waits"):
        pass
    (await process_of(pool, "c")).send_signal(signal.SIGKILL)
    with pytest.raises(WorkerCrashedError, match="SIGKILL"):
        await turn.reply()
    await until(lambda: _is(pool, "c", "stopped"), "the state", 1)
    await never(lambda: len(lines(tmp_path / "starts")) > 2)
    assert (await row_of(pool, "c")).pid is None


async def test_a_stop_while_a_dead_worker_is_being_replaced_ends_the_turn(
    open_pool: OpenPool, faulty: Faulty, tmp_path: Path
) -> None:
    pool = await open_pool(**faulty("waits_for_cancel"), worker_cwd=tmp_path, launcher="spawn")
    turn = await _in_turn(pool, "wait")
    (await process_of(pool, "c")).send_signal(signal.SIGKILL)
    await until(lambda: _is(pool, "c", "starting"), "the replacement to be started")
    await asyncio.wait_for(pool.stop("c"), 5)
    with pytest.raises(TurnCancelledError) as caught:
        await asyncio.wait_for(turn.reply(), 5)
    assert (caught.value.sent, caught.value.retryable) == (True, False)
    assert (await row_of(pool, "c")).state == "stopped"
    assert (await pool.send("c", "hello")).text == "hello"


@LAUNCHERS
async def test_an_agent_that_is_deaf_to_cancel_is_replaced_and_its_conversation_free(
    open_pool: OpenPool, faulty: Faulty, launcher: str
) -> None:
    pool = await open_pool(
        **faulty("deaf_to_cancel"), timeouts=quick(close_grace_s=0.3, term_grace_s=0.3), launcher=launcher
    )
    await pool.send("c", "hello")
    worker = await process_of(pool, "c")
    turn = await _in_turn(pool, "do not listen")
    behind = asyncio.create_task(pool.send("c", "/count"))
    began = time.monotonic()
    reply = await turn.cancel()
    took = time.monotonic() - began
    assert 0.3 <= took < 0.3 + 0.3 + 1
    assert reply is not None
    assert (reply.outcome, reply.text) == ("interrupted", "")
    assert gone(worker)
    assert (await behind).text == "2"
    assert await process_of(pool, "c") != worker


async def test_a_caller_that_is_cancelled_leaves_a_deaf_agent_to_the_pool(open_pool: OpenPool, faulty: Faulty) -> None:
    pool = await open_pool(**faulty("deaf_to_cancel"), timeouts=quick(close_grace_s=0.2, term_grace_s=0.2))
    await pool.send("c", "hello")
    sending = asyncio.create_task(pool.send("c", "do not listen"))
    await until(lambda: _is(pool, "c", "busy"), "the turn")
    began = time.monotonic()
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    assert time.monotonic() - began < 0.2
    assert (await asyncio.wait_for(pool.send("c", "/count"), 5)).text == "2"


async def test_a_deaf_agent_s_turn_ends_at_its_time_limit(open_pool: OpenPool, faulty: Faulty) -> None:
    pool = await open_pool(**faulty("deaf_to_cancel"), timeouts=quick(close_grace_s=0.2, term_grace_s=0.2, turn_s=0.5))
    await pool.send("c", "hello")
    with pytest.raises(TurnTimeoutError) as caught:
        await asyncio.wait_for(pool.send("c", "do not listen"), 3)
    assert caught.value.limit == "timeouts.turn_s"
    assert (await pool.send("c", "/count")).text == "2"


@LAUNCHERS
async def test_a_worker_that_is_deaf_to_everything_is_killed_within_both_graces(
    open_pool: OpenPool, faulty: Faulty, launcher: str
) -> None:
    pool = await open_pool(
        **faulty("deaf_to_everything"), timeouts=quick(close_grace_s=0.4, term_grace_s=0.4), launcher=launcher
    )
    await pool.send("c", "hello")
    worker = await process_of(pool, "c")
    began = time.monotonic()
    stopped = await pool.stop("c")
    assert 0.8 <= time.monotonic() - began < 0.8 + 1
    assert stopped is not None
    assert (stopped.how, stopped.exit.returncode) == ("killed", -9)
    assert gone(worker)
    assert (await row_of(pool, "c")).restart_count == 0
    assert (await pool.send("c", "/count")).text == "2"


async def test_closing_many_deaf_workers_takes_as_long_as_closing_one(
    open_pool: OpenPool, faulty: Faulty, tmp_path: Path
) -> None:
    took = {}
    for many in (1, 8):
        pool = await open_pool(
            **faulty("deaf_to_everything"),
            timeouts=quick(close_grace_s=0.4, term_grace_s=0.4, start_s=30.0), state_dir=tmp_path / str(many),
        )  # fmt: skip
        names = [f"c-{number}" for number in range(many)]
        await asyncio.gather(*(pool.send(name, "hello") for name in names))
        workers = [await process_of(pool, name) for name in names]
        with complaints() as complained:
            began = time.monotonic()
            stopped = await pool.close()
            took[many] = time.monotonic() - began
            assert await pool.close() == {}
        assert [end.how for end in stopped.values()] == ["killed"] * many
        assert all(gone(worker) for worker in workers)
        assert complained == []
    assert took[1] < 0.8 + 1
    assert took[8] < 0.8 + 1.5
    assert took[8] < took[1] + 1


async def test_a_frozen_worker_is_stopped_as_well(open_pool: OpenPool) -> None:
    pool = await open_pool(timeouts=quick(close_grace_s=0.2, term_grace_s=0.2))
    await pool.send("c", "hello")
    worker = await process_of(pool, "c")
    worker.suspend()
    stopped = await asyncio.wait_for(pool.stop("c"), 3)
    assert stopped is not None
    assert stopped.how == "killed"
    assert gone(worker)
    assert (await pool.send("c", "/count")).text == "2"


@pytest.mark.parametrize("launcher", ["zygote", "spawn"])
async def test_a_worker_is_stopped_and_mourned_also_where_no_thread_can_be_started(
    open_pool: OpenPool, monkeypatch: pytest.MonkeyPatch, launcher: str
) -> None:
    pool = await open_pool(launcher=launcher)
    await asyncio.gather(pool.send("c", "hello"), pool.send("d", "hello"))
    workers = {row.conversation_id: row.pid for row in await pool.sessions()}
    await until(lambda: not [each for each in threading.enumerate() if each.name == "hermes-pool"], "no thread is kept")

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    os.kill(known(workers["d"]), signal.SIGKILL)
    stopped = await asyncio.wait_for(pool.stop("c"), 10)
    assert stopped is not None
    assert (stopped.how, stopped.left) == ("closed", ())
    stopped_rows = {("c", "stopped", None), ("d", "stopped", None)}

    async def both_are_mourned() -> bool:
        return {(row.conversation_id, row.state, row.pid) for row in await pool.sessions()} == stopped_rows

    await until(both_are_mourned, "both workers to be mourned")
    monkeypatch.undo()
    assert (await pool.send("c", "/count")).text == "2"
