"""Keeps prepared workers ready for new conversations.

A spare is used once and never returned, so that nothing of one conversation is visible to another. Spares make a start
faster, but no start waits for one: there are none while memory is short or while they fail to start.
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
from hermes_pool.system.file_stamps import FileStamps, stamps_of
from hermes_pool.system.threads import in_thread
from hermes_pool_worker import wire

MEMORY_FREE_MIN = 0.1
"""Share of the machine's memory that must be available before another spare is started."""
REFILL_AFTER_S = 1.0
"""How long to wait before a taken spare is replaced: the conversation that took it comes first."""
RETRY_AFTER_S = 30.0
"""How long no spare is started after one failed to start, or while memory is short."""


@dataclass(frozen=True)
class Spare:
    """A prepared worker, and the stamps of the files that it was made from."""

    connection: WorkerConnection
    watched: tuple[str, ...]
    stamps: FileStamps

    def fresh(self) -> bool:
        """Return whether it is alive and none of its files has changed."""
        return self.connection.death is None and stamps_of(self.watched) == self.stamps


class Spares:
    """The spare workers of one pool: ``wanted`` of them, started one at a time in the background."""

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
        self._fill_task: asyncio.Task[None] | None = None
        self._refill_timer: asyncio.TimerHandle | None = None
        self._ending: set[asyncio.Task[Any]] = set()
        self._retry_at = 0.0

    def take(self) -> WorkerConnection | None:
        """Hand over a spare for good, or return ``None`` if none is ready. A replacement is started soon."""
        while self._ready:
            spare = self._ready.popleft()
            if spare.fresh():
                self._schedule_refill()
                return spare.connection
            self._discard(spare.connection, "was stale")
        self._schedule_refill()
        return None

    def refill(self) -> None:
        """Begin to start the spares that are missing, unless a failure was too recent."""
        if self._fill_task is None and len(self._ready) < self._wanted and monotonic() >= self._retry_at:
            self._fill_task = asyncio.get_running_loop().create_task(self._fill())

    def _schedule_refill(self) -> None:
        if self._wanted and self._refill_timer is None:
            self._refill_timer = asyncio.get_running_loop().call_later(REFILL_AFTER_S, self._refill_due)

    def _refill_due(self) -> None:
        self._refill_timer = None
        self.refill()

    async def close(self) -> None:
        """End the spares that are ready, and start no more."""
        self._wanted = 0
        if self._refill_timer is not None:
            self._refill_timer.cancel()
        if self._fill_task is not None:
            self._fill_task.cancel()
            await asyncio.wait({self._fill_task})
        while self._ready:
            self._discard(self._ready.popleft().connection, "was a spare when the pool closed")
        if self._ending:
            await asyncio.wait(self._ending)

    def snapshots(self) -> list[SessionSnapshot]:
        """Return the rows that ``ps`` shows for them."""
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
                if await in_thread(processes.memory_available) < MEMORY_FREE_MIN:
                    self._log.info("spares_paused", reason="memory is short")
                    self._retry_at = monotonic() + RETRY_AFTER_S
                    return
                connection, watched = await self._start(self)
                self._ready.append(Spare(connection, tuple(watched), stamps_of(watched)))
        except HermesPoolError as error:
            self._log.warning("spare_failed", error=str(error))
            self._retry_at = monotonic() + RETRY_AFTER_S
        finally:
            self._fill_task = None

    def _discard(self, connection: WorkerConnection, reason: str) -> None:
        task = asyncio.get_running_loop().create_task(connection.kill(reason))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    # --- connection.ConnectionListener ---

    def connection_begun(self, connection: WorkerConnection) -> None:
        """Do nothing: a spare counts once it is ready."""

    def connection_heard(self, frame: wire.TurnFrame) -> bool:
        """Refuse it: a spare has no turns."""
        return False

    def connection_heard_texts(self, frames: Sequence[wire.FromWorker]) -> int:
        """Take none: a spare has no turns."""
        return 0

    def connection_background(self, frame: wire.BackgroundFrame) -> bool:
        """Refuse it: a spare has no background jobs."""
        return False

    def connection_stderr(self, line: str) -> None:
        """Log a line of its stderr."""
        self._log.info("worker_stderr", line=line)

    def connection_died(self, connection: WorkerConnection, death: Death) -> None:
        """Remove a spare that has died."""
        self._ready = deque(spare for spare in self._ready if spare.connection is not connection)
        if not death.wanted:
            self._log.warning("spare_died", exit=str(death))
            # Spares that die at once must not be replaced in a tight loop.
            self._retry_at = max(self._retry_at, monotonic() + 1.0)
