"""The events of one conversation in their order, for any number of watchers.

Each event has a ``seq``, which grows by one. The first one is the time at which the log was made, in milliseconds, so
that a number from an earlier process of the host is never mistaken for one of this log. The latest events are kept,
bounded in number and in bytes. A watcher that comes late, or is slow, goes on from a snapshot of the running turn. It
never slows the worker down.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from time import time

from hermes_pool.conversation.events import ConversationEvent, EventsMissed, TurnSnapshot

EVENTS_KEPT = 2048
"""How many events of a conversation are kept at most."""
EVENT_BYTES_KEPT = 512 * 1024
"""How many bytes of text those may hold, approximately."""


class EventLog:
    """The latest events of one conversation. ``snapshot`` returns the running turn as it stands."""

    def __init__(self, snapshot: Callable[[], TurnSnapshot | None]) -> None:
        self._snapshot = snapshot
        self._events: deque[tuple[ConversationEvent, int]] = deque()
        self._bytes = 0
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

    def append(self, event: ConversationEvent, size: int = 0) -> None:
        """Append an event of about ``size`` bytes, and drop the oldest ones over the limits."""
        events = self._events
        events.append((event, size))
        self.last_seq += 1
        self._bytes += size
        while len(events) > EVENTS_KEPT or (self._bytes > EVENT_BYTES_KEPT and len(events) > 1):
            self._bytes -= events.popleft()[1]
        if self._waiters:
            self._wake()

    def close(self) -> None:
        """End all watching, once each watcher has had what is there."""
        self._closed = True
        self._wake()

    async def watch(self, after: int | None = None) -> AsyncGenerator[tuple[int, ConversationEvent], None]:
        """Yield ``(seq, event)`` of all events after number ``after``, and of those to come.

        ``None``: from the beginning of the running turn, or from now on if none runs.
        """
        at = (self.turn_seq or self.last_seq) if after is None else after
        self.watchers += 1
        if self.watchers == 1 and self.watched is not None:
            self.watched()
        try:
            while True:
                first = self.last_seq - len(self._events) + 1
                if at > self.last_seq or at < first - 1:
                    known = self._origin <= at <= self.last_seq
                    missed = self.last_seq - at if known else None
                    at = self.last_seq
                    yield at, EventsMissed(count=missed, snapshot=self._snapshot())
                    continue
                if at < self.last_seq:
                    event = self._events[at - first + 1][0]
                    at += 1
                    yield at, event
                    continue
                if self._closed:
                    return
                await self._change()
        finally:
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
