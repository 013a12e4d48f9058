"""Workers that hang, freeze, grow or get old: what is judged of them, what is done, and that nobody else notices."""

import asyncio
import signal
import time
from typing import Any

import pytest

from hermes_pool import MemoryLimits
from hermes_pool.errors import TurnTimeoutError, WorkerCrashedError
from hermes_pool.policy import memory
from hermes_pool_worker import wire
from tests.crash.outside import process_of, row_of
from tests.support import Faulty, OpenPool, alive, quick, until

LAUNCHERS = pytest.mark.parametrize("launcher", ["zygote", "spawn"])
MIB = 1024 * 1024
QUICK = {"sample_s": 0.3, "timeouts": quick(wedged_s=1.0), "replay": "never"}


async def _pid(pool: Any, conversation_id: str) -> int | None:
    return (await row_of(pool, conversation_id)).pid


# --- stuck or slow ---


@LAUNCHERS
async def test_a_wedged_worker_is_replaced_and_its_stacks_are_in_the_error(
    open_pool: OpenPool, faulty: Faulty, launcher: str
) -> None:
    pool = await open_pool(**faulty("hangs_or_grows"), **QUICK, launcher=launcher)
    await pool.send("innocent", "hello")
    untouched = await _pid(pool, "innocent")
    with pytest.raises(WorkerCrashedError) as caught:
        await asyncio.wait_for(pool.send("c", "deadlock"), 20)
    report = caught.value.report
    assert report is not None
    assert report.verdict is not None
    assert report.verdict.startswith("wedged")
    assert "no CPU, I/O or running child" in str(caught.value)
    assert any("hangs_or_grows.py" in line and "in turn" in line for line in report.stacks), report.stacks
    assert report.memory
    assert report.returncode == -signal.SIGKILL
    assert (await pool.send("c", "hello")).text == "hello"
    assert await _pid(pool, "innocent") == untouched


async def test_a_worker_that_holds_the_lock_and_works_is_busy_and_lives(open_pool: OpenPool, faulty: Faulty) -> None:
    pool = await open_pool(**faulty("hangs_or_grows"), **QUICK)
    await pool.send("c", "hello")
    pid = await _pid(pool, "c")
    began = time.monotonic()
    await pool.send("c", "compute 30000000")
    per_number_s = (time.monotonic() - began) / 3e7
    turn = asyncio.ensure_future(pool.send("c", f"compute {int(7 / per_number_s)}"))
    await until(lambda: _verdict(pool, "c", "busy"), "its verdict")
    reply = await asyncio.wait_for(turn, 60)
    assert reply.restarts == 0
    assert await _pid(pool, "c") == pid


async def test_a_deaf_worker_is_left_alone_for_less_than_the_limit(open_pool: OpenPool, faulty: Faulty) -> None:
    pool = await open_pool(**faulty("hangs_or_grows"), sample_s=0.3)
    await pool.send("c", "hello")
    pid = await _pid(pool, "c")
    turn = asyncio.ensure_future(pool.send("c", "sleep 8"))
    await until(lambda: _verdict(pool, "c", "slow"), "its verdict")
    assert (await asyncio.wait_for(turn, 30)).restarts == 0
    assert await _pid(pool, "c") == pid


async def test_a_worker_that_was_stopped_before_its_turn_is_replaced_at_once(
    open_pool: OpenPool, faulty: Faulty
) -> None:
    pool = await open_pool(**faulty("hangs_or_grows"), sample_s=0.3)
    await pool.send("c", "hello")
    worker = await process_of(pool, "c")
    worker.send_signal(signal.SIGSTOP)
    reply = await asyncio.wait_for(pool.send("c", "/count"), 15)
    assert (reply.text, reply.restarts) == ("2", 1)
    assert not alive(worker.pid)


async def test_a_worker_that_is_stopped_in_its_turn_is_told_apart_and_given_time(
    open_pool: OpenPool, faulty: Faulty
) -> None:
    pool = await open_pool(**faulty("waits_for_cancel"), sample_s=0.3)
    async with pool.turn("c", "wait") as turn:
        async for event in turn:
            assert isinstance(event, wire.Status)
            break
        worker = await process_of(pool, "c")
        worker.send_signal(signal.SIGSTOP)
        await until(lambda: _verdict(pool, "c", "frozen"), "its verdict")
        worker.send_signal(signal.SIGCONT)
        await until(lambda: _verdict(pool, "c", "slow"), "its verdict", 30)
    assert await _pid(pool, "c") == worker.pid


async def test_a_worker_that_does_not_obey_tells_where_it_was(open_pool: OpenPool, faulty: Faulty) -> None:
    pool = await open_pool(**faulty("hangs_or_grows"), timeouts=quick(turn_s=1.0, close_grace_s=0.2), sample_s=0.2)
    with pytest.raises(TurnTimeoutError) as caught:
        await asyncio.wait_for(pool.send("c", "deadlock"), 20)
    assert any("hangs_or_grows.py" in line for line in caught.value.stacks)
    assert caught.value.verdict is not None
    assert caught.value.verdict.startswith(("slow", "busy"))


async def _verdict(pool: Any, conversation_id: str, verdict: str) -> bool:
    return (await row_of(pool, conversation_id)).verdict == verdict


# --- memory, age, limits ---


@LAUNCHERS
async def test_a_big_worker_goes_between_two_turns_in_context(
    open_pool: OpenPool, faulty: Faulty, launcher: str
) -> None:
    pool = await open_pool(
        **faulty("hangs_or_grows"), sample_s=0.2, memory=MemoryLimits(recycle_bytes=120 * MIB), launcher=launcher
    )
    first, other = (await pool.send("c", "grow 150")).text, await pool.send("small", "hello")
    assert first == "grow 150"
    pid, small = await _pid(pool, "c"), await _pid(pool, "small")
    await until(lambda: _stopped(pool, "c"), "the big one to go")
    assert (await pool.send("c", "/count")).text == "2"
    assert await _pid(pool, "c") != pid
    assert (await _pid(pool, "small")) == small
    assert other.restarts == 0
    assert (await row_of(pool, "c")).restart_count == 0  # nobody has died


async def test_a_worker_over_the_last_mark_is_killed_and_reported(open_pool: OpenPool, faulty: Faulty) -> None:
    pool = await open_pool(**faulty("hangs_or_grows"), **QUICK, memory=MemoryLimits(kill_bytes=120 * MIB))
    with pytest.raises(WorkerCrashedError, match=r"memory\.kill_bytes") as caught:
        await asyncio.wait_for(pool.send("c", "grow 200 and wait"), 20)
    report = caught.value.report
    assert report is not None
    assert max(size for _, size in report.memory) > 120 * MIB
    assert (await pool.send("c", "hello")).text == "hello"


async def test_above_the_total_idle_workers_go_until_below_the_lower_mark(
    open_pool: OpenPool, faulty: Faulty, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "TOTAL_LOW", 0.5)
    # The first look comes when all have grown: one in the middle would see less, and let fewer go.
    pool = await open_pool(**faulty("hangs_or_grows"), sample_s=2.0, memory=MemoryLimits(total_bytes=200 * MIB))
    for name in "abcd":
        await pool.send(name, "grow 60")
    await until(lambda: _stopped(pool, "a"), "the one that has been idle longest")
    await until(lambda: _alive(pool, 1), "so many that half of it is free")
    assert (await pool.send("a", "/count")).text == "2"


async def test_an_old_worker_goes_and_nobody_sees_more_than_another_pid(open_pool: OpenPool, faulty: Faulty) -> None:
    pool = await open_pool(**faulty("hangs_or_grows"), sample_s=0.2, worker_age_max_s=0.5)
    pids = set()
    for number in range(1, 8):
        assert (await asyncio.wait_for(pool.send("c", "/count"), 10)).text == str(number)
        pids.add(await _pid(pool, "c"))
        await until(lambda: _stopped(pool, "c"), "the old one to go", 10)
        if len(pids) > 2:
            break
    assert len(pids) > 2


@LAUNCHERS
async def test_limits_of_resources_are_the_workers_own(open_pool: OpenPool, faulty: Faulty, launcher: str) -> None:
    import resource

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    pool = await open_pool(**faulty("hangs_or_grows"), worker_rlimits={"RLIMIT_NOFILE": 123}, launcher=launcher)
    assert (await pool.send("c", "files")).text == "(123, 123)"
    pid = await _pid(pool, "c")
    assert any(line.split()[3:5] == ["123", "123"] for line in _limits(pid) if line.startswith("Max open files"))
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before


async def test_a_question_waits_no_longer_than_it_may(open_pool: OpenPool, faulty: Faulty) -> None:
    pool = await open_pool(**faulty("hangs_or_grows"), timeouts=quick(question_s=0.3))
    assert (await asyncio.wait_for(pool.send("c", "ask"), 10)).text == "None"


def _limits(pid: int | None) -> list[str]:
    with open(f"/proc/{pid}/limits") as file:
        return file.read().splitlines()


async def _stopped(pool: Any, conversation_id: str) -> bool:
    return (await row_of(pool, conversation_id)).state == "stopped"


async def _alive(pool: Any, count: int) -> bool:
    rows = await pool.sessions()
    return sum(row.pid is not None and alive(row.pid) for row in rows) == count
