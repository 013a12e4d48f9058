"""The events of one conversation in their order, for any number of watchers.

Each event has a ``seq``, which grows by one. The first one is the time at which the log was made, in milliseconds, so
that a number from an earlier process of the host is never mistaken for one of this log. The latest events are kept,
bounded in number and in bytes. A watcher that comes late, or is slow, goes on from a snapshot of the running turn. It
never slows the worker down.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from time import time
from typing import Any, NoReturn

from hermes_pool.conversation.events import ConversationEvent, EventsMissed, TurnSnapshot

EVENTS_KEPT = 2048
"""How many events of a conversation are kept at most."""
EVENT_BYTES_KEPT = 512 * 1024
"""How many bytes of text those may hold, approximately. Where there is more, half of that is kept."""


class EventLog:
    """The latest events of one conversation. ``snapshot`` returns the running turn as it stands."""

    def __init__(self, snapshot: Callable[[], TurnSnapshot | None]) -> None:
        self._snapshot = snapshot
        self._events: deque[ConversationEvent] = deque(maxlen=EVENTS_KEPT)
        self._sizes: deque[int] = deque(maxlen=EVENTS_KEPT)
        self._bytes = 0
        """How many bytes there were when that was counted last, and how many have come since."""
        self.last_seq = self._origin = int(time() * 1000)
        """The number of the latest event."""
        self.turn_seq: int | None = None
        """The number before the first event of the running turn; ``None`` if none runs."""
        self.watchers = 0
        """How many follow the conversation now."""
        self.watched: Callable[[], None] | None = None
        """Called when the first watcher comes or the last one goes."""
        self._waiters: list[asyncio.Future[None]] = []
        self._closed = False

    def append(self, event: ConversationEvent, size: int) -> None:
        """Append an event with about ``size`` bytes of text; the oldest ones over the limits go."""
        self._events.append(event)
        self._sizes.append(size)
        self.last_seq += 1
        self._bytes += size
        if self._bytes > EVENT_BYTES_KEPT:
            self._trim()
        if self._waiters:
            self._wake()

    def extend(self, events: Sequence[ConversationEvent], sizes: Sequence[int], size: int) -> None:
        """Append many events at once: about so many bytes of text each, ``size`` in all."""
        self._events += events
        self._sizes += sizes
        self.last_seq += len(events)
        self._bytes += size
        if self._bytes > EVENT_BYTES_KEPT:
            self._trim()
        if self._waiters:
            self._wake()

    def _trim(self) -> None:
        """Drop the oldest events over half of the bytes, so that this is not needed again soon."""
        events, sizes = self._events, self._sizes
        held = sum(sizes)
        while held > EVENT_BYTES_KEPT // 2 and len(events) > 1:
            events.popleft()
            held -= sizes.popleft()
        self._bytes = held

    def close(self) -> None:
        """End all watching, once each watcher has had what is there."""
        self._closed = True
        self._wake()

    def watch(self, after: int | None = None) -> "Watcher":
        """Return an iterator over ``(seq, event)`` of all events after number ``after``, and of those to come.

        ``None``: from the beginning of the running turn, or from now on if none runs.
        """
        return Watcher(self, after)

    def _came(self) -> None:
        self.watchers += 1
        if self.watchers == 1 and self.watched is not None:
            self.watched()

    def _went(self) -> None:
        self.watchers -= 1
        if not self.watchers and self.watched is not None:
            self.watched()

    def _change(self) -> "asyncio.Future[None]":
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        return waiter

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


class Watcher(AsyncGenerator[tuple[int, ConversationEvent], None]):
    """Somebody who watches a conversation: see ``EventLog.watch``. Counts from its first event until it is closed.

    It is a class and not a generator function because this is on the path of every event: a generator costs more.
    """

    __slots__ = ("_at", "_is_closed", "_is_here", "_log")

    def __init__(self, log: EventLog, after: int | None) -> None:
        self._log = log
        self._at = after
        self._is_here = self._is_closed = False

    async def __anext__(self) -> tuple[int, ConversationEvent]:
        """Return the next event and its number."""
        log = self._log
        if not self._is_here:
            if self._is_closed:
                raise StopAsyncIteration
            self._is_here = True
            if self._at is None:
                self._at = log.turn_seq or log.last_seq
            log._came()  # noqa: SLF001 - two halves of one thing
        at: int = self._at  # type: ignore[assignment]  # known since the first event
        while at == log.last_seq:
            if log._closed:  # noqa: SLF001
                await self.aclose()
                raise StopAsyncIteration
            await log._change()  # noqa: SLF001
        events = log._events  # noqa: SLF001
        first = log.last_seq - len(events) + 1
        if first - 1 <= at < log.last_seq:
            self._at = at + 1
            return at + 1, events[at - first + 1]
        known = log._origin <= at <= log.last_seq  # noqa: SLF001
        self._at = log.last_seq
        missed = log.last_seq - at if known else None
        return log.last_seq, EventsMissed(count=missed, snapshot=log._snapshot())  # noqa: SLF001

    async def asend(self, _value: None) -> tuple[int, ConversationEvent]:
        """Return the next event and its number: there is nothing to send."""
        return await anext(self)

    async def athrow(self, kind: Any, value: Any = None, trace: Any = None) -> NoReturn:
        """Stop watching, and raise the exception."""
        await self.aclose()
        raise kind if value is None else value

    async def aclose(self) -> None:
        """Stop watching. Leaving an ``async for`` early and forgetting the watcher does the same."""
        self._is_closed = True
        if self._is_here:
            self._is_here = False
            self._log._went()  # noqa: SLF001

    def __del__(self) -> None:
        """Stop watching: nobody can ask any more."""
        if self._is_here:
            self._is_here = False
            self._log._went()  # noqa: SLF001
