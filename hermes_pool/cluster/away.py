"""A conversation that another process owns: the same as a session, as far as its callers can tell.

Each turn is carried to the owner's door and its events come back, into a turn of this process: what the caller has is
the same object as for a conversation that is here. If the owner is not the owner any more, or dies, the conversation is
looked for anew: the turn goes on elsewhere, or here.
"""

import asyncio
import contextlib
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator, Mapping
from typing import Any, Literal, TypeVar

import msgspec

from hermes_pool.cluster import messages
from hermes_pool.cluster.lease import Supervisor
from hermes_pool.cluster.link import Link
from hermes_pool.cluster.neighbours import Condition, Identity
from hermes_pool.conversation.active_turn import EVENTS_WAITING_MAX, ActiveTurn, Ending, Face, QuestionPolicy
from hermes_pool.conversation.event_log import EventLog
from hermes_pool.conversation.events import ConversationEvent
from hermes_pool.conversation.reply import Reply
from hermes_pool.conversation.session import Session
from hermes_pool.conversation.turn import Turn
from hermes_pool.errors import (
    ConversationElsewhereError,
    HermesPoolError,
    InvalidMessageError,
    MessageTooLargeError,
    OwnerStoppedError,
    TurnCancelledError,
)
from hermes_pool.lifecycle import TURN, TurnChange, TurnState
from hermes_pool.process.death import Stopped
from hermes_pool.settings import OnCancel, SessionKey
from hermes_pool_worker import wire

LOOK_S = 0.5
"""How often to look whether an owner that says nothing is stopped (SIGSTOP): the connection does not tell."""
STOPPED_S = 2.0
"""For how long an owner has to be stopped before a caller is told so. Debuggers stop processes for moments."""
AGAIN_S = 0.02
"""How soon to look again for a conversation that its owner is giving up."""

T = TypeVar("T")


class Doors:
    """The connections to the doors of other processes; idle ones are kept for the next turn."""

    def __init__(self) -> None:
        self._idle: dict[str, list[Link[messages.Answer]]] = {}
        self._all: set[Link[messages.Answer]] = set()

    async def link(self, owner: Supervisor) -> Link[messages.Answer]:
        """Return a connection to an owner. Raises ``OSError`` if nobody opens."""
        idle = self._idle.get(owner.address, [])
        while idle:
            link = idle.pop()
            if not link.lost:
                return link
        loop = asyncio.get_running_loop()
        _, link = await loop.create_unix_connection(lambda: Link[messages.Answer](messages.Answer), owner.address)
        self._all.add(link)
        return link

    def keep(self, owner: Supervisor, link: Link[messages.Answer]) -> None:
        """Keep a connection on which nothing is under way any more."""
        link.on_frame, link.on_lost = lambda _: None, lambda: self._all.discard(link)
        if link.lost:
            self._all.discard(link)
        else:
            self._idle.setdefault(owner.address, []).append(link)

    def drop(self, link: Link[messages.Answer]) -> None:
        """End a connection."""
        self._all.discard(link)
        link.close()

    def close(self) -> None:
        """End all connections."""
        for link in list(self._all):
            self.drop(link)


class Away:
    """A conversation that another process owns, with the methods of ``Session`` that callers need."""

    def __init__(
        self,
        key: SessionKey,
        owner: Supervisor,
        doors: Doors,
        *,
        place: Callable[[SessionKey], Awaitable["Session | Away"]],
        wait_s: float,
        turn_ids: Iterator[str],
        in_background: Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"],
    ) -> None:
        self.key = key
        self.owner = owner
        self.doors = doors
        self._place = place
        self.wait_s = wait_s
        """For how long a message waits for its conversation to find an owner, in seconds."""
        self._turn_ids = turn_ids
        self._in_background = in_background
        self._carriers: dict[ActiveTurn, _Carrier] = {}
        self.fence = None
        """This process has no lease of it."""

    # --- turns ---

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
        """Return a turn that has not begun. Raises ``InvalidMessageError`` for what is no text."""
        if not isinstance(text, str):
            raise InvalidMessageError(
                f"a message must be a str, not {type(text).__name__}", conversation_id=self.key.conversation_id
            )
        turn = ActiveTurn(
            next(self._turn_ids) if turn_id is None else turn_id,
            text,
            log=EventLog(lambda: None),
            drained=self._drained,
            left=lambda _: None,
            on_settled=lambda _: None,
            face=face,
            is_clients=turn_id is not None,
            metadata=metadata,
            on_cancel=on_cancel or "keep",
            on_question=on_question,
        )
        self._carriers[turn] = _Carrier(self, turn, on_cancel)
        return turn

    def take(self, turn: ActiveTurn, on_cancel: OnCancel | None) -> ActiveTurn:
        """Return a turn like one that was made for this process, which has not begun."""
        taken = self.new_turn(
            turn.text, turn.face, turn_id=turn.turn_id, metadata=turn.metadata, on_cancel=on_cancel,
            on_question=turn.on_question,
        )  # fmt: skip
        taken.is_clients = turn.is_clients
        return taken

    def start(self, turn: ActiveTurn) -> None:
        """Carry the turn to the owner."""
        turn.state = TURN[turn.state][TurnChange.BEGUN]
        turn.started()
        turn.beginning = self._in_background(self._carry(turn))

    async def _carry(self, turn: ActiveTurn) -> None:
        try:
            await self._carriers[turn].run(self, lambda: self._place(self.key))
        finally:
            del self._carriers[turn]

    def cancel(self, turn: ActiveTurn, ending: Ending = "cancelled") -> None:
        """Have the owner end the turn."""
        if turn.outcome is None and turn.ending is None:
            turn.ending = ending
            turn.state = TURN[turn.state][TurnChange.END_WANTED]
            self._carriers[turn].cancel(ending)

    def steer(self, turn: ActiveTurn, text: str) -> bool:
        """Pass a remark on; return whether the turn runs."""
        return turn.outcome is None and bool(turn.began_at) and self._carriers[turn].send(messages.Steer(text))

    def answer(self, turn: ActiveTurn, question_id: str, text: str | None) -> bool:
        """Pass an answer on; return whether the question was open, as far as is known here."""
        is_open = turn.outcome is None and question_id in turn.questions
        return (
            is_open
            and turn.questions.pop(question_id, None) is not None
            and self._carriers[turn].send(messages.AnswerQuestion(question_id, text))
        )

    def _drained(self, turn: ActiveTurn) -> None:
        if (carrier := self._carriers.get(turn)) is not None:
            carrier.drained()

    # --- watching, and single calls ---

    async def watch(self, after: int | None) -> AsyncGenerator[tuple[int, ConversationEvent], None]:
        """Watch the conversation until the owner is gone or has given it up."""
        link = await self.doors.link(self.owner)
        events: asyncio.Queue[tuple[int, ConversationEvent] | None] = asyncio.Queue()

        def heard(message: messages.Answer) -> None:
            events.put_nowait((message.seq, messages.event_of(message)) if isinstance(message, messages.Seen) else None)
            if events.qsize() >= EVENTS_WAITING_MAX:
                link.pause()

        link.on_frame, link.on_lost = heard, lambda: events.put_nowait(None)
        link.send(messages.Watch(self.key.conversation_id, self.key.user_id, after))
        try:
            while (event := await events.get()) is not None:
                if events.empty():
                    link.resume()
                yield event
        finally:
            self.doors.drop(link)

    async def call(
        self,
        verb: Literal["answer", "cancel", "steer", "stop", "transcript"],
        **arguments: Any,
    ) -> Any:
        """Have the owner carry out a call; return what it returned, in built-in types, or raise its error."""
        link = await self._link()
        answered: asyncio.Future[messages.Answer | None] = asyncio.get_running_loop().create_future()

        def heard(message: messages.Answer | None) -> None:
            if not answered.done():
                answered.set_result(message)

        link.on_frame, link.on_lost = heard, lambda: heard(None)
        link.send(messages.Call(verb, self.key.conversation_id, self.key.user_id, arguments))
        try:
            answer = await self.unless_stopped(answered)
        except BaseException:
            self.doors.drop(link)
            raise
        self.doors.keep(self.owner, link)
        if isinstance(answer, messages.Result):
            return answer.value
        outcome = messages.unpacked(answer.outcome) if isinstance(answer, messages.Ended) else None
        raise outcome if isinstance(outcome, HermesPoolError) else self.gone()

    async def cancel_by_id(self, turn_id: str | None) -> Reply | None:
        """Cancel a turn, and wait for its end: the running one, if there is no id."""
        value = await self.call("cancel", turn_id=turn_id)
        outcome = None if value is None else messages.unpacked(value)
        return outcome if isinstance(outcome, Reply) else None

    async def stop(self) -> Stopped | None:
        """Stop the worker."""
        value = await self.call("stop")
        return None if value is None else msgspec.convert(value, Stopped)

    async def transcript(self, after: str | None, limit: int) -> list[wire.PastTurn]:
        """Return the turns of the history."""
        return msgspec.convert(await self.call("transcript", after=after, limit=limit), list[wire.PastTurn])

    async def _link(self) -> Link[messages.Answer]:
        try:
            return await self.doors.link(self.owner)
        except OSError:
            raise self.gone() from None

    # --- the owner ---

    @property
    def pid(self) -> int | None:
        """The pid of the owner."""
        process = Identity.from_text(self.owner.process)
        return None if process is None else process.pid

    def gone(self) -> ConversationElsewhereError:
        """Return the error for an owner that does not answer."""
        return ConversationElsewhereError(
            "the process that answers it does not open its door",
            conversation_id=self.key.conversation_id,
            address=self.owner.address,
        )

    def _is_stopped(self) -> bool:
        process = Identity.from_text(self.owner.process)
        return process is not None and process.condition() is Condition.STOPPED

    def _stopped(self) -> OwnerStoppedError:
        process = Identity.from_text(self.owner.process)
        pid = None if process is None else process.pid
        return OwnerStoppedError(
            f"the process that answers it (pid {pid}) is stopped by a signal: continue it (SIGCONT), or end it",
            conversation_id=self.key.conversation_id,
            pid=pid,
        )

    async def unless_stopped(self, answered: "asyncio.Future[T]") -> T:
        """Wait for an answer. Raises ``OwnerStoppedError`` once the owner has been stopped for a while."""
        looks = 0
        while True:
            done, _ = await asyncio.wait({answered}, timeout=LOOK_S)
            if done:
                return answered.result()
            looks = looks + 1 if self._is_stopped() else 0
            if looks * LOOK_S >= STOPPED_S:
                raise self._stopped()


class _Carrier:
    """Carries one turn to where its conversation is, and after it where it moves."""

    def __init__(self, away: Away, turn: ActiveTurn, on_cancel: OnCancel | None) -> None:
        self._away = away
        self._turn = turn
        self._on_cancel = on_cancel
        self._link: Link[messages.Answer] | None = None
        self._here: tuple[Session, ActiveTurn] | None = None
        self._room: asyncio.Future[None] | None = None
        self._asking: set[asyncio.Task[None]] = set()

    async def run(self, host: "Session | Away", place: Callable[[], Awaitable["Session | Away"]]) -> None:
        """Carry the turn, until it has an outcome."""
        turn = self._turn
        outcome: Reply | HermesPoolError = self._ended_early()
        owner_died = False
        loop = asyncio.get_running_loop()
        end = loop.time() + self._away.wait_s
        try:
            while True:
                if turn.ending is not None and self._link is None and self._here is None and not owner_died:
                    outcome = self._ended_early()
                    break
                if isinstance(host, Away):
                    outcome = await self._run_there(host, after_death=owner_died)
                else:
                    outcome = await self._run_here(host, after_death=owner_died)
                if not isinstance(outcome, ConversationElsewhereError) or loop.time() >= end:
                    break
                if outcome.sent:
                    owner_died = True
                elif host is self._away:  # at the first time it may just have moved
                    pass
                else:
                    await asyncio.sleep(AGAIN_S)
                host = await place()
        except HermesPoolError as error:
            outcome = error
        except wire.FrameTooLargeError as error:
            outcome = MessageTooLargeError(
                f"the message is too large: {error}", conversation_id=self._away.key.conversation_id
            )
        except (TypeError, ValueError, OverflowError) as error:
            outcome = InvalidMessageError(
                f"its metadata cannot be sent to the process that answers it ({error}): use built-in types",
                conversation_id=self._away.key.conversation_id,
            )
        except asyncio.CancelledError:
            outcome = TurnCancelledError(
                "the pool closed", sent=bool(turn.began_at), conversation_id=self._away.key.conversation_id
            )
        turn.settle(outcome)

    async def _run_there(self, host: Away, *, after_death: bool) -> Reply | HermesPoolError:
        turn, key = self._turn, host.key
        try:
            link = await host.doors.link(host.owner)
        except OSError:
            return host.gone()
        ended: asyncio.Future[messages.Ended | None] = asyncio.get_running_loop().create_future()

        def heard(message: messages.Answer) -> None:
            if isinstance(message, messages.Ended):
                if not ended.done():
                    ended.set_result(message)
            else:
                self._heard(message)

        def lost() -> None:
            if not ended.done():
                ended.set_result(None)

        link.on_frame, link.on_lost, self._link = heard, lost, link
        try:
            link.send(
                messages.Run(
                    key.conversation_id,
                    key.user_id,
                    turn.face,
                    turn.turn_id,
                    turn.is_clients,
                    turn.text,
                    dict(turn.metadata),
                    self._on_cancel,
                    turn.on_question is not None,
                    after_death,
                )
            )
            if turn.ending is not None:
                self.cancel(turn.ending)
            end = await host.unless_stopped(ended)
        except OwnerStoppedError as stopped:
            stopped.sent = True
            host.doors.drop(link)
            raise
        except BaseException:
            host.doors.drop(link)
            raise
        finally:
            self._link = None
        if end is None:
            error = host.gone()
            error.sent = True
            return error
        host.doors.keep(host.owner, link)
        return messages.unpacked(end.outcome)

    async def _run_here(self, session: Session, *, after_death: bool) -> Reply | HermesPoolError:
        turn = self._turn
        if after_death:
            session.take_over(wire.Turn(turn.turn_id, turn.attempt, turn.text))
        inner = session.new_turn(
            turn.text, "turn", turn_id=turn.turn_id, metadata=turn.metadata, on_cancel=self._on_cancel,
            on_question=turn.on_question,
        )  # fmt: skip
        self._here = session, inner
        try:
            if inner.is_new:
                session.start(inner)
            if turn.ending is not None:
                session.cancel(inner, turn.ending)
            await inner.begun()
            if inner.began_at:
                self._heard(messages.Begun())
            async for event in Turn(session, inner, begun=True):
                self._told(event)
                if turn.lags:
                    self._room = asyncio.get_running_loop().create_future()
                    await self._room
            return await inner.settled()
        finally:
            session.cancel(inner)
            self._here = None

    def _heard(self, message: messages.Answer) -> None:
        turn = self._turn
        match message:
            case messages.Begun():
                if turn.state is not TurnState.RUNNING and turn.ending is None:
                    turn.state = TURN[turn.state][TurnChange.HANDED_OVER]
                turn.handed_over(asyncio.get_running_loop().time())
            case messages.Told():
                self._told(message.event)
                if turn.lags and self._link is not None:
                    self._link.pause()
            case messages.Asked():
                task = asyncio.get_running_loop().create_task(self._ask(message.question))
                self._asking.add(task)
                task.add_done_callback(self._asking.discard)

    def _told(self, event: wire.TurnEvent) -> None:
        turn = self._turn
        turn.attempt = event.attempt
        match event:
            case wire.TextDelta():
                turn.push_texts((event,))
                return
            case wire.ToolStarted():
                turn.tool_started(event)
            case wire.ToolFinished():
                turn.tool_finished(event)
            case wire.Question():
                turn.asked(event, asyncio.get_running_loop().time() + event.timeout_s)
        turn.push(event)

    async def _ask(self, question: wire.Question) -> None:
        policy, answer = self._turn.on_question, None
        with contextlib.suppress(Exception):  # an error of the host must not leave the agent waiting
            answer = None if policy is None else policy(self._away.key, question)
            if inspect.isawaitable(answer):
                answer = await answer
        self.send(messages.AnswerQuestion(question.question_id, answer if isinstance(answer, str) else None))

    def cancel(self, ending: Ending) -> None:
        """Have the turn ended, wherever it is."""
        if self._here is not None:
            self._here[0].cancel(self._here[1], ending)
        else:
            error = messages.packed(ending) if isinstance(ending, HermesPoolError) else None
            self.send(messages.Cancel(error))

    def send(self, request: messages.Request) -> bool:
        """Send something about the turn to the owner; return whether there is one."""
        if self._here is not None:
            session, inner = self._here
            if isinstance(request, messages.Steer):
                return session.steer(inner, request.text)
            if isinstance(request, messages.AnswerQuestion):
                return session.answer(inner, request.question_id, request.text)
        if self._link is None:
            return False
        self._link.send(request)
        return True

    def drained(self) -> None:
        """Read on: the caller has read what had piled up."""
        room, self._room = self._room, None
        if room is not None and not room.done():
            room.set_result(None)
        if self._link is not None:
            self._link.resume()

    def _ended_early(self) -> Reply | HermesPoolError:
        ending = self._turn.ending
        if isinstance(ending, HermesPoolError):
            return ending
        return Reply(
            text="", conversation_id=self._away.key.conversation_id, session_id=None, turn_id=self._turn.turn_id,
            outcome="interrupted", kept=False,
        )  # fmt: skip
