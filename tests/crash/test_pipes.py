"""Much data, and one side dying meanwhile."""

import asyncio
import logging
import math
import os
import signal
import time
from typing import Any

import psutil
import pytest

from hermes_pool.conversation import active_turn, session
from hermes_pool.errors import TurnCancelledError, WorkerCrashedError
from hermes_pool.process import connection
from tests.crash.outside import complaints, gone, memory_growth, process_of, row_of
from tests.support import AGENTS, Faulty, Obedient, OpenPool, quick, until

LAUNCHERS = pytest.mark.parametrize("launcher", ["spawn", "portable"])
MIB = 1024 * 1024


@pytest.mark.parametrize("kind", ["lines", "one line", "not utf-8"])
@LAUNCHERS
async def test_5_mib_of_stderr_hold_nobody_up(open_pool: OpenPool, faulty: Faulty, kind: str, launcher: str) -> None:
    pool = await open_pool(**faulty("floods_stderr"), launcher=launcher)
    await pool.send("c", "lines/warm")
    with memory_growth() as growth:
        reply = await asyncio.wait_for(pool.send("c", kind), 5)
    assert reply.text == kind
    assert growth.mib < 20


@pytest.mark.parametrize("kind", ["lines", "one line", "not utf-8"])
async def test_the_kept_tail_of_stderr_is_bounded_and_told_in_the_crash(
    open_pool: OpenPool, faulty: Faulty, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(connection, "LINES_KEPT", 7)
    pool = await open_pool(**faulty("floods_stderr"))
    with memory_growth() as growth, pytest.raises(WorkerCrashedError, match="SIGKILL") as caught:
        await asyncio.wait_for(pool.send("c", f"{kind}/die"), 10)
    tail = caught.value.stderr_tail
    assert 1 <= len(tail) <= 8
    assert all(0 < len(line) <= 2000 for line in tail)
    assert tail[-1] in str(caught.value)
    assert len(str(caught.value)) < 20_000
    assert growth.mib < 20


@pytest.mark.parametrize("size", [1, 65_535, 65_536, 65_537, 8 * MIB])
@LAUNCHERS
async def test_messages_of_any_size_cross_unchanged_both_ways_at_once(
    open_pool: OpenPool, size: int, launcher: str
) -> None:
    pool = await open_pool(launcher=launcher)
    texts = [(letter + os.urandom(512).hex()) * (size // 1025 + 1) for letter in "ab"]
    texts = [text[:size] for text in texts]
    replies = await asyncio.gather(*(pool.send(text[:1] + "-c", text) for text in texts))
    assert [reply.text == text for reply, text in zip(replies, texts, strict=True)] == [True, True]


@LAUNCHERS
async def test_a_cancel_in_the_middle_of_a_frame_from_the_worker_leaves_the_wire_whole(
    open_pool: OpenPool, launcher: str
) -> None:
    pool = await open_pool(agent="dribbles:Agent", agent_paths=(str(AGENTS),), launcher=launcher)
    await pool.send("c", "hello")
    worker = await process_of(pool, "c")
    for number in range(25):
        sending = asyncio.create_task(pool.send("c", f"dribble {number} " + "x" * 150))
        await until(lambda: _is_busy(pool), "the message to be handed over")
        await asyncio.sleep(number / 2000)  # where it strikes: the frame takes over 100 ms
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        assert (await pool.send("c", f"message {number}")).text == f"message {number}"
    assert await process_of(pool, "c") == worker


@LAUNCHERS
async def test_a_cancel_in_the_middle_of_a_frame_to_the_worker_leaves_the_wire_whole(
    open_pool: OpenPool, obedient: Obedient, monkeypatch: pytest.MonkeyPatch, launcher: str
) -> None:
    monkeypatch.setattr(session, "CHECK_FROZEN_AFTER_S", math.inf)
    pool = await open_pool(**obedient.settings(), launcher=launcher)
    await pool.send("c", "hello")
    worker = await process_of(pool, "c")
    long = [f"{number} " + "x" * 8 * MIB for number in range(8)]
    for number, text in enumerate(long):
        worker.suspend()
        await until(lambda: worker.status() == psutil.STATUS_STOPPED, "the worker to be stopped")
        sending = asyncio.create_task(pool.send("c", text))
        await until(lambda: _is_busy(pool), "the message to be handed over")
        worker.resume()
        await asyncio.sleep(number / 500)  # where it strikes: a message of this length takes some 10 ms
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        assert (await pool.send("c", f"message {number}")).text == f"message {number}"
    assert await process_of(pool, "c") == worker
    ran = obedient.marks("begun")
    assert [text for text in ran if text.startswith("message")] == [f"message {number}" for number in range(8)]
    assert [text[:3] for text in ran if text not in (*long, "hello") and not text.startswith("message")] == []


@LAUNCHERS
async def test_a_worker_that_dies_with_32_mib_unsent_is_one_restart(
    open_pool: OpenPool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, launcher: str
) -> None:
    # However slow the machine is: the stopped worker is given the message, and not replaced before.
    monkeypatch.setattr(session, "CHECK_FROZEN_AFTER_S", math.inf)
    caplog.set_level(logging.WARNING, "asyncio")
    pool = await open_pool(launcher=launcher)
    await pool.send("c", "hello")
    worker = await process_of(pool, "c")
    worker.suspend()
    await until(lambda: worker.status() == psutil.STATUS_STOPPED, "the worker to be stopped")
    text = "x" * (32 * MIB)
    with complaints() as complained:
        sending = asyncio.create_task(pool.send("c", text))
        await until(lambda: _is_busy(pool), "the message to be handed over")
        worker.send_signal(signal.SIGKILL)
        reply = await asyncio.wait_for(sending, 20)
        assert (reply.text == text, reply.restarts) == (True, 1)
    assert complained == []
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


async def _is_busy(pool: Any) -> bool:
    return (await row_of(pool, "c")).state == "busy"


async def test_closing_and_killing_with_32_mib_unsent_is_bounded(open_pool: OpenPool) -> None:
    pool = await open_pool(timeouts=quick(close_grace_s=0.3, term_grace_s=0.2))
    await pool.send("c", "hello")
    worker = await process_of(pool, "c")
    worker.suspend()
    with complaints() as complained:
        sending = asyncio.create_task(pool.send("c", "x" * (32 * MIB)))
        await until(lambda: _is_busy(pool), "the message to be handed over")
        began = time.monotonic()
        await pool.close()
        assert time.monotonic() - began < 0.5 + 1
        with pytest.raises(TurnCancelledError):
            await sending
        del sending
    assert gone(worker)
    assert complained == []


@LAUNCHERS
async def test_closing_with_ten_replies_in_flight_is_bounded(
    open_pool: OpenPool,
    faulty: Faulty,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    launcher: str,
) -> None:
    caplog.set_level(logging.WARNING, "asyncio")
    monkeypatch.setattr(active_turn, "EVENTS_WAITING_MAX", 1)
    pool = await open_pool(**faulty("replies_big"), launcher=launcher, timeouts=quick(start_s=30.0))
    names = [f"c-{number}" for number in range(10)]
    await asyncio.gather(*(pool.send(name, "1") for name in names))
    workers = [await process_of(pool, name) for name in names]
    turns = [pool.turn(name, f"{5 * MIB} in deltas of {MIB}") for name in names]
    with complaints() as complained:
        for turn in turns:
            await turn.__aenter__()
        for turn in turns:
            await until(lambda: turn._turn.lags, "the reply to pile up")  # noqa: B023
        began = time.monotonic()
        await pool.close()
        assert time.monotonic() - began < 1.0 + 1
        for turn in turns:
            with pytest.raises(TurnCancelledError):
                await turn.reply()
    assert all(gone(worker) for worker in workers)
    assert complained == []
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []
