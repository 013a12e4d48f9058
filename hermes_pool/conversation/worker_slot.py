"""A session's place for a worker: empty, being filled, taken, being vacated.

Here a worker is started when one is wanted, watched while it lives, stopped, and mourned when it dies by itself. What
it is asked and what it answers is none of this module's business: the session, whose place it is, sees to the turns.
Every change of state goes through ``became``, which asks the table in ``lifecycle``.
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import asdict, dataclass
from functools import partial
from logging import DEBUG, INFO
from time import monotonic
from typing import Any, Protocol

from hermes_pool import lifecycle
from hermes_pool.conversation.crashes import report_of
from hermes_pool.conversation.metadata import SessionMetadata
from hermes_pool.conversation.turn import Turn
from hermes_pool.crash_report import DeathReport
from hermes_pool.errors import (
    HermesPoolError,
    NoCapacityError,
    PoolUnavailableError,
    TurnCancelledError,
    WorkerStartError,
    WorkerUnusableError,
)
from hermes_pool.lifecycle import Event, State
from hermes_pool.policy.breakers import RestartBudget
from hermes_pool.policy.liveness import Diagnosis, ProcessIdentity, Verdict
from hermes_pool.process.connection import Death, Stopped, WorkerConnection, kill_strays
from hermes_pool.process.factory import WorkerFactory
from hermes_pool.scheduling.admission import Admission, Occupant
from hermes_pool.settings import PoolSettings, SessionKey
from hermes_pool.storage.store import ConversationStore
from hermes_pool.system import processes
from hermes_pool.system.log import is_enabled_for
from hermes_pool.system.sampler import Sampler
from hermes_pool.system.threads import in_thread_or_here
from hermes_pool_worker import wire

SWEEP_UP_AFTER_S = 0.1
"""How long after a death its orphans are looked for. The look takes milliseconds of this interpreter's lock."""
_OF_THE_POOL = (WorkerUnusableError, NoCapacityError, PoolUnavailableError)
"""Failed starts that say nothing of this session."""


@dataclass(frozen=True, kw_only=True)
class SessionServices:
    """What all sessions of a pool share."""

    settings: PoolSettings
    factory: WorkerFactory
    store: ConversationStore
    host: str
    log: Any
    admission: Admission
    sampler: Sampler
    save_soon: Callable[[Any], None]
    """Called with a session of which there is something new to store."""
    in_background: Callable[[Coroutine[Any, Any, Any]], "asyncio.Task[Any]"]
    new_turn_id: Callable[[], str]
    on_background: Callable[[SessionKey, wire.BackgroundFinished], None] | None
    """Called with what an agent's work in the background has brought."""
    reports: deque[DeathReport]
    """The latest deaths."""


class Tenant(Occupant, Protocol):
    """The session, as its place sees it."""

    @property
    def turn_running(self) -> Turn | None:
        """The turn that runs, if one does."""

    def refuse_if_closed(self) -> None:
        """Raise ``PoolClosedError`` where no worker is wanted any more."""

    def heard(self, message: Any) -> None:
        """Take a frame of a turn."""

    def heard_background(self, message: wire.BackgroundStarted | wire.BackgroundFinished) -> None:
        """Take note of work that outlasts its turn, and of its end."""

    def worker_ready(self, opened: wire.Opened) -> None:
        """Take note of a worker that is ready."""

    def worker_gone(self, report: DeathReport, *, wanted: bool) -> None:
        """Take note of the end of a worker that was ready; ``wanted`` says that the pool had decided it before."""


class WorkerSlot:
    """The place for the worker of one session."""

    def __init__(self, tenant: Tenant, metadata: SessionMetadata, services: SessionServices, log: Any) -> None:
        self.state = State.STOPPED
        self.connection: WorkerConnection | None = None
        """The worker, while it is ready."""
        self.diagnosis: Diagnosis | None = None
        """What it was up to when it was looked at last, in a turn."""
        self.unreplaced: DeathReport | None = None
        """The death of the last worker that nobody wanted, until another one has taken over."""
        self._id = tenant.key.conversation_id
        self.restart_budget = RestartBudget(services.settings, monotonic, random.random, conversation_id=self._id)
        self._tenant = tenant
        self._metadata = metadata
        self._services = services
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._begun: WorkerConnection | None = None
        self._starting: asyncio.Task[wire.Opened] | None = None
        self._tells_turns, self._tells_changes = is_enabled_for(DEBUG), is_enabled_for(INFO)
        self._ready_after_s = 0.0  # from the process' begin, and rather too little than too much
        self._servers: frozenset[int] = frozenset()  # what the agent had started by then
        self.connection_heard = tenant.heard  # straight to whom it concerns
        self.connection_background = tenant.heard_background

    @property
    def is_empty(self) -> bool:
        """Whether there is no worker, and none is on the way."""
        return self.state not in lifecycle.ALIVE and self._starting is None

    @property
    def newest(self) -> WorkerConnection | None:
        """The worker, or the one that is being started."""
        return self.connection or self._begun

    # --- filling it ---

    def refuse_start(self) -> None:
        """Raise ``RestartBackoffError`` or ``PoolUnavailableError`` while no worker is to be started."""
        self.restart_budget.check()
        self._services.factory.breaker.check(self._id)

    async def filled(self, unfinished: wire.Turn | None, *, given_up: bool = False) -> wire.Opened:
        """Start a worker, or wait for the start that goes on already.

        ``unfinished`` is the turn in which the one before died, and ``given_up`` says that its caller knows. Giving up
        the wait does not give up the start, unless that still stands in line for room and nobody else wants it.
        """
        if self._starting is None:
            self.refuse_start()
            self._starting = self._services.in_background(self._fill(unfinished, given_up))
        starting = self._starting
        try:
            await asyncio.wait({starting})
        except asyncio.CancelledError:
            if not self._tenant.waiting and self.state not in lifecycle.ALIVE:
                self._give_up(starting)
            raise
        if starting.cancelled():
            raise TurnCancelledError("stopped while its worker was starting", conversation_id=self._id)
        return starting.result()

    async def stop_filling(self) -> None:
        """Give up the start that goes on, if one does, and wait until nothing is left of it."""
        if (starting := self._starting) is not None:
            starting.cancel()
            await asyncio.wait({starting})
            self._give_up(starting)

    def _give_up(self, starting: "asyncio.Task[wire.Opened]") -> None:
        starting.cancel()
        if self._starting is starting:  # cancelled before its first step, it cannot do so itself
            self._starting = None

    async def _fill(self, unfinished: wire.Turn | None, given_up: bool) -> wire.Opened:
        try:
            await self._services.admission.make_room(self._tenant)
            self._tenant.refuse_if_closed()
            self.became(Event.START_BEGUN)
            try:
                connection = await self._services.factory.start(
                    self._id, self._request(unfinished, given_up), self, self._start_failed
                )
            except (
                asyncio.CancelledError
            ):  # by ``stop_filling``; the connection has seen to the process before it let go
                self.became(Event.STOP_BEGUN)
                self.became(Event.DIED)
                raise
            except Exception as error:
                self._stays_empty(error)
                raise
            return self._taken(connection)
        finally:
            if self._starting is None or self._starting is asyncio.current_task():
                self._starting = self._begun = None

    async def _request(self, unfinished: wire.Turn | None, given_up: bool) -> wire.Open:
        metadata = self._metadata
        if self._tenant.turn_running is None:  # else nobody can know better than we
            await metadata.recall()
        return self._services.factory.request(
            self._id,
            session_id=metadata.session_id,
            committed=metadata.committed,
            unfinished=unfinished,
            given_up=given_up,
        )

    def _start_failed(self, error: WorkerStartError) -> None:
        self._log.warning("start_failed", step=error.step, error=error.message)

    def _stays_empty(self, error: Exception) -> None:
        if isinstance(error, HermesPoolError):
            error.conversation_id = self._id  # a factory knows of none
        if isinstance(error, WorkerStartError) and not isinstance(error, _OF_THE_POOL):
            self.restart_budget.note_death()
        self.became(Event.START_FAILED, error=str(error))
        self._metadata.status = "failed"
        self._metadata.last_error = str(error)
        self._metadata.save_soon()

    def _taken(self, connection: WorkerConnection) -> wire.Opened:
        opened, process, metadata = connection.opened, connection.process, self._metadata
        assert opened is not None  # noqa: S101 - for the type checker: a connection that was started has opened
        assert process is not None  # noqa: S101
        self.connection = connection
        self._ready_after_s = monotonic() - connection.started_at - connection.steps.get("launch", 0.0)
        self._servers = processes.child_pids(process.pid)
        if self.unreplaced is not None:
            metadata.restart_count += 1
            self.unreplaced = None
        metadata.session_id, metadata.committed = opened.session_id, opened.committed
        metadata.status, metadata.worker = "healthy", (process.pid, process.create_time)
        self._tells_turns, self._tells_changes = is_enabled_for(DEBUG), is_enabled_for(INFO)
        self._tenant.worker_ready(opened)
        self.became(Event.OPENED, resumed=opened.resumed, steps=connection.steps)
        if opened.notice is not None:
            self._log.warning("not_resumed", notice=opened.notice)
        metadata.save_soon()
        return opened

    async def processes_left(self) -> tuple[str, ...]:
        """Return the names of the processes that live below the worker and began after it was ready.

        What the agent started in order to open, such as its servers, is not work of a turn.
        """
        worker = self._metadata.worker
        if self.connection is None or worker is None:
            return ()
        return await in_thread_or_here(
            partial(processes.descendants_started_after, *worker, self._ready_after_s, self._servers)
        )

    # --- vacating it ---

    async def vacate(self, reason: str) -> Stopped | None:
        """Stop the worker; return what it took, or ``None`` where there is none or another one stops it already."""
        connection = self.connection
        if connection is None or self.state not in (State.IDLE, State.BUSY):  # it died by itself in the meantime
            return None
        self.became(Event.STOP_BEGUN, reason=reason)
        settings = self._services.settings
        stopping = self._services.in_background(connection.stop(settings.close_grace_s, settings.term_grace_s))
        await asyncio.wait({stopping})  # whoever gives up waiting does not give up the stop
        stopped: Stopped = stopping.result()
        self._log.info("stopped", how=stopped.how, strays=stopped.strays, left=stopped.left)
        return stopped

    async def end_deaf(self) -> tuple[str, ...]:
        """Kill a worker that has not obeyed a cancel; return where its threads were."""
        connection = self.connection
        if connection is None or self.state is not State.BUSY:
            return ()
        self.became(Event.STOP_BEGUN, reason="the turn did not end when it was cancelled")
        stacks = () if connection.is_frozen() else await connection.take_stacks()
        self._services.in_background(
            connection.kill("did not obey a cancel", term_grace_s=self._services.settings.term_grace_s)
        )
        return stacks

    async def end_frozen(self) -> None:
        """Kill an idle worker that somebody has stopped (SIGSTOP): it would keep the turn that it is given."""
        connection = self.connection
        if connection is None or self.state is not State.IDLE or not connection.is_frozen():
            return
        self._log.warning("idle_worker_frozen")
        self.became(Event.STOP_BEGUN, reason="it was stopped by a signal")
        await asyncio.wait({self._services.in_background(connection.kill("was stopped by a signal"))})

    async def end_stuck(self, diagnosis: Diagnosis) -> None:
        """Kill a worker that hangs, and learn before where; for its turn that is a death like any other."""
        connection = self.connection
        if connection is None or self.state is not State.BUSY or connection.verdict is not None:
            return
        turn, connection.verdict = self._tenant.turn_running, f"{diagnosis.verdict}: {diagnosis.reason}"
        self._log.warning("worker_stuck", verdict=diagnosis.verdict.value, reason=diagnosis.reason)
        if diagnosis.verdict is not Verdict.FROZEN:
            await connection.take_stacks()
        if self._tenant.turn_running is turn:
            connection.condemn(f"was {diagnosis.verdict} ({diagnosis.reason})")
        else:  # to be asked where it is has interrupted what it was waiting for
            connection.verdict = None

    async def end_for(self, reason: str) -> None:
        """Kill the worker for a ``reason`` that follows "the worker". An idle one is saved first: nobody waits."""
        if self.state is State.IDLE:
            await self._metadata.save("dormant")
        if self.connection is not None:
            self.connection.condemn(reason)

    # --- what the worker does (connection.ConnectionListener) ---

    def connection_begun(self, connection: WorkerConnection) -> None:
        """Take note of the worker that is being started."""
        self._metadata.incarnation += 1
        self._begun = connection

    def note_unasked(self) -> None:
        """Take note of a frame of the worker's, or of the one that is being started, that has no addressee."""
        if self.newest is not None:
            self.newest.note_unasked()

    def connection_said(self, line: str) -> None:
        """Pass a line of the worker's stderr on to the log."""
        self._log.info("worker_stderr", line=line)

    def connection_died(self, connection: WorkerConnection, death: Death) -> None:
        """Take note of the end of a worker, whoever caused it."""
        if connection is not self.connection:
            return  # it never became ready; its start tells the story
        worker, metadata = self._metadata.worker, self._metadata
        self.connection = self.diagnosis = metadata.worker = None
        metadata.status = "dormant"
        self.became(Event.DIED, exit=str(death), wanted=death.wanted)
        report = report_of(
            connection,
            death,
            self._tenant.turn_running,
            key=self._tenant.key,
            incarnation=metadata.incarnation,
            now=self._loop.time(),
            memory=() if worker is None else self._memory_of(worker),
        )
        if not death.wanted:
            self.unreplaced = report
            self.restart_budget.note_death()
            metadata.last_error = f"the worker {report.exit}"
            self._services.reports.append(report)
            # Whoever waits for this turn comes first: the log may take longer than all else here.
            self._loop.call_later(0, self._tell, report)
            self._services.in_background(_sweep_up(connection.marker, self._services.sampler, worker))
        self._tenant.worker_gone(report, wanted=death.wanted)

    def _tell(self, report: DeathReport) -> None:
        self._log.warning("worker_died", **asdict(report))

    def _memory_of(self, worker: ProcessIdentity) -> list[tuple[float, int]]:
        now = monotonic()
        samples = self._services.sampler.samples(worker)
        return [(now - each.at, each.unique_bytes or each.rss_bytes or 0) for each in samples]

    # --- the table ---

    def became(self, event: Event, **facts: Any) -> None:
        """Make a transition and announce it; the facts go into the log."""
        before = self.state
        self.state = lifecycle.after(before, event)
        if event is Event.TURN_BEGUN or event is Event.TURN_ENDED:
            if self._tells_turns:
                self._log.debug(event.value, state=self.state.value, before=before.value, **facts)
        elif self._tells_changes:
            self._log.info(event.value, state=self.state.value, before=before.value, **facts)
        self._services.admission.changed(self._tenant)


async def _sweep_up(marker: str, sampler: Sampler, worker: ProcessIdentity | None) -> None:
    """End what the tools of a dead worker have left; a little later, since whoever waits for the turn comes first."""
    try:
        await asyncio.sleep(SWEEP_UP_AFTER_S)
    finally:  # also when the pool closes before
        await in_thread_or_here(
            lambda: (kill_strays(marker), worker is not None and processes.kill(sampler.process_tree(worker)))
        )
        if worker is not None:
            sampler.forget(worker)
