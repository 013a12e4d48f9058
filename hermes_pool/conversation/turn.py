"""One turn as its caller sees it: its events, its reply, and how to cancel it."""

from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self

from hermes_pool.conversation.active_turn import ActiveTurn
from hermes_pool.conversation.reply import Reply
from hermes_pool.conversation.session import Session
from hermes_pool.errors import HermesPoolError
from hermes_pool_worker import wire


class Turn:
    """One message on its way to a reply.

        async with sessions.turn("conversation-42", "Hello") as turn:
            async for event in turn:      # TextDelta, ToolStarted, Question, ...
                ...
            reply = await turn.reply()

    Entering waits for earlier turns and for a worker. Leaving before the end cancels the turn. When the ``attempt`` of
    the events increases, the worker has died, and another one starts the reply again from the beginning.
    """

    __slots__ = ("_session", "_turn")

    def __init__(self, session: Session, turn: ActiveTurn) -> None:
        self._session = session
        self._turn = turn

    @property
    def turn_id(self) -> str:
        """The turn's id in its events, its reply and the log."""
        return self._turn.turn_id

    @property
    def text(self) -> str:
        """The message."""
        return self._turn.text

    @property
    def attempt(self) -> int:
        """1, or more if workers died and the turn runs again."""
        return self._turn.attempt

    @property
    def outcome(self) -> Reply | HermesPoolError | None:
        """How it ended; ``None`` until then."""
        return self._turn.outcome

    async def __aenter__(self) -> Self:
        """Send the message. Raises those errors of ``HermesSessionManager.send`` that occur before a worker has it."""
        await self._session.begin(self._turn)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancel the turn unless it has ended. The conversation is free once its worker has confirmed or was killed."""
        self._turn.drop_events()
        self._session.cancel(self._turn)

    def __aiter__(self) -> AsyncIterator[wire.TurnEvent]:
        """Iterate over the events until the turn ends, however it ends: ``reply`` reports that."""
        return self._turn

    async def __anext__(self) -> wire.TurnEvent:
        """Return the next event."""
        return await self._turn.__anext__()

    async def reply(self) -> Reply:
        """Wait for the end; return the reply, or raise the turn's error. Unread events are dropped."""
        outcome = await self._turn.settled()
        if isinstance(outcome, Reply):
            return outcome
        raise outcome

    async def cancel(self) -> Reply | None:
        """Cancel the turn and wait until it has ended. Return the reply so far, or ``None`` if it ended with an error.

        Does nothing to a turn that has ended. A cancelled caller stops waiting; the turn ends nevertheless.
        """
        self._session.cancel(self._turn)
        outcome = await self._turn.settled()
        return outcome if isinstance(outcome, Reply) else None

    async def answer(self, question_id: str, text: str) -> None:
        """Answer a ``Question`` event of this turn. An answer that comes too late has no effect."""
        self._session.answer(self._turn, question_id, text)
