"""Starts workers by forking them from a zygote: a process that has already imported everything they need.

When the zygote dies, its workers live on and the next launch starts a new one. When a file that the zygote has read
changes, a successor is started and takes over once it is ready. Whenever no zygote can fork, the worker is spawned
instead, and the log says why.

A zygote first lets the agent preload what it wants to share, and then imports what workers were seen to need (see
``preload``).
"""

import asyncio
import errno
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hermes_pool.process.launcher import Command, ProcessListener, WorkerProcess
from hermes_pool.process.preload import PreloadList
from hermes_pool.process.spawn import SpawnLauncher
from hermes_pool.process.zygote import NotForkedError, Zygote
from hermes_pool_worker import wire
from hermes_pool_worker.contract import ZYGOTE_OPTION

RETRY_AFTER_S = 30.0
"""How long workers are spawned, after a zygote could not be started, before another one is tried."""
MODULES_WORTH_IT = 10
"""A zygote is replaced when a worker had to import at least this many new modules itself."""


class ZygoteLauncher:
    """Forks workers if possible and spawns them if not. One zygote serves at a time; a successor may be warming up."""

    def __init__(
        self,
        command: Command,
        options: Mapping[str, Any],
        preload_dir: Path,
        ready_timeout_s: float,
        log: Any,
        *,
        lifeline: Callable[[], int | None] = lambda: None,
        on_exit_without_zygote: Callable[[WorkerProcess], None] = lambda _worker: None,
    ) -> None:
        """Start nothing yet.

        ``command`` starts a plain worker; the zygote has the same interpreter, agent and environment. ``options`` are
        the agent's. ``lifeline`` returns the descriptor that each process inherits, so that it dies with the
        supervisor. ``on_exit_without_zygote`` is called for each worker that outlived its zygote and has now ended:
        the zygote would have ended what the worker left in its session.
        """
        interpreter, flag, program, *arguments = command.argv
        self._command = Command((interpreter, flag, program, ZYGOTE_OPTION, *arguments), command.env, command.cwd)
        self._options = dict(options)
        self._ready_timeout_s = ready_timeout_s
        self._preload = PreloadList(preload_dir, command.argv)
        self._log = log
        self._lifeline = lifeline
        self._on_exit_without_zygote = on_exit_without_zygote
        self._spawn = SpawnLauncher(lifeline)
        self._serving: Zygote | None = None
        self._warming: asyncio.Task[Zygote] | None = None
        self._retry_at = 0.0
        self._closed = False

    def warm_up(self) -> None:
        """Begin to start a zygote, unless one is being started already."""
        if self._warming is None and not self._closed:
            self._warming = asyncio.get_running_loop().create_task(self._start())
            self._warming.add_done_callback(self._started)

    async def launch(self, command: Command, listener: ProcessListener) -> WorkerProcess:
        """Fork a worker, or spawn it if that fails. Raises ``OSError`` if neither is possible."""
        if not command.cwd.is_dir():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(command.cwd))
        try:
            zygote = await self._ready()
            return await zygote.fork(command, listener)
        except NotForkedError as error:
            self._log.warning("spawned_instead", reason=str(error))
            return await self._spawn.launch(command, listener)

    async def close(self) -> None:
        """End the zygotes. Their workers live on."""
        self._closed = True
        if self._warming is not None:
            self._warming.cancel()
            await asyncio.wait({self._warming})
        if self._serving is not None:
            await self._serving.close()

    def learn(self, modules: Sequence[str]) -> None:
        """Remember what a worker had to import itself; replace the zygote if a new one would save much."""
        if self._preload.add(modules) >= MODULES_WORTH_IT:
            self.warm_up()

    @property
    def pid(self) -> int | None:
        """Pid of the zygote that serves; ``None`` if there is none."""
        return None if self._serving is None or self._serving.gone else self._serving.pid

    async def _ready(self) -> Zygote:
        serving = self._serving
        if serving is not None and not serving.gone:
            if serving.stale():
                self.warm_up()  # and fork from this one until its successor is ready
            return serving
        if asyncio.get_running_loop().time() < self._retry_at:
            raise NotForkedError("the last zygote could not be started")
        self.warm_up()
        assert self._warming is not None  # noqa: S101 - for the type checker: it was just set
        await asyncio.wait({self._warming})
        if self._serving is None or self._serving.gone:
            raise NotForkedError("the zygote could not be started")
        return self._serving

    async def _start(self) -> Zygote:
        self._preload.load()
        zygote = Zygote(self._log, self._lifeline, self._on_exit_without_zygote)
        try:
            async with asyncio.timeout(self._ready_timeout_s):
                await zygote.start(self._command, wire.Preload(self._preload.names(), self._options))
        except TimeoutError:
            await zygote.close()
            raise NotForkedError(f"the zygote was not ready within {self._ready_timeout_s:g} s") from None
        except BaseException:
            await zygote.close()
            raise
        return zygote

    def _started(self, task: "asyncio.Task[Zygote]") -> None:
        self._warming = None
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            self._retry_at = asyncio.get_running_loop().time() + RETRY_AFTER_S
            self._log.warning("zygote_failed", error=str(error))
            return
        predecessor, self._serving = self._serving, task.result()
        self._log.info("zygote_ready", pid=self._serving.pid, modules=self._serving.modules)
        if predecessor is not None:
            predecessor.retire()
