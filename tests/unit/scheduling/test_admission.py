"""Permits, queue and state of a pool, with sessions that are no more than their states, on a virtual clock."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, cast

import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_pool import (
    PoolClosedError,
    PoolDrainingError,
    PoolFullError,
    PoolPausedError,
    PoolSettings,
    QueueLimits,
    SessionKey,
    SettingsError,
    Timeouts,
)
from hermes_pool.lifecycle import ALIVE, WorkerState
from hermes_pool.scheduling.admission import Admission
from hermes_pool.scheduling.pool_state import Drained, PoolState
from tests import virtual_time

MB = 1024 * 1024


class Actor:
    """A session: what it does is decided by the test, and told to the admission as a session does."""

    def __init__(self, pool: "Pool", name: str, user: str | None = None) -> None:
        self.key = SessionKey(name, user)
        self.state = WorkerState.STOPPED
        self.waiting = 0
        self.in_turn = False
        self.starting: asyncio.Task[None] | None = None
        self.can_be_saved = True
        self._pool = pool
        self._idle_since = 0.0

    @property
    def is_inactive(self) -> bool:
        return self.state not in ALIVE and not self.in_turn and self.starting is None

    def idle_s(self) -> float | None:
        return asyncio.get_running_loop().time() - self._idle_since if self.state is WorkerState.IDLE else None

    @property
    def is_ready(self) -> bool:
        return self.state is WorkerState.IDLE

    async def hibernate(self, idle_at_least_s: float, *, room_is_needed: bool = False, reason: str = "idle") -> bool:
        assert room_is_needed
        if not self.can_be_saved or self.state is not WorkerState.IDLE:
            return False
        self._become(WorkerState.STOPPING)
        await asyncio.sleep(0.5)
        self._become(WorkerState.STOPPED)
        return True

    async def stop(self, reason: str, *, retryable: bool = False) -> None:
        if self.starting is not None:
            self.starting.cancel()
            await asyncio.wait({self.starting})
        if self.state in ALIVE:
            self._become(WorkerState.STOPPING)
            self._become(WorkerState.STOPPED)
        if self.in_turn:
            self.settle()

    def start(self, *, for_a_turn: bool = False) -> "asyncio.Task[None]":
        self.starting = asyncio.create_task(self._start(for_a_turn))
        return self.starting

    async def _start(self, for_a_turn: bool) -> None:
        try:
            await self._pool.admission.make_room(self)
            self._become(WorkerState.STARTING)
            try:
                await asyncio.sleep(self._pool.start_s)
            except asyncio.CancelledError:
                self._become(WorkerState.STOPPED)
                raise
            self.idle()
            if for_a_turn:
                self.begin()
        finally:
            self.starting = None

    def begin(self) -> None:
        self.in_turn = True
        self._become(WorkerState.BUSY)

    def idle(self) -> None:
        self.in_turn = False
        self._idle_since = asyncio.get_running_loop().time()
        self._become(WorkerState.IDLE)

    def die(self) -> None:
        self._become(WorkerState.STOPPED)

    def settle(self) -> None:
        """Its turn ends without a worker."""
        self.in_turn = False
        self._pool.admission.changed(self, self.state)

    def _become(self, state: WorkerState) -> None:
        self.state = state
        self._pool.admission.changed(self, state)


class Pool:
    def __init__(self, **given: Any) -> None:
        self.actors: list[Actor] = []
        self.tasks: set[asyncio.Task[Any]] = set()
        self.start_s = 0.0
        self.memory: dict[str, int] = {}
        self.admission = Admission(
            settings=PoolSettings(**{"workers_max": 1, "timeouts": Timeouts(wait_s=60.0), **given}),
            sessions=lambda: self.actors,
            in_background=self._in_background,
            log=structlog.wrap_logger(None, processors=[_drop]),
            memory_of=lambda session: self.memory.get(session.key.conversation_id),
        )
        self.admission.become(PoolState.OPEN)

    def _in_background(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    def actor(self, name: str, user: str | None = None) -> Actor:
        self.actors.append(Actor(self, name, user))
        return self.actors[-1]

    async def busy(self, name: str, user: str | None = None) -> Actor:
        actor = self.actor(name, user)
        await actor.start(for_a_turn=True)
        return actor

    @property
    def workers(self) -> int:
        return self.admission.snapshot().workers

    @property
    def in_queue(self) -> int:
        return self.admission.snapshot().waiting


def _drop(*_: Any) -> Any:
    raise structlog.DropEvent


def virtually(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    """Run a test on the virtual clock: hours pass in no time."""

    def run() -> None:
        virtual_time.run(cast("Coroutine[Any, Any, None]", test()))

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


# --- which idle session goes first ------------------------------------------------------------------------------------


@virtually
async def test_what_is_known_of_an_idle_session_decides_which_one_goes() -> None:
    pool = Pool(workers_max=3)
    for name, start_s in (("slow to start", 9.0), ("big", 1.0), ("small", 1.0)):
        pool.start_s = start_s
        await pool.actor(name).start()
        await asyncio.sleep(5)
    pool.memory = {"big": 500 * MB, "small": 100 * MB}
    await asyncio.sleep(100)
    await pool.actor("new").start()
    assert [actor.state for actor in pool.actors] == [
        WorkerState.IDLE,
        WorkerState.STOPPED,
        WorkerState.IDLE,
        WorkerState.IDLE,
    ]


# --- waiting for a permit ---------------------------------------------------------------------------------------------


@virtually
async def test_a_start_counts_from_the_moment_it_is_admitted() -> None:
    pool = Pool(workers_max=2)
    pool.start_s = 10
    actors = [pool.actor(str(number)) for number in range(5)]
    tasks = [actor.start() for actor in actors]
    await asyncio.sleep(1)
    assert [actor.state for actor in actors] == [WorkerState.STARTING] * 2 + [WorkerState.STOPPED] * 3
    assert (pool.workers, pool.in_queue) == (2, 3)
    await asyncio.gather(*tasks)  # those that are idle make room
    assert sum(actor.state is WorkerState.IDLE for actor in actors) == 2


@virtually
async def test_a_slot_goes_from_user_to_user() -> None:
    pool = Pool()
    running = await pool.busy("first", "ada")
    waiting = [pool.actor(f"ada {number}", "ada") for number in range(3)] + [pool.actor("bob", "bob")]
    for actor in waiting:
        actor.start(for_a_turn=True)
    await asyncio.sleep(0)
    served = []
    for _ in waiting:
        running.idle()
        await asyncio.sleep(2)
        (running,) = [actor for actor in pool.actors if actor.state is WorkerState.BUSY]
        served.append(running.key.conversation_id)
    assert served == ["ada 0", "bob", "ada 1", "ada 2"]


@virtually
async def test_who_waits_disturbs_nobody_and_is_refused_in_time_with_its_place_and_the_pace() -> None:
    pool = Pool(workers_max=2)
    first, second = await pool.busy("a"), await pool.busy("b")
    await asyncio.sleep(30)
    for actor in (first, second):  # two turns of 30 s each
        actor.idle()
        actor.begin()
    began = asyncio.get_running_loop().time()
    tasks = [pool.actor(name).start() for name in "cde"]
    await asyncio.sleep(0)
    assert pool.admission.snapshot().expected_wait_s == 4 * 30 / 2
    tasks[0].cancel()
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert asyncio.get_running_loop().time() - began == 60
    assert [type(end) for end in ends] == [asyncio.CancelledError, PoolFullError, PoolFullError]
    error = cast("PoolFullError", ends[1])
    assert (error.position, error.waiting, error.expected_wait_s) == (1, 1, 15)
    assert error.conversation_id == "d"
    assert "workers_max" in str(error)
    assert "15 s" in str(error)
    assert first.state is second.state is WorkerState.BUSY
    assert (pool.workers, pool.in_queue) == (2, 0)


@virtually
async def test_the_expected_wait_is_not_guessed() -> None:
    pool = Pool(busy="reject")
    assert pool.admission.snapshot().expected_wait_s == 0
    await pool.busy("a")
    with pytest.raises(PoolFullError, match="reject") as refused:
        await pool.actor("b").start()
    assert (refused.value.position, refused.value.waiting, refused.value.expected_wait_s) == (1, 0, None)
    assert pool.in_queue == 0


@virtually
async def test_only_turns_of_a_full_pool_are_measured() -> None:
    pool = Pool()
    actor = await pool.busy("a")
    pool.admission.resize(2)
    await asyncio.sleep(100)
    actor.idle()
    actor.begin()
    await asyncio.sleep(100)
    pool.admission.resize(1)
    actor.idle()
    assert pool.admission.snapshot().expected_wait_s is None
    actor.begin()
    await asyncio.sleep(10)
    actor.idle()
    assert pool.admission.snapshot().expected_wait_s == 10


@virtually
async def test_who_does_not_want_to_wait_still_gets_the_slot_of_an_idle_session() -> None:
    pool = Pool(busy="reject")
    await pool.actor("idle").start()
    asked = [pool.actor(name).start() for name in "bc"]
    got, refused = await asyncio.gather(*asked, return_exceptions=True)
    assert got is None
    assert isinstance(refused, PoolFullError)


@virtually
async def test_who_does_not_want_to_wait_is_refused_when_the_idle_session_cannot_go() -> None:
    pool = Pool(busy="reject")
    stubborn = pool.actor("idle")
    await stubborn.start()
    stubborn.can_be_saved = False
    with pytest.raises(PoolFullError):
        await pool.actor("b").start()
    assert stubborn.state is WorkerState.IDLE


@virtually
async def test_a_line_that_is_full_refuses_who_would_be_served_last() -> None:
    pool = Pool(queues=QueueLimits(admissions_max=3))
    await pool.busy("running")
    flood = [pool.actor(f"ada {number}", "ada").start() for number in range(4)]
    await asyncio.sleep(0.1)
    assert [task.done() for task in flood] == [False, False, False, True]
    modest = pool.actor("bob", "bob").start()
    await asyncio.sleep(0.1)
    assert [task.done() for task in (*flood, modest)] == [False, False, True, True, False]
    error = cast("PoolFullError", flood[2].exception())
    assert (error.position, error.waiting) == (4, 3)
    assert "queues.admissions_max" in str(error)
    flood[3].exception()
    for task in (*flood[:2], modest):
        task.cancel()


@virtually
async def test_one_that_gives_up_takes_no_slot_with_it_not_even_one_that_is_on_its_way() -> None:
    pool = Pool()
    running = await pool.busy("running")
    first, second = pool.actor("first"), pool.actor("second")
    tasks = [first.start(), second.start()]
    await asyncio.sleep(0)
    running.idle()
    running.die()
    assert pool.workers == 1  # it has been given to the first, who does not know yet
    tasks[0].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (first.state, second.state) == (WorkerState.STOPPED, WorkerState.IDLE)
    assert pool.workers == 1


@virtually
async def test_a_slot_is_not_given_to_one_who_has_just_given_up() -> None:
    pool = Pool()
    running = await pool.busy("running")
    first, second = pool.actor("first"), pool.actor("second")
    tasks = [first.start(), second.start()]
    await asyncio.sleep(0)
    tasks[0].cancel()
    running.idle()
    running.die()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (first.state, second.state) == (WorkerState.STOPPED, WorkerState.IDLE)


@virtually
async def test_an_idle_session_with_a_message_on_its_way_is_left_alone() -> None:
    pool = Pool(workers_max=2)
    wanted, other = pool.actor("wanted"), pool.actor("other")
    await wanted.start()
    await asyncio.sleep(100)
    await other.start()
    wanted.waiting = 1
    await pool.actor("new").start()
    assert (wanted.state, other.state) == (WorkerState.IDLE, WorkerState.STOPPED)


@virtually
async def test_a_session_whose_worker_dies_in_a_turn_keeps_its_slot() -> None:
    pool = Pool()
    running, other = await pool.busy("running"), pool.actor("other")
    waiting = other.start()
    await asyncio.sleep(0)
    running.die()
    await asyncio.sleep(1)
    await running.start()
    running.begin()
    assert not waiting.done()
    running.die()
    running.settle()  # with an error, and no start
    await waiting
    assert other.state is WorkerState.IDLE


@virtually
async def test_an_idle_session_that_could_not_go_is_asked_again() -> None:
    pool = Pool()
    stubborn = pool.actor("idle")
    await stubborn.start()
    stubborn.can_be_saved = False
    waiting = pool.actor("new").start()
    await asyncio.sleep(5)
    assert not waiting.done()
    stubborn.can_be_saved = True
    async with asyncio.timeout(2):
        await waiting


@virtually
async def test_a_slot_that_was_lost_is_found() -> None:
    pool = Pool()
    lost = pool.actor("lost")
    await pool.admission.make_room(lost)  # and its start never begins
    pool.admission.reclaim_permits()
    assert pool.workers == 0


# --- the limit while it runs ------------------------------------------------------------------------------------------


@virtually
async def test_shrinking_lets_idle_sessions_go_and_running_ones_when_they_are_done() -> None:
    pool = Pool(workers_max=3)
    busy = [await pool.busy("a"), await pool.busy("b")]
    idle = pool.actor("c")
    await idle.start()
    pool.admission.resize(1)
    await asyncio.sleep(5)
    assert [actor.state for actor in (*busy, idle)] == [WorkerState.BUSY, WorkerState.BUSY, WorkerState.STOPPED]
    busy[1].idle()
    await asyncio.sleep(5)
    assert [actor.state for actor in busy] == [WorkerState.BUSY, WorkerState.STOPPED]
    assert pool.workers == 1


@virtually
async def test_growing_serves_those_who_wait() -> None:
    pool = Pool()
    await pool.busy("a")
    tasks = [pool.actor(name).start() for name in "bcd"]
    await asyncio.sleep(0)
    pool.admission.resize(3)
    await asyncio.sleep(1)
    assert pool.workers == 3
    assert sum(task.done() for task in tasks) >= 2
    await asyncio.gather(*tasks)
    with pytest.raises(SettingsError, match="workers_max"):
        pool.admission.resize(0)


# --- the state ----------------------------------------------------------------------------------------------------


@virtually
async def test_a_paused_pool_holds_messages_and_starts_and_lets_them_on_when_resumed() -> None:
    pool = Pool(workers_max=2)
    running = await pool.busy("running")
    new = pool.actor("new")
    assert await pool.admission.pause(deadline_s=5) == 1
    held = asyncio.create_task(pool.admission.wait_while_paused(running))
    start = new.start()
    await asyncio.sleep(30)
    assert (held.done(), start.done(), new.state) == (False, False, WorkerState.STOPPED)
    assert pool.admission.snapshot().state == "paused"
    assert (pool.admission.snapshot().held, pool.in_queue) == (1, 1)
    pool.admission.resume()
    await asyncio.gather(held, start)
    assert new.state is WorkerState.IDLE
    assert (pool.admission.snapshot().held, pool.in_queue) == (0, 0)


@virtually
async def test_a_pause_waits_for_the_turns_that_run() -> None:
    pool = Pool()
    running = await pool.busy("running")
    loop = asyncio.get_running_loop()
    loop.call_later(3, running.idle)
    began = loop.time()
    assert await pool.admission.pause(deadline_s=100) == 0
    assert loop.time() - began == pytest.approx(3, abs=0.1)


@virtually
async def test_a_pause_that_lasts_too_long_or_holds_too_many_refuses() -> None:
    pool = Pool(queues=QueueLimits(admissions_max=1), timeouts=Timeouts(wait_s=20))
    actor, starting = pool.actor("a"), pool.actor("b")
    await pool.admission.pause(0)
    began = asyncio.get_running_loop().time()
    held, start = asyncio.create_task(pool.admission.wait_while_paused(actor)), starting.start()
    await asyncio.sleep(0)
    with pytest.raises(PoolFullError, match="paused") as refused:
        await pool.admission.wait_while_paused(actor)
    assert (refused.value.position, refused.value.waiting) == (2, 1)
    ends = await asyncio.gather(held, start, return_exceptions=True)
    assert [type(end) for end in ends] == [PoolPausedError, PoolPausedError]
    assert asyncio.get_running_loop().time() - began == 20
    impatient = Pool(busy="reject")
    await impatient.admission.pause(0)
    with pytest.raises(PoolPausedError):
        await impatient.admission.wait_while_paused(impatient.actor("a"))


@virtually
async def test_a_drain_finishes_what_is_there_and_ends_the_rest_at_its_deadline() -> None:
    pool = Pool(workers_max=3)
    quick, slow = await pool.busy("quick"), await pool.busy("slow")
    idle = pool.actor("idle")
    await idle.start()
    loop = asyncio.get_running_loop()
    loop.call_later(3, quick.idle)
    began = loop.time()
    drain = asyncio.create_task(pool.admission.drain(10))
    await asyncio.sleep(0)
    with pytest.raises(PoolDrainingError, match="draining"):
        pool.admission.refuse_new()
    assert await drain == Drained(finished=1, cut=1)
    assert loop.time() - began == pytest.approx(10, abs=0.1)
    assert [actor.state for actor in (quick, slow, idle)] == [WorkerState.IDLE, WorkerState.STOPPED, WorkerState.IDLE]
    with pytest.raises(PoolDrainingError, match="drained"):
        await pool.admission.wait_while_paused(quick)
    with pytest.raises(PoolDrainingError):
        await pool.admission.pause(0)
    assert await pool.admission.drain(10) == Drained(0, 0)
    pool.admission.resume()
    pool.admission.refuse_new()


@virtually
async def test_a_drain_ends_with_its_last_message_or_when_it_is_called_off() -> None:
    pool = Pool()
    running = await pool.busy("running")
    loop = asyncio.get_running_loop()
    loop.call_later(3, running.idle)
    began = loop.time()
    assert await pool.admission.drain(1000) == Drained(finished=1, cut=0)
    assert loop.time() - began < 3.1
    pool.admission.resume()
    running.begin()
    drain = asyncio.create_task(pool.admission.drain(1000))
    await asyncio.sleep(1)
    pool.admission.resume()
    assert await drain == Drained(finished=0, cut=0)
    assert running.state is WorkerState.BUSY


@virtually
async def test_a_close_ends_all_waiting() -> None:
    pool = Pool()
    running = await pool.busy("running")
    start = pool.actor("b").start()
    await asyncio.sleep(0)
    await pool.admission.pause(0)
    held = asyncio.create_task(pool.admission.wait_while_paused(running))
    await asyncio.sleep(0)
    pool.admission.become(PoolState.CLOSED)
    ends = await asyncio.gather(start, held, return_exceptions=True)
    assert [type(end) for end in ends] == [PoolClosedError, PoolClosedError]
    with pytest.raises(PoolClosedError):
        pool.admission.resume()


# --- whatever happens -------------------------------------------------------------------------------------------------

STEPS = st.tuples(
    st.sampled_from(
        [
            "start",
            "start",
            "start",
            "turn",
            "turn",
            "die",
            "settle",
            "give up",
            "stop",
            "wait",
            "resize",
            "pause",
            "resume",
        ]
    ),
    st.integers(0, 7),
    st.sampled_from([0, 0, 1, 3, 100]),  # rounds of the loop, or seconds, until the next step
)


@settings(max_examples=150, deadline=None)
@given(st.lists(STEPS, max_size=60), st.sampled_from([0.0, 2.0]), st.sampled_from(["wait", "reject"]))
def test_no_slot_is_lost_or_given_twice(steps: list[tuple[str, int, int]], start_s: float, busy: str) -> None:
    virtual_time.run(_random_life(steps, start_s, busy))


async def _random_life(steps: list[tuple[str, int, int]], start_s: float, busy: str) -> None:
    pool = Pool(workers_max=2, queues=QueueLimits(admissions_max=4), timeouts=Timeouts(wait_s=50), busy=busy)
    pool.start_s = start_s
    actors = [pool.actor(str(number), "ada" if number < 4 else None) for number in range(8)]
    tasks = []
    limit = before = 2
    for what, number, rounds in steps:
        actor = actors[number]
        match what:
            case "start" if actor.starting is None and actor.state not in ALIVE:
                tasks.append(actor.start())
            case "turn" if actor.state is WorkerState.IDLE:
                actor.begin()
            case "turn" if actor.state is WorkerState.BUSY:
                actor.idle()
            case "die" if actor.state in (WorkerState.IDLE, WorkerState.BUSY):
                actor.die()
            case "settle" if actor.state not in ALIVE:
                actor.settle()
            case "give up" if actor.starting is not None and actor.state not in ALIVE:
                actor.starting.cancel()
            case "stop":
                await actor.stop("by request")
            case "wait":
                await asyncio.sleep(rounds)
            case "resize":
                limit = number + 1
                pool.admission.resize(limit)
            case "pause":
                await pool.admission.pause(0)
            case "resume":
                pool.admission.resume()
        for _ in range(min(rounds, 3)):
            await asyncio.sleep(0)
        alive = sum(actor.state in ALIVE for actor in actors)
        assert alive <= pool.workers <= max(limit, before), (
            "more than allowed, or more than before while over the limit"
        )
        before = pool.workers
        if pool.admission.state is PoolState.OPEN and pool.workers < limit:
            assert not pool.in_queue, "there is a permit, and somebody waits"
    pool.admission.resume()
    for actor in actors:
        if actor.in_turn and actor.state not in ALIVE:
            actor.settle()
        if actor.state is WorkerState.BUSY:
            actor.idle()
    await asyncio.sleep(100)  # longer than anybody waits
    assert all(task.done() for task in tasks), "somebody waits in a pool in which nothing runs"
    for actor in actors:
        await actor.stop("the end")
    await asyncio.sleep(1)
    assert (pool.workers, pool.in_queue, len(pool.tasks), len(pool.admission._starting_since)) == (0, 0, 0, 0)
    await asyncio.gather(*tasks, return_exceptions=True)
