"""One turn as its host sees it: its events, its reply, and how to end it."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from types import TracebackType
from typing import Any, Protocol, Self

from hermes_pool.conversation.active_turn import ActiveTurn, Ending
from hermes_pool.conversation.events import EventsMissed, TurnEnded
from hermes_pool.conversation.reply import Reply
from hermes_pool.errors import HermesPoolError, InvalidUseError
from hermes_pool.lifecycle import TurnState
from hermes_pool.settings import SessionKey
from hermes_pool_worker import wire


class TurnHost(Protocol):
    """A conversation, wherever it is answered."""

    key: SessionKey

    def start(self, turn: ActiveTurn) -> None:
        """Accept the turn, or raise what refuses it."""

    def cancel(self, turn: ActiveTurn, ending: Ending = "cancelled") -> None:
        """End the turn."""

    def answer(self, turn: ActiveTurn, question_id: str, text: str | None) -> bool:
        """Answer a question of the turn; return whether it was open."""

    def steer(self, turn: ActiveTurn, text: str) -> bool:
        """Say something to the agent in the turn; return whether a worker was there to hear it."""


class Turn:
    """One message on its way to a reply. It belongs to its conversation, not to the task that sent it.

    ``HermesSessionManager.start`` returns one that is on its way already. That of ``HermesSessionManager.turn`` begins
    when it is entered:

        async with sessions.turn("conversation-42", "Hello") as turn:
            async for event in turn:      # TextDelta, ToolStarted, Question, ...
                ...
            reply = await turn.reply()

    Entering waits for earlier turns and for a worker. Leaving before the end cancels the turn. When the ``attempt`` of
    the events increases, the worker has died, and another one starts the reply again from the beginning.

    What makes no sense raises ``InvalidUseError``: entering twice, iterating twice, waiting for a turn that was not
    entered.
    """

    __slots__ = ("_begun", "_events", "_place", "_session", "_turn")

    def __init__(
        self,
        session: TurnHost,
        turn: ActiveTurn,
        *,
        begun: bool = False,
        place: Callable[[ActiveTurn], Awaitable[tuple[TurnHost, ActiveTurn]]] | None = None,
    ) -> None:
        self._session = session
        self._turn = turn
        self._place = place
        self._begun = begun
        self._events: AsyncIterator[wire.TurnEvent] | None = None

    def __eq__(self, other: object) -> bool:
        """Whether it is the same turn."""
        return isinstance(other, Turn) and other._turn is self._turn

    def __hash__(self) -> int:
        """Return the hash of what ``==`` compares."""
        return hash(self._turn)

    @property
    def conversation_id(self) -> str:
        """The conversation that it belongs to."""
        return self._session.key.conversation_id

    @property
    def turn_id(self) -> str:
        """The turn's id in its events, its reply and the log."""
        return self._turn.turn_id

    @property
    def text(self) -> str:
        """The message."""
        return self._turn.text

    @property
    def metadata(self) -> Mapping[str, Any]:
        """What the host gave to ``start``."""
        return self._turn.metadata

    @property
    def attempt(self) -> int:
        """1, or more if workers died and the turn runs again."""
        return self._turn.attempt

    @property
    def state(self) -> TurnState:
        """Where it stands."""
        return self._turn.state

    @property
    def outcome(self) -> Reply | HermesPoolError | None:
        """How it ended; ``None`` until then."""
        return self._turn.outcome

    async def __aenter__(self) -> Self:
        """Send the message. Raises those errors of ``HermesSessionManager.send`` that occur before a worker has it."""
        if self._begun:
            raise InvalidUseError(
                "this turn has begun already: a turn is entered once, and one that start() returned not at all",
                conversation_id=self.conversation_id,
            )
        self._begun = True
        if self._place is not None:  # its conversation may be another process' one
            self._session, self._turn = await self._place(self._turn)
        self._session.start(self._turn)
        try:
            await self._turn.begun()
        except BaseException:
            self._session.cancel(self._turn)
            raise
        if not self._turn.began_at and isinstance(outcome := self._turn.outcome, HermesPoolError):
            raise outcome
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancel the turn unless it has ended. The conversation is free once its worker has confirmed or was killed."""
        self._turn.drop_events()
        self._session.cancel(self._turn)

    def __aiter__(self) -> AsyncIterator[wire.TurnEvent]:
        """Iterate over the events until the turn ends, however it ends: ``reply`` reports that.

        A turn that was entered tells all its events, and its worker waits for a slow reader. One that ``start``
        returned tells those that the conversation has kept, to any number of readers.
        """
        self._check_begun()
        if self._turn.face != "turn":
            return self._watch()
        if not self._turn.is_heard:
            raise InvalidUseError(
                "the events of a turn are read once, and before its reply: use sessions.events() for another reader",
                conversation_id=self.conversation_id,
            )
        return self._turn

    async def __anext__(self) -> wire.TurnEvent:
        """Return the next event."""
        if self._events is None:
            self._events = aiter(self)
        return await anext(self._events)

    async def _watch(self) -> AsyncIterator[wire.TurnEvent]:
        if self._turn.outcome is not None and self._turn.started_seq is None:
            return
        async for _, event in self._turn.log.watch(self._turn.started_seq):
            if isinstance(event, TurnEnded) and event.turn_id == self.turn_id:
                return
            if isinstance(event, wire.TurnMessage) and event.turn_id == self.turn_id:
                yield event
            elif isinstance(event, EventsMissed) and self._turn.outcome is not None:
                return  # its end was missed

    async def reply(self) -> Reply:
        """Wait for the end; return the reply, or raise the turn's error. Unread events of ``turn`` are dropped."""
        self._check_begun()
        outcome = await self._turn.settled()
        if isinstance(outcome, Reply):
            return outcome
        raise outcome

    async def cancel(self) -> Reply | None:
        """Cancel the turn and wait until it has ended. Return the reply so far, or ``None`` if it ended with an error.

        Does nothing to a turn that has ended. A cancelled caller stops waiting; the turn ends nevertheless.
        """
        self._check_begun()
        self._session.cancel(self._turn)
        outcome = await self._turn.settled()
        return outcome if isinstance(outcome, Reply) else None

    async def answer(self, question_id: str, text: str) -> bool:
        """Answer a ``Question`` event of this turn; return whether it was still open."""
        return self._session.answer(self._turn, question_id, text)

    async def steer(self, text: str) -> bool:
        """Say something to the agent while it works on this turn; return whether a worker was there to hear it.

        What comes too late to be used is in ``Reply.pending_steer``. Raises ``InvalidMessageError`` if it is no text.
        """
        return self._session.steer(self._turn, text)

    def _check_begun(self) -> None:
        if not self._begun:
            raise InvalidUseError(
                "this turn was not entered, so its message was not sent: use `async with`, or start()",
                conversation_id=self.conversation_id,
            )
