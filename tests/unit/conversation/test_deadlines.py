import asyncio
from collections.abc import Awaitable, Callable

import pytest

from hermes_pool import PoolSettings, Turn
from hermes_pool.conversation.deadlines import TurnDeadlines
from tests import virtual_time

SETTINGS = PoolSettings(turn_timeout_s=1800, progress_timeout_s=600)


class Host:
    """No session at all: the clocks look at the turn only."""


def new_turn(name: str = "t") -> Turn:
    turn = Turn(Host(), name, "text", events_waiting_max=10)  # type: ignore[arg-type] # it asks its host nothing here
    turn.began_at = turn.heard_at = asyncio.get_running_loop().time()
    return turn


async def watched(turn_work: Callable[[TurnDeadlines], Awaitable[None]]) -> list[tuple[str, str, float]]:
    loop = asyncio.get_running_loop()
    began, how = loop.time(), []
    clocks = TurnDeadlines(SETTINGS, lambda turn, limit, _: how.append((turn.turn_id, limit, loop.time() - began)))
    await turn_work(clocks)
    clocks.stop()
    return how


def test_silence_rings_after_the_limit_of_progress() -> None:
    async def work(clocks: TurnDeadlines) -> None:
        clocks.watch(new_turn())
        await asyncio.sleep(3600)

    assert virtual_time.run(watched(work)) == [("t", "progress_timeout_s", 600)]


def test_a_turn_that_shows_progress_runs_to_its_total_limit() -> None:
    async def work(clocks: TurnDeadlines) -> None:
        turn = new_turn()
        clocks.watch(turn)
        for _ in range(36):
            await asyncio.sleep(100)
            turn.heard_at = asyncio.get_running_loop().time()

    assert virtual_time.run(watched(work)) == [("t", "turn_timeout_s", 1800)]


@pytest.mark.parametrize("why", ["tool", "question", "slow consumer"])
def test_the_clock_of_progress_stands_still(why: str) -> None:
    async def work(clocks: TurnDeadlines) -> None:
        turn = new_turn()
        match why:
            case "tool":
                turn.tools_open["c1"] = "a tool"
            case "question":
                turn.questions_open["q1"] = turn.began_at + 1500
            case "slow consumer":
                turn.lags = True
        clocks.watch(turn)
        await asyncio.sleep(1500)
        turn.tools_open.clear()
        turn.questions_open.clear()
        turn.lags = False
        await asyncio.sleep(3600)

    assert virtual_time.run(watched(work)) == [("t", "turn_timeout_s", 1800)]


def test_a_turn_that_has_ended_is_watched_no_more_and_the_next_has_its_own_time() -> None:
    async def work(clocks: TurnDeadlines) -> None:
        first = new_turn("first")
        clocks.watch(first)
        await asyncio.sleep(500)
        first.outcome = TimeoutError()  # type: ignore[assignment] # any outcome will do
        second = new_turn("second")
        clocks.watch(second)
        await asyncio.sleep(3600)

    assert virtual_time.run(watched(work)) == [("second", "progress_timeout_s", 1100)]


def test_one_timer_serves_many_turns() -> None:
    async def work(clocks: TurnDeadlines) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(100):
            turn = new_turn()
            clocks.watch(turn)
            turn.outcome = TimeoutError()  # type: ignore[assignment] # any outcome will do
        assert len(loop._scheduled) == 1  # type: ignore[attr-defined] # asyncio's own list of timers

    assert virtual_time.run(watched(work)) == []
