"""One conversation: its queue, its turns, and what happens to them when the worker dies.

A turn holds the conversation's lock from when it begins until it settles. Settling releases the lock, never the caller:
a caller that leaves early cannot let the next message in too soon.
"""

import asyncio
from typing import Literal, assert_never

from hermes_pool.conversation.active_turn import ActiveTurn, Ending
from hermes_pool.conversation.background_jobs import summary_of
from hermes_pool.conversation.crashes import died_with
from hermes_pool.conversation.deadlines import Limit, TurnDeadlines
from hermes_pool.conversation.metadata import SessionMetadata
from hermes_pool.conversation.reply import Reply
from hermes_pool.conversation.services import SessionServices
from hermes_pool.conversation.worker_slot import WorkerSlot
from hermes_pool.crash_report import DeathReport
from hermes_pool.errors import (
    AgentFailedError,
    ConversationBusyError,
    HermesPoolError,
    InvalidMessageError,
    MessageTooLargeError,
    RestartBackoffError,
    TurnCancelledError,
    TurnTimeoutError,
    WorkerStartError,
)
from hermes_pool.lifecycle import TURN, TurnChange, TurnState, WorkerState
from hermes_pool.policy import recovery
from hermes_pool.policy.quarantine import Quarantine
from hermes_pool.policy.recovery import Decision, Replacement, TurnFacts
from hermes_pool.process.death import Stopped
from hermes_pool.process.factory import LAUNCHES_MAX
from hermes_pool.scheduling.pool_state import PoolState
from hermes_pool.settings import SessionKey
from hermes_pool.snapshot import SessionSnapshot
from hermes_pool_worker import wire

CHECK_FROZEN_AFTER_S = 0.5
"""A worker that was idle for this long is checked before it gets a turn: a signal may have stopped it."""
# Looked up once: in CPython 3.11 a member of an enumeration costs ten times as much as a global name, and these are on
# the path of every turn or frame.
_IDLE = WorkerState.IDLE
_OPEN, _CLOSED = PoolState.OPEN, PoolState.CLOSED
_BEGUN, _HANDED_OVER, _RECOVERING = TurnChange.BEGUN, TurnChange.HANDED_OVER, TurnState.RECOVERING
_UTF8_BYTES_MAX = 4
_TURN_BYTES_MAX = 256  # of a turn's frame, without its text


class Session:
    """A conversation's session: at most one worker, at most one turn at a time."""

    def __init__(self, key: SessionKey, services: SessionServices) -> None:
        self.key = key
        self._id = key.conversation_id
        self.waiting = 0
        """How many messages wait for the conversation."""
        self._services = services
        self._settings = services.settings
        self._loop = asyncio.get_running_loop()
        self._log = services.log.bind(conversation_id=key.conversation_id)
        self.metadata = SessionMetadata(
            key,
            services.store,
            agent=services.settings.agent,
            host=services.host,
            log=self._log,
            changed=lambda: services.saver.soon(self.metadata, urgent=self.state is not WorkerState.IDLE),
        )
        self.slot = WorkerSlot(
            self,
            self.metadata,
            services,
            self._log,
            on_frame=self._heard,
            on_ready=self._worker_ready,
            on_death=self._worker_died,
        )
        self.quarantine = Quarantine(services.settings.restarts, conversation_id=self._id)
        self._lock = asyncio.Lock()
        self._begun: ActiveTurn | None = None
        """The turn that holds the lock, until it settles."""
        self._deadlines = TurnDeadlines(services.settings.timeouts, self._over_limit)
        self._notice: str | None = None
        """What the next reply has to report."""

    # --- what the manager and admission ask (admission.Occupant) ---

    @property
    def state(self) -> WorkerState:
        """What the worker is doing."""
        return self.slot.state

    @property
    def in_turn(self) -> bool:
        """Whether a turn runs, or waits for another worker."""
        return self.slot.turn is not None

    @property
    def is_inactive(self) -> bool:
        """Whether nothing at all is going on: no process, no caller."""
        return self.slot.is_empty and not self._lock.locked()

    @property
    def is_ready(self) -> bool:
        """Whether the worker is ready for a turn; it may have background work."""
        return self.state is WorkerState.IDLE and not self._lock.locked()

    def idle_s(self) -> float | None:
        """Return how long the worker has had nothing to do, in seconds; ``None`` if it is busy or there is none.

        An open background job counts as work, for ``timeouts.background_s``: until then it keeps the worker even if
        room is needed. Work that is visible only as a process is looked for when the worker is about to go.
        """
        if not self.is_ready or self.slot.jobs.keep_worker:
            return None
        return self._loop.time() - self.slot.jobs.idle_since

    def snapshot(self) -> SessionSnapshot:
        """Return what the session knows. The manager adds what the operating system reports."""
        now, metadata, slot = self._loop.time(), self.metadata, self.slot
        connection, diagnosis, turn = slot.newest, slot.diagnosis, slot.turn
        process = connection.process if connection is not None else None
        breaker = slot.restart_budget.snapshot()
        return SessionSnapshot(
            conversation_id=self.key.conversation_id,
            user_id=self.key.user_id,
            session_id=metadata.session_id,
            state=self.state.value,
            agent=self._settings.agent,
            pid=process.pid if process is not None else None,
            create_time=process.create_time if process is not None else None,
            incarnation=metadata.incarnation,
            uptime_s=now - connection.started_at if connection is not None and process is not None else None,
            idle_s=now - slot.jobs.ready_since if self.is_ready else None,
            jobs=slot.jobs.names,
            turn_s=now - turn.began_at if turn is not None else None,
            verdict=None if diagnosis is None else diagnosis.verdict.value,
            verdict_reason=None if diagnosis is None else diagnosis.reason,
            turns=metadata.turns,
            waiting=self.waiting,
            restart_count=metadata.restart_count,
            last_used_at=metadata.last_used,
            last_error=metadata.last_error or (None if metadata.save_error is None else str(metadata.save_error)),
            restart_breaker=breaker.state,
            retry_after_s=breaker.retry_after_s,
            quarantined=tuple(each.fingerprint for each in self.quarantine.snapshot() if each.quarantined),
            host=self._services.host,
        )

    async def hibernate(self, idle_at_least_s: float, *, room_is_needed: bool = False, reason: str = "idle") -> bool:
        """Save the metadata and stop the worker, if it has been idle that long; return whether it was stopped.

        This claims the session: it holds the lock throughout, and checks idleness again under it. A message that
        arrives meanwhile either prevents the stop, or waits for it and then starts another worker. If
        ``room_is_needed``, a session that can never be stored is stopped too; its metadata stays in memory. Background
        work keeps the worker for ``timeouts.background_s``; then it is abandoned, and ``last_error`` says so.
        """
        if self._lock.locked() or self.waiting:
            return False
        await self._lock.acquire()
        slot, metadata = self.slot, self.metadata
        try:
            if self.state is not WorkerState.IDLE or self._loop.time() - slot.jobs.idle_since < idle_at_least_s:
                return False
            if slot.jobs.keep_worker:
                return False
            left = await slot.work_left()
            if left and slot.jobs.in_time:
                slot.jobs.still_working()
                return False
            abandoned = f"background work was abandoned (timeouts.background_s): {summary_of(left)}" if left else None
            saved = await metadata.save("dormant", error=abandoned)
            if not saved and not (room_is_needed and metadata.never_storable):
                return False  # never stopped before it is saved; the next sweep tries again
            if self.waiting or self.state is not WorkerState.IDLE:  # a message arrived during the save
                metadata.save_soon()
                return False
            if abandoned is not None:
                metadata.last_error = abandoned
                self._log.warning("background_abandoned", work=left)
            await slot.stop(reason)
            return True
        finally:
            self._release()

    async def stop(self, reason: str, *, retryable: bool = False) -> Stopped | None:
        """Stop the worker, whatever it is doing, after saving the metadata if the store answers.

        A running turn ends with a ``TurnCancelledError``; if ``retryable``, so is the error, unless a tool had started.
        Return how the worker was stopped, or ``None`` if there was none.
        """
        await self.slot.stop_filling()
        turn = self.slot.turn
        if turn is not None:
            error = TurnCancelledError(
                f"stopped ({reason})", conversation_id=self._id, retryable=retryable and not turn.tools_started
            )
            self.cancel(turn, error)
        await self.metadata.save("dormant" if self.slot.connection is not None else None)
        return await self.slot.stop(reason)

    async def close(self) -> Stopped | None:
        """Stop for good. The pool is closed, so no message gets in any more."""
        stopped = await self.stop("the pool is closing", retryable=True)
        self._deadlines.stop()
        return stopped

    # --- what callers ask ---

    def new_turn(self, text: str, *, streams: bool = True) -> ActiveTurn:
        """Return a turn that has not begun."""
        if not isinstance(text, str):
            raise InvalidMessageError(f"a message must be a str, not {type(text).__name__}", conversation_id=self._id)
        return ActiveTurn(
            next(self._services.turn_ids),
            text,
            drained=self._drained,
            streams=streams,
        )

    async def begin(self, turn: ActiveTurn) -> None:
        """Wait for earlier turns and for a worker, and hand the turn over. A refused turn is settled with its error."""
        try:
            self._check_size(turn)  # before it waits
            if self.quarantine.killers:
                self.quarantine.check(turn.text)
            if self.slot.state is not _IDLE and self.slot.is_empty:
                self.slot.check_start()
            if self._lock.locked() or self.waiting:  # the lock is free for a moment when the next in line is waking up
                await self._wait_in_queue()
            else:
                await self._lock.acquire()
        except BaseException as error:
            self._refuse(turn, error)
            raise
        try:
            turn.state = TURN[turn.state][_BEGUN]
            self._begun = turn
            if self.quarantine.killers:
                self.quarantine.check(turn.text)  # again: sent twice, it may have waited for itself
            if self._services.admission.state is not _OPEN:
                await self._services.admission.wait_while_paused(self)
            if self._loop.time() - self.slot.jobs.ready_since >= CHECK_FROZEN_AFTER_S:
                await self._replace_frozen()
            if self.slot.state is not _IDLE or self._services.admission.state is _CLOSED:
                await self._have_idle_worker(turn)
            if turn.ending is None:
                self._hand_over(turn)
                return
        except BaseException as error:
            self._refuse(turn, error)
            self._release()
            raise
        turn.settle(self._ended_early(turn))  # cancelled before it began
        self.slot.start_not_wanted()  # one that an earlier message has left behind
        self._release()

    def cancel(self, turn: ActiveTurn, ending: Ending = "cancelled") -> None:
        """End the turn: ask its worker, and kill that after ``timeouts.close_grace_s``. Only the first call counts."""
        if turn.state is TurnState.SETTLED or turn.ending is not None:
            return
        turn.ending = ending
        turn.state = TURN[turn.state][TurnChange.END_WANTED]
        connection = self.slot.connection
        if turn.state is TurnState.CANCELLING and self.state is WorkerState.BUSY and connection is not None:
            connection.send(wire.Cancel(turn.turn_id, turn.attempt))
            self._loop.call_later(self._settings.timeouts.close_grace_s, self._cancel_was_ignored, turn)

    def answer(self, turn: ActiveTurn, question_id: str, text: str) -> None:
        """Pass an answer to the worker."""
        if turn is self.slot.turn and self.slot.connection is not None:
            turn.questions_open.pop(question_id, None)
            turn.heard_at = self._loop.time()
            self.slot.connection.send(wire.Answer(turn.turn_id, turn.attempt, question_id, text))

    def _drained(self, turn: ActiveTurn) -> None:
        """Resume reading from the worker: the events that had piled up have been consumed."""
        if turn is self.slot.turn and self.slot.connection is not None:
            turn.heard_at = self._loop.time()
            self.slot.connection.resume_reading()

    # --- before a turn runs ---

    def _check_size(self, turn: ActiveTurn) -> None:
        limit = self._settings.frame_bytes_max
        if len(turn.text) * _UTF8_BYTES_MAX + _TURN_BYTES_MAX <= limit:
            return
        try:
            wire.encode(wire.Turn(turn.turn_id, turn.attempt, turn.text, turn.streams), limit)
        except wire.FrameTooLargeError as error:
            raise MessageTooLargeError(f"the message is too large: {error}", conversation_id=self._id) from None

    async def _wait_in_queue(self) -> None:
        settings = self._settings
        if settings.busy == "reject" and (self._begun is not None or self.waiting):  # not if its worker only leaves
            raise ConversationBusyError(
                'another message is being answered, and messages do not wait (busy="reject")', conversation_id=self._id
            )
        if self.waiting >= settings.queues.turns_max:
            raise ConversationBusyError(
                f"{self.waiting} messages are already waiting (queues.turns_max)", conversation_id=self._id
            )
        self.waiting += 1
        try:
            async with asyncio.timeout(settings.timeouts.wait_s):
                await self._lock.acquire()
        except TimeoutError:
            raise ConversationBusyError(
                f"earlier messages took longer than {settings.timeouts.wait_s:g} s (timeouts.wait_s)",
                conversation_id=self._id,
            ) from None
        finally:
            self.waiting -= 1
            if (counts_changed := self._services.admission.counts_changed) is not None:
                counts_changed.set()

    async def _replace_frozen(self) -> None:
        """Kill an idle worker that was stopped by a signal (SIGSTOP): it would never begin the turn."""
        connection = self.slot.connection
        if self.state is WorkerState.IDLE and connection is not None and connection.is_frozen():
            self._log.warning("idle_worker_frozen")
            await self.slot.kill("was stopped by a signal", wanted=True)

    async def _have_idle_worker(self, turn: ActiveTurn) -> None:
        """Make sure that the worker is idle: wait for the end of one that is being stopped, and start another."""
        starts = 0
        while turn.ending is None:
            self._services.admission.check_open(self)
            if self.state is WorkerState.IDLE:
                return
            if self.state is WorkerState.STOPPING and self.slot.connection is not None:
                await self.slot.connection.dead()
            elif starts < LAUNCHES_MAX:
                starts += 1
                await self.slot.fill()
            else:
                raise WorkerStartError(
                    "its workers die as soon as they are ready",
                    step="open",
                    conversation_id=self._id,
                )

    def _refuse(self, turn: ActiveTurn, error: BaseException) -> None:
        """Settle a turn that will not begin."""
        if not isinstance(error, HermesPoolError):
            error = TurnCancelledError(
                "the caller gave up before the turn began", sent=False, retryable=True, conversation_id=self._id
            )
        turn.settle(error)

    # --- a turn ---

    def _hand_over(self, turn: ActiveTurn) -> None:
        now = self._loop.time()
        turn.began_at = turn.began_at or now
        turn.heard_at = now
        turn.state = TURN[turn.state][_HANDED_OVER]
        self.slot.hand_over(turn)
        self._deadlines.watch(turn)

    def _heard(self, frame: wire.TurnFrame) -> bool:
        """Take a frame; return ``False`` if it belongs to another turn or attempt, and so is unsolicited."""
        turn = self.slot.turn
        if (
            turn is None
            or frame.turn_id != turn.turn_id
            or frame.attempt != turn.attempt
            or turn.state is _RECOVERING  # no worker has it
        ):
            return False
        turn.heard_at = self._loop.time()
        if isinstance(frame, wire.TextDelta):  # first and by itself, since there may be thousands
            turn.last_event = "TextDelta"
            turn.push(frame)
            if turn.lags and self.slot.connection is not None:
                self.slot.connection.pause_reading()
            return True
        match frame:
            case wire.TurnDone():
                self._settle(turn, self._done(turn, frame))
                return True
            case wire.TurnFailed():
                self.metadata.turn_failed(frame)
                error = AgentFailedError(frame.text, reason=frame.reason, conversation_id=self._id)
                self._settle(turn, error if turn.ending is None else self._ended_early(turn))
                return True
            case wire.ToolStarted():
                turn.tool_started(frame.call_id, frame.name)
            case wire.ToolFinished():
                turn.tools_open.pop(frame.call_id, None)
            case wire.Question():
                turn.asked(frame.question_id, turn.heard_at + frame.timeout_s)
            case wire.SessionMoved():
                self.metadata.moved(frame.session_id)
            case wire.ReasoningDelta() | wire.Status():
                pass
            case _:
                assert_never(frame)
        turn.last_event = type(frame).__name__
        turn.push(frame)
        if turn.lags and self.slot.connection is not None:
            self.slot.connection.pause_reading()
        return True

    def _done(self, turn: ActiveTurn, done: wire.TurnDone) -> Reply | HermesPoolError:
        self.metadata.turn_done(done)
        if done.outcome == "interrupted" and isinstance(turn.ending, HermesPoolError):
            return self._ended_early(turn)
        notice = done.notice
        if self._notice is not None:
            notice = self._notice if notice is None else f"{self._notice} {notice}"
            self._notice = None
        self._completed(turn)
        return self._reply(turn, done.text, done.outcome, done.usage, notice)

    def _completed(self, turn: ActiveTurn) -> None:
        self.slot.restart_budget.note_completed()
        if self.quarantine.killers:
            self.quarantine.note_completed(turn.text)
        self.metadata.turns += 1
        self.metadata.last_error = None

    def _reply(
        self,
        turn: ActiveTurn,
        text: str,
        outcome: Literal["completed", "interrupted", "partial"] = "completed",
        usage: dict[str, int] | None = None,
        notice: str | None = None,
    ) -> Reply:
        return Reply(
            text=text,
            conversation_id=self._id,
            session_id=self.metadata.session_id,
            turn_id=turn.turn_id,
            outcome=outcome,
            restarts=turn.deaths,
            usage=usage or {},
            notice=notice,
            duration_s=self._loop.time() - turn.began_at if turn.began_at else 0.0,
        )

    def _ended_early(self, turn: ActiveTurn) -> Reply | HermesPoolError:
        if isinstance(turn.ending, TurnCancelledError) and turn.tools_started:  # since its end was wanted, perhaps
            turn.ending.tool_may_have_acted()
        if isinstance(turn.ending, HermesPoolError):
            return turn.ending
        return self._reply(turn, "", outcome="interrupted")

    def _settle(self, turn: ActiveTurn, outcome: Reply | HermesPoolError) -> None:
        """Settle the running turn. That frees the conversation, unless its worker has to go first."""
        slot, metadata = self.slot, self.metadata
        error = None if isinstance(outcome, Reply) else outcome
        if slot.connection is None:
            completed = isinstance(outcome, Reply) and outcome.outcome == "completed"
            metadata.turn_left(None if completed else wire.Turn(turn.turn_id, turn.attempt, turn.text))
        self._begun = self._deadlines.turn = None
        turn.settle(outcome)
        slot.turn_settled()
        metadata.turn_settled(error)
        if error is not None:
            self._log.info("turn_failed", turn_id=turn.turn_id, error=type(error).__name__)
        if slot.retiring is None or slot.jobs.keep_worker:
            self._release()
        else:
            self._services.in_background(self._retire(slot.retiring))

    async def _retire(self, reason: str) -> None:
        """Stop the worker between two turns, and let the next message in only then."""
        slot = self.slot
        try:
            if slot.jobs.in_time and await slot.work_left():
                return  # it may go after the next turn
            slot.retiring = None
            if self.state is WorkerState.IDLE and await self.metadata.save("dormant"):
                await slot.stop(reason)
        finally:
            self._release()

    def _release(self) -> None:
        """Let the next message in."""
        self._begun = None
        self._lock.release()
        if (counts_changed := self._services.admission.counts_changed) is not None:
            counts_changed.set()

    # --- time limits ---

    def _over_limit(self, turn: ActiveTurn, limit: Limit, limit_s: float) -> None:
        self._log.warning("turn_timed_out", turn_id=turn.turn_id, limit=limit.value)
        what = "no reply" if limit is Limit.TURN else "no progress"
        diagnosis = self.slot.diagnosis
        verdict = None if diagnosis is None else f"{diagnosis.verdict}: {diagnosis.reason}"
        text = f"{what} for {limit_s:g} s ({limit.value})" + (f"; its worker was {verdict}" if verdict else "")
        self.cancel(turn, TurnTimeoutError(text, limit=limit.value, conversation_id=self._id, verdict=verdict))

    def _cancel_was_ignored(self, turn: ActiveTurn) -> None:
        if turn is self.slot.turn and self.state is WorkerState.BUSY:
            self._services.in_background(self.slot.kill("ignored a cancel", wanted=True))

    # --- after a death ---

    def _worker_ready(self, opened: wire.Opened) -> None:
        self._notice = opened.notice

    def _worker_died(self, report: DeathReport, wanted: bool) -> None:
        """React to a death: the worker's turn still gets a reply or a clean error."""
        turn = self.slot.turn
        if turn is None:
            self.metadata.save_soon()
            return
        if turn.state is TurnState.RECOVERING:  # the new worker had only opened: the recovery notices
            turn.state = TURN[turn.state][TurnChange.WORKER_DIED]
            turn.deaths += 1
            return
        if turn.ending is None:
            turn.worker_died()
            if not wanted:
                self.quarantine.note_death(turn.text)
        decision = recovery.after_death(self._facts(turn))
        if decision is Decision.REPLACE:
            turn.state = TURN[turn.state][TurnChange.WORKER_DIED]
            self._services.in_background(self._recover(turn, report))
        elif decision is Decision.END:
            if isinstance(turn.ending, TurnTimeoutError):
                turn.ending.stacks = report.stacks
            self._settle(turn, self._ended_early(turn))
        else:
            self.metadata.replacements_spent()
            self._settle(turn, died_with(turn, report, decision))

    def _facts(self, turn: ActiveTurn) -> TurnFacts:
        return TurnFacts(
            deaths=turn.deaths,
            tools_started=bool(turn.tools_started),
            end_wanted=turn.ending is not None,
            replay=self._settings.replay,
            replacements_max=self._settings.restarts.replacements_per_turn_max,
        )

    async def _recover(self, turn: ActiveTurn, report: DeathReport) -> None:
        """Give the turn of a dead worker its reply, another run, or a clean error."""
        try:
            outcome = await self._replace_worker(turn, report)
        except BaseException:  # our bug, or the loop is ending: the caller must not wait for ever
            self._settle(turn, died_with(turn, report, Decision.CRASH))
            raise
        if outcome is not None:
            self._settle(turn, outcome)

    async def _replace_worker(self, turn: ActiveTurn, report: DeathReport) -> Reply | HermesPoolError | None:
        """Start another worker in place of the dead one; return the turn's outcome, or ``None`` if it runs again."""
        if turn.ending is not None:
            return self._ended_early(turn)
        try:
            opened = await self.slot.fill()
        except HermesPoolError as error:
            backing_off = isinstance(error, RestartBackoffError)
            decision = recovery.after_failed_start(self._facts(turn), backing_off=backing_off)
            if decision is Decision.END:
                return self._ended_early(turn)
            if decision is Decision.REFUSE:
                error.sent = True  # to the worker that died
                return error
            failed = died_with(turn, report, decision, what_next=error.message)
            failed.__cause__ = error
            return failed
        replacement = Replacement(alive=self.state is WorkerState.IDLE, recovered=opened.recovered is not None)
        decision = recovery.after_replacement(self._facts(turn), replacement)
        match decision:
            case Decision.DELIVER:
                self._completed(turn)
                return self._reply(turn, opened.recovered or "")
            case Decision.END:
                return self._ended_early(turn)
            case Decision.REPLAY:
                turn.attempt += 1
                self._hand_over(turn)
                turn.push(
                    wire.Status(
                        turn.turn_id, turn.attempt, f"the worker {report.exit}; another one starts the reply again"
                    )
                )
                return None
            case _:
                return died_with(turn, self.slot.unreplaced or report, decision)
