"""Who may have a worker, who makes room for whom, and whether the pool begins anything new at all.

A worker needs a permit, and there are ``workers_max``. A session holds its permit from its admission (a start counts
before there is a process) until its process has ended. A session whose worker dies in a turn keeps it: it is about to
start another one. A session that finds none waits in a queue that is fair between users, while as many idle sessions as
are needed go dormant, the least valuable first. Running sessions are never disturbed.

A permit that becomes free goes at once to the session that is next. Nobody has to look again and nobody can snatch it;
a session that gives up at that very moment hands it on.
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
from hermes_pool.scheduling.fair_queue import FairQueue
from hermes_pool.scheduling.pool_state import MAY_BECOME, Drained, PoolState
from hermes_pool.settings import PoolSettings, SessionKey
from hermes_pool.snapshot import PoolSnapshot

TRY_AGAIN_S = 1.0
"""An idle session that could not go (its metadata could not be saved) is asked again after this long."""
HOLDS_KEPT = 64
"""From how many turns the expected wait is reckoned."""


# --- what an idle session is worth ------------------------------------------------------------------------------------

QUICK_START_S = 1.0
"""Starts below this are all alike: the difference is noise, and nobody waits long."""
SMALL_BYTES = 64 * 1024 * 1024
"""Less memory than this is not worth a thought."""


@dataclass(frozen=True, slots=True)
class Idle:
    """What speaks for and against an idle worker; ``None`` is "not known"."""

    idle_s: float
    start_s: float | None = None
    """What its last start took, the resuming of its session included."""
    memory_bytes: int | None = None
    """What would be free without it."""


def gain(idle: Idle) -> float:
    """Say what is won when this worker goes: the more, the longer it idled, the more it holds, the sooner it is back.

    Idle time stands for how unlikely the next message is, so this is memory times disuse for each second of a later
    start. Only ratios matter.
    """
    memory_bytes = max(idle.memory_bytes or 0, SMALL_BYTES)
    return idle.idle_s * memory_bytes / max(idle.start_s or 0.0, QUICK_START_S)


# --- who has a permit, and who waits for one --------------------------------------------------------------------------


class Occupant(Protocol):
    """A session, as far as admission knows it."""

    key: SessionKey
    waiting: int

    @property
    def state(self) -> WorkerState:
        """What its worker is doing."""

    @property
    def at_rest(self) -> bool:
        """Whether nothing at all goes on: no process, no caller."""

    @property
    def in_turn(self) -> bool:
        """Whether it has a turn, be it between two workers."""

    @property
    def is_resting(self) -> bool:
        """Whether its worker is ready and has no turn; it may have work in the background."""

    def idle_s(self) -> float | None:
        """Return for how long its worker has had nothing to do; ``None`` when it has, or there is none."""

    async def hibernate(self, idle_at_least_s: float, *, room_is_needed: bool = False, reason: str = "idle") -> bool:
        """Let the worker go if it is still idle; return whether it went."""

    async def stop(self, reason: str) -> object:
        """End the turn that runs, and the worker."""


@dataclass(slots=True, eq=False)
class _Permit:
    start_s: float | None = None
    busy_since: float | None = None
    """When its turn began, if the pool has been full ever since."""
    not_before: float = 0.0
    """Until then it is not asked to go again."""


@dataclass(slots=True, eq=False)
class Waiter:
    """Somebody in the queue. ``admitted`` gets the permit, or the refusal."""

    session: Occupant
    admitted: "asyncio.Future[_Permit]"

    @property
    def user(self) -> str | SessionKey:
        """Whose turn it is counted as: the user's, or where there is none the conversation's own."""
        key = self.session.key
        return key if key.user_id is None else key.user_id


# --- admission --------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True, eq=False)
class Admission:
    """The permits of one pool, the queue before them, and the pool's state.

    ``make_room`` and ``changed`` are called by the sessions, ``passed`` by those that come while ``condition`` is not
    ``OPEN``. Nothing here may be called from another thread than the loop's.
    """

    settings: PoolSettings
    sessions: Callable[[], Iterable[Occupant]]
    """All sessions of the pool."""
    in_background: Callable[[Coroutine[Any, Any, Any]], "asyncio.Task[Any]"]
    log: Any
    memory_of: Callable[[Occupant], int | None] = lambda _: None
    """Memory that would be free without a session's worker, as it was last seen."""

    state: PoolState = field(default=PoolState.NEW, init=False)
    """Read by each message; set by ``become`` only."""
    _limit: int = field(init=False)
    _permits: dict[Occupant, _Permit] = field(default_factory=dict, init=False)
    _queue: FairQueue[Waiter] = field(default_factory=FairQueue, init=False)
    _leaving: set[Occupant] = field(default_factory=set, init=False)
    """Those that have been asked to go dormant."""
    _held: list["asyncio.Future[None]"] = field(default_factory=list, init=False)
    """Messages that a paused pool holds."""
    _begun: dict[Occupant, float] = field(default_factory=dict, init=False)
    """Sessions that start, each with the moment when that began."""
    _holds_s: deque[float] = field(default_factory=lambda: deque(maxlen=HOLDS_KEPT), init=False)
    """How long permits of the full pool were busy lately, from a turn's begin to its end."""
    _clock: Callable[[], float] = field(default=time.monotonic, init=False)
    """The loop's, as soon as there is one."""
    news: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    """Set at every change that may bring the pool to rest: here, and by sessions when a message stops waiting or the
    conversation is free again. Whoever waits for that clears it."""

    def __post_init__(self) -> None:
        """Begin with the limit of the settings; it may change, they may not."""
        self._limit = self.settings.workers_max

    def snapshot(self) -> PoolSnapshot:
        """Return what the outside may see."""
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
        """Return when one worker more is allowed: the session has its permit from then on, until ``changed`` frees it.

        Waits at most ``timeouts.wait_s``, and with ``busy="reject"`` only for an idle session that goes. Raises
        ``PoolFullError``, ``PoolPausedError`` or ``PoolClosedError``; a cancelled caller leaves the queue at once.
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
        overtime = loop.call_later(self.settings.timeouts.wait_s, self._refuse, waiter, "too late")
        try:
            if len(self._queue) > self.settings.queues.admissions_max:
                # Who would be served last: so a user who fills the queue takes nothing from another one.
                self._refuse(list(self._queue)[-1], "too many")
            self._serve()
            await waiter.admitted
            if self.state is PoolState.CLOSED:
                raise self._refusal(asking)
        except BaseException:  # refused, or cancelled; and that may have met the permit on its way
            self._queue.discard(waiter)
            if not waiter.admitted.cancelled() and waiter.admitted.exception() is None:
                self._free(asking, waiter.admitted.result())
            raise
        finally:
            overtime.cancel()

    def changed(self, session: Occupant, state: WorkerState) -> None:
        """Learn of a session's change of state, or that its turn has settled without a worker.

        Called twice in each turn, mostly with nothing to do.
        """
        if state is WorkerState.BUSY or state is WorkerState.IDLE:
            if len(self._permits) >= self._limit or self._begun:
                self._note(session, state)
        elif state is WorkerState.STARTING:
            self._begun[session] = self._clock()
        elif state not in ALIVE:
            self._begun.pop(session, None)
            permit = self._permits.get(session)
            if permit is not None and (not session.in_turn or self.state is PoolState.CLOSED):
                self._free(session, permit)
        self.news.set()

    def _note(self, session: Occupant, state: WorkerState) -> None:
        """Measure starts, and in a full pool turns; have a session go that became idle where it is one too many."""
        permit = self._permits.get(session)
        if permit is None:
            return
        now = self._clock()
        if state is WorkerState.BUSY:
            permit.busy_since = now if len(self._permits) >= self._limit else None
            return
        begun_at = self._begun.pop(session, None)
        if begun_at is not None:
            permit.start_s = now - begun_at
        if permit.busy_since is not None:
            self._holds_s.append(now - permit.busy_since)
            permit.busy_since = None
        permit.not_before = 0.0
        if self._queue or len(self._permits) > self._limit:
            # Not now: the lock of a session that becomes idle is still held.
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
            self._measure_no_more()

    def _measure_no_more(self) -> None:
        """Forget when turns began, unless the pool is full: their ends may not be noted."""
        if len(self._permits) < self._limit:
            for permit in self._permits.values():
                permit.busy_since = None

    def _serve(self) -> None:
        """Give free permits to those who are next, and have idle sessions go for those who are left."""
        while self._queue and self._has_permit():
            waiter = self._queue.pop()
            if not waiter.admitted.done():  # else it was cancelled a moment ago
                waiter.admitted.set_result(self._take(waiter.session))
        if self._queue or len(self._permits) > self._limit:
            self._make_some_go()

    def _make_some_go(self) -> None:
        wanted = 0 if self.state is PoolState.PAUSED else len(self._queue)
        going = sum(session in self._leaving or session.state is WorkerState.STOPPING for session in self._permits)
        short = len(self._permits) + wanted - self._limit - going
        if short <= 0:
            return
        for session in self._dispensable()[:short]:
            self._leaving.add(session)
            self.in_background(self._let_go(session))
            short -= 1
        if short > 0 and self.settings.busy == "reject":
            for waiter in list(self._queue)[-short:]:
                self._refuse(waiter, "busy")

    def _dispensable(self) -> list[Occupant]:
        """Return the idle sessions that may go, the least valuable first."""
        now = self._clock()
        idle = [
            session
            for session, permit in self._permits.items()
            if session.idle_s() is not None
            and not session.waiting
            and session not in self._leaving
            and now >= permit.not_before
        ]
        return sorted(idle, key=self.worth)

    def worth(self, session: Occupant) -> float:
        """Return how much an idle session's worker is worth keeping: less, the more is gained by letting it go."""
        permit = self._permits.get(session)
        return -gain(Idle(session.idle_s() or 0.0, None if permit is None else permit.start_s, self.memory_of(session)))

    async def _let_go(self, session: Occupant) -> None:
        went = False
        try:
            if session.idle_s() is not None and not session.waiting:  # else it would wait in the queue for its own turn
                went = await session.hibernate(0.0, room_is_needed=True)
        finally:
            self._leaving.discard(session)
            permit = self._permits.get(session)
            if not went and permit is not None:
                permit.not_before = self._clock() + TRY_AGAIN_S
                asyncio.get_running_loop().call_later(TRY_AGAIN_S, self._serve)
            self._serve()

    def tidy(self) -> None:
        """Free the permits of sessions that are at rest: none should be left, but a lost permit would be lost for ever.

        And serve those in the queue: a session may have become idle by nothing but time, when its work took too long.
        """
        for session, permit in list(self._permits.items()):
            if session.at_rest:
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
        pace = "" if expected_s is None else f", about {expected_s:.3g} s at the present pace"
        problem = {
            "busy": f'none is idle, and you do not want to wait (busy="reject"); it would be number {position}{pace}',
            "too many": f"{len(self._queue)} messages wait for one already (queues.admissions_max); it would be "
            f"number {position} in the queue{pace}",
            "too late": f"none became free within {self.settings.timeouts.wait_s:g} s (timeouts.wait_s); it was number "
            f"{position} in the queue{pace}",
        }[why]
        error = PoolFullError(
            f"all {self._limit} workers (workers_max) are taken, and {problem}. Try again later, answer it another "
            "way, or allow more workers",
            position=position,
            waiting=len(self._queue),
            expected_wait_s=expected_s,
            conversation_id=waiter.session.key.conversation_id,
        )
        waiter.admitted.set_exception(error)

    def _expected_wait_s(self, position: int) -> float | None:
        """Reckon how long a place in the queue takes: so many turns must end, of as many as there are permits."""
        if len(self._permits) < self._limit and not self._queue:
            return 0.0
        if not self._holds_s:
            return None
        return position * sum(self._holds_s) / len(self._holds_s) / self._limit

    def _refusal(self, session: Occupant | None = None) -> HermesPoolError:
        """Return the error that says why nothing is begun in this state."""
        conversation_id = None if session is None else session.key.conversation_id
        match self.state:
            case PoolState.NEW:
                return PoolClosedError("enter the pool first: async with", conversation_id=conversation_id)
            case PoolState.DRAINING | PoolState.DRAINED:
                return PoolDrainingError(
                    f"the pool is {self.state.value} and begins nothing new. Answer it another way, or resume() "
                    "the pool",
                    conversation_id=conversation_id,
                )
            case PoolState.PAUSED:
                return PoolPausedError(
                    "the pool is paused, and was not resumed in time (timeouts.wait_s). Try again later, answer it "
                    "another way, or resume() the pool",
                    conversation_id=conversation_id,
                )
        return PoolClosedError("the pool is closed", conversation_id=conversation_id)

    # --- the state ---

    def check_open(self, session: Occupant) -> None:
        """Raise ``PoolClosedError`` where no worker is wanted any more."""
        if self.state is PoolState.CLOSED:
            raise self._refusal(session)

    def refuse_new(self) -> None:
        """Raise what a new message gets now; nothing where it may come, be it to wait."""
        if self.state is not PoolState.OPEN and self.state is not PoolState.PAUSED:
            raise self._refusal()

    async def passed(self, session: Occupant) -> None:
        """Return when a message that has come in may begin its turn: while the pool is paused it is held here.

        Raises ``PoolPausedError`` after ``timeouts.wait_s`` (at once with ``busy="reject"``), ``PoolFullError`` when
        ``queues.admissions_max`` are held already, and ``PoolClosedError`` and its kinds.
        """
        settings = self.settings
        deadline = self._clock() + settings.timeouts.wait_s
        while self.state is PoolState.PAUSED:
            if settings.busy == "reject":
                raise self._refusal(session)
            if len(self._held) >= settings.queues.admissions_max:
                raise PoolFullError(
                    f"the pool is paused, and {len(self._held)} messages wait already (queues.admissions_max). Try "
                    "again later, answer it another way, or resume() the pool",
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
            if self.state is PoolState.PAUSED:  # else it was resumed at that very moment
                raise self._refusal(session) from None
        finally:
            if held in self._held:
                self._held.remove(held)

    def become(self, state: PoolState) -> None:
        """Change the condition; raises ``PoolClosedError``, or one of its kinds, where that cannot be."""
        before = self.state
        if state is before:
            return
        if state not in MAY_BECOME[before]:
            raise self._refusal()
        if before is PoolState.NEW:
            self._clock = asyncio.get_running_loop().time
        self.state = state
        self.log.info("pool_state", state=state.value, before=before.value)
        self.news.set()
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
        """Begin no more turns, wait up to ``deadline_s`` for those that run, and return how many still do."""
        self.become(PoolState.PAUSED)
        await self._rest(deadline_s, self._running, PoolState.PAUSED)
        return self._running()

    async def drain(self, deadline_s: float) -> Drained:
        """Finish what has come in, refuse what is new, end at the deadline what is left; as the manager's ``drain``."""
        if self.state is PoolState.DRAINED:
            return Drained(0, 0)
        self.become(PoolState.DRAINING)
        before = self._unanswered()
        undisturbed = await self._rest(deadline_s, self._unanswered, PoolState.DRAINING)
        cut = self._unanswered()
        if not undisturbed:  # resumed or closed meanwhile
            return Drained(max(0, before - cut), 0)
        self.become(PoolState.DRAINED)
        while self._is(PoolState.DRAINED) and (busy := [each for each in self.sessions() if _unanswered(each)]):
            self.news.clear()
            await asyncio.wait({self.in_background(session.stop("the pool was drained")) for session in busy})
            if self._is(PoolState.DRAINED) and self._unanswered():
                await self.news.wait()  # some message was between two states
        return Drained(max(0, before - cut), cut)

    def resize(self, workers_max: int) -> None:
        """Change the limit; where there are more workers than that, the idle ones go, and busy ones when they are."""
        if not workers_max > 0:
            raise SettingsError(f"workers_max must be over 0, not {workers_max!r}")
        self.log.info("pool_resized", workers_max=workers_max, before=self._limit)
        self._limit = workers_max
        self._serve()
        self._measure_no_more()

    async def _rest(self, deadline_s: float, count: Callable[[], int], state: PoolState) -> bool:
        """Wait until nothing is left to count, or the deadline; return whether the state is still the same."""
        deadline = self._clock() + deadline_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                while self._is(state) and count():
                    self.news.clear()
                    await self.news.wait()
        return self._is(state)

    def _is(self, state: PoolState) -> bool:
        return self.state is state  # a function, since it changes while others wait

    def _running(self) -> int:
        """Count turns that run, or whose worker is being started."""
        return sum(session.state is WorkerState.STARTING or session.in_turn for session in self.sessions())

    def _unanswered(self) -> int:
        return sum(map(_unanswered, self.sessions()))


def _unanswered(session: Occupant) -> int:
    """Count a session's messages that wait or are on their way; a session that goes dormant counts as one."""
    return session.waiting + (not session.at_rest and not session.is_resting)
