"""Decides which sessions may have a worker, which idle ones make room, and whether the pool begins new turns.

A worker needs a permit, and there are ``workers_max``. A session holds its permit from its admission, before there is
a process, until its process has ended. A session whose worker dies in a turn keeps it, since it is about to start
another worker. A session that finds no free permit waits in a queue that is fair between users, while as many idle
sessions as needed go dormant, the least valuable first. A session with a turn is never disturbed.

A freed permit goes at once to the next session in the queue: there is no polling, and no newcomer can overtake. A
session that gives up at that very moment passes the permit on.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from hermes_pool.errors import (
    HermesPoolError,
    PoolClosedError,
    PoolDrainingError,
    PoolFullError,
    PoolPausedError,
    SettingsError,
)
from hermes_pool.lifecycle import ALIVE, WorkerState
from hermes_pool.policy.eviction import Idle, gain
from hermes_pool.scheduling.fair_queue import FairQueue
from hermes_pool.scheduling.pool_state import MAY_BECOME, Drained, PoolState
from hermes_pool.settings import PoolSettings, SessionKey
from hermes_pool.snapshot import PoolSnapshot

RETRY_S = 1.0
"""How long to wait before evicting an idle session again that could not go: its metadata could not be saved, say."""
TURN_TIMES_KEPT = 64
"""How many of the latest turns the expected wait is estimated from."""


_BUSY, _IDLE = WorkerState.BUSY, WorkerState.IDLE  # looked up once: every turn uses them


# --- permits and waiters ----------------------------------------------------------------------------------------------


class Occupant(Protocol):
    """A session as admission sees it."""

    key: SessionKey

    @property
    def waiting(self) -> int:
        """How many messages wait for the conversation."""

    @property
    def state(self) -> WorkerState:
        """What its worker is doing."""

    @property
    def is_inactive(self) -> bool:
        """Whether nothing at all is going on: no process, no caller."""

    @property
    def in_turn(self) -> bool:
        """Whether it has a turn, even if the turn is between two workers."""

    @property
    def is_ready(self) -> bool:
        """Whether its worker is ready for a turn; it may have background work."""

    def idle_s(self) -> float | None:
        """Return how long its worker has had nothing to do, in seconds; ``None`` if it is busy or there is none."""

    async def hibernate(self, idle_at_least_s: float, *, room_is_needed: bool = False, reason: str = "idle") -> bool:
        """Stop the worker if it is still idle, after saving the session; return whether it was stopped."""

    async def stop(self, reason: str, *, retryable: bool = False) -> object:
        """End the running turn and the worker; ``retryable``: another pool may take the message."""


@dataclass(slots=True, eq=False)
class _Permit:
    start_s: float | None = None
    busy_since: float | None = None
    """When its turn began, if the pool has been full ever since (the admission's clock)."""
    not_before: float = 0.0
    """When it may be evicted again, after an eviction that failed (the admission's clock)."""


@dataclass(slots=True, eq=False)
class Waiter:
    """A session in the queue. ``admitted`` receives the permit, or the error that refuses it."""

    session: Occupant
    admitted: "asyncio.Future[_Permit]"

    @property
    def user(self) -> str | SessionKey:
        """The user it counts for; a conversation without a user counts as its own."""
        key = self.session.key
        return key if key.user_id is None else key.user_id


# --- admission --------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True, eq=False)
class Admission:
    """The permits of one pool, the queue before them, and the pool's state.

    Sessions call ``make_room`` and ``changed``; messages that arrive while ``state`` is not ``OPEN`` call
    ``wait_while_paused``. Call everything here from the thread of the event loop only.
    """

    settings: PoolSettings
    sessions: Callable[[], Iterable[Occupant]]
    """All sessions of the pool."""
    in_background: Callable[[Coroutine[Any, Any, Any]], "asyncio.Task[Any]"]
    log: Any
    memory_of: Callable[[Occupant], int | None]
    """How many bytes the end of a session's worker would free, by its last sample; ``None`` if unknown."""

    state: PoolState = field(default=PoolState.NEW, init=False)
    """Every message reads it; only ``become`` sets it."""
    _limit: int = field(init=False)
    _permits: dict[Occupant, _Permit] = field(default_factory=dict, init=False)
    _queue: FairQueue[Waiter] = field(default_factory=FairQueue, init=False)
    _evicting: set[Occupant] = field(default_factory=set, init=False)
    """Sessions that have been asked to go dormant."""
    _held: list["asyncio.Future[None]"] = field(default_factory=list, init=False)
    """Messages held while the pool is paused."""
    _starting_since: dict[Occupant, float] = field(default_factory=dict, init=False)
    """Sessions whose worker is starting, and when that start began."""
    _turn_times_s: deque[float] = field(default_factory=lambda: deque(maxlen=TURN_TIMES_KEPT), init=False)
    """How long the latest turns of the full pool took, in seconds."""
    _clock: Callable[[], float] = field(default=time.monotonic, init=False)
    """The event loop's clock once the pool has been opened."""
    counts_changed: asyncio.Event | None = field(default=None, init=False)
    """Set whenever the numbers of running turns and unanswered messages may have changed: here, and by sessions when a
    message stops waiting or the conversation is free again. Made by the first that waits for it: few pools are ever
    paused or drained, and every turn would have to set it."""

    def __post_init__(self) -> None:
        """Start with the limit from the settings. ``resize`` changes the limit; the settings stay as they are."""
        self._limit = self.settings.workers_max

    def snapshot(self) -> PoolSnapshot:
        """Return the public view of the pool."""
        return PoolSnapshot(
            state=self.state.value,
            workers=len(self._permits),
            workers_max=self._limit,
            waiting=len(self._queue),
            held=len(self._held),
            expected_wait_s=self._expected_wait_s(len(self._queue) + 1),
        )

    # --- what sessions ask ---

    async def make_room(self, asking: Occupant) -> None:
        """Wait until the session may start a worker. It then has a permit, until ``changed`` frees it.

        Waits at most ``timeouts.wait_s``; with ``busy="reject"`` only for an idle session that makes room. Raises
        ``PoolFullError``, ``PoolPausedError`` or ``PoolClosedError``. A cancelled caller leaves the queue at once.
        """
        self.check_open(asking)
        if asking in self._permits:  # its worker died in a turn: the permit was kept for this
            return
        if not self._queue and self._has_permit():
            self._take(asking)
            return
        loop = asyncio.get_running_loop()
        waiter = Waiter(asking, loop.create_future())
        self._queue.add(waiter)
        timeout = loop.call_later(self.settings.timeouts.wait_s, self._refuse, waiter, "too late")
        try:
            if len(self._queue) > self.settings.queues.admissions_max:
                # The one that would be served last: a user who fills the queue takes no place from another user.
                self._refuse(list(self._queue)[-1], "too many")
            self._serve()
            await waiter.admitted
            if self.state is PoolState.CLOSED:
                raise self._refusal(asking)
        except BaseException:  # refused or cancelled, and the permit may have been granted at the same moment
            self._queue.discard(waiter)
            if not waiter.admitted.cancelled() and waiter.admitted.exception() is None:
                self._free(asking, waiter.admitted.result())
            raise
        finally:
            timeout.cancel()

    def changed(self, session: Occupant, state: WorkerState) -> None:
        """Take a session's new state, or the news that its turn has settled without a worker.

        Called twice in every turn, and mostly has nothing to do.
        """
        if state is _BUSY or state is _IDLE:
            if len(self._permits) >= self._limit or self._starting_since:
                self._measure(session, state)
        elif state is WorkerState.STARTING:
            self._starting_since[session] = self._clock()
        elif state not in ALIVE:
            self._starting_since.pop(session, None)
            permit = self._permits.get(session)
            if permit is not None and (not session.in_turn or self.state is PoolState.CLOSED):
                self._free(session, permit)
        if self.counts_changed is not None:
            self.counts_changed.set()

    def _measure(self, session: Occupant, state: WorkerState) -> None:
        """Measure starts and, in a full pool, turns. Serve the queue if the session has become idle."""
        permit = self._permits.get(session)
        if permit is None:
            return
        now = self._clock()
        if state is WorkerState.BUSY:
            permit.busy_since = now if len(self._permits) >= self._limit else None
            return
        begun_at = self._starting_since.pop(session, None)
        if begun_at is not None:
            permit.start_s = now - begun_at
        if permit.busy_since is not None:
            self._turn_times_s.append(now - permit.busy_since)
            permit.busy_since = None
        permit.not_before = 0.0
        if self._queue or len(self._permits) > self._limit:
            # Not now: a session that has just become idle still holds its lock.
            asyncio.get_running_loop().call_soon(self._serve)

    # --- permits ---

    def _has_permit(self) -> bool:
        return len(self._permits) < self._limit and self.state is not PoolState.PAUSED

    def _take(self, session: Occupant) -> _Permit:
        permit = self._permits[session] = _Permit()
        return permit

    def _free(self, session: Occupant, permit: _Permit) -> None:
        if self._permits.get(session) is permit:
            del self._permits[session]
            self._serve()
            self._forget_turn_starts()

    def _forget_turn_starts(self) -> None:
        """Forget when turns began if the pool is not full: their ends may not be measured."""
        if len(self._permits) < self._limit:
            for permit in self._permits.values():
                permit.busy_since = None

    def _serve(self) -> None:
        """Grant free permits to the next in the queue, and evict idle sessions for those that still wait."""
        while self._queue and self._has_permit():
            waiter = self._queue.pop()
            if not waiter.admitted.done():  # otherwise it was cancelled a moment ago
                waiter.admitted.set_result(self._take(waiter.session))
        if self._queue or len(self._permits) > self._limit:
            self._evict_idle()

    def _evict_idle(self) -> None:
        wanted = 0 if self.state is PoolState.PAUSED else len(self._queue)
        going = sum(session in self._evicting or session.state is WorkerState.STOPPING for session in self._permits)
        short = len(self._permits) + wanted - self._limit - going
        if short <= 0:
            return
        for session in self._evictable()[:short]:
            self._evicting.add(session)
            self.in_background(self._evict(session))
            short -= 1
        if short > 0 and self.settings.busy == "reject":
            for waiter in list(self._queue)[-short:]:
                self._refuse(waiter, "busy")

    def _evictable(self) -> list[Occupant]:
        """Return the idle sessions that may be evicted, the least valuable first."""
        now = self._clock()
        idle = [
            session
            for session, permit in self._permits.items()
            if session.idle_s() is not None
            and not session.waiting
            and session not in self._evicting
            and now >= permit.not_before
        ]
        return sorted(idle, key=self.worth)

    def worth(self, session: Occupant) -> float:
        """Return how much an idle session's worker is worth keeping: the negative of what ending it gains."""
        permit = self._permits.get(session)
        return -gain(Idle(session.idle_s() or 0.0, None if permit is None else permit.start_s, self.memory_of(session)))

    async def _evict(self, session: Occupant) -> None:
        went = False
        try:
            if session.idle_s() is not None and not session.waiting:  # its own message would have to queue for a permit
                went = await session.hibernate(0.0, room_is_needed=True)
        finally:
            self._evicting.discard(session)
            permit = self._permits.get(session)
            if not went and permit is not None:
                permit.not_before = self._clock() + RETRY_S
                asyncio.get_running_loop().call_later(RETRY_S, self._serve)
            self._serve()

    def reclaim_permits(self) -> None:
        """Free the permits of inactive sessions, then serve the queue. Called periodically.

        An inactive session should hold none, but a leaked permit would be lost for good. The queue is served because a
        session can become evictable merely by the passing of time: its background work has had its time.
        """
        for session, permit in list(self._permits.items()):
            if session.is_inactive:
                self.log.warning("permit_lost", conversation_id=session.key.conversation_id)
                self._free(session, permit)
        self._serve()

    # --- refusals ---

    def _refuse(self, waiter: Waiter, why: str) -> None:
        if waiter.admitted.done():
            return
        position = self._queue.position(waiter)
        self._queue.discard(waiter)
        if self.state is PoolState.PAUSED:
            waiter.admitted.set_exception(self._refusal(waiter.session))
            return
        expected_s = self._expected_wait_s(position)
        pace = "" if expected_s is None else f", about {expected_s:.3g} s at the current pace"
        problem = {
            "busy": 'none is idle and messages do not wait (busy="reject"); '
            f"it would be number {position} in the queue{pace}",
            "too many": f"{len(self._queue)} messages are already waiting for one (queues.admissions_max); it would be "
            f"number {position} in the queue{pace}",
            "too late": f"none became free within {self.settings.timeouts.wait_s:g} s (timeouts.wait_s); it was number "
            f"{position} in the queue{pace}",
        }[why]
        error = PoolFullError(
            f"all {self._limit} workers (workers_max) are in use, and {problem}. Try again later, answer the message "
            "another way, or allow more workers",
            position=position,
            waiting=len(self._queue),
            expected_wait_s=expected_s,
            conversation_id=waiter.session.key.conversation_id,
        )
        waiter.admitted.set_exception(error)

    def _expected_wait_s(self, position: int) -> float | None:
        """Estimate the wait at a position of the queue: that many turns must end, ``workers_max`` run at a time."""
        if len(self._permits) < self._limit and not self._queue:
            return 0.0
        if not self._turn_times_s:
            return None
        return position * sum(self._turn_times_s) / len(self._turn_times_s) / self._limit

    def _refusal(self, session: Occupant | None = None) -> HermesPoolError:
        """Return the error that says why nothing new begins in this state."""
        conversation_id = None if session is None else session.key.conversation_id
        match self.state:
            case PoolState.NEW:
                return PoolClosedError(
                    "the pool is not open: enter it first, with async with", conversation_id=conversation_id
                )
            case PoolState.DRAINING | PoolState.DRAINED:
                return PoolDrainingError(
                    f"the pool is {self.state.value} and begins nothing new. Answer the message another way, or "
                    "resume() the pool",
                    conversation_id=conversation_id,
                )
            case PoolState.PAUSED:
                return PoolPausedError(
                    "the pool is paused, and was not resumed in time (timeouts.wait_s). Try again later, answer the "
                    "message another way, or resume() the pool",
                    conversation_id=conversation_id,
                )
        return PoolClosedError("the pool is closed", conversation_id=conversation_id)

    # --- the state ---

    def check_open(self, session: Occupant) -> None:
        """Raise ``PoolClosedError`` if the pool is closed."""
        if self.state is PoolState.CLOSED:
            raise self._refusal(session)

    def refuse_new(self) -> None:
        """Raise the error for a new message, unless the pool is open, or paused: then messages are held."""
        if self.state is not PoolState.OPEN and self.state is not PoolState.PAUSED:
            raise self._refusal()

    async def wait_while_paused(self, session: Occupant) -> None:
        """Hold an accepted message while the pool is paused; return when it may begin its turn.

        Raises ``PoolPausedError`` after ``timeouts.wait_s`` (at once with ``busy="reject"``), ``PoolFullError`` if
        ``queues.admissions_max`` are held already, and ``PoolClosedError`` and its subclasses.
        """
        settings = self.settings
        deadline = self._clock() + settings.timeouts.wait_s
        while self.state is PoolState.PAUSED:
            if settings.busy == "reject":
                raise self._refusal(session)
            if len(self._held) >= settings.queues.admissions_max:
                raise PoolFullError(
                    f"the pool is paused, and {len(self._held)} messages are already waiting (queues.admissions_max). "
                    "Try again later, answer the message another way, or resume() the pool",
                    position=len(self._held) + 1,
                    waiting=len(self._held),
                    conversation_id=session.key.conversation_id,
                )
            await self._hold(session, deadline)
        if self.state is not PoolState.OPEN and self.state is not PoolState.DRAINING:
            raise self._refusal(session)

    async def _hold(self, session: Occupant, deadline: float) -> None:
        held: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._held.append(held)
        try:
            async with asyncio.timeout_at(deadline):
                await held
        except TimeoutError:
            if self.state is PoolState.PAUSED:  # otherwise it was resumed at that very moment
                raise self._refusal(session) from None
        finally:
            if held in self._held:
                self._held.remove(held)

    def become(self, state: PoolState) -> None:
        """Change the state; raise ``PoolClosedError`` or a subclass if the table does not allow it."""
        before = self.state
        if state is before:
            return
        if state not in MAY_BECOME[before]:
            raise self._refusal()
        if before is PoolState.NEW:
            self._clock = asyncio.get_running_loop().time
        self.state = state
        self.log.info("pool_state", state=state.value, before=before.value)
        if self.counts_changed is not None:
            self.counts_changed.set()
        if state is not PoolState.PAUSED:
            held, self._held = self._held, []
            for each in held:
                if not each.done():
                    each.set_result(None)
        if state is PoolState.CLOSED:
            for waiter in list(self._queue):
                self._queue.discard(waiter)
                if not waiter.admitted.done():
                    waiter.admitted.set_exception(self._refusal(waiter.session))
        self._serve()

    def resume(self) -> None:
        """Begin turns again."""
        if self.state is PoolState.NEW:
            raise self._refusal()
        self.become(PoolState.OPEN)

    async def pause(self, deadline_s: float) -> int:
        """Begin no more turns, wait up to ``deadline_s`` for the running ones, and return how many still run."""
        self.become(PoolState.PAUSED)
        await self._wait_for_none(deadline_s, self._running, PoolState.PAUSED)
        return self._running()

    async def drain(self, deadline_s: float) -> Drained:
        """Finish accepted messages, refuse new ones, end what is left at the deadline: see the manager's ``drain``."""
        if self.state is PoolState.DRAINED:
            return Drained(0, 0)
        self.become(PoolState.DRAINING)
        before = self._unanswered()
        undisturbed = await self._wait_for_none(deadline_s, self._unanswered, PoolState.DRAINING)
        cut = self._unanswered()
        if not undisturbed:  # resumed or closed meanwhile
            return Drained(max(0, before - cut), 0)
        self.become(PoolState.DRAINED)
        while self._is(PoolState.DRAINED) and (busy := [each for each in self.sessions() if _unanswered(each)]):
            counts_changed = self._watch_counts()
            await asyncio.wait(
                {self.in_background(session.stop("the pool was drained", retryable=True)) for session in busy}
            )
            if self._is(PoolState.DRAINED) and self._unanswered():
                await counts_changed.wait()  # a message was between two states
        return Drained(max(0, before - cut), cut)

    def resize(self, workers_max: int) -> None:
        """Change the limit. Surplus workers go: idle ones now, busy ones once they are idle."""
        if not workers_max > 0:
            raise SettingsError(f"workers_max must be greater than 0, not {workers_max!r}")
        self.log.info("pool_resized", workers_max=workers_max, before=self._limit)
        self._limit = workers_max
        self._serve()
        self._forget_turn_starts()

    async def _wait_for_none(self, deadline_s: float, count: Callable[[], int], state: PoolState) -> bool:
        """Wait until ``count()`` is 0, at most ``deadline_s``; return whether the pool is still in ``state``."""
        deadline = self._clock() + deadline_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                while self._is(state) and count():
                    await self._watch_counts().wait()
        return self._is(state)

    def _watch_counts(self) -> asyncio.Event:
        """Return an event that is set at the next change of the counts."""
        if self.counts_changed is None:
            self.counts_changed = asyncio.Event()
        self.counts_changed.clear()
        return self.counts_changed

    def _is(self, state: PoolState) -> bool:
        return self.state is state  # a method: the type checker would assume that an await leaves the state as it is

    def _running(self) -> int:
        """Count the turns that run or whose worker is starting."""
        return sum(session.state is WorkerState.STARTING or session.in_turn for session in self.sessions())

    def _unanswered(self) -> int:
        return sum(map(_unanswered, self.sessions()))


def _unanswered(session: Occupant) -> int:
    """Count a session's messages that wait or are being answered; one that is going dormant counts as one."""
    return session.waiting + (not session.is_inactive and not session.is_ready)
