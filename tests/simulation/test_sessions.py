"""Random lives of a pool: real sessions and a real manager, with fake workers, a fake database and a virtual clock.

A life of half a minute takes some milliseconds. Each is one history of steps (callers, deaths, operators, time going
by), then everything is put in order, and it must be as if nothing had happened: all callers have their answers, no
slot is lost, every conversation answers, and idle workers go.

    HERMES_POOL_HISTORIES=100000 HERMES_POOL_SEED=1000 pytest tests/simulation --timeout=0 -k by_chance    # a long soak
"""

import asyncio
import os
import random
from typing import assert_never

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from hermes_pool import Reply
from tests import virtual_time
from tests.simulation.fakes import KEYS, Pool, outside_replaced, story_of
from tests.simulation.histories import (
    CONVERSATIONS,
    History,
    NextBirth,
    Operate,
    OperatePool,
    Pass,
    Rules,
    Say,
    SetStore,
    Step,
    ToCaller,
    ToWorker,
    random_history,
    rules_from,
    step_from,
)
from tests.simulation.judging import judge
from tests.simulation.past_faults import PAST_FAULTS
from tests.simulation.world import IDLE_TIMEOUT_S, World, now

ALL_ANSWERED_S = 60.0
"""Beyond all limits of all callers in line together."""
BACKGROUND_S = 3.5
SOAK = int(os.environ.get("HERMES_POOL_HISTORIES", "200"))
SEED = int(os.environ.get("HERMES_POOL_SEED", "0"))


# --- a life -----------------------------------------------------------------------------------------------------------


def live(history: History) -> World:
    """Live it, put all in order, and fail with its whole story if anything was wrong."""
    random.seed(0)  # of it, breakers make their jitter
    world: World = virtual_time.run(_live(history))
    if world.complaints:
        pytest.fail(story_of(world, history), pytrace=False)
    return world


async def _live(history: History) -> World:
    loop = asyncio.get_running_loop()
    world = World(history.rules)
    loop.set_exception_handler(lambda _, context: world.complain(f"in the loop: {context}"))
    with outside_replaced(world):
        async with Pool(world) as pool:
            for step in history.steps:
                await _take(step, pool, world)
                if world.complaints:
                    break
            else:
                await _put_in_order(pool, world)
            await pool.closed()
            await _until_rest()
            world.check(not pool.operators_at_work, "an operator waits for ever")
        await _until_rest()
        for call in world.calls:
            judge(world, call)
        left = asyncio.all_tasks() - {asyncio.current_task()} - {call.task for call in world.calls}
        world.check(not left, f"tasks are left: {left}")
    return world


async def _until_rest() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def _take(step: Step, pool: Pool, world: World) -> None:
    if not isinstance(step, Pass):
        world.tell(f"-- {step}")
    match step:
        case Say():
            pool.say(step)
        case Pass(seconds):
            await asyncio.sleep(seconds)
        case NextBirth(birth):
            world.births.append(birth)
        case ToWorker(conversation, what):
            _befall(pool, conversation, what)
        case ToCaller(back, what):
            called = world.calls[::-1][back : back + 1]
            for call in called:
                (pool.cancel_turn if what == "turn_is_cancelled" else pool.cancel_task)(call)
        case Operate(conversation, what):
            getattr(pool, what)(conversation)
        case OperatePool():
            _operate(step, pool, world)
        case SetStore(mode):
            world.store_mode, world.changed_at = mode, now()
            world.happened.add(mode)
        case _:
            assert_never(step)


def _befall(pool: Pool, conversation: int, what: str) -> None:
    worker = pool.worker_of(conversation)
    if worker is None:
        return
    match what:
        case "crashes":
            worker.exits(1)
        case "is_killed":
            worker.exits(-9)
        case "exits":
            worker.exits(0)
        case "freezes":
            worker.freeze()
        case "sends_stray":
            worker.send_stray()
        case "finishes_job":
            worker.finish_job()


def _operate(step: OperatePool, pool: Pool, world: World) -> None:
    match step.what:
        case "pause":
            pool.pause()
        case "resume":
            pool.resume()
        case "drain":
            pool.drain(0.3)
        case "drain_now":
            pool.drain(0.0)
        case "reset":
            pool.reset(None)
        case "shrink":
            pool.resize(1)
        case "grow":
            pool.resize(CONVERSATIONS)
        case "close":
            pool.close()


# --- and what must be true when it is over ----------------------------------------------------------------------------


async def _put_in_order(pool: Pool, world: World) -> None:
    """Mend what was broken on purpose, and look whether all is as it was."""
    world.births.clear()
    await _until_rest()  # what was begun by the last step
    if pool.condition != "closed":
        pool.resume()
    callers = [call.task for call in world.calls if call.task is not None]
    if callers:
        await asyncio.wait(callers, timeout=ALL_ANSWERED_S)
    world.is_mended = True
    world.changed_at = now()
    world.store_mode = "works"  # not before: all get their answers, whatever the database is like
    await asyncio.sleep(BACKGROUND_S)
    pool.look()
    world.check(not pool.operators_at_work, "an operator waits for ever")
    if pool.condition == "closed":
        pool.check_nothing_lives()
        return
    live = [each for each in world.connections if each.process is not None and each.death is None]
    world.check(pool.workers == len(live), f"{pool.workers} slots are taken, and {live} live")
    for number, key in enumerate(KEYS):
        jobs = sum(len(each.jobs) for each in live if each.conversation == key.conversation_id)
        world.check(pool.jobs(number) == jobs, f"{key} is said to have {pool.jobs(number)} jobs, and has {jobs}")
        _check_books(pool, world, number, key.conversation_id)
    if world.complaints:
        return
    await asyncio.sleep(IDLE_TIMEOUT_S + BACKGROUND_S)
    world.check(not world.live, f"{world.live} idle for ever")
    world.check(not pool.workers, f"{pool.workers} slots are taken, and no worker lives")
    await _ask_all(pool, world)


async def _ask_all(pool: Pool, world: World) -> None:
    """Every conversation answers its next message, once nothing holds it back any more."""
    pool.reset(None)
    for number in range(CONVERSATIONS):
        pool.reset(number)
        probe = pool.say(Say(number))
        assert probe.task is not None
        await asyncio.wait({probe.task}, timeout=ALL_ANSWERED_S)
        answered = isinstance(probe.outcome, Reply) and probe.outcome.outcome == "completed"
        world.check(answered, f"{KEYS[number]} is broken: {probe.outcome!r}")
        world.check(pool.failures(number) == 0, f"{KEYS[number]} works, and old deaths count against it")
        await asyncio.sleep(0.1)


def _check_books(pool: Pool, world: World, number: int, conversation: str) -> None:
    """A death counts where nobody had wanted it, and nowhere else."""
    most = world.rules.restarts_in_window_max + 1
    counted = pool.failures(number)
    least, at_most = (min(most, each[conversation]) for each in (world.strikes_least, world.strikes_most))
    world.check(least <= counted <= at_most, f"{counted} deaths of {conversation} count, and not {least} to {at_most}")
    killed, texts = pool.killers(number), {call.text for call in world.calls if call.conversation == conversation}
    least, at_most = (sum(each[text] for text in texts) for each in (world.killed_least, world.killed_most))
    world.check(least <= killed <= at_most, f"{killed} deaths count against messages, and not {least} to {at_most}")
    died, told = world.unwanted_deaths[conversation], pool.reported()[conversation]
    world.check(died == told, f"{told} deaths of {conversation} were reported, and {died} happened")


# --- the tests --------------------------------------------------------------------------------------------------------


@st.composite
def _rules(draw: st.DrawFn) -> Rules:
    return rules_from(lambda options: draw(st.sampled_from(options)))


@st.composite
def _steps(draw: st.DrawFn) -> Step:
    return step_from(lambda options: draw(st.sampled_from(options)))


HISTORIES = st.builds(History, _rules(), st.lists(_steps(), min_size=1, max_size=40).map(tuple))


@settings(
    max_examples=150,
    deadline=None,
    database=None,
    derandomize=True,  # the same histories each time: what is found anew is found by a soak
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate, Phase.shrink],
)
@given(HISTORIES)
def test_whatever_happens_all_get_their_answers(history: History) -> None:
    live(history)


@pytest.mark.parametrize("history", PAST_FAULTS.values(), ids=PAST_FAULTS)
def test_what_has_gone_wrong_before(history: History) -> None:
    live(history)


def test_long_histories_by_chance() -> None:
    for seed in range(SEED, SEED + SOAK):
        live(random_history(seed))  # a failure shows the history, so the seed need not be told
