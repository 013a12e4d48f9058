"""All conversations: finds or creates their sessions, stops idle workers, saves metadata, and closes in order."""

import asyncio
import os
import secrets
import socket
from asyncio import get_running_loop
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from itertools import count
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from hermes_pool.control import messages, server
from hermes_pool.conversation.active_turn import ActiveTurn, QuestionPolicy
from hermes_pool.conversation.events import ConversationEvent, OpenQuestion
from hermes_pool.conversation.reply import Reply
from hermes_pool.conversation.saver import Saver
from hermes_pool.conversation.services import History, OnTurn, SessionServices
from hermes_pool.conversation.session import Session
from hermes_pool.conversation.turn import Turn, TurnHost
from hermes_pool.crash_report import DeathReport
from hermes_pool.errors import HermesPoolError, InvalidUseError, PoolClosedError
from hermes_pool.process.death import Stopped
from hermes_pool.process.factory import WorkerFactory
from hermes_pool.scheduling.admission import Admission, Occupant
from hermes_pool.scheduling.monitor import Monitor
from hermes_pool.scheduling.pool_state import Drained, PoolState
from hermes_pool.settings import OnCancel, PoolSettings, SessionKey
from hermes_pool.snapshot import PoolSnapshot, SessionSnapshot
from hermes_pool.system import processes
from hermes_pool.system.log import logger
from hermes_pool.system.sampler import Sampler
from hermes_pool.system.state_dir import prepare_state_dir
from hermes_pool.system.threads import in_thread_or_here
from hermes_pool_worker import wire

if TYPE_CHECKING:
    from hermes_pool.cluster.away import Away
    from hermes_pool.cluster.ownership import Ownership
    from hermes_pool.storage.store import ConversationStore

REPORTS_KEPT = 64
"""How many death reports are kept in memory."""
HAND_ON_S = 0.05
"""How often a pool that drains looks for conversations that it can give up."""
SESSIONS_KEPT = 1024
"""How many sessions are kept in memory, for ``ps``. Beyond that, inactive ones are dropped; the store has them."""
SWEEP_EVERY_S_MAX = 10.0
"""The longest time between two sweeps, which stop idle workers and retry failed saves, in seconds."""


def sweep_every_s(idle_s: float) -> float:
    """Return how often to sweep, in seconds, so that no worker stays idle for much longer than ``idle_s``."""
    return min(SWEEP_EVERY_S_MAX, idle_s / 4)


class HermesSessionManager:
    """One long-lived agent worker per conversation; an async context manager that a host enters once.

        async with HermesSessionManager(PoolSettings()) as sessions:
            reply = await sessions.send("conversation-42", "Hi, I am Ada.")

    It belongs to the event loop in which it was entered. ``store`` holds the session metadata: by default in a database
    of the pool's own (``PoolSettings.database_url``); pass a store over your own table to keep it next to your data.
    ``on_background`` is called in the loop when background work of an agent has ended; what it raises is logged.

    ``on_question`` answers the agents' questions in the place of a person: it gets the key and the ``Question``, and
    returns the answer, or ``None`` to leave it to those who watch; it may be a coroutine function. A question that
    nobody can see is denied at once, or the agent is told to decide for itself.

    ``history`` returns what was said in a conversation before the pool came to it, for one that has no session yet: the
    messages, the oldest first, with ``role`` (others than ``user`` and ``assistant`` are left out) and ``content``.
    ``on_turn`` is told each turn that has come to the history, in order, with its mark: see ``transcript``. Both may be
    coroutine functions.
    """

    def __init__(
        self,
        settings: PoolSettings | None = None,
        *,
        store: "ConversationStore | None" = None,
        on_background: Callable[[SessionKey, wire.BackgroundFinished], None] | None = None,
        on_question: QuestionPolicy | None = None,
        on_turn: OnTurn | None = None,
        history: History | None = None,
    ) -> None:
        self.settings = settings or PoolSettings()
        self._given_store = store
        self._on_background = on_background
        self._on_question = on_question
        self._on_turn = on_turn
        self._history = history
        self._sessions: dict[SessionKey, Session] = {}
        self._by_id: dict[str, Session] = {}  # those without a user: a known id needs no check and no key
        self._tasks: set[asyncio.Task[Any]] = set()
        self._saver = Saver()
        self._reports: deque[DeathReport] = deque(maxlen=REPORTS_KEPT)
        self._closing: asyncio.Task[dict[SessionKey, Stopped]] | None = None
        self._log = logger()
        self._sampler = Sampler()
        self._ownership: Ownership | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = os.getpid()
        self._admission = Admission(
            settings=self.settings,
            memory_of=self._memory_of,
            sessions=lambda: list(self._sessions.values()),
            in_background=self._in_background,
            log=self._log,
        )

    # --- opening and closing ---

    async def __aenter__(self) -> Self:
        """Open the store and the control socket. No worker is started before the first message.

        Raises ``SettingsError`` if ``database_url`` is unusable, and ``StateDirError`` if ``state_dir`` is.
        """
        if self._admission.state is not PoolState.NEW:
            raise PoolClosedError("a manager can be entered only once: create another one")
        settings = self.settings
        self._loop, self._pid = get_running_loop(), os.getpid()
        prepare_state_dir(
            settings.state_dir, workspace=settings.worker_cwd is None, locks=settings.cluster == "machine"
        )
        if self._given_store is not None:
            self._store = self._given_store
        else:  # in a thread: SQLAlchemy takes half a second to import, unless the host has done so
            self._store = await in_thread_or_here(partial(_own_store, settings))
        self._services = SessionServices(
            settings=settings,
            factory=WorkerFactory(settings, dict(os.environ), self._log),
            store=self._store,
            host=socket.gethostname(),
            log=self._log,
            admission=self._admission,
            saver=self._saver,
            in_background=self._in_background,
            on_background=self._on_background,
            on_question=self._on_question,
            on_turn=self._on_turn,
            history=self._history,
            turn_ids=map(f"{secrets.token_hex(4)}-{{}}".format, count(1)),
            reports=self._reports,
            sampler=self._sampler,
        )
        self._started_at = datetime.now(UTC)
        self._control = server.ControlServer(settings.state_dir, self._answer)
        try:
            await self._control.start()
        except HermesPoolError as error:  # the CLI cannot reach this pool, but the pool works
            self._log.warning("control_socket_failed", error=str(error))
        if settings.cluster == "machine":
            from hermes_pool.cluster.ownership import Ownership  # noqa: PLC0415 - it needs SQLAlchemy, as the store does

            self._ownership = Ownership(
                self._store,
                settings,
                self,
                session=self._find_or_make,
                turn_ids=self._services.turn_ids,
                in_background=self._in_background,
                log=self._log,
            )
            try:
                await self._ownership.open()
            except BaseException:
                await self._control.close()
                raise
        self._admission.become(PoolState.OPEN)
        self._services.factory.warm_up()
        monitor = Monitor(
            settings,
            self._sampler,
            slots=lambda: [session.slot for session in self._sessions.values()],
            worth=lambda slot: self._admission.worth(slot.occupant),
            in_background=self._in_background,
            log=self._log,
        )
        self._in_background(monitor.run())
        self._in_background(self._sweep())
        self._in_background(self._saver.run())
        self._log.info("pool_opened", agent=settings.agent, state_dir=str(settings.state_dir))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        await self.close()

    async def close(self, drain_s: float | None = None) -> dict[SessionKey, Stopped]:
        """Save all metadata and stop all workers, in parallel and in bounded time; return how each was stopped.

        For up to ``drain_s`` seconds (default: ``timeouts.drain_s``) running turns and waiting messages come to their
        ends, and new messages are refused with ``PoolDrainingError``, which is retryable. What is left is cut: turns
        end with ``TurnCancelledError``, which is retryable where the turn had no effect and nothing of it was kept;
        without a drain, waiting messages end with ``PoolClosedError``.

        Cancelling the caller does not cancel the closing. Another call waits for the same closing, and returns an empty
        dict.
        """
        self._check_loop()
        if self._closing is None and self._admission.state is not PoolState.NEW:
            drain_s = self.settings.timeouts.drain_s if drain_s is None else drain_s
            if self._admission.state is PoolState.DRAINED:
                drain_s = 0.0
            self._admission.become(PoolState.DRAINING if drain_s > 0 else PoolState.CLOSED)
            self._closing = asyncio.get_running_loop().create_task(self._close(drain_s))
            return await asyncio.shield(self._closing)
        if self._closing is None:
            self._admission.become(PoolState.CLOSED)
        else:
            await asyncio.shield(self._closing)
        return {}

    async def _close(self, drain_s: float) -> dict[SessionKey, Stopped]:
        if drain_s > 0:
            handing_on = self._in_background(self._hand_on())
            drained = await self._admission.drain(drain_s)
            handing_on.cancel()
            self._log.info("pool_drained", finished=drained.finished, cut=drained.cut)
            self._admission.become(PoolState.CLOSED)
        sessions = list(self._sessions.values())
        ends = await asyncio.gather(*(session.close() for session in sessions), return_exceptions=True)
        for session, end in zip(sessions, ends, strict=True):
            if isinstance(end, BaseException):
                self._log.error("stop_failed", conversation_id=session.key.conversation_id, error=repr(end))
        self._saver.close()
        await asyncio.gather(*(session.metadata.finish() for session in sessions))
        if self._ownership is not None:
            await self._ownership.close()
        await self._control.close()
        await self._services.factory.close()
        tasks = self._tasks - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._given_store is None:
            await self._store.close()
        self._log.info("pool_closed")
        return {s.key: end for s, end in zip(sessions, ends, strict=True) if isinstance(end, Stopped)}

    # --- talking ---

    async def send(
        self,
        conversation: str | SessionKey,
        text: str,
        *,
        turn_id: str | None = None,
        on_cancel: OnCancel | None = None,
        on_question: QuestionPolicy | None = None,
    ) -> Reply:
        """Send a message and return the reply. If need be, a worker is started, and a dead one is replaced.

        Cancelling the caller cancels the turn. Nobody sees the events, so a question is answered by ``on_question`` or
        by nobody. The other arguments are those of ``start``. Raises the errors of ``hermes_pool.errors``:
        ``InvalidKeyError``, ``InvalidMessageError`` and its subclass ``MessageTooLargeError``, ``TurnIdConflictError``,
        ``MessageQuarantinedError``, ``PoolClosedError`` and its subclass ``PoolDrainingError``, ``PoolPausedError``,
        ``ConversationBusyError``, ``PoolFullError``, ``RestartBackoffError``, ``WorkerStartError`` and its subclasses,
        ``StoreError`` (only if it is unknown whether there is a session to resume), and ``TurnError`` and its
        subclasses.
        """
        session: Session | Away = self._session(conversation)
        if self._ownership is not None and session.fence is None:
            session = await self._ownership.place(session.key)
        turn = session.new_turn(text, "send", turn_id=turn_id, on_cancel=on_cancel, on_question=on_question)
        is_new = turn_id is None or turn.is_new
        if is_new:
            session.start(turn)
        try:
            outcome = await turn.settled()
        except asyncio.CancelledError:
            if is_new:
                session.cancel(turn)
            raise
        if isinstance(outcome, Reply):
            return outcome
        raise outcome

    def turn(
        self,
        conversation: str | SessionKey,
        text: str,
        *,
        metadata: Mapping[str, Any] | None = None,
        on_cancel: OnCancel | None = None,
        on_question: QuestionPolicy | None = None,
    ) -> Turn:
        """Return the turn for a message, to enter with ``async with``: see ``Turn``. Raises the errors of ``send``.

        The other arguments are those of ``start``.
        """
        session = self._session(conversation)
        turn = session.new_turn(text, "turn", metadata=metadata, on_cancel=on_cancel, on_question=on_question)
        ownership = self._ownership
        if ownership is None:
            return Turn(session, turn)

        async def place(turn: ActiveTurn) -> tuple[TurnHost, ActiveTurn]:
            host = session if session.fence is not None else await ownership.place(session.key)
            return host, turn if isinstance(host, Session) else host.take(turn, on_cancel)

        return Turn(session, turn, place=place)

    async def start(
        self,
        conversation: str | SessionKey,
        text: str,
        *,
        turn_id: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        on_cancel: OnCancel | None = None,
        on_question: QuestionPolicy | None = None,
    ) -> Turn:
        """Send a message, and return its turn as soon as it is accepted. It goes on whatever becomes of the caller.

        ``turn_id`` is the client's own id of the message, 1 to 128 characters. The same id again is the same turn, not
        a second one: a double click, a request that is repeated, a page that connects again. ``metadata`` is shown with
        the turn and means nothing to the pool. ``on_cancel`` ("keep" or "discard") and ``on_question`` replace those of
        the pool for this turn.

        Raises the errors of ``send`` that refuse a message at once, ``TurnIdConflictError`` among them. What goes wrong
        later is the outcome of the turn.
        """
        session: Session | Away = self._session(conversation)
        if self._ownership is not None and session.fence is None:
            session = await self._ownership.place(session.key)
        turn = session.new_turn(
            text, "start", turn_id=turn_id, metadata=metadata, on_cancel=on_cancel, on_question=on_question
        )
        if turn_id is None or turn.is_new:
            session.start(turn)
        return Turn(session, turn, begun=True)

    def events(
        self, conversation: str | SessionKey, *, after: int | None = None
    ) -> AsyncGenerator[tuple[int, ConversationEvent], None]:
        """Watch a conversation: yield ``(seq, event)`` of all its turns, until the pool closes.

        Any number of watchers may come and go. ``seq`` grows by one from event to event; ``after`` is the last one that
        the watcher has seen. Without it, the first events are those of the running turn. The latest events are kept, a
        bounded number of them; if some that were asked for are gone, ``EventsMissed`` says so, and brings the running
        turn as it stands. A watcher never slows the worker down, and never ends a turn. Raises ``InvalidKeyError`` and
        ``PoolClosedError``.
        """
        self._refuse_unless_open()
        session = self._find_or_make(_key(conversation))
        return session.log.watch(after) if self._ownership is None else self._ownership.watch(session, after)

    async def transcript(
        self, conversation: str | SessionKey, *, after: str | None = None, limit: int = 100
    ) -> list[wire.PastTurn]:
        """Return the turns of a conversation's history, the oldest first: at most ``limit`` of those after a mark.

        ``after`` is the mark (``PastTurn.committed``) of the last turn that the host has. Store it with that turn, in
        one transaction, and each turn is stored once. A worker is started if there is none. Raises the errors of
        ``send`` that occur before a turn, and ``StoreError`` for an unknown mark or an agent that tells no history.
        """
        session: Session | Away = self._session(conversation)
        if self._ownership is not None and session.fence is None:
            session = await self._ownership.place(session.key)
        return await session.transcript(after, limit)

    def turn_of(self, conversation: str | SessionKey) -> Turn | None:
        """Return the turn that the conversation is at; ``None`` if there is none."""
        session = self._sessions.get(_key(conversation))
        return None if session is None or session.turn is None else Turn(session, session.turn, begun=True)

    def waiting(self, conversation: str | SessionKey) -> list[Turn]:
        """Return the turns that wait for that one, the next one first. ``cancel`` takes one out of the line."""
        session = self._sessions.get(_key(conversation))
        return [] if session is None else [Turn(session, turn, begun=True) for turn in session.turns_waiting]

    def questions(self, conversation: str | SessionKey | None = None) -> list[OpenQuestion]:
        """Return the questions that wait for an answer: those of one conversation, or of all."""
        if conversation is None:
            sessions = list(self._sessions.values())
        else:
            sessions = [session for session in [self._sessions.get(_key(conversation))] if session is not None]
        return [question for session in sessions for question in session.questions()]

    async def answer(self, conversation: str | SessionKey, question_id: str, text: str) -> bool:
        """Answer a question; return whether it was still open."""
        session = self._sessions.get(_key(conversation))
        if (away := await self._elsewhere(conversation)) is not None:
            return bool(await away.call("answer", question_id=question_id, text=text))
        turn = None if session is None else session.turn
        return turn is not None and session is not None and session.answer(turn, question_id, text)

    async def steer(self, conversation: str | SessionKey, text: str) -> bool:
        """Say something to the agent while it works on its turn: see ``Turn.steer``."""
        if (away := await self._elsewhere(conversation)) is not None:
            return bool(await away.call("steer", text=text))
        turn = self.turn_of(conversation)
        return turn is not None and await turn.steer(text)

    async def cancel(self, conversation: str | SessionKey, turn_id: str | None = None) -> Reply | None:
        """Cancel a turn that runs or waits, and wait for its end: see ``Turn.cancel``. Without an id, the running one.

        Return the reply so far; ``None`` if there is no such turn, or if it ended with an error.
        """
        if (away := await self._elsewhere(conversation)) is not None:
            return await away.cancel_by_id(turn_id)
        session = self._sessions.get(_key(conversation))
        if session is None:
            return None
        turn = session.turn if turn_id is None else session.find(turn_id)
        return None if turn is None else await Turn(session, turn, begun=True).cancel()

    async def stop(self, conversation: str | SessionKey) -> Stopped | None:
        """Stop the worker of a conversation. The next message starts another one and resumes the session.

        A running turn ends with ``TurnCancelledError``. Return how the worker was stopped; ``None`` if there was none.
        """
        if (away := await self._elsewhere(conversation)) is not None:
            return await away.stop()
        session = self._sessions.get(_key(conversation))
        return None if session is None else await asyncio.shield(self._in_background(session.stop("by request")))

    async def owner(self, conversation: str | SessionKey) -> int | None:
        """Return the pid of the process that answers a conversation; ``None`` if none does at the moment.

        Of several processes that share a store (``cluster="machine"``) each one answers some conversations. Raises
        ``StoreError``.
        """
        key = _key(conversation)
        session = self._sessions.get(key)
        if session is not None and (session.fence is not None or not session.slot.is_empty):
            return os.getpid()
        away = await self._elsewhere(key)
        return None if away is None else away.pid

    async def set_runtime(self, conversation_id: str, runtime: Literal["hermes", "jarvis"]) -> None:
        """Set which runtime answers a conversation: the key ``runtime`` of its ``agent_state``, and nothing else."""
        self._refuse_unless_open()
        await self._store.set_runtime(conversation_id, runtime)

    async def sessions(self) -> list[SessionSnapshot]:
        """Return all sessions of this pool, with what the operating system reports about their processes."""
        here = [each for each in self._sessions.values() if self._ownership is None or each.fence is not None]
        rows = [session.snapshot() for session in here] + self._services.factory.spares.snapshots()
        identities = [(row.pid, row.create_time) for row in rows if row.pid is not None and row.create_time is not None]
        trees = await in_thread_or_here(partial(processes.inspect_trees, identities))
        found = dict(zip(identities, trees, strict=True))
        deaths = {(report.conversation_id, report.user_id): report.report_id for report in self._reports}
        seen = []
        for row in rows:
            last_death = deaths.get((row.conversation_id, row.user_id))
            snapshot = replace(row, supervisor_pid=os.getpid(), last_death=last_death)
            if row.pid is not None and row.create_time is not None:
                tree = found[row.pid, row.create_time]
                snapshot = replace(snapshot, health=tree.health, rss_bytes=tree.rss_bytes, cpu_s=tree.cpu_s)
            seen.append(snapshot)
        return seen

    # --- the pool as a whole ---

    def pool(self) -> PoolSnapshot:
        """Return the pool's state, its limit, how many messages wait, and whether workers may be started."""
        seen = self._admission.snapshot()
        if self._admission.state is PoolState.NEW:
            return seen
        return replace(seen, starts=self._services.factory.breaker.snapshot())

    async def pause(self, deadline_s: float = 0.0) -> int:
        """Begin no more turns until ``resume``. Messages wait, up to ``timeouts.wait_s``; running turns go on.

        Waits up to ``deadline_s`` seconds for the running turns, and returns how many still run: once that is 0, you
        can upgrade Hermes, say. It never cancels anything. Raises ``PoolClosedError``, or ``PoolDrainingError`` if the
        pool is drained.
        """
        return await self._admission.pause(deadline_s)

    def resume(self) -> None:
        """Begin turns again after ``pause`` or ``drain``, even if that is in progress. Raises ``PoolClosedError``."""
        self._admission.resume()

    async def drain(self, deadline_s: float) -> Drained:
        """Finish running turns and waiting messages, and refuse new messages with ``PoolDrainingError``.

        What is left after ``deadline_s`` seconds is cut: the turns end with ``TurnCancelledError``, and their workers
        are stopped. Idle workers stay. Return how many messages were finished and how many were cut. The pool is then
        drained until ``resume`` or ``close``. Cancelling the caller leaves it draining and cuts nothing. Raises
        ``PoolClosedError``.
        """
        return await self._admission.drain(deadline_s)

    def resize(self, workers_max: int) -> None:
        """Change ``workers_max`` of the running pool. Surplus workers are stopped once they are idle, never in a turn.

        Raises ``SettingsError`` if ``workers_max`` is less than 1.
        """
        self._admission.resize(workers_max)

    # --- what went wrong, and another chance ---

    def deaths(self) -> list[DeathReport]:
        """Return the reports of the workers that died unexpectedly, the latest first. 64 are kept, in memory only.

        The same report is in the error of the turn (``WorkerDiedError.report``) and in the log (``worker_died``).
        """
        return list(reversed(self._reports))

    def reset(self, conversation: str | SessionKey | None = None) -> None:
        """Lift temporary refusals at once. Call it when you have fixed something that the pool cannot see.

        Without a conversation, worker starts are allowed again (``PoolUnavailableError`` and its subclass end). With
        one, its back-off ends (``RestartBackoffError``), its deaths are forgotten, and all its quarantined messages are
        released; an unknown conversation is ignored. Raises ``InvalidKeyError`` and ``PoolClosedError``.
        """
        self._refuse_unless_open()
        if conversation is None:
            self._services.factory.breaker.reset()
            self._log.info("starts_reset")
        elif (session := self._sessions.get(_key(conversation))) is not None:
            session.slot.restart_budget.reset()
            self._services.factory.breaker.reset(session.key.conversation_id)
            session.quarantine.reset()
            self._log.info("session_reset", conversation_id=session.key.conversation_id)

    def release(self, conversation: str | SessionKey, fingerprint: str) -> bool:
        """Release a quarantined message, by the fingerprint in its ``MessageQuarantinedError``.

        Return whether the fingerprint was known: fingerprints are valid in one supervisor only. The message's deaths
        are forgotten, so that it may kill ``restarts.quarantine_after`` workers again. Raises ``InvalidKeyError`` and
        ``PoolClosedError``.
        """
        self._refuse_unless_open()
        session = self._sessions.get(_key(conversation))
        if session is None or not session.quarantine.release(fingerprint):
            return False
        self._log.info("message_released", conversation_id=session.key.conversation_id, fingerprint=fingerprint)
        return True

    def _check_loop(self) -> None:
        """Raise ``InvalidUseError`` in a forked process, in another thread, and in another event loop."""
        if self._loop is None or get_running_loop() is self._loop:
            return
        forked = os.getpid() != self._pid
        where = "a forked process" if forked else "another event loop, or another thread,"
        raise InvalidUseError(
            f"this pool was opened by process {self._pid}, and cannot be used in {where}: "
            + ("open one here" if forked else "hand the work to its loop with asyncio.run_coroutine_threadsafe")
        )

    def _refuse_unless_open(self) -> None:
        self._check_loop()
        if self._admission.state in (PoolState.NEW, PoolState.CLOSED):
            self._admission.refuse_new()

    # --- sessions ---

    def _session(self, conversation: str | SessionKey) -> Session:
        if get_running_loop() is not self._loop:  # inline: this is on the path of every message
            self._check_loop()
        if self._admission.state is not PoolState.OPEN:
            self._admission.refuse_new()
        session = self._by_id.get(conversation) if type(conversation) is str else None
        if session is None:
            session = self._find_or_make(_key(conversation))
        return session

    def _find_or_make(self, key: SessionKey) -> Session:
        session = self._sessions.get(key)
        if session is None:
            session = self._sessions[key] = Session(key, self._services)
            self._forget_some()
        if key.user_id is None:
            self._by_id[key.conversation_id] = session
        return session

    def _forget_some(self) -> None:
        """Drop inactive sessions from memory if there are too many, the oldest first."""
        if len(self._sessions) <= SESSIONS_KEPT:
            return
        inactive = [
            key for key, session in self._sessions.items() if session.is_inactive and not session.metadata.unsaved
        ]
        for key in inactive[: len(self._sessions) - SESSIONS_KEPT]:
            if self._sessions[key].fence is not None:
                continue  # it is given up first
            del self._sessions[key]
            self._by_id.pop(key.conversation_id, None)

    # --- in the background ---

    def _memory_of(self, session: Occupant) -> int | None:
        worker = self._sessions[session.key].slot.worker if session.key in self._sessions else None
        samples = () if worker is None else self._sampler.samples(worker)
        return (samples[-1].unique_bytes or samples[-1].rss_bytes) if samples else None

    def _in_background(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, HermesPoolError):
            self._log.error("task_failed", error=repr(error), exc_info=error)

    async def _sweep(self) -> None:
        """Stop idle workers and retry failed saves, periodically, until cancelled."""
        while True:
            await asyncio.sleep(sweep_every_s(self.settings.timeouts.idle_s))
            self._services.factory.spares.refill()
            self._admission.reclaim_permits()
            idle = [
                session
                for session in self._sessions.values()
                if (idle_s := session.idle_s()) is not None and idle_s >= self.settings.timeouts.idle_s
            ]
            results = await asyncio.gather(
                *(session.hibernate(self.settings.timeouts.idle_s) for session in idle),
                *(session.metadata.save() for session in list(self._sessions.values()) if session.metadata.unsaved),
                *self._releases(),
                return_exceptions=True,  # a failure of one session must not end the sweeps
            )
            for error in results:
                if isinstance(error, Exception):
                    self._log.error("sweep_failed", error=repr(error), exc_info=error)

    # --- several processes ---

    async def _elsewhere(self, conversation: str | SessionKey) -> "Away | None":
        """Return where a conversation is, if it is not here."""
        self._check_loop()
        session = self._sessions.get(key := _key(conversation))
        if self._ownership is None or (session is not None and session.fence is not None):
            return None
        self._refuse_unless_open()
        return await self._ownership.find(key)

    async def _hand_on(self) -> None:
        """Give each conversation up as soon as nothing runs in it, so that another process can go on with it."""
        ownership = self._ownership
        while ownership is not None:
            for session in list(self._sessions.values()):
                if session.fence is not None and not session.in_turn and not session.waiting:
                    await session.hibernate(0.0, reason="handed on")
                    await ownership.release(session)
            await asyncio.sleep(HAND_ON_S)

    def _releases(self) -> list[Coroutine[Any, Any, None]]:
        """Return what gives up the conversations of which nothing is left here."""
        if self._ownership is None:
            return []
        left = [s for s in self._sessions.values() if s.fence is not None and s.is_inactive and not s.metadata.unsaved]
        return [self._ownership.release(session) for session in left]

    # --- from outside ---

    async def _answer(self, request: messages.Request) -> messages.Response:
        match request:
            case messages.Ps():
                rows = await self.sessions()
                return messages.PsReply(rows, os.getpid(), _version(), self._started_at.isoformat(), self.pool())
            case messages.Stop():
                await self.stop(SessionKey(request.conversation_id, request.user_id))
                return messages.Done()
            case messages.Pause():
                running = await self.pause(request.deadline_s)
                return messages.Done("paused" if not running else f"paused; {_turns(running)} still running")
            case messages.Resume():
                self.resume()
                return messages.Done("resumed")
            case messages.Drain():
                drained = await self.drain(request.deadline_s)
                summary = f"{_turns(drained.finished)} finished, {drained.cut} cut"
                return messages.Done(f"{self.pool().state}; {summary}")
            case messages.Resize():
                self.resize(request.workers_max)
                pool = self.pool()
                return messages.Done(f"{pool.workers} of {pool.workers_max} workers")
            case messages.Deaths():
                return messages.DeathsReply(self.deaths())
            case messages.Reset():
                if request.conversation_id is None:
                    self.reset()
                    return messages.Done("worker starts are allowed again")
                key = SessionKey(request.conversation_id, request.user_id)
                self.reset(key)
                return messages.Done("reset" if key in self._sessions else "unknown conversation, nothing to reset")
            case messages.Release():
                key = SessionKey(request.conversation_id, request.user_id)
                if not self.release(key, request.fingerprint):
                    return messages.Failed(f"no quarantined message has the fingerprint {request.fingerprint}")
                return messages.Done("released")


def _own_store(settings: PoolSettings) -> "ConversationStore":
    # SQLAlchemy takes longer to import than everything else together, and not every importer opens a pool.
    from hermes_pool.storage.store import ConversationStore  # noqa: PLC0415

    return ConversationStore.from_url(settings.store_url, settings.timeouts.database_s)


def _turns(count: int) -> str:
    return f"{count} turn" if count == 1 else f"{count} turns"


def _key(conversation: str | SessionKey) -> SessionKey:
    return conversation if isinstance(conversation, SessionKey) else SessionKey(conversation)


def _version() -> str:
    from importlib.metadata import version  # noqa: PLC0415 - slow, and seldom needed

    return version("hermes-pool")
