"""One turn as its session runs it: its state, what is known about it, and its events on the way to the caller.

The turn is passive. Its session feeds it from callbacks of the event loop, whether the caller listens or not, and
settles it exactly once. So a caller that is slow, gone or cancelled can block nothing but its own stream.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Literal

import msgspec

from hermes_pool.conversation.reply import Reply
from hermes_pool.errors import HermesPoolError
from hermes_pool.lifecycle import TURN, TurnChange, TurnState
from hermes_pool_worker import wire

CALLS_KEPT = 1000
"""How many tool calls, and open questions, of one turn are kept. A turn with more is an attack, or out of control."""
EVENTS_WAITING_MAX = 1024
"""How many events may wait for a slow consumer. At this number the pool stops reading, which slows the worker down."""
EVENT_BYTES_WAITING_MAX = 4 * 1024 * 1024
"""How many bytes those events may hold, approximately."""
_QUEUED, _SETTLED = TurnState.QUEUED, TurnChange.SETTLED  # looked up once: every turn uses them

Ending = HermesPoolError | Literal["cancelled"]
"""Why a turn was to end before its reply. An error is what its caller gets."""


class ActiveTurn:
    """One message on its way to a reply. It is also the stream of its events."""

    __slots__ = (
        "_bytes_waiting", "_drained", "_events", "_waiters", "attempt", "began_at", "deaths",
        "ending", "heard_at", "lags", "last_event", "outcome", "questions_open", "state", "streams", "text",
        "tools_open", "tools_started", "turn_id",
    )  # fmt: skip

    def __init__(
        self,
        turn_id: str,
        text: str,
        *,
        drained: Callable[["ActiveTurn"], None],
        streams: bool = True,
    ) -> None:
        self.turn_id = turn_id
        self.text = text
        self.streams = streams
        """Whether the caller wants the events."""
        self.state = _QUEUED
        self.attempt = 1
        self.deaths = 0
        """How many workers have died with it."""
        self.tools_started: list[str] = []
        """The names of its tools over all attempts, in the order in which they started."""
        self.tools_open: dict[str, str] = {}
        """The names of the running tools, by call id."""
        self.questions_open: dict[str, float] = {}
        """For each open question id, when the worker stops waiting for the answer, on the loop's clock."""
        self.began_at = 0.0
        """When a worker was first given it, on the loop's clock."""
        self.heard_at = 0.0
        """When its worker last made progress, as far as known, on the loop's clock."""
        self.last_event: str | None = None
        """The type of the last event from its worker."""
        self.ending: Ending | None = None
        self.outcome: Reply | HermesPoolError | None = None
        """How it ended; ``None`` until then."""
        self.lags = False
        """Whether too many events wait: nothing more is read from the worker until they are consumed."""
        self._drained = drained
        self._events: deque[wire.TurnEvent] | None = deque() if streams else None
        self._bytes_waiting = 0
        self._waiters: tuple[asyncio.Future[None], ...] = ()

    # --- the session's side ---

    def push(self, event: wire.TurnEvent) -> None:
        """Queue an event for the caller, if the caller still listens."""
        events = self._events
        if events is None:
            return
        events.append(event)
        self._bytes_waiting += len(event.text) if type(event) is wire.TextDelta else _size(event)
        if len(events) >= EVENTS_WAITING_MAX or self._bytes_waiting >= EVENT_BYTES_WAITING_MAX:
            self.lags = True
        if self._waiters:
            self._wake()

    def tool_started(self, call_id: str, name: str) -> None:
        """Record a tool. From here on the turn may have had effects."""
        if len(self.tools_started) < CALLS_KEPT:
            self.tools_started.append(name)
        if len(self.tools_open) < CALLS_KEPT:
            self.tools_open[call_id] = name

    def asked(self, question_id: str, until: float) -> None:
        """Record a question that waits for its answer until ``until``, on the loop's clock."""
        if len(self.questions_open) < CALLS_KEPT:
            self.questions_open[question_id] = until

    def worker_died(self) -> None:
        """Count the death, and forget what ended with the worker."""
        self.deaths += 1
        self.tools_open.clear()
        self.questions_open.clear()

    def settle(self, outcome: Reply | HermesPoolError) -> None:
        """End the turn with its outcome, once and for good."""
        self.state = TURN[self.state][_SETTLED]
        self.outcome = outcome
        if self._waiters:
            self._wake()

    # --- the caller's side ---

    def __aiter__(self) -> AsyncIterator[wire.TurnEvent]:
        """Iterate over the events until the turn ends."""
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

    async def settled(self) -> Reply | HermesPoolError:
        """Wait for the outcome and return it. Unread events are dropped."""
        self._events = None
        if self.lags:
            self._consumed()
        while self.outcome is None:
            await self._change()
        return self.outcome

    def drop_events(self) -> None:
        """Stop listening."""
        self._events = None
        if self.lags:
            self._consumed()

    def _consumed(self) -> None:
        events = self._events
        if events is None or (
            len(events) <= EVENTS_WAITING_MAX // 2 and self._bytes_waiting <= EVENT_BYTES_WAITING_MAX // 2
        ):
            self.lags = False
            self._drained(self)

    def _change(self) -> "asyncio.Future[None]":
        """Return a future that the next event or the outcome completes. It need not be awaited."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters = (*self._waiters, waiter)
        return waiter

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, ()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


def _size(event: wire.TurnEvent) -> int:
    """Return approximately how many bytes an event holds. Too slow for text deltas: there may be thousands."""
    return sum(len(value) for value in msgspec.structs.astuple(event) if isinstance(value, str | list))
