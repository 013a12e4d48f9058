"""A session's slot for a worker: empty, being filled, filled, or being emptied.

Here a worker is started when one is needed, stopped or killed, and its death is reported. The frames of a turn go to
the session. Every change of state goes through the worker's table in ``lifecycle``.
"""

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict
from functools import partial
from logging import DEBUG, INFO
from time import monotonic
from typing import Any

from hermes_pool.conversation.active_turn import ActiveTurn
from hermes_pool.conversation.background_jobs import BackgroundJobs
from hermes_pool.conversation.crashes import report_of
from hermes_pool.conversation.metadata import SessionMetadata
from hermes_pool.conversation.past import earlier_messages
from hermes_pool.conversation.services import SessionServices
from hermes_pool.crash_report import DeathReport
from hermes_pool.errors import (
    HermesPoolError,
    NoCapacityError,
    PoolUnavailableError,
    StoreError,
    TurnCancelledError,
    WorkerStartError,
    WorkerUnusableError,
)
from hermes_pool.lifecycle import ALIVE, WORKER, WorkerChange, WorkerState
from hermes_pool.policy.breakers import RestartBudget
from hermes_pool.policy.liveness import Diagnosis, Evidence, ProcessIdentity, Sample
from hermes_pool.process.connection import WorkerConnection
from hermes_pool.process.death import Death, Stopped
from hermes_pool.scheduling.admission import Occupant
from hermes_pool.system import processes
from hermes_pool.system.log import is_enabled_for
from hermes_pool.system.sampler import Sampler
from hermes_pool.system.threads import in_thread_or_here
from hermes_pool_worker import wire

KILL_ORPHANS_AFTER_S = 0.1
"""How long after a death to look for orphans. The search holds the interpreter's lock for milliseconds."""
# Looked up once: every turn uses them.
_BUSY, _STOPPING = WorkerState.BUSY, WorkerState.STOPPING
_TURN_BEGUN, _TURN_ENDED = WorkerChange.TURN_BEGUN, WorkerChange.TURN_ENDED
_OF_THE_POOL = (WorkerUnusableError, NoCapacityError, PoolUnavailableError)
"""Failed starts that are not the fault of this session."""


class WorkerSlot:
    """The slot for the worker of one session, which is the ``occupant`` for admission.

    ``on_frame`` takes the frames of turns and returns whether they were expected; ``on_texts`` takes the pieces of text
    with which a batch of frames begins, and returns how many. ``on_ready`` is called when a worker has opened the
    session, and ``on_death`` when such a worker has died, with whether the pool wanted that.
    """

    def __init__(
        self,
        occupant: Occupant,
        metadata: SessionMetadata,
        services: SessionServices,
        log: Any,
        *,
        on_frame: Callable[[wire.TurnFrame], bool],
        on_texts: Callable[[Sequence[wire.FromWorker]], int],
        on_ready: Callable[[wire.Opened], None],
        on_death: Callable[[DeathReport, bool], None],
    ) -> None:
        self.state = WorkerState.STOPPED
        self.connection: WorkerConnection | None = None
        """The worker, while it is ready."""
        self.turn: ActiveTurn | None = None
        """The turn that the worker runs, or that waits for another worker since the last one died."""
        self.diagnosis: Diagnosis | None = None
        """What the worker was doing in its turn, by the last sample."""
        self.unreplaced: DeathReport | None = None
        """The death of the last worker, if it was unexpected and no other worker has taken over yet."""
        self.retiring: str | None = None
        """Why the worker is to be stopped once it has nothing to do; ``None`` if it is not."""
        self.jobs = BackgroundJobs(services.settings.timeouts.background_s, asyncio.get_running_loop().time)
        self.connection_heard = on_frame  # straight to the session: this is on the path of every frame
        self.connection_heard_texts = on_texts
        self._id = occupant.key.conversation_id
        self.restart_budget = RestartBudget(
            services.settings.restarts, monotonic, random.random, conversation_id=self._id
        )
        self.occupant = occupant
        self._metadata = metadata
        self._services = services
        self._log = log
        self._on_ready = on_ready
        self._on_death = on_death
        self._loop = asyncio.get_running_loop()
        self._begun: WorkerConnection | None = None
        self._starting: asyncio.Task[wire.Opened] | None = None
        self._ending: asyncio.Task[Stopped] | None = None
        self._logs_turns, self._logs_changes = is_enabled_for(DEBUG), is_enabled_for(INFO)
        self._ready_after_s = 0.0  # since the process was created; too early rather than too late
        self._servers: frozenset[int] = frozenset()  # processes that the agent had started by then

    @property
    def is_empty(self) -> bool:
        """Whether there is no worker, and none is being started."""
        return self.state not in ALIVE and self._starting is None

    @property
    def newest(self) -> WorkerConnection | None:
        """The ready worker, or the one that is being started."""
        return self.connection or self._begun

    # --- filling it ---

    def check_start(self) -> None:
        """Raise ``RestartBackoffError`` or ``PoolUnavailableError`` if no worker may be started now."""
        self.restart_budget.check()
        self._services.factory.breaker.check(self._id)

    async def fill(self) -> wire.Opened:
        """Start a worker, or join the start that is in progress; return the worker's report on opening the session.

        A cancelled caller does not end the start, unless the start still waits for a permit and no message waits.
        """
        if self._starting is None:
            self.check_start()
            self._starting = self._services.in_background(self._fill())
        starting = self._starting
        try:
            await asyncio.wait({starting})
        except asyncio.CancelledError:
            self.start_not_wanted()
            raise
        if starting.cancelled():
            sent = self.turn is not None  # to the previous worker
            raise TurnCancelledError(
                "stopped while the worker was starting", sent=sent, retryable=not sent, conversation_id=self._id
            )
        return starting.result()

    def start_not_wanted(self) -> None:
        """Give up a start that still waits for room, unless another message of the conversation waits for it."""
        if self._starting is not None and not self.occupant.waiting and self.state not in ALIVE:
            self._give_up(self._starting)

    async def stop_filling(self) -> None:
        """Cancel the start that is in progress, if any, and wait until nothing is left of it."""
        if (starting := self._starting) is not None:
            starting.cancel()
            await asyncio.wait({starting})
            self._give_up(starting)

    def _give_up(self, starting: asyncio.Task[wire.Opened]) -> None:
        starting.cancel()
        if self._starting is starting:  # cancelled before its first step, the task cannot do so itself
            self._starting = None

    async def _fill(self) -> wire.Opened:
        try:
            await self._services.admission.make_room(self.occupant)
            self.transition(WorkerChange.START_BEGUN)
            try:
                connection = await self._services.factory.start(self._id, self._request(), self, self._launch_failed)
            except asyncio.CancelledError:  # the connection has ended the process by now
                self.transition(WorkerChange.STOP_BEGUN)
                self.transition(WorkerChange.DIED)
                raise
            except Exception as error:
                self._start_failed(error)
                raise
            return self._take(connection)
        finally:
            if self._starting is None or self._starting is asyncio.current_task():
                self._starting = self._begun = None

    async def _request(self) -> wire.Open:
        metadata = self._metadata
        if self.turn is None:  # in a turn, the metadata here is the newest
            await metadata.recall()
        earlier: list[wire.Said] = []
        if metadata.session_id is None and self._services.history is not None:
            earlier = await earlier_messages(self._services.history, self.occupant.key)
        left = metadata.left
        return self._services.factory.request(
            self._id,
            user_id=self.occupant.key.user_id,
            earlier=earlier,
            session_id=metadata.session_id,
            committed=metadata.committed,
            unfinished=None if left is None else left.turn,
            given_up=left is not None and left.given_up,
            keep=left.keep if left is not None and left.given_up else self._services.settings.replay != "always",
            said="" if left is None else left.said,
            why="" if left is None else left.why,
        )

    def _launch_failed(self, error: WorkerStartError) -> None:
        self._log.warning("start_failed", step=error.step, error=error.message)

    def _start_failed(self, error: Exception) -> None:
        if isinstance(error, HermesPoolError):
            error.conversation_id = self._id  # the factory does not know it
        self._metadata.start_failed(error)
        if isinstance(error, WorkerStartError) and not isinstance(error, _OF_THE_POOL):
            self.restart_budget.note_death()
        self.transition(WorkerChange.START_FAILED, error=str(error))

    def _take(self, connection: WorkerConnection) -> wire.Opened:
        opened, process = connection.opened, connection.process
        assert opened is not None  # noqa: S101 - for the type checker: a started worker has opened
        assert process is not None  # noqa: S101
        self.connection = connection
        self._ready_after_s = monotonic() - connection.started_at - connection.steps.get("launch", 0.0)
        self._servers = processes.child_pids(process.pid)
        self._logs_turns, self._logs_changes = is_enabled_for(DEBUG), is_enabled_for(INFO)
        self.jobs.restart_clocks()
        replaces, self.unreplaced = self.unreplaced is not None, None
        self._on_ready(opened)
        self.transition(WorkerChange.OPENED, resumed=opened.resumed, steps=connection.steps)
        if opened.notice is not None:
            self._log.warning("not_resumed", notice=opened.notice)
        self._metadata.opened(opened, (process.pid, process.create_time), replaces=replaces)
        return opened

    # --- a turn ---

    def hand_over(self, turn: ActiveTurn) -> None:
        """Hand a turn to the idle worker."""
        assert self.connection is not None  # noqa: S101 - for the type checker: the worker is idle
        self.turn = turn
        self.transition(_TURN_BEGUN)
        self.connection.hand_over(wire.Turn(turn.turn_id, turn.attempt, turn.text, turn.streams))

    def turn_settled(self) -> None:
        """Update the worker's state after its turn has settled."""
        turn, self.turn = self.turn, None
        self.jobs.restart_clocks()
        if self.state is _BUSY or self.state is _STOPPING:
            self.transition(_TURN_ENDED)
        if self.connection is None:
            self._services.admission.changed(self.occupant, self.state)  # the turn had kept the permit
        elif turn is not None and turn.lags:
            self.connection.resume_reading()

    async def work_left(self) -> tuple[str, ...]:
        """Return the names of unfinished background work: the open jobs or, if none was reported, the processes.

        Processes that the agent had started by the time it was ready, such as tool servers, do not count.
        """
        worker = self._metadata.worker
        if self.jobs.names or not self._services.settings.timeouts.background_s:
            return self.jobs.names
        if self.connection is None or worker is None:
            return ()
        return await in_thread_or_here(
            partial(processes.descendants_started_after, *worker, self._ready_after_s, self._servers)
        )

    async def read_turns(self, after: str | None, limit: int) -> list[wire.PastTurn]:
        """Return the turns of the history after a mark. ``StoreError`` if the idle worker does not tell them."""
        assert self.connection is not None  # noqa: S101 - for the type checker: the worker is idle
        try:
            answer = await self.connection.ask_history(
                wire.ReadTurns(after, limit), self._services.settings.timeouts.database_s
            )
        except TimeoutError:
            raise StoreError("the worker did not tell its history in time", conversation_id=self._id) from None
        if not isinstance(answer, wire.TurnsRead) or answer.error is not None:
            why = answer.error if isinstance(answer, wire.TurnsRead) else "the worker gave another answer"
            raise StoreError(f"the history cannot be told: {why}", conversation_id=self._id)
        return answer.turns

    async def flush(self) -> str | None:
        """Let the idle worker write what its history lacks; return why it could not, or ``None``."""
        if self.connection is None:
            return None
        try:
            answer = await self.connection.ask_history(wire.Flush(), self._services.settings.timeouts.database_s)
        except TimeoutError:
            return "the worker did not answer in time"
        if not isinstance(answer, wire.Flushed):
            return "the worker gave another answer"
        self._metadata.committed = answer.committed or self._metadata.committed
        return answer.error

    # --- emptying it ---

    async def stop(self, reason: str) -> Stopped | None:
        """Stop the worker, or wait for an end that has begun; return how it ended, or ``None`` if there is none.

        A cancelled caller does not cancel the stop.
        """
        connection = self.connection
        if connection is not None and (self.state is WorkerState.IDLE or self.state is WorkerState.BUSY):
            self.transition(WorkerChange.STOP_BEGUN, reason=reason)
            timeouts = self._services.settings.timeouts
            self._end(connection.stop(timeouts.close_grace_s, timeouts.term_grace_s))
        if self._ending is None:
            return None
        ending = self._ending
        await asyncio.wait({ending})
        return ending.result()

    def _end(self, ending: Coroutine[Any, Any, Stopped]) -> None:
        """End the worker, in a task of its own that runs until nothing is left of the worker."""

        async def end() -> Stopped:
            try:
                stopped = await ending
                self._log.info("stopped", how=stopped.how, strays=stopped.strays, left=stopped.left)
                return stopped
            finally:
                self._ending = None

        self._ending = self._services.in_background(end())

    async def kill(self, reason: str, *, wanted: bool, diagnosis: Diagnosis | None = None) -> None:
        """Kill the worker; ``reason`` is worded to follow "the worker".

        If the death is not ``wanted``, it counts against the budget, and the turn is recovered as after any other
        death; the metadata of an idle worker is saved first. A ``diagnosis`` means that the worker hangs: its stacks
        are taken first, and it lives if that makes it go on. A cancelled caller does not cancel a wanted kill.
        """
        connection, turn = self.connection, self.turn
        if connection is None or connection.verdict is not None:
            return
        if self.state is not WorkerState.BUSY and (self.state is not WorkerState.IDLE or diagnosis is not None):
            return
        if wanted:
            self.transition(WorkerChange.STOP_BEGUN, reason=reason)
            self._end(self._kill(connection, reason, hangs=turn is not None))
            await self.stop(reason)
            return
        if self.state is WorkerState.IDLE:
            await self._metadata.save("dormant")
        if diagnosis is not None:
            connection.verdict = f"{diagnosis.verdict}: {diagnosis.reason}"
            self._log.warning("worker_stuck", verdict=diagnosis.verdict.value, reason=diagnosis.reason)
            if not connection.is_frozen():
                await connection.take_stacks()
            if self.turn is not turn:  # the signal for the stacks interrupted what it was waiting for
                connection.verdict = None
                return
        connection.condemn(reason)

    async def _kill(self, connection: WorkerConnection, reason: str, *, hangs: bool) -> Stopped:
        frozen = connection.is_frozen()
        if hangs and not frozen:
            await connection.take_stacks()
        return await connection.kill(reason, 0.0 if frozen else self._services.settings.timeouts.term_grace_s)

    def retire(self, reason: str) -> None:
        """Stop the worker: now if it is idle, otherwise after its turn and its background work."""
        if self.state is WorkerState.BUSY or self.jobs.keep_worker:
            self.retiring = reason
        else:
            self._services.in_background(self.occupant.hibernate(0.0, reason=reason))

    # --- what the monitor asks ---

    @property
    def worker(self) -> ProcessIdentity | None:
        """The identity of the worker; ``None`` while no worker is ready."""
        return self._metadata.worker

    @property
    def worker_age_s(self) -> float:
        """How long the worker has been running, in seconds."""
        return 0.0 if self.connection is None else monotonic() - self.connection.started_at

    @property
    def has_work(self) -> bool:
        """Whether the worker has a turn, or background work that may go on."""
        return self.state is not WorkerState.IDLE or self.jobs.keep_worker

    def ping(self) -> None:
        """Ping the worker, unless an earlier ping is still unanswered."""
        if self.connection is not None:
            self.connection.ping()

    def evidence(
        self, samples: tuple[Sample, ...], descendants_when_idle: frozenset[ProcessIdentity], trusted_from: float
    ) -> Evidence:
        """Return all that is known about the worker and its turn."""
        turn, now = self.turn, self._loop.time()
        excuse = None
        if turn is not None and turn.lags:
            excuse = "waits until its events are read"
        elif turn is not None and any(asked.until > now for asked in turn.questions.values()):
            excuse = "waits for an answer"
        return Evidence(
            now=now,
            heard_at=now if turn is None else turn.heard_at,
            begun=turn is None or turn.last_event is not None,
            pinged_at=None if self.connection is None else self.connection.pinged_at,
            samples=samples,
            descendants_when_idle=descendants_when_idle,
            tools_open=() if turn is None else tuple(turn.tools_open.values()),
            excuse=excuse,
            trusted_from=trusted_from,
        )

    # --- what the worker does (connection.ConnectionListener) ---

    def connection_begun(self, connection: WorkerConnection) -> None:
        """Take the connection of a worker that is being started."""
        self._metadata.start_begun()
        self._begun = connection

    def connection_background(self, frame: wire.BackgroundFrame) -> bool:
        """Record the start or the end of background work; return whether the frame was expected."""
        jobs = self.jobs
        if self.connection is None:
            return False
        if isinstance(frame, wire.BackgroundStarted):
            accepted = jobs.started(frame.job_id, frame.name)
            if accepted:
                self._log.info("background_started", job_id=frame.job_id, job=frame.name)
            return accepted
        name = jobs.finished(frame.job_id)
        if name is None:
            return False
        self._log.info("background_finished", job_id=frame.job_id, job=name)
        self._notify_host(frame)
        if not jobs.names and self.state is WorkerState.IDLE:
            self._services.admission.changed(self.occupant, self.state)  # it can be evicted now
            if self.retiring is not None:
                self._services.in_background(self.occupant.hibernate(0.0, reason=self.retiring))
        return True

    def _notify_host(self, finished: wire.BackgroundFinished) -> None:
        if self._services.on_background is not None:
            try:
                self._services.on_background(self.occupant.key, finished)
            except Exception as error:  # noqa: BLE001 - an error of the host must not harm the worker
                self._log.error("on_background_failed", error=repr(error), exc_info=error)

    def connection_stderr(self, line: str) -> None:
        """Log a line of the worker's stderr."""
        self._log.info("worker_stderr", line=line)

    def connection_died(self, connection: WorkerConnection, death: Death) -> None:
        """Empty the slot, report the death, and let the session react to it."""
        if connection is not self.connection:
            return  # it never became ready: its start reports it
        worker, metadata, turn = self._metadata.worker, self._metadata, self.turn
        self.connection = self.diagnosis = self.retiring = None
        self.transition(WorkerChange.DIED, exit=str(death), wanted=death.wanted)
        report = report_of(
            connection,
            death,
            turn,
            key=self.occupant.key,
            incarnation=metadata.incarnation,
            now=self._loop.time(),
            memory=() if worker is None else self._memory_of(worker),
        )
        metadata.died(
            error=None if death.wanted else f"the worker {report.exit}",
            unfinished=None if turn is None else wire.Turn(turn.turn_id, turn.attempt, turn.text),
        )
        lost = self.jobs.lost()
        if not death.wanted:
            self.unreplaced = report
            self.restart_budget.note_death()
            self._services.reports.append(report)
            # The turn's caller comes first: logging may take longer than everything else here.
            self._loop.call_later(0, self._log_death, report, lost)
            self._services.in_background(_kill_orphans_later(connection.marker, self._services.sampler, worker))
        self._on_death(report, death.wanted)

    def _log_death(self, report: DeathReport, lost: tuple[str, ...]) -> None:
        self._log.warning("worker_died", **asdict(report))
        if lost:
            self._log.warning("background_lost", work=lost)

    def _memory_of(self, worker: ProcessIdentity) -> list[tuple[float, int]]:
        now = monotonic()
        samples = self._services.sampler.samples(worker)
        return [(now - each.at, each.unique_bytes or each.rss_bytes or 0) for each in samples]

    # --- the table ---

    def transition(self, event: WorkerChange, **facts: Any) -> None:
        """Change the state according to the table, log the facts, and notify admission."""
        before = self.state
        self.state = WORKER[before][event]
        if event is _TURN_BEGUN or event is _TURN_ENDED:
            if self._logs_turns:
                self._log.debug(event.value, state=self.state.value, before=before.value, **facts)
        elif self._logs_changes:
            self._log.info(event.value, state=self.state.value, before=before.value, **facts)
        self._services.admission.changed(self.occupant, self.state)


async def _kill_orphans_later(marker: str, sampler: Sampler, worker: ProcessIdentity | None) -> None:
    """Kill the orphans of a dead worker, after a short delay: the turn's caller comes first."""
    try:
        await asyncio.sleep(KILL_ORPHANS_AFTER_S)
    finally:  # even if the pool closes during the delay
        await in_thread_or_here(partial(_kill_orphans, marker, sampler, worker))
        if worker is not None:
            sampler.forget(worker)


def _kill_orphans(marker: str, sampler: Sampler, worker: ProcessIdentity | None) -> None:
    processes.kill(processes.find_by_marker(marker))
    if worker is not None:
        processes.kill(sampler.process_tree(worker))
