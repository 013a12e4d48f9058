"""Keeps workers ready for conversations to come.

A spare is used once and never goes back: nothing of one conversation can be seen by another. It is a gift to the next
caller and nothing that anybody waits for: while memory is short, or when they cannot be started, there are none.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any

from hermes_pool.errors import HermesPoolError
from hermes_pool.process.connection import ConnectionListener, WorkerConnection
from hermes_pool.process.death import Death
from hermes_pool.snapshot import SessionSnapshot
from hermes_pool.system import processes
from hermes_pool.system.file_stamps import Stamps, stamps_of
from hermes_pool.system.threads import in_thread
from hermes_pool_worker import wire

MEMORY_FREE_LEAST = 0.1
"""Share of the machine's memory that must be available for another spare to be started."""
REFILL_AFTER_S = 1.0
"""How long after a spare was taken its successor is started: first the conversation that took it has its turn."""
RETRY_AFTER_S = 30.0
"""How long none is started after one could not be."""


@dataclass(frozen=True)
class Spare:
    """A prepared worker, and the state of the files that went into it."""

    connection: WorkerConnection
    watched: tuple[str, ...]
    stamps: Stamps

    def fresh(self) -> bool:
        """Whether it lives, and would be made the same way now."""
        return self.connection.death is None and stamps_of(self.watched) == self.stamps


class Spares:
    """The spare workers of one pool: ``wanted`` of them, started one after the other in the background."""

    def __init__(
        self,
        wanted: int,
        start: Callable[[ConnectionListener], Awaitable[tuple[WorkerConnection, Sequence[str]]]],
        log: Any,
    ) -> None:
        self._wanted = wanted
        self._start = start
        self._log = log
        self._ready: deque[Spare] = deque()
        self._filling: asyncio.Task[None] | None = None
        self._refilling: asyncio.TimerHandle | None = None
        self._leaving: set[asyncio.Task[Any]] = set()
        self._retry_at = 0.0

    def take(self) -> WorkerConnection | None:
        """Return a spare for good, or ``None`` where there is none; another one is started in its place."""
        while self._ready:
            spare = self._ready.popleft()
            if spare.fresh():
                self._refill_soon()
                return spare.connection
            self._let_go(spare.connection, "it is stale")
        self._refill_soon()
        return None

    def refill(self) -> None:
        """See that spares are being started, if some are missing and there is reason to hope."""
        if self._filling is None and len(self._ready) < self._wanted and monotonic() >= self._retry_at:
            self._filling = asyncio.get_running_loop().create_task(self._fill())

    def _refill_soon(self) -> None:
        if self._wanted and self._refilling is None:
            self._refilling = asyncio.get_running_loop().call_later(REFILL_AFTER_S, self._refill_now)

    def _refill_now(self) -> None:
        self._refilling = None
        self.refill()

    async def close(self) -> None:
        """Start no more, and end those that are ready."""
        self._wanted = 0
        if self._refilling is not None:
            self._refilling.cancel()
        if self._filling is not None:
            self._filling.cancel()
            await asyncio.wait({self._filling})
        while self._ready:
            self._let_go(self._ready.popleft().connection, "the pool is closing")
        if self._leaving:
            await asyncio.wait(self._leaving)

    def snapshots(self) -> list[SessionSnapshot]:
        """Return what ``ps`` shows of them."""
        return [
            SessionSnapshot(
                conversation_id="",
                state="spare",
                pid=spare.connection.process.pid,
                create_time=spare.connection.process.create_time,
                uptime_s=monotonic() - spare.connection.started_at,
            )
            for spare in self._ready
            if spare.connection.process is not None
        ]

    async def _fill(self) -> None:
        try:
            while len(self._ready) < self._wanted:
                if await in_thread(processes.memory_available) < MEMORY_FREE_LEAST:
                    self._log.info("spares_paused", reason="memory is short")
                    self._retry_at = monotonic() + RETRY_AFTER_S
                    return
                connection, watched = await self._start(self)
                self._ready.append(Spare(connection, tuple(watched), stamps_of(watched)))
        except HermesPoolError as error:
            self._log.warning("spare_failed", error=str(error))
            self._retry_at = monotonic() + RETRY_AFTER_S
        finally:
            self._filling = None

    def _let_go(self, connection: WorkerConnection, why: str) -> None:
        task = asyncio.get_running_loop().create_task(connection.kill(why))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    # --- connection.ConnectionListener ---

    def connection_begun(self, connection: WorkerConnection) -> None:
        """Do nothing: it counts when it is ready."""

    def connection_heard(self, frame: wire.TurnFrame) -> bool:
        """Refuse it: a spare has no turns."""
        return False

    def connection_background(self, frame: wire.BackgroundFrame) -> bool:
        """Refuse it: a spare has no work."""
        return False

    def connection_said(self, line: str) -> None:
        """Pass a line of its stderr on to the log."""
        self._log.info("worker_stderr", line=line)

    def connection_died(self, connection: WorkerConnection, death: Death) -> None:
        """Forget a spare that has died."""
        self._ready = deque(spare for spare in self._ready if spare.connection is not connection)
        if not death.wanted:
            self._log.warning("spare_died", exit=str(death))
            self._retry_at = max(self._retry_at, monotonic() + 1.0)  # not in a circle
