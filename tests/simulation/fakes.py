"""Everything that the simulation knows of the pool's inside, and all that it puts in the place of the outside.

The pool is the real one, from ``HermesSessionManager`` down to the last state. In place of worker processes there are
``FakeConnection`` and ``FakeFactory``, in place of the database ``FakeStore``, and time is the event loop's. Nothing
here starts a process or a thread, or touches a file or a socket.
"""

import asyncio
import contextlib
import math
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from hermes_pool import (
    HermesPoolError,
    HermesSessionManager,
    NoCapacityError,
    PoolSettings,
    PoolUnavailableError,
    SessionKey,
    StateNotWritableError,
    StoreError,
    Turn,
    WorkerStartError,
    WorkerStartTimeoutError,
    WorkerUnusableError,
    manager,
)
from hermes_pool.control import server
from hermes_pool.conversation import active_turn, worker_slot
from hermes_pool.policy import breakers
from hermes_pool.policy.breakers import StartBreaker
from hermes_pool.policy.liveness import Diagnosis, Verdict
from hermes_pool.process.connection import ConnectionListener
from hermes_pool.process.death import Death, How, Stopped
from hermes_pool.process.factory import LAUNCHES_MAX
from hermes_pool.process.launcher import Exit
from hermes_pool.settings import QueueLimits, RestartPolicy, StartPolicy, Timeouts
from hermes_pool.storage.record import SessionRecord
from hermes_pool.storage.store import FoundSession
from hermes_pool.system import processes
from hermes_pool_worker import wire
from hermes_pool_worker.contract import EXIT_UNUSABLE
from tests.simulation.histories import CONVERSATIONS, Birth, History, Op, Rules, Say
from tests.simulation.world import (
    BREATH_S,
    CLOSE_GRACE_S,
    EXITS_S,
    IDLE_TIMEOUT_S,
    LONG_QUESTION_S,
    LOOK_S,
    PAUSE_S,
    PROGRESS_TIMEOUT_S,
    QUESTION_S,
    START_TIMEOUT_S,
    TERM_GRACE_S,
    TURN_TIMEOUT_S,
    WAIT_TIMEOUT_S,
    Call,
    HandOver,
    World,
    now,
)  # fmt: skip

DRAIN_S = 2.5
"""How long a drain may take beyond its deadline, to stop what is left."""

KEYS: tuple[SessionKey, ...] = (
    SessionKey("c0"),
    *(SessionKey(f"c{number}", "the same user") for number in range(1, CONVERSATIONS)),
)


@cache
def settings_for(rules: Rules) -> PoolSettings:
    """Limits of seconds, so that all of them strike in a short history."""
    return PoolSettings(
        agent="echo",
        state_dir=Path(tempfile.gettempdir()),  # it exists, and nothing is put there
        timeouts=Timeouts(
            idle_s=IDLE_TIMEOUT_S,
            start_s=START_TIMEOUT_S,
            turn_s=TURN_TIMEOUT_S,
            progress_s=PROGRESS_TIMEOUT_S,
            wait_s=WAIT_TIMEOUT_S,
            close_grace_s=CLOSE_GRACE_S,
            term_grace_s=TERM_GRACE_S,
            background_s=rules.background_timeout_s,
        ),
        restarts=RestartPolicy(
            replacements_per_turn_max=rules.restarts_max,
            deaths_in_window_max=rules.restarts_in_window_max,
            window_s=10_000.0,
            backoff_s=0.5,
            quarantine_after=rules.quarantine_after,
        ),
        starts=StartPolicy(failures_max=rules.start_failures_max, probe_s=0.5),
        queues=QueueLimits(turns_max=rules.turns_waiting_max, admissions_max=rules.admissions_waiting_max),
        workers_max=rules.workers_max,
        busy=rules.busy,
        replay=rules.replay,
    )


# --- the database -----------------------------------------------------------------------------------------------------


class FakeStore:
    """A database that is slow, or fails, as it is told. It stands in for ``ConversationStore``."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def find(self, key: SessionKey) -> FoundSession:
        conversation = key.conversation_id
        await self._answer("load")
        return FoundSession(record=self._world.records.get(conversation))

    async def save(self, key: SessionKey, record: SessionRecord) -> None:
        conversation = key.conversation_id
        try:
            await self._answer("save")
        except StateNotWritableError:
            self._world.refused_for_good.add(conversation)
            raise
        self._world.refused_for_good.discard(conversation)
        self._world.records[conversation] = record
        self._world.tell(f"saved {conversation} {record.status} {record.session_id} {record.committed}")

    async def _answer(self, what: str) -> None:
        mode = self._world.store_mode
        await asyncio.sleep(0.2 if mode == "slow" else LOOK_S)
        if mode == "fails":
            raise StoreError(f"the database does not {what}")
        if mode == "unwritable":
            raise StateNotWritableError(f"the row cannot be used to {what}")


# --- a worker ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FakeProcess:
    pid: int
    create_time: float


class FakeConnection:
    """A worker, both ends of the wire, and its process. It stands in for ``WorkerConnection``."""

    def __init__(self, world: World, conversation: str, listener: ConnectionListener, birth: Birth) -> None:
        self.conversation = conversation
        self.birth = birth
        self.number = len(world.connections)
        world.connections.append(self)
        # What the pool knows a worker by.
        self.marker = f"marker-{self.number}"
        self.listener = listener
        self.process: FakeProcess | None = None
        self.opened: wire.Opened | None = None
        self.death: Death | None = None
        self.started_at = now()
        self.steps: dict[str, float] = {}
        self.verdict: str | None = None
        self.stacks: tuple[str, ...] = ()
        self.pinged_at: float | None = None
        # The pool's side of it.
        self.ready = False
        self.ready_at = 0.0
        self.recycle_asked = False
        self.recycle_asked_in_turn = False
        self.recycle_asked_at_work = False
        self.jobs_ended_at = 0.0
        """Whether it was given to its conversation."""
        self.wanted = False
        self.host_has: HandOver | None = None
        """The turn whose end the pool has not heard of yet."""
        self.processes: list[str] = []
        """What its tools have left running."""
        self.jobs: set[str] = set()
        """Open, as far as the pool has heard."""
        self.rests_since = 0.0
        self._paused = False
        # The worker's side.
        self.alive = False
        self.frozen = False
        self.frozen_at = math.inf
        self.exited_at = math.inf
        self.died_at: float | None = None
        """When the pool heard of it."""
        self.session_id = ""
        self._has: HandOver | None = None
        self._script: deque[Op] = deque()
        self._serial = 0
        self._question: str | None = None
        self._jobs: deque[str] = deque()
        self._timer: asyncio.TimerHandle | asyncio.Handle | None = None
        # In between.
        self._world = world
        self._loop = asyncio.get_running_loop()
        self._to_worker: deque[wire.Message] = deque()
        self._to_host: deque[wire.Message] = deque()
        self._step_done: asyncio.Future[None] | None = None
        self._dead = asyncio.Event()
        self._returncode: int | None = None
        self._cause: str | None = None

    @property
    def works_on(self) -> bool:
        return bool(self.jobs or self.processes)

    def __repr__(self) -> str:
        return f"worker {self.number} of {self.conversation}"

    # --- its start, as the factory asks for it ---

    async def launch(self, deadline: float) -> None:
        async with self._step("launch", deadline):
            await asyncio.sleep(self.birth.takes_s)
            if self.birth.fate == "no_capacity":
                raise NoCapacityError("there is no room for another worker here", step="launch")
            self.process = FakeProcess(100_000 + self.number, 1.0)
            self.alive = True
            self._world.launched(self)
        async with self._step("hello", deadline):
            await self._until_worker("dies_before_hello", "hangs_before_hello", "hello")

    async def open(self, request: "asyncio.Future[wire.Open]", deadline: float) -> None:
        async with self._step("open", deadline):
            asked = await asyncio.shield(request)
            self._world.asked_to_open(self, asked)
            await self._until_worker("dies_before_opened", "hangs_before_opened", "open")
            self.opened = self._open_session(asked)
            if self.birth.fate == "dies_as_it_opens":
                self.exits(1)
                await self._dead.wait()
            elif self.birth.fate == "dies_once_open":
                self.exits(1)

    @contextlib.asynccontextmanager
    async def _step(self, name: str, deadline: float) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout_at(deadline):
                yield
        except BaseException as error:
            killing = asyncio.ensure_future(self.kill("was given up while starting"))
            while not killing.done():  # also where it is cancelled once more
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait({killing})
            if not isinstance(error, TimeoutError):
                raise
            raise WorkerStartTimeoutError(f"it did not get past {name!r}", step=name) from None
        self.steps[name] = 0.0

    async def _until_worker(self, dies: str, hangs: str, step: str) -> None:
        """Wait for the worker's next word in its start, or its death."""
        if not self.alive:
            await self._dead.wait()
            raise self._died_early(step)
        self._step_done = self._loop.create_future()
        fate = self.birth.fate
        if fate == "unusable":
            self._after(0.0, lambda: self.exits(EXIT_UNUSABLE))
        elif fate == dies:
            self._after(0.0, lambda: self.exits(1))
        elif fate != hangs:
            self._after(self.birth.takes_s, self._take_step)
        try:
            await self._step_done
        except WorkerStartError as error:
            error.step = step
            raise

    def _take_step(self) -> None:
        if self.alive and not self.frozen and self._step_done is not None and not self._step_done.done():
            self._step_done.set_result(None)

    def _died_early(self, step: str) -> WorkerStartError:
        if self._returncode == EXIT_UNUSABLE and self._cause is None:
            return WorkerUnusableError("no worker can start like this", step=step)
        return WorkerStartError("the worker died before it was ready", step=step)

    def _open_session(self, request: wire.Open) -> wire.Opened:
        """Begin a session, or resume one: take out what is to be taken out, and find what was done already."""
        self.session_id = request.session_id or f"session-{self.number}"
        history = self._history
        recovered, unfinished = None, request.unfinished
        if unfinished is not None and history and history[-1] == (unfinished.turn_id, unfinished.text):
            if request.given_up:
                history.pop()
            else:
                recovered = f"re:{unfinished.text}"
        self.rests_since = now()
        return wire.Opened(self.session_id, bool(history), str(len(history)), recovered)

    @property
    def _history(self) -> list[tuple[str, str]]:
        return self._world.histories.setdefault(self.session_id, [])

    # --- what the pool asks of a connection ---

    def send(self, message: wire.Message) -> None:
        if self.process is not None:
            self._to_worker.append(message)
            self._after(self._world.rules.latency_s, self._hear)

    def hand_over(self, turn: wire.Turn) -> None:
        self.host_has = self._world.handed_over(self, turn)
        self.send(turn)

    def ping(self) -> None:
        if self.pinged_at is None:
            self.pinged_at = now()
            self.send(wire.Ping(1))

    def pause_reading(self) -> None:
        self._paused = self.alive

    def resume_reading(self) -> None:
        if self._paused:
            self._paused = False
            self._after(0.0, self._deliver)

    def is_frozen(self) -> bool:
        return self.frozen and self.alive

    async def take_stacks(self) -> tuple[str, ...]:
        await asyncio.sleep(0.05)
        self.stacks = ("a stack",) if self.alive else ()
        return self.stacks

    async def dead(self) -> Death:
        await self._dead.wait()
        assert self.death is not None
        return self.death

    def condemn(self, cause: str) -> None:
        self._cause = self._cause or cause
        self._signal_kill()

    async def stop(self, close_grace_s: float, term_grace_s: float) -> Stopped:
        self.wanted = True
        self._world.asked_to_close(self)
        if self.death is None:
            await asyncio.sleep(LOOK_S)
        self.send(wire.Close())
        how: How = "closed"
        if not await self._died_within(close_grace_s):
            how = await self._signal(term_grace_s)
        return await self._stopped(how)

    async def kill(self, cause: str, term_grace_s: float = 0.0) -> Stopped:
        self.wanted = True
        self._cause = self._cause or cause
        how: How = "killed"
        if self.process is not None and self.death is None:
            how = await self._signal(term_grace_s)
        return await self._stopped(how)

    async def _signal(self, term_grace_s: float) -> How:
        await asyncio.sleep(LOOK_S)
        if term_grace_s > 0:
            if not self.frozen and self.birth.on_close != "needs_kill":
                self._after(EXITS_S, lambda: self.exits(-15))
            if await self._died_within(term_grace_s):
                return "terminated"
        self._signal_kill()
        await self._died_within(5.0)
        return "killed"

    def _signal_kill(self) -> None:
        self._after(0.0, lambda: self.exits(-9))

    async def _stopped(self, how: How) -> Stopped:
        await asyncio.sleep(LOOK_S)
        worker = None if self.process is None else (self.process.pid, self.process.create_time)
        return Stopped(self.death.exit if self.death is not None else Exit(None), how, (), worker)

    async def _died_within(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._dead.wait()
        return self._dead.is_set()

    # --- the wire ---

    def _after(self, seconds: float, act: Callable[[], None]) -> asyncio.Handle:
        return self._loop.call_later(seconds, act) if seconds else self._loop.call_soon(act)

    def _emit(self, message: wire.Message) -> None:
        if self._has is not None and isinstance(message, wire.TurnEvent):
            ours = (message.turn_id, message.attempt) == (self._has.turn.turn_id, self._has.turn.attempt)
            if ours:
                self._has.sent.append(message)
        self._to_host.append(message)
        self._after(self._world.rules.latency_s, self._deliver)

    def _deliver(self) -> None:
        """Let the host read: all that is there at once, and nothing while it wants nothing."""
        if self._paused:
            return
        there, self._to_host = self._to_host, deque()
        for message in there:
            self.pinged_at = None
            if isinstance(message, wire.TurnFrame):
                self._world.tell(f"{self} told: {message}")
                self._note_heard(message)
                self.listener.connection_heard(message)
            elif isinstance(message, wire.BackgroundStarted | wire.BackgroundFinished):
                if isinstance(message, wire.BackgroundStarted):
                    self.jobs.add(message.job_id)
                else:
                    self.jobs.discard(message.job_id)
                    self.jobs_ended_at = now()
                self.listener.connection_background(message)

    def _note_heard(self, message: wire.TurnMessage) -> None:
        hand_over = self.host_has
        if hand_over is None or (message.turn_id, message.attempt) != (hand_over.turn.turn_id, hand_over.turn.attempt):
            return
        known = self._world.known
        self._world.heard_of(hand_over, message)
        match message:
            case wire.TurnDone() | wire.TurnFailed():
                assert message.session_id is not None
                known[self.conversation] = (message.session_id, message.committed)
                self.host_has = None
                self.rests_since = now()
            case wire.SessionMoved():
                known[self.conversation] = (message.session_id, known[self.conversation][1])

    # --- what the worker does ---

    def _hear(self) -> None:
        if not self.alive or self.frozen or not self._to_worker:
            return
        message = self._to_worker.popleft()
        has = self._has
        mine = has is not None and isinstance(message, wire.TurnMessage) and message.turn_id == has.turn.turn_id
        match message:
            case wire.Turn():
                self._world.check(has is None, f"{self} was given {message} and has {has and has.turn}")
                self._begin(message)
            case wire.Cancel() if mine:
                self._world.tell(f"{self} is asked to cancel and {self.birth.on_cancel}")
                self._be_cancelled()
            case wire.Answer() if mine and message.question_id == self._question:
                self._question = None
                assert has is not None
                has.answered.add(message.question_id)
                if self.host_has is not None:
                    self.host_has.question_until = 0.0
                self._say_text("answered")
                self._go_on_after(0.0)
            case wire.Ping():
                self._emit(wire.Pong(message.number))
            case wire.Close():
                self._world.tell(f"{self} is asked to close and {self.birth.on_close}")
                if self.birth.on_close == "leaves":
                    self._after(EXITS_S, lambda: self.exits(0))
                elif self.birth.on_close == "leaves_late":
                    self._after(0.1, self._finish_and_leave)

    def _begin(self, turn: wire.Turn) -> None:
        self._has = self.host_has
        if self._has is None:
            return
        call = self._has.call
        scripts = call.say.scripts
        self._script = deque(scripts[min(self._world.times_heard[call.text], len(scripts) - 1)])
        self._world.times_heard[call.text] += 1
        self._world.tell(f"{self} begins attempt {turn.attempt} of {call.text}: {' '.join(self._script)}")
        self._go_on()

    def _go_on_after(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._after(seconds, self._go_on)

    def _go_on(self) -> None:
        """Take the steps of the script up to the next one that takes time."""
        while self._has is not None and self.alive and not self.frozen:
            if not self._script:
                self._end_turn("completed")
                return
            waits_s = self._do(self._script.popleft())
            if waits_s is not None:
                if waits_s:
                    self._go_on_after(waits_s)
                return

    def _do(self, op: Op) -> float | None:
        """Take one step; return how long the next one has to wait, with 0 for ever, or ``None``: not at all."""
        assert self._has is not None
        turn = self._has.turn
        name = (turn.turn_id, turn.attempt)
        self._serial += 1
        serial = f"{self.number}.{self._serial}"
        match op:
            case "text":
                self._say_text(serial)
            case "tool":
                self._has.tools.append(f"tool-{serial}")
                self._emit(wire.ToolStarted(*name, f"call-{serial}", f"tool-{serial}", ""))
            case "tool_end" if self._has.tools:
                tool = self._has.tools[-1]
                self._emit(wire.ToolFinished(*name, tool.replace("tool", "call"), tool, True, "", 0.0))
            case "ask" | "ask_long":
                self._question = f"question-{serial}"
                waits_s = QUESTION_S if op == "ask" else LONG_QUESTION_S
                self._has.asked_until[self._question] = now() + waits_s
                self._emit(wire.Question(*name, self._question, "clarify", "?", [], waits_s))
                return BREATH_S if self._script and self._script[0] == "dies" else waits_s
            case "worn":
                self._world.wear_out(self.conversation)
            case "process":
                self.processes.append("a process")
            case "moves":
                moved = f"session-{serial}"
                self._world.histories[moved] = list(self._history)
                self.session_id = moved
                self._emit(wire.SessionMoved(*name, moved))
            case "job" | "short_job":
                if op == "short_job":
                    self._after(PAUSE_S, self.finish_job)
                self._jobs.append(f"job-{serial}")
                self._emit(wire.BackgroundStarted(self._jobs[-1], "a job"))
            case "job_end":
                self.finish_job()
            case "stray":
                self._emit(wire.TextDelta("another-turn", turn.attempt, "stray"))
            case "old_attempt":
                self._emit(wire.TextDelta(turn.turn_id, turn.attempt - 1, "stray"))
                self._emit(wire.TurnDone(turn.turn_id, turn.attempt - 1, "stray", self.session_id))
            case "commit":
                self._commit()
            case "dies":
                self.exits(1)
            case "fails":
                self._fail()
            case "partial":
                self._end_turn("partial")
            case "breath":
                return BREATH_S
            case "pause":
                return PAUSE_S
            case "hang":
                return 0.0
        return None

    def _say_text(self, text: str) -> None:
        assert self._has is not None
        self._emit(wire.TextDelta(self._has.turn.turn_id, self._has.turn.attempt, text))

    def _commit(self) -> None:
        assert self._has is not None
        entry = (self._has.turn.turn_id, self._has.turn.text)
        if entry not in self._history:
            self._history.append(entry)

    def _end_turn(self, outcome: Literal["completed", "interrupted", "partial"]) -> None:
        has = self._has
        if has is None or not self.alive or self.frozen:
            return
        self._commit()
        turn, mark = has.turn, str(len(self._history))
        has.done_at = now()
        has.done = wire.TurnDone(turn.turn_id, turn.attempt, f"re:{turn.text}", self.session_id, outcome, mark)
        self._has = self._question = None
        self._emit(has.done)

    def _fail(self) -> None:
        has = self._has
        if has is None or not self.alive or self.frozen:
            return
        turn = has.turn
        self._world.histories[self.session_id] = [each for each in self._history if each[0] != turn.turn_id]
        has.failed = True
        self._has = self._question = None
        mark = str(len(self._history))
        self._emit(wire.TurnFailed(turn.turn_id, turn.attempt, "rate_limit", "it failed", self.session_id, mark))

    def _be_cancelled(self) -> None:
        match self.birth.on_cancel:
            case "obeys":
                self._end_turn("interrupted")
            case "obeys_late":
                self._after(0.1, lambda: self._end_turn("interrupted"))
            case "dies":
                self.exits(1)
            case "finishes":
                self._end_turn("completed")
            case "fails":
                self._fail()

    def _finish_and_leave(self) -> None:
        self._end_turn("interrupted")
        self.exits(0)

    # --- what befalls it ---

    def finish_job(self) -> None:
        if self._jobs and self.alive:
            self._emit(wire.BackgroundFinished(self._jobs.popleft(), "done"))

    def send_stray(self) -> None:
        """Speak of a turn that is over, or of none."""
        if self.alive and not self.frozen:
            last = next((each for each in reversed(self._world.hand_overs) if each.connection is self), None)
            if last is not None and self._has is None and self.host_has is None:
                self._to_host.append(wire.TextDelta(last.turn.turn_id, last.turn.attempt, "stray"))
            self._emit(wire.TextDelta("another-turn", 1, "stray"))

    def freeze(self) -> None:
        if self.alive and self.ready:
            self._world.tell(f"{self} is frozen")
            self.frozen = True
            self.frozen_at = now()

    def exits(self, returncode: int) -> None:
        """End the process; what it has written is still read, and then its end is told."""
        if not self.alive:
            return
        self._world.tell(f"{self} exits with {returncode}")
        self.alive = False
        self.exited_at = now()
        self._returncode = returncode
        self._world.live.discard(self)
        if self._timer is not None:
            self._timer.cancel()
        self._after(self._world.rules.latency_s, self._die)

    def _die(self) -> None:
        self._paused = False
        self._deliver()
        self.died_at = now()
        self.death = Death(Exit(self._returncode), (), self._cause, self.wanted)
        self._world.tell(f"{self} is known to be dead, which was {'' if self.wanted else 'not '}wanted")
        self._world.told_of_death(self)
        self._dead.set()
        if self._step_done is not None and not self._step_done.done():
            self._step_done.set_exception(self._died_early("?"))
        self.listener.connection_died(self, self.death)  # type: ignore[arg-type] # a fake


# --- where workers come from ------------------------------------------------------------------------------------------


class FakeSpares:
    """No spares: a session cannot tell."""

    def refill(self) -> None:
        """Do nothing."""

    def snapshots(self) -> list[Any]:
        return []


class FakeFactory:
    """Starts fake workers, up to two for each start. It stands in for ``hermes_pool.process.factory.WorkerFactory``."""

    def __init__(self, world: World, settings: PoolSettings, *_: Any) -> None:
        self.breaker = StartBreaker(settings.starts, now, lambda: 0.5, start_timeout_s=settings.timeouts.start_s)
        self.spares = FakeSpares()
        self._world = world
        self._inherited: set[HandOver] = set()

    def warm_up(self) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""

    def _birth(self, conversation: str) -> Birth:
        """Return how the next worker is born: the heir of one that died of its turn, or who is next at all."""
        world = self._world
        if world.is_mended:
            return Birth()
        last = next((each for each in reversed(world.hand_overs) if each.call.conversation == conversation), None)
        if last is not None and last.connection.death is not None and not last.told and last not in self._inherited:
            self._inherited.add(last)
            return last.call.say.heir
        return world.births.popleft() if world.births else Birth()

    def request(self, conversation_id: str, **session: Any) -> wire.Open:
        return wire.Open(conversation_id, **session)

    async def start(
        self,
        conversation_id: str,
        request: Coroutine[Any, Any, wire.Open],
        listener: ConnectionListener,
        on_failure: Callable[[WorkerStartError], None],
    ) -> FakeConnection:
        deadline = now() + START_TIMEOUT_S
        asked = asyncio.ensure_future(request)
        self._world.got_room(conversation_id)
        self._world.starting[conversation_id] += 1
        try:
            with self.breaker.start(conversation_id):
                connection = await self._start(conversation_id, asked, listener, on_failure, deadline)
        except WorkerStartError as error:
            self._note(conversation_id, error)
            raise
        finally:
            self._world.starting[conversation_id] -= 1
            if not asked.done():
                asked.cancel()
                await asyncio.wait({asked})
            if not asked.cancelled():
                asked.exception()
        assert connection.opened is not None
        connection.ready, connection.ready_at = True, now()
        world, opened = self._world, connection.opened
        world.known[conversation_id] = (opened.session_id, opened.committed)
        if opened.recovered is not None:
            world.worked(conversation_id, opened.recovered.removeprefix("re:"), surely=False)
        world.tell(f"{connection} is ready: {opened}")
        return connection

    async def _start(
        self,
        conversation: str,
        asked: "asyncio.Future[wire.Open]",
        listener: ConnectionListener,
        on_failure: Callable[[WorkerStartError], None],
        deadline: float,
    ) -> FakeConnection:
        for tries_left in reversed(range(LAUNCHES_MAX)):
            birth = self._birth(conversation)
            connection = FakeConnection(self._world, conversation, listener, birth)
            self._world.tell(f"{connection} is started: {birth}")
            listener.connection_begun(connection)  # type: ignore[arg-type] # a fake
            try:
                await connection.launch(deadline)
                await connection.open(asked, deadline)
            except WorkerStartError as error:
                on_failure(error)
                if not tries_left or not error.retryable or now() >= deadline:
                    raise
            else:
                if connection.death is None:
                    return connection
        raise WorkerStartError("the worker died as soon as it was ready", step="open")

    def _note(self, conversation: str, error: WorkerStartError) -> None:
        self._world.happened.add(type(error).__name__)
        if not isinstance(error, WorkerUnusableError | NoCapacityError | PoolUnavailableError):
            self._world.strike(conversation)


# --- the rest of the outside ------------------------------------------------------------------------------------------


class FakeMonitor:
    """Looks at nothing by itself. It stands in for ``hermes_pool.scheduling.monitor.Monitor``."""

    last: ClassVar["FakeMonitor"]

    def __init__(self, *_: Any, slots: Callable[[], list[Any]], **__: Any) -> None:
        self.slots = slots
        FakeMonitor.last = self

    async def run(self) -> None:
        await asyncio.Event().wait()


class FakeControl:
    """Nobody looks in from outside."""

    def __init__(self, *_: Any) -> None:
        """Take what a control server takes."""

    async def start(self) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""


class Log:
    """Puts all into the story, and complains of what must never be in a log."""

    def __init__(self, world: World) -> None:
        self._world = world

    def bind(self, **_: Any) -> "Log":
        return self

    def _tell(self, event: str, **facts: Any) -> None:
        told = " ".join(f"{name}={value!r}" for name, value in facts.items() if name not in ("steps", "report_id"))
        self._world.tell(f"log: {event} {told[:200]}")

    def warning(self, event: str, **facts: Any) -> None:
        self._tell(event, **facts)
        if event == "permit_lost":
            self._world.complain(f"a permit was lost: {facts}")

    def error(self, event: str, **facts: Any) -> None:
        self._world.complain(f"logged as an error: {event} {facts}")

    debug = info = _tell


async def _as_if_in_a_thread(work: Callable[[], Any]) -> Any:
    await asyncio.sleep(LOOK_S)
    return work()


def _processes_left(world: World, pid: int, *_: Any) -> tuple[str, ...]:
    return next(tuple(each.processes) for each in world.connections if each.process and each.process.pid == pid)


@contextlib.contextmanager
def _replaced(*names: tuple[Any, str, Any]) -> Iterator[None]:
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in names]
    for owner, name, value in names:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


@cache
def _users_of_the_clock() -> tuple[Any, ...]:
    ours = [module for name, module in sys.modules.items() if name.startswith("hermes_pool.")]
    return tuple(module for module in ours if getattr(module, "monotonic", None) is time.monotonic)


def outside_replaced(world: World) -> contextlib.AbstractContextManager[None]:
    """Put fakes in the place of all that is outside: processes, threads, clocks, the log, the control socket."""
    return _replaced(
        (manager, "WorkerFactory", partial(FakeFactory, world)),
        (manager, "Monitor", FakeMonitor),
        (manager, "logger", lambda: Log(world)),
        (manager, "sweep_every_s", lambda _: 1.0),
        (server, "ControlServer", FakeControl),
        (active_turn, "EVENTS_WAITING_MAX", world.rules.events_waiting_max),
        (breakers, "BACKOFF_MAX_S", 2.0),
        (breakers, "PROBE_MAX_S", 2.0),
        (worker_slot, "is_enabled_for", lambda _: True),
        (worker_slot, "in_thread_or_here", _as_if_in_a_thread),
        (processes, "find_by_marker", lambda _: []),
        (processes, "child_pids", lambda _: frozenset()),
        (processes, "descendants_started_after", partial(_processes_left, world)),
        (processes, "kill", lambda *_: []),
        *((module, "monotonic", now) for module in _users_of_the_clock()),
    )


# --- the pool, and who talks to it ------------------------------------------------------------------------------------


class Pool:
    """A real pool with its callers. Each method begins something and waits for nothing, unless it says so."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._manager = HermesSessionManager(settings_for(world.rules), store=FakeStore(world))  # type: ignore[arg-type] # a fake
        self._tasks: set[asyncio.Task[None]] = set()
        self._texts: Counter[str] = Counter()
        self._last_text: dict[str, str] = {}

    async def __aenter__(self) -> Self:
        await self._manager.__aenter__()
        self._monitor = FakeMonitor.last
        numbers = {key.conversation_id: number for number, key in enumerate(KEYS)}
        self.world.wear_out = lambda conversation: self.recycle(numbers[conversation])
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._manager.close()

    # --- callers ---

    def say(self, say: Say) -> Call:
        key = KEYS[say.conversation]
        conversation = key.conversation_id
        again = say.again and conversation in self._last_text
        if not again:
            self._texts[conversation] += 1
            self._last_text[conversation] = f"{conversation}#{self._texts[conversation]}"
        text = self._last_text[conversation]
        call = Call(len(self.world.calls), conversation, text, say, now())
        self.world.calls.append(call)
        call.sends = say.manner == "sends" and not again  # a text that is sent twice is told apart by its turns
        call.task = asyncio.get_running_loop().create_task(self._talk(call, key))
        call.task.add_done_callback(lambda _: self._end(call))
        self.world.tell(f"call {call.number}: {text} {say.manner}")
        return call

    def _has_to_do(self, call: Call) -> bool:
        world, conversation = self.world, call.conversation
        if world.starting[conversation]:  # of a turn, perhaps, whose caller is gone
            return True
        others = [each for each in world.calls if each.conversation == conversation and each is not call]
        ours = [each for each in world.connections if each.conversation == conversation]
        return any(each.is_open for each in others) or any(each.host_has is not None for each in ours if not each.death)

    async def _talk(self, call: Call, key: SessionKey) -> None:
        call.touched = bool(self.world.stopping[call.conversation])
        call.rivals = self._has_to_do(call)
        try:
            if call.sends:
                call.outcome = await self._manager.send(key, call.text)
            else:
                call.turn = self._manager.turn(key, call.text)
                await self._take_part(call, call.turn)
        except (HermesPoolError, asyncio.CancelledError) as error:
            call.outcome = error
        except BaseException as error:
            call.outcome = error
            self.world.complain(f"call {call.number} got {error!r}")
        finally:
            self._end(call)

    def _end(self, call: Call) -> None:
        if call.ended_at is None:
            call.ended_at = now()
            self.world.tell(f"call {call.number} ended: {call.outcome!r:.300}")

    async def _take_part(self, call: Call, turn: Turn) -> None:
        manner = call.say.manner
        async with turn:
            if manner != "only_replies":
                async for event in turn:
                    call.events.append(event)
                    call.events_at.append(now())
                    if manner == "streams_slowly":
                        await asyncio.sleep(0.1)
                    if manner == "answers" and isinstance(event, wire.Question):
                        await asyncio.sleep(0.05)
                        call.answers.append((event.question_id, now()))
                        await turn.answer(event.question_id, "yes")
                    if manner == "leaves":
                        call.touched = True
                        return
                    if manner == "cancels":
                        call.touched = True
                        call.outcome = await turn.cancel()
                        return
                call.read_to_the_end = True
            call.outcome = await turn.reply()

    def cancel_turn(self, call: Call) -> None:
        if call.turn is not None and call.is_open:
            call.touched = True
            self._begin(self._cancel(call, call.turn))

    async def _cancel(self, call: Call, turn: Turn) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await turn.cancel()

    def cancel_task(self, call: Call) -> None:
        if call.task is not None and call.is_open:
            call.touched = True
            call.task.cancel()

    # --- operators ---

    def worker_of(self, conversation: int) -> FakeConnection | None:
        name = KEYS[conversation].conversation_id
        return next((each for each in self.world.live if each.conversation == name), None)

    def stop(self, conversation: int) -> None:
        self._begin(self._stop(conversation))

    async def _stop(self, conversation: int) -> None:
        name = KEYS[conversation].conversation_id
        before = [each for each in self.world.live if each.conversation == name]
        self._touch(name)
        self.world.stopping[name] += 1
        self._end_turns(name)
        await self._manager.stop(KEYS[conversation])
        self.world.stopping[name] -= 1
        for each in before:
            self.world.check(not each.alive, f"{each} lives on after a stop")

    def reset(self, conversation: int | None) -> None:
        with contextlib.suppress(HermesPoolError):
            self._manager.reset(None if conversation is None else KEYS[conversation])
            if conversation is not None:
                self.world.strikes_least[KEYS[conversation].conversation_id] = 0
                self._forgive(KEYS[conversation].conversation_id)

    def release(self, conversation: int) -> None:
        """Release all messages of a conversation that are refused."""
        for fingerprint in self._quarantined(conversation):
            with contextlib.suppress(HermesPoolError):
                self._manager.release(KEYS[conversation], fingerprint)
                self._forgive(KEYS[conversation].conversation_id)

    def _forgive(self, conversation: str) -> None:
        for text in self.world.killed_least:
            if text.startswith(f"{conversation}#"):
                self.world.killed_least[text] = 0

    def pause(self) -> None:
        self.world.happened.add("pause")
        self._begin(self._manager.pause(0.05))

    def drain(self, deadline_s: float) -> None:
        self.world.happened.add("drain")
        self._begin(self._drain(deadline_s))

    async def _drain(self, deadline_s: float) -> None:
        for key in KEYS:
            self._touch(key.conversation_id)
            self.world.stopping[key.conversation_id] += 1
        try:
            began_at = now()
            await self._manager.drain(deadline_s)
            took_s = now() - began_at
            if self.condition == "drained" and self.world.resumed_at[-1] < began_at:
                self.world.check(took_s <= deadline_s + DRAIN_S, f"a drain took {took_s:g} s")
        finally:
            for key in KEYS:
                self.world.stopping[key.conversation_id] -= 1

    def resume(self) -> None:
        self.world.changed_at = now()
        self.world.resumed_at.append(now())
        with contextlib.suppress(HermesPoolError):
            self._manager.resume()

    def resize(self, workers_max: int) -> None:
        self.world.limits.add(workers_max)
        self.world.changed_at = now()
        self._manager.resize(workers_max)

    def close(self) -> None:
        self._begin(self.closed())

    async def closed(self) -> None:
        """Close, and wait for that."""
        self.world.closed_at = min(self.world.closed_at, now())
        for key in KEYS:
            self._end_turns(key.conversation_id)
            self._refuse_those_in_line(key.conversation_id)
            self._touch(key.conversation_id)
            self.world.stopping[key.conversation_id] += 1
        await self._manager.close()
        self.check_nothing_lives()

    def _end_turns(self, conversation: str) -> None:
        """Whatever runs here is stopped, and must not begin anew."""
        for each in self.world.live:
            if (
                each.conversation == conversation
                and each.host_has is not None
                and not self.world.starting[conversation]
            ):
                self.world.stopped_turns.add(each.host_has.turn.turn_id)

    def check_nothing_lives(self) -> None:
        live = self.world.live
        self.world.check(not live, f"{live} live on in a closed pool")

    def _refuse_those_in_line(self, conversation: str) -> None:
        """Who waits for room, with nothing going on in the conversation, is to hear that the pool is closed."""
        world = self.world
        busy = world.starting[conversation] or any(each.conversation == conversation for each in world.live)
        calls = [each for each in world.calls if each.conversation == conversation and each.is_open]
        for call in calls:
            call.must_be_refused = not (
                busy
                or call.touched
                or call.turn_id in world.of_turn
                or now() - max(call.began_at, world.resumed_at[-1]) < BREATH_S
            )

    def _touch(self, conversation: str) -> None:
        for call in self.world.calls:
            if call.conversation == conversation and call.is_open:
                call.touched = True

    def _begin(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(self._operate(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _operate(self, work: Coroutine[Any, Any, Any]) -> None:
        try:
            await work
        except HermesPoolError as error:
            self.world.tell(f"an operator got {error!r:.200}")
        except Exception as error:
            self.world.complain(f"an operator got {error!r}")

    # --- the pool's own watch ---

    def recycle(self, conversation: int) -> None:
        if (session := self._session(conversation)) is not None and session.slot.worker is not None:
            worker = self.worker_of(conversation)
            if worker is not None:
                worker.recycle_asked = True
                worker.recycle_asked_at_work |= bool(worker.jobs)
                worker.recycle_asked_in_turn |= worker.host_has is not None and not worker.wanted
            session.slot.retire("is too big")

    def kill_for(self, conversation: int) -> None:
        if (session := self._session(conversation)) is not None and session.slot.worker is not None:
            self._begin(session.slot.kill("was far too big", wanted=False))

    def replace_stuck(self, conversation: int) -> None:
        if (session := self._session(conversation)) is not None and session.slot.worker is not None:
            wedged = Diagnosis(Verdict.WEDGED, "nothing moves")
            self._begin(session.slot.kill("was wedged", wanted=False, diagnosis=wedged))

    def ask(self, conversation: int) -> None:
        if (session := self._session(conversation)) is not None:
            session.slot.ping()

    # --- what can be seen of it ---

    def _session(self, conversation: int) -> Any:
        return next((each.occupant for each in self._monitor.slots() if each.occupant.key == KEYS[conversation]), None)

    def _quarantined(self, conversation: int) -> tuple[str, ...]:
        session = self._session(conversation)
        quarantined: tuple[str, ...] = () if session is None else session.snapshot().quarantined
        return quarantined

    def jobs(self, conversation: int) -> int:
        """How many jobs are open, as far as it knows."""
        session = self._session(conversation)
        return 0 if session is None else len(session.snapshot().jobs)

    def killers(self, conversation: int) -> int:
        """How many deaths count against the messages of a conversation."""
        session = self._session(conversation)
        return 0 if session is None else sum(each.deaths for each in session.quarantine.snapshot())

    def failures(self, conversation: int) -> int:
        """How many deaths and failed starts count against a conversation."""
        session = self._session(conversation)
        failures: int = 0 if session is None else session.slot.restart_budget.snapshot().failures
        return failures

    @property
    def condition(self) -> str:
        return self._manager.pool().state

    @property
    def workers(self) -> int:
        """How many workers the pool counts."""
        return self._manager.pool().workers

    def reported(self) -> Counter[str]:
        """How many deaths it has reported, by conversation."""
        return Counter(report.conversation_id for report in self._manager.deaths())

    def look(self) -> None:
        """See all that ``ps`` would show: it must never fail."""
        self._manager.pool()
        for slot in self._monitor.slots():
            slot.occupant.snapshot()

    @property
    def operators_at_work(self) -> bool:
        return bool(self._tasks)


def story_of(world: World, history: History) -> str:
    """Return all that there is to say of a history that went wrong."""
    said = [f"{each!r}," for each in history.steps]
    return "\n".join([*world.complaints, "", str(history.rules), *said, "", *world.story])
