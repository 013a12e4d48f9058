"""One conversation: its queue, its turns, and what happens to them when the worker dies.

A turn holds the conversation's lock from when it begins until it settles. Settling releases the lock, never the caller:
a caller that leaves early cannot let the next message in too soon.
"""

import asyncio
import inspect
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Literal, assert_never

import msgspec

from hermes_pool.account import ToolUse, TurnAccount
from hermes_pool.conversation import outcomes
from hermes_pool.conversation.active_turn import ActiveTurn, Ending, Face, QuestionPolicy
from hermes_pool.conversation.background_jobs import summary_of
from hermes_pool.conversation.crashes import died_with
from hermes_pool.conversation.deadlines import Limit, TurnDeadlines
from hermes_pool.conversation.event_log import EventLog
from hermes_pool.conversation.events import OpenQuestion, QuestionAnswered, TurnSnapshot, TurnSteered
from hermes_pool.conversation.line import Line
from hermes_pool.conversation.metadata import LeftTurn, SessionMetadata
from hermes_pool.conversation.past import TurnTeller
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
    StoreError,
    TurnCancelledError,
    TurnError,
    TurnIdConflictError,
    TurnInterruptedError,
    TurnTimeoutError,
    WorkerStartError,
)
from hermes_pool.lifecycle import TURN, TurnChange, TurnState, WorkerState
from hermes_pool.policy import failures, recovery
from hermes_pool.policy.quarantine import Quarantine
from hermes_pool.policy.recovery import Decision, Replacement, TurnFacts
from hermes_pool.process.death import Stopped
from hermes_pool.process.factory import LAUNCHES_MAX
from hermes_pool.scheduling.pool_state import PoolState
from hermes_pool.settings import OnCancel, SessionKey
from hermes_pool.snapshot import SessionSnapshot
from hermes_pool_worker import wire

CHECK_FROZEN_AFTER_S = 0.5
"""A worker that was idle for this long is checked before it gets a turn: a signal may have stopped it."""
WATCHER_GRACE_S = 10.0
"""For how long a question waits for a watcher if none is there, in seconds: a page that is loaded again comes back."""
TURN_ID_CHARS_MAX = 128
"""Longest id that a host may give to a turn."""
TURNS_TOLD = 1000
"""How many turns are told to the host at once, at most."""
TURNS_REMEMBERED = 64
"""How many turns that have ended are remembered by the ids that the host gave them, for each conversation."""
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
            on_texts=self._heard_texts,
            on_ready=self._worker_ready,
            on_death=self._worker_died,
        )
        self.quarantine = Quarantine(services.settings.restarts, self._loop.time, conversation_id=self._id)
        self.log = EventLog(self._snapshot)
        """What those who watch the conversation see."""
        self.log.watched = self._watchers_changed
        self.fence: int | None = None
        """The fence of the lease by which this process owns the conversation, where several share the store."""
        self._line = Line()
        self._begun: ActiveTurn | None = None
        """The turn that has the conversation, until it settles."""
        self._safe_tools = frozenset(services.settings.safe_tools)
        self._ended: OrderedDict[str, ActiveTurn] = OrderedDict()
        """The latest turns that have ended, by the ids that the host gave them."""
        on_turn = services.on_turn
        self._teller = None if on_turn is None else TurnTeller(key, on_turn, self._log)
        self._left: dict[str, Reply | HermesPoolError] = {}
        """What became of turns with ids of the host's in which an earlier host ended."""
        self._recording: set[asyncio.Task[None]] = set()
        """The outcomes that are being recorded."""
        self._named: dict[str, ActiveTurn] = {}
        """The turns that have not ended, by their ids, where the host gave those."""
        self._unwatched_since = self._loop.time()
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
    def waiting(self) -> int:
        """How many messages wait for the conversation."""
        return len(self._line)

    @property
    def is_inactive(self) -> bool:
        """Whether nothing at all is going on: no process, no caller, no watcher."""
        return self.slot.is_empty and not self._line.is_held and not self.log.watchers

    @property
    def is_ready(self) -> bool:
        """Whether the worker is ready for a turn; it may have background work."""
        return self.state is WorkerState.IDLE and not self._line.is_held

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
        if not self._line.take():
            return False
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
            if not await self._history_is_written() and not room_is_needed:
                return False  # this worker has the only copy; the next sweep tries again
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

        A running turn ends with a ``TurnCancelledError``; if ``retryable``, so is the error, unless a tool may have
        acted or the turn was kept. Return how the worker was stopped, or ``None`` if there was none.
        """
        await self.slot.stop_filling()
        turn = self.slot.turn
        if turn is not None:
            self.cancel(turn, TurnCancelledError(f"stopped ({reason})", conversation_id=self._id, retryable=retryable))
        elif self._line.take():
            try:
                await self._history_is_written()
            finally:
                self._release()
        await self.metadata.save("dormant" if self.slot.connection is not None else None)
        return await self.slot.stop(reason)

    async def close(self) -> Stopped | None:
        """Stop for good. The pool is closed, so no message gets in any more."""
        stopped = await self.stop("the pool is closing", retryable=True)
        self._deadlines.stop()
        self.log.close()
        if self._recording:  # and telling
            await asyncio.wait(self._recording, timeout=self._settings.timeouts.database_s)
        return stopped

    # --- what callers ask ---

    def new_turn(
        self,
        text: str,
        face: Face = "turn",
        *,
        turn_id: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        on_cancel: OnCancel | None = None,
        on_question: QuestionPolicy | None = None,
    ) -> ActiveTurn:
        """Return a turn that has not begun; with the ``turn_id`` of an earlier one, that one.

        Raises ``InvalidMessageError`` for a text or an id that cannot be one, and ``TurnIdConflictError`` for an id
        that had another text.
        """
        if not isinstance(text, str):
            raise InvalidMessageError(f"a message must be a str, not {type(text).__name__}", conversation_id=self._id)
        if turn_id is not None:
            known = self._known(turn_id)
            if known is not None:
                if known.text != text:
                    raise self._conflict(turn_id)
                return known
        return ActiveTurn(
            next(self._services.turn_ids) if turn_id is None else turn_id,
            text,
            log=self.log,
            drained=self._drained,
            left=self._caller_left,
            on_settled=self._forget,
            face=face,
            is_clients=turn_id is not None,
            metadata=metadata,
            on_cancel=self._settings.on_cancel if on_cancel is None else on_cancel,
            on_question=on_question or self._services.on_question,
            safe_tools=self._safe_tools,
        )

    def _known(self, turn_id: object) -> ActiveTurn | None:
        if (
            not isinstance(turn_id, str)
            or not 0 < len(turn_id) <= TURN_ID_CHARS_MAX
            or outcomes.storable(turn_id) != turn_id
        ):
            raise InvalidMessageError(
                f"a turn id is a str of 1 to {TURN_ID_CHARS_MAX} characters that a database can store, "
                f"not {turn_id!r:.80}",
                conversation_id=self._id,
            )
        return self._named.get(turn_id) or self._ended.get(turn_id)

    def _forget(self, turn: ActiveTurn) -> None:
        """Note that a turn with an id of the host's has settled. One that may run again is not remembered."""
        if self._named.pop(turn.turn_id, None) is None or turn.outcome is None:
            return
        outcome = outcomes.recorded(turn.outcome)
        if outcome is not None:
            self._ended[turn.turn_id] = turn
            if len(self._ended) > TURNS_REMEMBERED:
                self._ended.popitem(last=False)
        if turn.began_at:
            self._record_soon(turn.turn_id, outcome)

    def _record_soon(self, turn_id: str, outcome: str | None) -> None:
        """Record the outcome of such a turn, in the background."""

        async def record() -> None:
            try:
                await self._services.store.end_turn(self.key, turn_id, outcome)
            except StoreError as error:
                self._log.warning("turn_not_recorded", turn_id=turn_id, error=str(error))

        task = self._services.in_background(record())
        self._recording.add(task)
        task.add_done_callback(self._recording.discard)

    async def _recorded(self, turn: ActiveTurn) -> Reply | HermesPoolError | None:
        """Return how a turn with this id of the host's ended before; record that it begins if it is new.

        A database that fails never fails the turn: it runs, and is not remembered beyond this process.
        """
        if self._recording:
            await asyncio.wait(self._recording)
        if (known := self._left.pop(turn.turn_id, None)) is not None:
            outcome = outcomes.recorded(known)
            self._record_soon(turn.turn_id, outcome)
            return known
        try:
            before = await self._services.store.begin_turn(
                self.key, turn.turn_id, outcomes.digest_of(turn.text), outcomes.storable(turn.text)
            )
        except StoreError as error:
            self._log.warning("turn_not_recorded", turn_id=turn.turn_id, error=str(error))
            return None
        if before is None or (before.outcome is None and before.digest == outcomes.digest_of(turn.text)):
            return None  # new, or it left nothing: the worker that opened the session has seen to that
        if before.digest != outcomes.digest_of(turn.text):
            raise self._conflict(turn.turn_id)
        return outcomes.restored(before.outcome or "")

    def _conflict(self, turn_id: str) -> TurnIdConflictError:
        return TurnIdConflictError(
            f"the turn id {turn_id!r} belongs to another message: give each message an id of its own",
            turn_id=turn_id,
            conversation_id=self._id,
        )

    def start(self, turn: ActiveTurn) -> None:
        """Accept a turn: it runs at once if it can, and otherwise when its time comes.

        What refuses it at once is raised, and settles it too; what goes wrong later only settles it.
        """
        if turn.is_clients:
            self._named[turn.turn_id] = turn
        try:
            self._check_size(turn)  # before it waits
            if self.quarantine.killers:
                self.quarantine.check(turn.text)
            if self.slot.state is not _IDLE and self.slot.is_empty:
                self.slot.check_start()
            if not self._line.take():
                self._check_line()
                turned = self._line.join(turn)
                turn.beginning = self._services.in_background(self._begin_later(turn, turned))
                turn.beginning.add_done_callback(lambda _: self._begin_given_up(turn))
                return
        except BaseException as error:
            self._refuse(turn, error)
            raise
        self._take_up(turn)
        if (
            self.slot.state is _IDLE
            and not turn.is_clients
            and not self.quarantine.killers
            and self._services.admission.state is _OPEN
            and self._loop.time() - self.slot.jobs.ready_since < CHECK_FROZEN_AFTER_S
        ):  # there is nothing to wait for
            try:
                self._hand_over(turn)
            except BaseException as error:
                self._refuse(turn, error)
                self._release()
                raise
        else:
            turn.beginning = self._services.in_background(self._begin(turn))
            turn.beginning.add_done_callback(lambda _: self._begin_given_up(turn))

    def _begin_given_up(self, turn: ActiveTurn) -> None:
        """Settle a turn whose task was cancelled before its first step, and so could not do it itself."""
        if turn.outcome is not None or turn.began_at:
            return
        self._refuse(turn, asyncio.CancelledError())
        if self._begun is turn:
            self._release()
        else:
            self._line.leave(turn)

    async def _begin_later(self, turn: ActiveTurn, turned: "asyncio.Future[None]") -> None:
        """Wait for earlier turns, and begin."""
        try:
            await self._wait_in_line(turn, turned)
        except BaseException as error:  # noqa: BLE001 - it is the outcome of the turn
            if turn.outcome is None:
                self._refuse(turn, error)
            return
        self._take_up(turn)
        await self._begin(turn)

    async def _begin(self, turn: ActiveTurn) -> None:
        """Wait for a worker, and hand the turn over. The conversation is taken."""
        try:
            if self.quarantine.killers:
                self.quarantine.check(turn.text)  # again: sent twice, it may have waited for itself
            if self._services.admission.state is not _OPEN:
                await self._services.admission.wait_while_paused(self)
            if self._loop.time() - self.slot.jobs.ready_since >= CHECK_FROZEN_AFTER_S:
                await self._replace_frozen()
            if self.slot.state is not _IDLE or self._services.admission.state is _CLOSED:
                await self._have_idle_worker(turn)
            if self.fence is not None and not self.metadata.identity_is_stored:
                # Another process may have to go on from here at any moment.
                await self.metadata.save()
            outcome = await self._recorded(turn) if turn.is_clients else None
            if self.slot.state is not _IDLE and turn.ending is None:  # it died during that
                await self._have_idle_worker(turn)
            if turn.ending is None and outcome is None:
                self._hand_over(turn)
                return
            outcome = outcome or self._ended_early(turn)
        except BaseException as error:  # noqa: BLE001 - it is the outcome of the turn
            self._refuse(turn, error)
            self._release()
            return
        turn.settle(outcome)  # cancelled before it began
        self.slot.start_not_wanted()  # one that an earlier message has left behind
        self._release()

    def _take_up(self, turn: ActiveTurn) -> None:
        turn.state = TURN[turn.state][_BEGUN]
        self._begun = turn
        turn.started()

    def cancel(self, turn: ActiveTurn, ending: Ending = "cancelled") -> None:
        """End the turn: ask its worker, and kill that after ``timeouts.close_grace_s``. Only the first call counts.

        One that has no worker yet ends at once.
        """
        if turn.state is TurnState.SETTLED or turn.ending is not None:
            return
        turn.ending = ending
        turn.state = TURN[turn.state][TurnChange.END_WANTED]
        connection = self.slot.connection
        if turn.state is TurnState.CANCELLING and self.state is WorkerState.BUSY and connection is not None:
            connection.send(wire.Cancel(turn.turn_id, turn.attempt, turn.on_cancel == "keep", _why(ending)))
            self._loop.call_later(self._settings.timeouts.close_grace_s, self._cancel_was_ignored, turn)
        elif turn.state is TurnState.QUEUED:
            if turn.beginning is not None:
                self._line.leave(turn)
                turn.settle(self._ended_early(turn))
        elif turn.beginning is not None and not turn.began_at:
            turn.beginning.cancel()

    def steer(self, turn: ActiveTurn, text: str) -> bool:
        """Pass a remark of the user to the worker that runs the turn; return whether one does."""
        if not isinstance(text, str):
            raise InvalidMessageError(f"a remark must be a str, not {type(text).__name__}", conversation_id=self._id)
        connection = self.slot.connection
        if turn is not self.slot.turn or turn.state is not TurnState.RUNNING or connection is None:
            return False
        connection.send(wire.Steer(turn.turn_id, turn.attempt, text))
        self.log.append(TurnSteered(turn_id=turn.turn_id, text=text), len(text))
        return True

    @property
    def turn(self) -> ActiveTurn | None:
        """The turn that has the conversation."""
        return self._begun

    @property
    def turns_waiting(self) -> list[ActiveTurn]:
        """The turns that wait for the conversation, the first one first."""
        return self._line.turns

    def find(self, turn_id: str) -> ActiveTurn | None:
        """Return the turn of this id, if it runs or waits."""
        every = [*([] if self._begun is None else [self._begun]), *self._line.turns]
        return next((turn for turn in every if turn.turn_id == turn_id), None)

    def _snapshot(self) -> TurnSnapshot | None:
        return None if self._begun is None else self._begun.snapshot(self._loop.time())

    # --- questions ---

    def questions(self) -> list[OpenQuestion]:
        """Return the questions that wait for an answer."""
        turn, now = self.slot.turn, self._loop.time()
        if turn is None:
            return []
        return [
            OpenQuestion(
                conversation_id=self._id,
                user_id=self.key.user_id,
                question=asked.question,
                left_s=asked.until - now,
            )
            for asked in turn.questions.values()
            if asked.until > now
        ]

    def answer(self, turn: ActiveTurn, question_id: str, text: str | None) -> bool:
        """Pass an answer to the worker (``None``: nobody can answer); return whether the question was open."""
        connection = self.slot.connection
        if turn is not self.slot.turn or connection is None or not turn.answered(question_id, self._loop.time()):
            return False
        turn.heard_at = self._loop.time()
        connection.send(wire.Answer(turn.turn_id, turn.attempt, question_id, text or "", nobody=text is None))
        self.log.append(QuestionAnswered(turn_id=turn.turn_id, question_id=question_id, text=text), len(text or ""))
        return True

    def _asked(self, turn: ActiveTurn, question: wire.Question) -> None:
        """Let the host's policy answer a question, and see to it that somebody can, if it does not."""
        if turn.on_question is not None:
            self._services.in_background(self._ask_policy(turn, question))
        elif not self._is_watched(turn):
            self._nobody_watches(turn)

    async def _ask_policy(self, turn: ActiveTurn, question: wire.Question) -> None:
        assert turn.on_question is not None  # noqa: S101 - for the type checker
        answer = None
        try:
            answer = turn.on_question(self.key, question)
            if inspect.isawaitable(answer):
                answer = await answer
            if answer is not None and not isinstance(answer, str):
                raise TypeError(f"on_question must return a str or None, not {type(answer).__name__}")
        except Exception as error:  # noqa: BLE001 - an error of the host must not leave the agent waiting
            self._log.error("on_question_failed", turn_id=turn.turn_id, error=repr(error), exc_info=error)
            answer = None
        if answer is not None:
            self.answer(turn, question.question_id, answer)
        elif not self._is_watched(turn):
            self._nobody_watches(turn)

    def _is_watched(self, turn: ActiveTurn) -> bool:
        return turn.is_heard or self.log.watchers > 0

    def _nobody_watches(self, turn: ActiveTurn) -> None:
        """Answer the open questions of a turn that nobody watches: at once, unless a watcher may come back."""
        if turn.face == "start":
            self._loop.call_later(WATCHER_GRACE_S, self._answer_for_nobody, turn)
        else:
            self._answer_for_nobody(turn)

    def _answer_for_nobody(self, turn: ActiveTurn) -> None:
        alone_s = self._loop.time() - self._unwatched_since
        if self._is_watched(turn) or (turn.face == "start" and alone_s < WATCHER_GRACE_S):
            return
        for question_id in list(turn.questions):
            self._log.info("question_denied", turn_id=turn.turn_id, question_id=question_id, why="nobody watches")
            self.answer(turn, question_id, None)

    def _caller_left(self, turn: ActiveTurn) -> None:
        """Take note that the caller of ``turn`` reads no more events."""
        if not self._is_watched(turn):
            self._nobody_watches(turn)

    def _watchers_changed(self) -> None:
        """Take note that the first watcher came, or the last one went."""
        self._unwatched_since = self._loop.time()
        turn = self.slot.turn
        if self.log.watchers or turn is None:
            return
        if turn.questions and not turn.is_heard:
            self._nobody_watches(turn)
        self._cancel_unwatched_later(turn)

    def _cancel_unwatched_later(self, turn: ActiveTurn) -> None:
        unwatched_s = self._settings.timeouts.unwatched_s
        if unwatched_s is not None and turn.face == "start" and not self.log.watchers:
            self._loop.call_later(unwatched_s, self._cancel_unwatched, turn, unwatched_s)

    def _cancel_unwatched(self, turn: ActiveTurn, unwatched_s: float) -> None:
        alone_s = self._loop.time() - max(self._unwatched_since, turn.began_at)
        if turn is self.slot.turn and not self.log.watchers and alone_s >= unwatched_s:
            self._log.info("turn_unwatched", turn_id=turn.turn_id, unwatched_s=unwatched_s)
            self.cancel(turn)

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

    def _check_line(self) -> None:
        settings = self._settings
        if settings.busy == "reject" and (self._begun is not None or self.waiting):  # not if its worker only leaves
            raise ConversationBusyError(
                'another message is being answered, and messages do not wait (busy="reject")', conversation_id=self._id
            )
        if self.waiting >= settings.queues.turns_max:
            raise ConversationBusyError(
                f"{self.waiting} messages are already waiting (queues.turns_max)", conversation_id=self._id
            )

    async def _wait_in_line(self, turn: ActiveTurn, turned: "asyncio.Future[None]") -> None:
        wait_s = self._settings.timeouts.wait_s
        try:
            async with asyncio.timeout(wait_s):
                await asyncio.shield(turned)
            self._line.arrived(turn)
        except TimeoutError:
            self._line.leave(turn)
            raise ConversationBusyError(
                f"earlier messages took longer than {wait_s:g} s (timeouts.wait_s)", conversation_id=self._id
            ) from None
        except BaseException:
            self._line.leave(turn)
            raise
        finally:
            if (counts_changed := self._services.admission.counts_changed) is not None:
                counts_changed.set()

    async def _replace_frozen(self) -> None:
        """Kill an idle worker that was stopped by a signal (SIGSTOP): it would never begin the turn."""
        connection = self.slot.connection
        if self.state is WorkerState.IDLE and connection is not None and connection.is_frozen():
            self._log.warning("idle_worker_frozen")
            await self.slot.kill("was stopped by a signal", wanted=True)

    async def _have_idle_worker(self, turn: ActiveTurn | None) -> None:
        """Make sure that the worker is idle: wait for the end of one that is being stopped, and start another."""
        starts = 0
        while turn is None or turn.ending is None:
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
        if turn.ending is not None:
            turn.settle(self._ended_early(turn))
        elif isinstance(error, HermesPoolError):
            turn.settle(error)
        else:
            if isinstance(error, Exception):
                self._log.error("turn_not_begun", turn_id=turn.turn_id, error=repr(error), exc_info=error)
            turn.settle(
                TurnCancelledError(
                    "the caller gave up before the turn began", sent=False, retryable=True, conversation_id=self._id
                )
            )

    # --- a turn ---

    def _hand_over(self, turn: ActiveTurn) -> None:
        turn.state = TURN[turn.state][_HANDED_OVER]
        self.slot.hand_over(turn)
        turn.handed_over(self._loop.time())
        self._deadlines.watch(turn)
        if turn.face == "start":
            self._cancel_unwatched_later(turn)

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
        if isinstance(frame, wire.TextDelta):
            turn.last_event = "TextDelta"
            turn.push_texts((frame,))
        elif isinstance(frame, wire.TurnDone):
            self._settle(turn, self._done(turn, frame))
            return True
        elif isinstance(frame, wire.TurnFailed):
            self._settle(turn, self._failed(turn, frame))
            return True
        else:
            self._happened(turn, frame)
        if turn.lags and self.slot.connection is not None:
            self.slot.connection.pause_reading()
        return True

    def _heard_texts(self, frames: Sequence[wire.FromWorker]) -> int:
        """Take the pieces of text of the running turn with which a batch of frames begins; return how many."""
        turn = self.slot.turn
        if turn is None or turn.state is _RECOVERING:
            return 0
        turn_id, attempt = turn.turn_id, turn.attempt
        pieces: list[wire.TextDelta] = []
        for frame in frames:
            if type(frame) is not wire.TextDelta or frame.turn_id != turn_id or frame.attempt != attempt:
                break
            pieces.append(frame)
        if pieces:
            turn.heard_at = self._loop.time()
            turn.last_event = "TextDelta"
            turn.push_texts(pieces)
            if turn.lags and self.slot.connection is not None:
                self.slot.connection.pause_reading()
        return len(pieces)

    def _happened(self, turn: ActiveTurn, event: wire.TurnEvent) -> None:
        """Record an event of the running turn, and tell it."""
        match event:
            case wire.ToolStarted():
                turn.tool_started(event)
            case wire.ToolFinished():
                turn.tool_finished(event)
            case wire.Question():
                turn.asked(event, turn.heard_at + event.timeout_s)
            case wire.SessionMoved():
                self.metadata.moved(event.session_id)
            case wire.TextDelta() | wire.ReasoningDelta() | wire.Status():
                pass
            case _:
                assert_never(event)
        turn.last_event = type(event).__name__
        turn.push(event)
        if type(event) is wire.Question:
            self._asked(turn, event)

    def _failed(self, turn: ActiveTurn, failed: wire.TurnFailed) -> Reply | HermesPoolError:
        self.metadata.turn_failed(failed)
        turn.end, turn.kept = failed, failed.kept
        if turn.ending is not None:
            return self._ended_early(turn)
        return AgentFailedError(
            failed.text,
            reason=failed.reason,
            retryable=failures.is_retryable(failed.reason) if failed.retryable is None else failed.retryable,
            retry_after_s=failed.retry_after_s,
            conversation_id=self._id,
        )

    def _done(self, turn: ActiveTurn, done: wire.TurnDone) -> Reply | HermesPoolError:
        self.metadata.turn_done(done)
        turn.end, turn.kept = done, done.kept
        if done.outcome == "interrupted" and isinstance(turn.ending, HermesPoolError):
            self._note_written(done)
            return self._ended_early(turn)
        notice = done.notice
        if self._notice is not None:
            notice = self._notice if notice is None else f"{self._notice} {notice}"
            self._notice = None
        self._completed(turn)
        if not done.kept or self.metadata.unwritten is not None:
            self._note_written(done)
        return self._reply(turn, done.outcome, notice, done.pending_steer)

    def _note_written(self, done: wire.TurnDone) -> None:
        """Note whether the history could be written. A cancelled turn may be absent from it, if there is no notice."""
        if not done.kept and (done.outcome != "interrupted" or done.notice is not None):
            self.metadata.history_written(done.notice or "the agent did not say why")
        elif done.kept:
            self.metadata.history_written(None)

    def _completed(self, turn: ActiveTurn) -> None:
        self.slot.restart_budget.note_completed()
        if self.quarantine.killers:
            self.quarantine.note_completed(turn.text)
        self.metadata.turns += 1
        self.metadata.last_error = None

    def _reply(
        self,
        turn: ActiveTurn,
        outcome: Literal["completed", "interrupted", "partial"] = "completed",
        notice: str | None = None,
        pending_steer: str | None = None,
        text: str | None = None,
    ) -> Reply:
        account = turn.account()
        return Reply(
            text=account.text if text is None else text,
            conversation_id=self._id,
            session_id=self.metadata.session_id,
            turn_id=turn.turn_id,
            outcome=outcome,
            restarts=turn.deaths,
            usage=account.usage,
            notice=notice,
            duration_s=self._loop.time() - turn.began_at if turn.began_at else 0.0,
            tools=account.tools,
            attempts=account.attempts,
            kept=account.kept,
            model=account.model,
            pending_steer=pending_steer,
        )

    def _ended_early(self, turn: ActiveTurn) -> Reply | HermesPoolError:
        if isinstance(turn.ending, HermesPoolError):
            return turn.ending
        return self._reply(turn, outcome="interrupted")

    def _stays(self, turn: ActiveTurn) -> bool:
        """Whether a turn that ended without its worker is to stay in the history: what was seen, or may have acted."""
        if turn.ending is not None:
            return turn.on_cancel == "keep" and turn.was_seen
        return turn.may_have_acted and self._settings.replay != "always"

    def _settle(self, turn: ActiveTurn, outcome: Reply | HermesPoolError) -> None:
        """Settle the running turn. That frees the conversation, unless its worker has to go first."""
        slot, metadata = self.slot, self.metadata
        error = None if isinstance(outcome, Reply) else outcome
        if slot.connection is None:
            completed = isinstance(outcome, Reply) and outcome.outcome == "completed"
            turn.kept = completed or self._stays(turn)
            why = "the worker died" if turn.ending is None else _why(turn.ending)
            left = wire.Turn(turn.turn_id, turn.attempt, turn.text)
            metadata.turn_left(None if completed else LeftTurn(left, True, turn.kept, turn.said, why))
            if isinstance(outcome, Reply) and not completed:
                outcome = self._reply(turn, outcome.outcome, outcome.notice)
        if isinstance(error, TurnError):
            error.account_for(turn.turn_id, turn.account())
        self._begun = self._deadlines.turn = None
        turn.settle(outcome)
        slot.turn_settled()
        metadata.turn_settled(error)
        if error is not None:
            self._log.info("turn_failed", turn_id=turn.turn_id, error=type(error).__name__)
        if self._teller is not None and slot.connection is not None:
            telling = self._services.in_background(self._tell_turns(self._teller, turn, slot.retiring))
            self._recording.add(telling)
            telling.add_done_callback(self._recording.discard)
        elif slot.retiring is None or slot.jobs.keep_worker:
            self._release()
        else:
            self._services.in_background(self._retire(slot.retiring))

    async def _tell_turns(self, teller: TurnTeller, turn: ActiveTurn, retiring: str | None) -> None:
        """Tell the host what has come to the history, and let the next message in meanwhile."""
        turns: list[wire.PastTurn] = []
        try:
            if self.state is WorkerState.IDLE:
                turns = await self.slot.read_turns(teller.told, TURNS_TOLD)
        except StoreError as error:
            self._log.warning("turns_not_told", error=str(error))
        if turns and turn.kept and turns[-1].committed == self.metadata.committed:
            turns[-1] = msgspec.structs.replace(turns[-1], turn_id=turn.turn_id)
        teller.told = turns[-1].committed if turns else self.metadata.committed
        if retiring is None or self.slot.jobs.keep_worker:
            self._release()
        else:
            self._services.in_background(self._retire(retiring))
        await teller.tell(turns)

    async def transcript(self, after: str | None, limit: int) -> list[wire.PastTurn]:
        """Return the turns of the history after a mark; a worker is started if there is none."""
        who = object()
        if not self._line.take():
            turned = self._line.join(who)
            try:
                await asyncio.shield(turned)
            except BaseException:
                self._line.leave(who)
                raise
            self._line.arrived(who)
        try:
            await self._have_idle_worker(None)
            return await self.slot.read_turns(after, limit)
        finally:
            self._release()

    async def _retire(self, reason: str) -> None:
        """Stop the worker between two turns, and let the next message in only then."""
        slot = self.slot
        try:
            if slot.jobs.in_time and await slot.work_left():
                return  # it may go after the next turn
            slot.retiring = None
            if (
                self.state is WorkerState.IDLE
                and await self._history_is_written()
                and await self.metadata.save("dormant")
            ):
                await slot.stop(reason)
        finally:
            self._release()

    async def _history_is_written(self) -> bool:
        """Let the idle worker write what its history lacks; return whether it lacks nothing now."""
        if self.metadata.unwritten is None or self.state is not WorkerState.IDLE:
            return True
        error = await self.slot.flush()
        self.metadata.history_written(error)
        if error is not None:
            self._log.warning("history_unwritten", error=error)
        return error is None

    def _release(self) -> None:
        """Let the next message in."""
        self._begun = None
        self._line.release()
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

    def take_over(self, turn: wire.Turn) -> None:
        """Have the next worker look for a turn in which the process that owned the conversation has died.

        Raises ``TurnInterruptedError`` if a worker has opened the session already, so that nobody can look any more.
        """
        if not self.slot.is_empty:
            raise TurnInterruptedError(
                "the process that answered it has ended, and it is not known how far the turn had come: check what it "
                "did before you send it again",
                exit="ended with its host",
                returncode=None,
                conversation_id=self._id,
            )
        self.metadata.left = LeftTurn(turn)
        self.metadata.open_turn_id = turn.turn_id

    def _worker_ready(self, opened: wire.Opened) -> None:
        self._notice = " ".join(filter(None, (self.metadata.notice, opened.notice))) or None
        if self._teller is not None and self._teller.told is None:
            # What came after the last turn that an earlier host has stored: it may not have told that.
            self._teller.told = self.metadata.committed if self.metadata.session_id else opened.committed
        self.metadata.notice = None
        left_id, self.metadata.open_turn_id = self.metadata.open_turn_id, None
        if left_id is None:
            return
        if opened.recovered is not None:
            outcome: Reply | HermesPoolError = Reply(
                text=opened.recovered,
                conversation_id=self._id,
                session_id=opened.session_id,
                turn_id=left_id,
                notice="The host ended during this turn; its reply was found in the history.",
            )
        elif opened.kept:
            outcome = TurnInterruptedError(
                "the host ended after a tool had started. The tool may have acted, so the message was not run again: "
                "check what it did before you send it again",
                exit="ended with its host",
                returncode=None,
                conversation_id=self._id,
            )
            tools = tuple(ToolUse(name=name) for name in opened.acted)
            outcome.account_for(left_id, TurnAccount(tools=tools, kept=True))
        else:
            self._record_soon(left_id, None)
            return
        self._left[left_id] = outcome
        self._record_soon(left_id, outcomes.recorded(outcome))

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
            tools_started=turn.may_have_acted,
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
        turn.kept = opened.kept
        turn.acted(opened.acted)
        replacement = Replacement(
            alive=self.state is WorkerState.IDLE, recovered=opened.recovered is not None, kept=opened.kept
        )
        decision = recovery.after_replacement(self._facts(turn), replacement)
        match decision:
            case Decision.DELIVER:
                self._completed(turn)
                turn.kept = True
                return self._reply(turn, text=opened.recovered or "")
            case Decision.END:
                return self._ended_early(turn)
            case Decision.REPLAY:
                turn.runs_again()
                self._hand_over(turn)
                turn.push(
                    wire.Status(
                        turn.turn_id, turn.attempt, f"the worker {report.exit}; another one starts the reply again"
                    )
                )
                return None
            case _:
                return died_with(turn, self.slot.unreplaced or report, decision)


def _why(ending: Ending) -> str:
    """Return why a turn was to end, in words that the model is told."""
    if isinstance(ending, TurnTimeoutError):
        return "it took too long"
    return "it was cancelled" if ending == "cancelled" else "it was stopped"
