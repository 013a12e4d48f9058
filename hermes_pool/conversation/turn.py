"""One turn as its caller sees it: its events, its reply, and the ways to end it early.

The turn is passive. Its session feeds it from the loop's callbacks, whether the caller listens or not, and settles it
exactly once; so a caller that is slow, gone or cancelled can hold up nothing but its own stream.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Literal, Protocol, Self, cast

import msgspec

from hermes_pool.errors import HermesPoolError
from hermes_pool_worker import wire

CALLS_KEPT = 1000
"""How many tool calls and open questions of one turn are remembered. One that has more attacks, or is out of hand."""
EVENT_BYTES_WAITING_MAX = 4 * 1024 * 1024
"""What the events of a turn that wait for a slow consumer may hold, about; beyond, its worker is no longer read."""


def _size(event: wire.TurnEvent) -> int:
    """Return about how much an event holds. Of a piece of text, of which there may be thousands, nobody asks it."""
    return sum(len(value) for value in msgspec.structs.astuple(event) if isinstance(value, str | list))


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to one message."""

    text: str
    conversation_id: str
    session_id: str | None
    """The agent's own name of the session (Hermes' ``session_id``)."""
    turn_id: str
    outcome: Literal["completed", "interrupted", "partial"] = "completed"
    """``interrupted``: it was cancelled, and ``text`` is what there was. ``partial``: the agent stopped early."""
    restarts: int = 0
    """Workers that died and were replaced on the way to this reply."""
    usage: dict[str, int] = {}
    """What the agent counted for this turn (``input_tokens``, ``output_tokens``, ...)."""
    notice: str | None = None
    """What a person should know: why it is partial, or that the session could not be resumed."""
    duration_s: float = 0.0
    """From the hand-over to a worker to the reply."""


class TurnHost(Protocol):
    """The session, as its turns see it."""

    async def begin(self, turn: "Turn") -> None:
        """Wait in line, see that a worker is ready, and hand the turn over."""

    def cancel(self, turn: "Turn") -> None:
        """End the turn soon; one that is not running is left alone."""

    def answer(self, turn: "Turn", question_id: str, text: str) -> None:
        """Pass an answer on to the worker."""

    def drained(self, turn: "Turn") -> None:
        """Take note that the turn's events have been consumed after they had piled up."""


class Turn:
    """One message on its way to a reply.

        async with sessions.turn("conversation-42", "Hello") as turn:
            async for event in turn:      # wire.TextDelta, ToolStarted, Question, ...
                ...
            reply = await turn.reply()

    Entering waits in line and for a worker; leaving before the end cancels the turn. When an event carries another
    ``attempt`` than the ones before, the worker has died and another one begins the reply anew.
    """

    __slots__ = (
        "_bytes_waiting", "_events", "_events_waiting_max", "_host", "_waiters", "attempt", "began_at", "deaths",
        "ending", "heard_at", "lags", "last_event", "outcome", "questions_open", "streams", "text", "tools_open",
        "tools_started", "turn_id",
    )  # fmt: skip

    def __init__(
        self, host: TurnHost, turn_id: str, text: str, *, events_waiting_max: int, streams: bool = True
    ) -> None:
        self.turn_id = turn_id
        self.text = text
        self.streams = streams
        """Whether anybody wants to see the events."""
        self.attempt = 1
        self.deaths = 0
        self.tools_started: list[str] = []
        self.tools_open: dict[str, str] = {}
        """The names of the tools that run, by their calls."""
        self.questions_open: dict[str, float] = {}
        """Each with the moment (loop's clock) when its worker gives up waiting for an answer."""
        self.began_at = 0.0
        self.heard_at = 0.0
        self.last_event: str | None = None
        """The kind of the last message of its worker."""
        self.ending: HermesPoolError | Literal["cancelled"] | None = None
        """Why the turn is being ended before its reply; ``None`` while nobody wants that."""
        self.outcome: Reply | HermesPoolError | None = None
        """How it ended; ``None`` before."""
        self._host = host
        self._events: deque[wire.TurnEvent] | None = deque() if streams else None
        self._events_waiting_max = events_waiting_max
        self._bytes_waiting = 0
        self._waiters: tuple[asyncio.Future[None], ...] = ()
        self.lags = False
        """Whether more events wait than allowed: the worker is not read until they are consumed."""

    # --- the caller's side ---

    async def __aenter__(self) -> Self:
        """Hand the message over; the errors are those of ``HermesSessionManager.send`` up to here."""
        await self._host.begin(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancel what has not ended; the conversation is free again once its worker has confirmed or was replaced."""
        self._events = None
        self._consumed()
        self._host.cancel(self)

    def __aiter__(self) -> AsyncIterator[wire.TurnEvent]:
        """Iterate over the events, up to the end of the turn, whatever that is: ``reply`` tells."""
        return self

    async def __anext__(self) -> wire.TurnEvent:
        """Return the next event."""
        while self._events is not None:
            if self._events:
                event = self._events.popleft()
                self._bytes_waiting -= len(event.text) if type(event) is wire.TextDelta else _size(event)
                if self.lags:
                    self._consumed()
                return event
            if self.outcome is not None:
                break
            await self._change()
        raise StopAsyncIteration

    async def reply(self) -> Reply:
        """Wait for the end; return the reply or raise how it failed. Events that were not read are dropped."""
        self._events = None
        if self.lags:
            self._consumed()
        while self.outcome is None:
            await self._change()
        if type(self.outcome) is Reply:
            return self.outcome
        raise cast("HermesPoolError", self.outcome)

    async def cancel(self) -> Reply | None:
        """End the turn and wait until it has: the reply so far, or ``None`` if there was none to have.

        No-op for a turn that has ended. A cancelled waiter gives up waiting, and the turn is cancelled all the same.
        """
        self._host.cancel(self)
        self._events = None
        self._consumed()
        while self.outcome is None:
            await self._change()
        return self.outcome if isinstance(self.outcome, Reply) else None

    async def answer(self, question_id: str, text: str) -> None:
        """Answer a ``Question`` event of this turn; one that is over is left alone."""
        self._host.answer(self, question_id, text)

    # --- the session's side ---

    def push(self, event: wire.TurnEvent) -> None:
        """Hand an event to the caller, if the caller still listens."""
        events = self._events
        if events is None:
            return
        events.append(event)
        self._bytes_waiting += len(event.text) if type(event) is wire.TextDelta else _size(event)
        if len(events) >= self._events_waiting_max or self._bytes_waiting >= EVENT_BYTES_WAITING_MAX:
            self.lags = True
        if self._waiters:
            self._wake()

    def note_tool(self, call_id: str, name: str) -> None:
        """Remember a tool that has started."""
        if len(self.tools_started) < CALLS_KEPT:
            self.tools_started.append(name)
        if len(self.tools_open) < CALLS_KEPT:
            self.tools_open[call_id] = name

    def note_question(self, question_id: str, until: float) -> None:
        """Remember a question that waits for its answer until that moment of the loop's clock."""
        if len(self.questions_open) < CALLS_KEPT:
            self.questions_open[question_id] = until

    def settle(self, outcome: Reply | HermesPoolError) -> None:
        """End the turn; only the first call counts."""
        if self.outcome is None:
            self.outcome = outcome
            if self._waiters:
                self._wake()

    def _consumed(self) -> None:
        if self.lags and (
            self._events is None
            or (
                len(self._events) <= self._events_waiting_max // 2
                and self._bytes_waiting <= EVENT_BYTES_WAITING_MAX // 2
            )
        ):
            self.lags = False
            self._host.drained(self)

    def _change(self) -> "asyncio.Future[None]":
        """Return what is done at the next change. One that nobody awaits any more is forgotten with that change."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters = (*self._waiters, waiter)
        return waiter

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, ()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
