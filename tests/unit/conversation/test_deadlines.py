import asyncio
from collections.abc import Awaitable, Callable

import pytest

from hermes_pool import Timeouts, TurnCancelledError
from hermes_pool.conversation.active_turn import ActiveTurn
from hermes_pool.conversation.deadlines import Limit, TurnDeadlines
from hermes_pool.conversation.event_log import EventLog
from hermes_pool_worker import wire
from tests import virtual_time

TIMEOUTS = Timeouts(turn_s=1800, progress_s=600)


def new_turn(name: str = "t") -> ActiveTurn:
    nothing = lambda _: None  # noqa: E731
    turn = ActiveTurn(name, "text", log=EventLog(lambda: None), drained=nothing, left=nothing, on_settled=nothing)
    turn.began_at = turn.heard_at = asyncio.get_running_loop().time()
    return turn


async def watched(turn_work: Callable[[TurnDeadlines], Awaitable[None]]) -> list[tuple[str, Limit, float]]:
    loop = asyncio.get_running_loop()
    began, how = loop.time(), []
    deadlines = TurnDeadlines(TIMEOUTS, lambda turn, limit, _: how.append((turn.turn_id, limit, loop.time() - began)))
    await turn_work(deadlines)
    deadlines.stop()
    return how


def test_silence_ends_a_turn_at_the_limit_of_progress() -> None:
    async def work(deadlines: TurnDeadlines) -> None:
        deadlines.watch(new_turn())
        await asyncio.sleep(3600)

    assert virtual_time.run(watched(work)) == [("t", "timeouts.progress_s", 600)]


def test_a_turn_that_shows_progress_runs_to_its_total_limit() -> None:
    async def work(deadlines: TurnDeadlines) -> None:
        turn = new_turn()
        deadlines.watch(turn)
        for _ in range(36):
            await asyncio.sleep(100)
            turn.heard_at = asyncio.get_running_loop().time()

    assert virtual_time.run(watched(work)) == [("t", "timeouts.turn_s", 1800)]


@pytest.mark.parametrize("why", ["tool", "question", "slow consumer"])
def test_the_clock_of_progress_stands_still(why: str) -> None:
    async def work(deadlines: TurnDeadlines) -> None:
        turn = new_turn()
        match why:
            case "tool":
                turn.tools_open["c1"] = "a tool"
            case "question":
                turn.asked(wire.Question("t", 1, "q1", "clarify", "?", [], 1500), turn.began_at + 1500)
            case "slow consumer":
                turn.lags = True
        deadlines.watch(turn)
        await asyncio.sleep(1500)
        turn.tools_open.clear()
        turn.questions.clear()
        turn.lags = False
        await asyncio.sleep(3600)

    assert virtual_time.run(watched(work)) == [("t", "timeouts.turn_s", 1800)]


def test_a_turn_that_has_ended_is_watched_no_more_and_the_next_has_its_own_time() -> None:
    async def work(deadlines: TurnDeadlines) -> None:
        first = new_turn("first")
        deadlines.watch(first)
        await asyncio.sleep(500)
        first.settle(TurnCancelledError("over"))
        second = new_turn("second")
        deadlines.watch(second)
        await asyncio.sleep(3600)

    assert virtual_time.run(watched(work)) == [("second", "timeouts.progress_s", 1100)]


def test_one_timer_serves_many_turns() -> None:
    async def work(deadlines: TurnDeadlines) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(100):
            turn = new_turn()
            deadlines.watch(turn)
            turn.settle(TurnCancelledError("over"))
        assert len(loop._scheduled) == 1  # type: ignore[attr-defined] # asyncio's own list of timers

    assert virtual_time.run(watched(work)) == []
