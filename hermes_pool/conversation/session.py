"""One conversation: its line, its turns, and what becomes of them when the worker dies.

The worker itself, from the wish for one to its death, is the business of the session's ``place``. Whoever starts a turn
holds the conversation's lock until the turn is settled; the lock is released by the settling itself, never by the
caller, so a caller that leaves early cannot let the next message in too soon.
"""

import asyncio
from time import monotonic
from typing import Any, Literal

from hermes_pool.conversation.background_jobs import Background, told
from hermes_pool.conversation.crashes import crashed
from hermes_pool.conversation.deadlines import TurnDeadlines
from hermes_pool.conversation.metadata import SessionMetadata
from hermes_pool.conversation.turn import Reply, Turn
from hermes_pool.conversation.worker_slot import SessionServices, WorkerSlot
from hermes_pool.crash_report import DeathReport
from hermes_pool.errors import (
    AgentFailedError,
    ConversationBusyError,
    HermesPoolError,
    InvalidMessageError,
    MessageTooLargeError,
    PoolClosedError,
    RestartBackoffError,
    TurnCancelledError,
    TurnTimeoutError,
    WorkerCrashedError,
    WorkerStartError,
)
from hermes_pool.lifecycle import Event, State
from hermes_pool.policy.liveness import Diagnosis, Evidence, ProcessIdentity, Sample
from hermes_pool.policy.quarantine import Quarantine
from hermes_pool.process.connection import Stopped
from hermes_pool.process.factory import LAUNCHES_MAX
from hermes_pool.scheduling.pool_state import PoolState
from hermes_pool.settings import SessionKey
from hermes_pool.snapshot import SessionSnapshot
from hermes_pool_worker import wire

LOOKED_AT_AFTER_S = 0.5
"""A worker that was idle for so long is looked at before it is given a turn: it may have been stopped meanwhile."""
_UTF8_BYTES_MAX = 4
_TURN_BYTES_MAX = 256  # of a turn's frame, beside its text


class Session:
    """A conversation's session: at most one worker, at most one turn at a time."""

    def __init__(self, key: SessionKey, services: SessionServices) -> None:
        self.key = key
        self.waiting = 0
        """Callers in line."""
        self.closed = False
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
            changed=lambda: services.save_soon(self),
        )
        self.slot = WorkerSlot(self, self.metadata, services, self._log)
        self.quarantine = Quarantine(services.settings.restarts, conversation_id=self._id)
        self._lock = asyncio.Lock()
        self._turn: Turn | None = None
        self._idle_since = self._loop.time()
        self._background = Background(services.settings.timeouts.background_s, self._loop.time)
        self._deadlines = TurnDeadlines(services.settings.timeouts, self._over_limit)
        self._notice: str | None = None
        self._given_up: wire.Turn | None = None
        """The last turn, where it ended without a reply and its worker can no more take it out of the history."""
        self._recovering = False
        """Whether the turn is between two workers: it has one recovery at a time, whoever dies meanwhile."""
        self._recycle: str | None = None
        """Why the worker goes after this turn; ``None``: it stays."""

    # --- what the manager asks ---

    def new_turn(self, text: str, *, streams: bool = True) -> Turn:
        """Return a turn that is not begun yet."""
        if not isinstance(text, str):
            raise InvalidMessageError(f"a message is text, not {type(text).__name__}", conversation_id=self._id)
        return Turn(
            self,
            self._services.new_turn_id(),
            text,
            streams=streams,
        )

    @property
    def state(self) -> State:
        """What the worker is doing."""
        return self.slot.state

    @property
    def at_rest(self) -> bool:
        """Whether nothing at all goes on here: no process, no caller."""
        return self.slot.is_empty and not self._lock.locked()

    def idle_s(self) -> float | None:
        """Seconds since the worker has nothing to do; ``None`` when it has, or when there is no worker.

        Work in the background is something to do, for ``timeouts.background_s``: so not even where room is needed a
        worker goes that has any. What only shows as a process is looked for when the worker is about to go.
        """
        if not self.is_resting or self.works_on:
            return None
        return self._loop.time() - self._idle_since

    def snapshot(self) -> SessionSnapshot:
        """Return what is known here; what the operating system knows is added by the manager."""
        now, metadata = self._loop.time(), self.metadata
        connection, diagnosis = self.slot.newest, self.slot.diagnosis
        process = connection.process if connection is not None else None
        breaker = self.slot.restart_budget.snapshot()
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
            idle_s=now - self._background.resting_since if self.is_resting else None,
            jobs=self._background.names,
            turn_s=now - self._turn.began_at if self._turn is not None else None,
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

    @property
    def is_resting(self) -> bool:
        """Whether its worker is ready and has no turn; it may have work in the background."""
        return self.state is State.IDLE and not self._lock.locked()

    async def hibernate(self, idle_at_least_s: float, *, room_is_needed: bool = False, reason: str = "idle") -> bool:
        """Let the worker go if it has been idle that long: metadata first, then the kill. Say whether it went.

        It is a claim and no check: the lock is held throughout, the idleness is looked at again under it, and a message
        that comes in the meantime either prevents it or waits and starts afresh. Where ``room_is_needed``, a session
        that can never be stored goes as well: what it knows stays in memory. Work in the background keeps it either
        way, until ``timeouts.background_s`` is over; then that is abandoned, and ``last_error`` says so.
        """
        if self._lock.locked():
            return False
        await self._lock.acquire()
        error_before = self.metadata.last_error
        try:
            if self.state is not State.IDLE or self._loop.time() - self._idle_since < idle_at_least_s or self.works_on:
                return False
            left = await self._work_left()
            if left and self._background.in_time:
                self._idle_since = self._loop.time()
                return False
            if left:
                self.metadata.last_error = f"work in the background was abandoned (timeouts.background_s): {told(left)}"
            if not await self.metadata.save("dormant") and not (room_is_needed and self.metadata.never_storable):
                self.metadata.last_error = error_before
                return False  # never killed before it is saved; the next sweep tries again
            if self.waiting or self.state is not State.IDLE:  # somebody came while it was saved
                self.metadata.last_error = error_before
                self.metadata.save_soon()
                return False
            if left:
                self._log.warning("background_abandoned", work=left)
            await self.slot.vacate(reason)
            return True
        finally:
            self._lock.release()

    async def _work_left(self) -> tuple[str, ...]:
        """Return the names of what the agent has not finished: its open jobs; if it told of none, its processes."""
        if self._background.names or not self._settings.timeouts.background_s:
            return self._background.names
        return await self.slot.processes_left()

    async def stop(self, reason: str) -> Stopped | None:
        """Stop the worker now, whatever it does: a running turn is cancelled and ends with ``TurnCancelledError``.

        Return what it took, or ``None`` where there was no worker. Metadata is saved first, if the store answers.
        """
        await self.slot.stop_filling()
        if self._turn is not None:
            self.cancel(self._turn, TurnCancelledError(f"stopped ({reason})", conversation_id=self._id))
        if self.state not in (State.IDLE, State.BUSY):
            if self.slot.connection is not None:
                await self.slot.connection.dead()
            await self.metadata.save()
            return None
        await self.metadata.save("dormant")
        return await self.slot.vacate(reason)

    async def close(self) -> Stopped | None:
        """Stop, and let nobody in any more: callers in line get ``PoolClosedError``."""
        self.closed = True
        stopped = await self.stop("the pool is closing")
        self._deadlines.stop()
        return stopped

    # --- what the monitor asks (monitor.Ward) ---

    @property
    def worker(self) -> ProcessIdentity | None:
        """The worker, if it is ready."""
        return self.metadata.worker

    @property
    def worker_age_s(self) -> float:
        """For how long the worker runs, in seconds."""
        return 0.0 if self.slot.connection is None else monotonic() - self.slot.connection.started_at

    @property
    def works_on(self) -> bool:
        """Whether the agent has told of work in the background, and it may still go on."""
        return self._background.works_on

    def ask(self) -> None:
        """Ask the worker for a sign of life, unless it owes one already."""
        if self.slot.connection is not None:
            self.slot.connection.ask()

    def evidence(
        self, samples: tuple[Sample, ...], at_rest: frozenset[ProcessIdentity], trusted_from: float
    ) -> Evidence:
        """Return all that is known of the worker in its turn."""
        turn, now = self._turn, self._loop.time()
        excuse = None
        if turn is not None and turn.lags:
            excuse = "waits until its events are read"
        elif turn is not None and turn.questions_open:
            excuse = "waits for an answer"
        return Evidence(
            now=now,
            heard_at=now if turn is None else turn.heard_at,
            begun=turn is None or turn.last_event is not None,
            asked_at=None if self.slot.connection is None else self.slot.connection.asked_at,
            samples=samples,
            at_rest=at_rest,
            tools_open=() if turn is None else tuple(turn.tools_open.values()),
            excuse=excuse,
            trusted_from=trusted_from,
        )

    def diagnosed(self, diagnosis: Diagnosis | None) -> None:
        """Take note of what the worker is up to."""
        self.slot.diagnosis = diagnosis

    async def replace_stuck(self, diagnosis: Diagnosis) -> None:
        """End a worker that hangs; its turn goes on as after any other death."""
        await self.slot.end_stuck(diagnosis)

    async def kill_for(self, reason: str) -> None:
        """End the worker at once, for a ``reason`` that follows "the worker"."""
        await self.slot.end_for(reason)

    def recycle(self, reason: str) -> None:
        """Let the worker go: now if it is idle, else after its turn and its work in the background."""
        if self.state is State.BUSY or self.works_on:
            self._recycle = reason
        else:
            self._services.in_background(self.hibernate(0.0, reason=reason))

    # --- what turns ask (turn.TurnHost) ---

    async def begin(self, turn: Turn) -> None:
        """Wait in line, see that a worker is ready, and hand the turn over."""
        self._refuse_if_too_large(turn)  # and not after it has waited
        self.quarantine.check(turn.text)
        if self.slot.state is not State.IDLE and self.slot.is_empty:
            self.slot.refuse_start()
        if self._lock.locked():
            await self._wait_in_line()
        else:
            await self._lock.acquire()
        try:
            if self._services.admission.state is not PoolState.OPEN:
                await self._services.admission.passed(self)
            if self._loop.time() - self._background.resting_since >= LOOKED_AT_AFTER_S:
                await self.slot.end_frozen()
            if self.slot.state is not State.IDLE or self.closed:
                self.quarantine.check(turn.text)  # again: it may have waited for itself, sent twice
                await self._idle_worker(turn)
            if turn.ending is not None:  # cancelled before it began
                turn.settle(self._ended_early(turn))
                self._lock.release()
            else:
                self._hand_over(turn)
        except BaseException as error:
            self._lock.release()
            given_up = TurnCancelledError("its caller gave up before it began", conversation_id=self._id)
            turn.settle(error if isinstance(error, HermesPoolError) else given_up)
            raise

    def cancel(self, turn: Turn, ending: HermesPoolError | Literal["cancelled"] = "cancelled") -> None:
        """End the turn soon: ask its worker, and after ``timeouts.close_grace_s`` replace it.

        No-op for a turn that is over.
        """
        if turn.outcome is not None or turn.ending is not None:
            return
        turn.ending = ending
        if turn is self._turn and self.state is State.BUSY and self.slot.connection is not None:
            self.slot.connection.send(wire.Cancel(turn.turn_id, turn.attempt))
            self._loop.call_later(self._settings.timeouts.close_grace_s, self._force, turn)

    def answer(self, turn: Turn, question_id: str, text: str) -> None:
        """Pass an answer on to the worker."""
        if turn is self._turn and self.slot.connection is not None:
            turn.questions_open.pop(question_id, None)
            turn.heard_at = self._loop.time()
            self.slot.connection.send(wire.Answer(turn.turn_id, turn.attempt, question_id, text))

    def drained(self, turn: Turn) -> None:
        """Read on: the events that had piled up are consumed."""
        if turn is self._turn and self.slot.connection is not None:
            turn.heard_at = self._loop.time()
            self.slot.connection.resume_reading()

    # --- waiting in line ---

    async def _wait_in_line(self) -> None:
        settings = self._settings
        if settings.busy == "reject":
            raise ConversationBusyError("another message is being answered", conversation_id=self._id)
        if self.waiting >= settings.queues.turns_max:
            raise ConversationBusyError(
                f"{self.waiting} messages wait in line already (queues.turns_max)", conversation_id=self._id
            )
        self.waiting += 1
        try:
            async with asyncio.timeout(settings.timeouts.wait_s):
                await self._lock.acquire()
        except TimeoutError:
            raise ConversationBusyError(
                f"the messages before took longer than {settings.timeouts.wait_s:g} s (timeouts.wait_s)",
                conversation_id=self._id,
            ) from None
        finally:
            self.waiting -= 1

    async def _idle_worker(self, turn: Turn) -> None:
        """See that an idle worker is there: wait for one that leaves, start another, or find it ready."""
        self.refuse_if_closed()
        starts = 0
        while turn.ending is None and self.state is not State.IDLE:
            if self.state is State.STOPPING and self.slot.connection is not None:
                await self.slot.connection.dead()
            elif starts < LAUNCHES_MAX:
                starts += 1
                await self.slot.filled(self._given_up, given_up=self._given_up is not None)
            else:
                raise WorkerStartError(
                    "its workers die as soon as they are ready", step="open", conversation_id=self._id
                )
            self.refuse_if_closed()

    # --- what the place tells and asks (place.Tenant) ---

    @property
    def in_turn(self) -> bool:
        """Whether a turn runs, or waits for another worker."""
        return self._turn is not None

    @property
    def turn_running(self) -> Turn | None:
        """The turn that runs, if one does."""
        return self._turn

    def refuse_if_closed(self) -> None:
        """Raise ``PoolClosedError`` where no worker is wanted any more."""
        if self.closed:
            raise PoolClosedError("the pool is closing", conversation_id=self._id)

    def worker_ready(self, opened: wire.Opened) -> None:
        """Take note of a worker that is ready."""
        self._notice = opened.notice
        if self._turn is None:
            self._given_up = None
        self._background.rest()
        self._idle_since = self._background.resting_since

    def worker_gone(self, report: DeathReport, *, wanted: bool) -> None:
        """Take note of the end of a worker; the turn that it had gets a reply or a clean error all the same."""
        self._recycle = None
        lost = self._background.lost()
        if lost and not wanted:
            self._log.warning("background_lost", work=lost)
        turn = self._turn
        if turn is None:
            self.metadata.save_soon()
            return
        if self._recovering:  # it had taken over and not begun: the recovery that goes on finds that it is gone
            turn.deaths += 1
            return
        if turn.ending is not None:
            self._settle(turn, self._ended_early(turn))
            return
        if not wanted:
            self.quarantine.note_death(turn.text)
        turn.deaths += 1
        turn.tools_open.clear()
        turn.questions_open.clear()
        if turn.deaths > self._settings.restarts.replacements_per_turn_max:
            self.metadata.status = "failed"
            self._settle(turn, self._crashed(turn, report))
            return
        self._recovering = True
        self._services.in_background(self._recover(turn, report))

    # --- a turn ---

    def _refuse_if_too_large(self, turn: Turn) -> None:
        limit = self._settings.frame_bytes_max
        if len(turn.text) * _UTF8_BYTES_MAX + _TURN_BYTES_MAX <= limit:
            return
        try:
            wire.encode(wire.Turn(turn.turn_id, turn.attempt, turn.text, turn.streams), limit)
        except wire.FrameTooLargeError as error:
            raise MessageTooLargeError(f"the message does not fit: {error}", conversation_id=self._id) from None

    def _hand_over(self, turn: Turn) -> None:
        now = self._loop.time()
        turn.began_at = turn.began_at or now
        turn.heard_at = now
        self._turn = turn
        self.slot.became(Event.TURN_BEGUN)
        assert self.slot.connection is not None  # noqa: S101 - for the type checker: an idle session has one
        self.slot.connection.hand_over(wire.Turn(turn.turn_id, turn.attempt, turn.text, turn.streams))
        self._deadlines.watch(turn)

    def heard(self, message: Any) -> None:
        """Take a frame of a turn; one that is not of this attempt of this turn has no addressee any more."""
        turn = self._turn
        if (
            turn is None
            or message.turn_id != turn.turn_id
            or message.attempt != turn.attempt
            or self.slot.connection is None  # the turn waits for another worker, and has none that could speak for it
        ):
            self.slot.note_unasked()
            return
        turn.heard_at = self._loop.time()
        match message:
            case wire.TurnDone():
                self.metadata.session_id, self.metadata.committed = message.session_id, message.committed
                self._settle(turn, self._done(turn, message))
                return
            case wire.TextDelta():  # so early, for there may be thousands
                turn.last_event = "TextDelta"
                turn.push(message)
                if turn.lags and self.slot.connection is not None:
                    self.slot.connection.pause_reading()
                return
            case wire.TurnFailed():
                self.metadata.session_id = message.session_id or self.metadata.session_id
                self.metadata.committed = message.committed or self.metadata.committed
                error = AgentFailedError(message.text, reason=message.reason, conversation_id=self._id)
                self._settle(turn, error if turn.ending is None else self._ended_early(turn))
                return
            case wire.ToolStarted():
                turn.note_tool(message.call_id, message.name)
            case wire.ToolFinished():
                turn.tools_open.pop(message.call_id, None)
            case wire.Question():
                turn.note_question(message.question_id, turn.heard_at + message.timeout_s)
            case wire.SessionMoved():
                self.metadata.session_id = message.session_id
                self.metadata.save_soon()
        turn.last_event = type(message).__name__
        turn.push(message)
        if turn.lags and self.slot.connection is not None:
            self.slot.connection.pause_reading()

    def heard_background(self, message: wire.BackgroundStarted | wire.BackgroundFinished) -> None:
        """Take note of work that outlasts its turn, and of its end. Neither is part of any turn."""
        background = self._background
        if self.slot.connection is None:
            self.slot.note_unasked()
        elif isinstance(message, wire.BackgroundStarted):
            if background.started(message.job_id, message.name):
                self._log.info("background_started", job_id=message.job_id, job=message.name)
            else:
                self.slot.note_unasked()
        elif (name := background.finished(message.job_id)) is None:
            self.slot.note_unasked()
        else:
            self._log.info("background_finished", job_id=message.job_id, job=name)
            self._tell_owner(message)
            if background.in_time:
                self._idle_since = self._loop.time()
            if not background.names:
                self._nothing_left_to_do()

    def _tell_owner(self, message: wire.BackgroundFinished) -> None:
        if self._services.on_background is not None:
            try:
                self._services.on_background(self.key, message)
            except Exception as error:  # noqa: BLE001 - a fault of the host's is none of the worker's
                self._log.error("on_background_failed", error=repr(error), exc_info=error)

    def _nothing_left_to_do(self) -> None:
        """Let the worker go if that had to wait for its work, or let whoever needs room have it."""
        if self.state is not State.IDLE:
            return
        self._services.admission.changed(self)
        if self._recycle is not None:
            self._services.in_background(self.hibernate(0.0, reason=self._recycle))

    def _done(self, turn: Turn, message: wire.TurnDone) -> Reply | HermesPoolError:
        if message.outcome == "interrupted" and isinstance(turn.ending, HermesPoolError):
            return turn.ending
        notice = message.notice
        if self._notice is not None:
            notice = self._notice if notice is None else f"{self._notice} {notice}"
            self._notice = None
        self._completed(turn)
        return self._reply(turn, message.text, message.outcome, message.usage, notice)

    def _completed(self, turn: Turn) -> None:
        self.slot.restart_budget.note_completed()
        self.quarantine.note_completed(turn.text)
        self.metadata.turns += 1
        self.metadata.last_error = None

    def _reply(
        self,
        turn: Turn,
        text: str,
        outcome: Literal["completed", "interrupted", "partial"] = "completed",
        usage: dict[str, int] | None = None,
        notice: str | None = None,
    ) -> Reply:
        return Reply(
            text=text,
            conversation_id=self.key.conversation_id,
            session_id=self.metadata.session_id,
            turn_id=turn.turn_id,
            outcome=outcome,
            restarts=turn.deaths,
            usage=usage or {},
            notice=notice,
            duration_s=self._loop.time() - turn.began_at if turn.began_at else 0.0,
        )

    def _ended_early(self, turn: Turn) -> Reply | HermesPoolError:
        if isinstance(turn.ending, HermesPoolError):
            return turn.ending
        return self._reply(turn, "", outcome="interrupted")

    def _settle(self, turn: Turn, outcome: Reply | HermesPoolError) -> None:
        """End the running turn: the conversation is free from here on."""
        self._turn = None
        self._deadlines.rest()
        self._background.rest()
        self._idle_since = self._background.resting_since
        if self.slot.connection is None and (type(outcome) is not Reply or outcome.outcome != "completed"):
            self._given_up = wire.Turn(turn.turn_id, turn.attempt, turn.text)
        if type(outcome) is not Reply:
            self.metadata.last_error = str(outcome)
            self._log.info("turn_failed", turn_id=turn.turn_id, error=type(outcome).__name__)
        if self.slot.state is State.BUSY or self.slot.state is State.STOPPING:
            self.slot.became(Event.TURN_ENDED)
        if turn.lags and self.slot.connection is not None:
            self.slot.connection.resume_reading()
        turn.settle(outcome)
        self.metadata.used()
        if self._recycle is None or self.works_on:
            self._lock.release()
        else:
            self._services.in_background(self._let_go(self._recycle))

    async def _let_go(self, reason: str) -> None:
        """Let the worker go between two turns, and only then the next message in."""
        try:
            if self._background.in_time and await self._work_left():
                return  # after the next turn, then
            self._recycle = None
            if self.state is State.IDLE and await self.metadata.save("dormant"):
                await self.slot.vacate(reason)
        finally:
            self._lock.release()

    # --- over a limit ---

    def _over_limit(self, turn: Turn, limit: str, seconds: float) -> None:
        self._log.warning("turn_timed_out", turn_id=turn.turn_id, limit=limit)
        what = "no reply" if limit == "timeouts.turn_s" else "no sign of progress"
        diagnosis = self.slot.diagnosis
        verdict = None if diagnosis is None else f"{diagnosis.verdict}: {diagnosis.reason}"
        said = f"{what} for {seconds:g} s ({limit})" + (f"; its worker was {verdict}" if verdict else "")
        self.cancel(turn, TurnTimeoutError(said, limit=limit, conversation_id=self._id, verdict=verdict))

    def _force(self, turn: Turn) -> None:
        """Replace a worker that has not obeyed a cancel."""
        if turn is self._turn and self.state is State.BUSY:
            self._services.in_background(self._replace_deaf(turn))

    async def _replace_deaf(self, turn: Turn) -> None:
        stacks = await self.slot.end_deaf()
        if isinstance(turn.ending, TurnTimeoutError):
            turn.ending.stacks = stacks

    # --- after a death ---

    async def _recover(self, turn: Turn, report: DeathReport) -> None:
        """Give the turn in which a worker died its reply, or a clean error."""
        try:
            outcome = await self._replace_worker(turn, report)
        except BaseException:  # a bug of ours, or the loop is ending: nobody shall wait for this turn for ever
            self._settle(turn, self._crashed(turn, report))
            raise
        finally:
            self._recovering = False
        if outcome is not None:
            self._settle(turn, outcome)

    async def _replace_worker(self, turn: Turn, report: DeathReport) -> Reply | HermesPoolError | None:
        """Start another worker in place of the dead one; return how the turn ends, or ``None``: it runs again."""
        if turn.ending is not None:
            return self._ended_early(turn)
        try:
            opened = await self.slot.filled(wire.Turn(turn.turn_id, turn.attempt, turn.text))
        except HermesPoolError as error:
            if turn.ending is not None:
                return self._ended_early(turn)
            if not turn.tools_started and not isinstance(error, RestartBackoffError):
                return error
            # What has, or may have, happened matters more than that nobody could take over.
            interrupted = self._crashed(turn, report, str(error.message))
            interrupted.__cause__ = error
            return interrupted
        if opened.recovered is not None:
            self._completed(turn)
            return self._reply(turn, opened.recovered)
        if turn.ending is not None:
            return self._ended_early(turn)
        if self.state is not State.IDLE:  # the new one is gone already
            return self._crashed(turn, self.slot.unreplaced or report)
        if not self._may_replay(turn):
            return self._crashed(turn, report)
        turn.attempt += 1
        self._hand_over(turn)
        turn.push(wire.Status(turn.turn_id, turn.attempt, f"the worker {report.exit}; another one begins anew"))
        return None

    def _may_replay(self, turn: Turn) -> bool:
        policy = self._settings.replay
        return policy == "always" or (policy == "until_tool" and not turn.tools_started)

    def _crashed(
        self, turn: Turn, report: DeathReport, what_next: str = "The next message gets a new one"
    ) -> WorkerCrashedError:
        return crashed(turn, report, replays_always=self._settings.replay == "always", what_next=what_next)

    @property
    def _id(self) -> str:
        return self.key.conversation_id
