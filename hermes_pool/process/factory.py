"""Gets a worker for a session: what is run, in which environment, and what happens when that fails."""

import asyncio
import os
import random
import secrets
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from time import monotonic
from typing import Any

import hermes_pool_worker
from hermes_pool.errors import WorkerStartError
from hermes_pool.policy.breakers import StartBreaker
from hermes_pool.process.connection import ConnectionListener, WorkerConnection
from hermes_pool.process.environment import worker_environment
from hermes_pool.process.launcher import Command, Launcher, WorkerProcess
from hermes_pool.process.lifeline import Lifeline
from hermes_pool.process.orphans import Orphans, end_session
from hermes_pool.process.portable import PortableLauncher
from hermes_pool.process.spares import Spares
from hermes_pool.process.spawn import HAS_PIDFD, SpawnLauncher
from hermes_pool.process.zygote import ZygoteLauncher
from hermes_pool.settings import PoolSettings
from hermes_pool.system.file_stamps import stamps_of
from hermes_pool.system.state_dir import WORKSPACE
from hermes_pool.system.threads import in_thread
from hermes_pool_worker import wire
from hermes_pool_worker.contract import GUARDIAN, GUARDIAN_OPTION, MARKER_VARIABLE, ZYGOTE, marker

LAUNCHES_MAX = 2
"""How many workers one start may try: a start that failed once may have had bad luck, twice has a reason."""
LAUNCHES_PER_CPU = 2
"""How many processes for each CPU are on the way to their greeting at the same time."""
GATE_S = 0.5
"""How long such a process counts for that at most."""
WORKER_PROGRAM = Path(hermes_pool_worker.__file__).with_name("__main__.py")


class WorkerFactory:
    """Starts the workers of one pool."""

    def __init__(self, settings: PoolSettings, host_environment: Mapping[str, str], log: Any) -> None:
        self._settings = settings
        self._environment = worker_environment(settings, host_environment)
        self._cwd = settings.worker_cwd or settings.state_dir / WORKSPACE
        self._data_dir = str(settings.state_dir / "agents" / settings.agent.replace(":", "_"))
        self._log = log
        self._pool = secrets.token_hex(8)
        self._markers = (marker(self._pool, number) for number in count(1))
        self._orphans = Orphans(settings.state_dir, self._pool, log)
        self._sweeping: set[asyncio.Task[None]] = set()
        self._lifeline = Lifeline(
            # The host's own interpreter: that of the workers may be anything.
            (sys.executable, "-I", "-S", str(WORKER_PROGRAM), GUARDIAN_OPTION, self._pool),
            {MARKER_VARIABLE: marker(self._pool, GUARDIAN)},
            log,
        )
        self._launcher = self._choose_launcher(log)
        self._gate = asyncio.Semaphore(LAUNCHES_PER_CPU * (os.cpu_count() or 1))
        self.breaker = StartBreaker(
            settings.starts, monotonic, random.random, self._ground, start_timeout_s=settings.timeouts.start_s
        )
        self.spares = Spares(settings.spares, self._start_spare, log)

    def _choose_launcher(self, log: Any) -> Launcher:
        settings = self._settings
        if settings.launcher == "portable" or not HAS_PIDFD:
            return PortableLauncher()
        if settings.launcher == "spawn":
            return SpawnLauncher(self._lifeline.inherit)
        return ZygoteLauncher(
            self._command(**{MARKER_VARIABLE: marker(self._pool, ZYGOTE)}),
            settings.agent_options,
            settings.state_dir / "preload",
            settings.timeouts.start_s / 2,  # so that the same start may still go the other way
            log,
            lifeline=self._lifeline.inherit,
            on_widowed=self._end_session,
        )

    def warm_up(self) -> None:
        """Take ownership of the pool's processes, and begin with what makes the first starts quick."""
        self._orphans.record()
        self._in_background(self._orphans.sweep)
        if isinstance(self._launcher, ZygoteLauncher):
            self._launcher.warm_up()
        self.spares.refill()

    async def close(self) -> None:
        """End what was kept for further starts, and whatever else is left of the pool's processes."""
        await self.spares.close()
        await self._launcher.close()
        await self._lifeline.close()
        if self._sweeping:
            await asyncio.wait(self._sweeping)
        self._orphans.forget()

    def _end_session(self, worker: WorkerProcess) -> None:
        self._in_background(partial(end_session, worker.pid, worker.create_time, self._pool))

    def _in_background(self, work: Callable[[], object]) -> None:
        async def run() -> None:
            try:
                await in_thread(work)
            except OSError as error:
                self._log.warning("sweep_failed", error=str(error))

        task = asyncio.get_running_loop().create_task(run())
        self._sweeping.add(task)
        task.add_done_callback(self._sweeping.discard)

    def _learn(self, modules: Sequence[str]) -> None:
        if isinstance(self._launcher, ZygoteLauncher):
            self._launcher.learn(modules)

    def _ground(self) -> object:
        """Return what a start stands on, as far as files show it: has it changed, somebody has mended something."""
        settings = self._settings
        module, _, factory = settings.agent.partition(":")
        files = [f"{folder}/{module}.py" for folder in settings.agent_paths] if factory else []
        home = settings.hermes_home
        config = [str(home / name) for name in ("config.yaml", ".env")] if home is not None else []
        return (
            stamps_of([settings.worker_python, *settings.agent_paths, *files, *config]),
            os.access(settings.worker_python, os.X_OK),
            self._cwd.is_dir(),
        )

    async def start(
        self,
        conversation_id: str,
        request: Coroutine[Any, Any, wire.Open],
        listener: ConnectionListener,
        on_failure: Callable[[WorkerStartError], None],
    ) -> WorkerConnection:
        """Return a worker that has opened a session, within ``timeouts.start_s``: a spare, or up to two launches.

        ``request`` says which session; it may take its time (a database is asked), the process is started meanwhile.
        ``on_failure`` hears of each try that failed. Raises ``WorkerStartError``, ``WorkerUnusableError`` at once where
        a second try is useless, and what ``request`` raises.
        """
        deadline = asyncio.get_running_loop().time() + self._settings.timeouts.start_s
        asked = asyncio.ensure_future(request)
        try:
            with self.breaker.start(conversation_id):
                return await self._start(asked, listener, on_failure, deadline)
        finally:
            # Nothing is awaited after a success: a worker that died meanwhile would be nobody's, and its death unheard.
            if not asked.done():
                asked.cancel()
                await asyncio.wait({asked})
            if not asked.cancelled():
                asked.exception()  # seen, also where the launch has failed first

    async def _start(
        self,
        asked: "asyncio.Future[wire.Open]",
        listener: ConnectionListener,
        on_failure: Callable[[WorkerStartError], None],
        deadline: float,
    ) -> WorkerConnection:
        if (spare := self.spares.take()) is not None:
            spare.listener = listener
            listener.connection_begun(spare)
            try:
                await spare.open(asked, deadline)
            except WorkerStartError as error:
                on_failure(error)
            else:
                if spare.death is None:
                    return spare
        for tries_left in reversed(range(LAUNCHES_MAX)):
            connection = self._new_connection(listener)
            try:
                await self._launch(connection, deadline)
                await connection.open(asked, deadline)
            except WorkerStartError as error:
                on_failure(error)
                if not tries_left or not error.retryable or asyncio.get_running_loop().time() >= deadline:
                    raise
            else:
                if connection.death is None:
                    return connection
        raise WorkerStartError("the worker died as soon as it was ready", step="open")

    async def _start_spare(self, listener: ConnectionListener) -> tuple[WorkerConnection, list[str]]:
        """Return a worker that waits for a conversation, and the files that make it stale when they change."""
        deadline = asyncio.get_running_loop().time() + self._settings.timeouts.start_s
        connection = self._new_connection(listener)
        await self._launch(connection, deadline)
        prepared = await connection.prepare(wire.Prepare(dict(self._settings.agent_options), self._data_dir), deadline)
        return connection, prepared.watched

    async def _launch(self, connection: WorkerConnection, deadline: float) -> None:
        """Have a process started and greet, with few others at the same time: more would only starve the event loop.

        One that takes long gives its place to the next, so that no worker that hangs holds up another one.
        """
        loop = asyncio.get_running_loop()
        await self._gate.acquire()
        gives_way = loop.call_later(GATE_S, self._gate.release)
        try:
            await connection.launch(self._launcher, self._command(**{MARKER_VARIABLE: connection.marker}), deadline)
        finally:
            if gives_way.when() > loop.time():
                gives_way.cancel()
                self._gate.release()

    def _new_connection(self, listener: ConnectionListener) -> WorkerConnection:
        connection = WorkerConnection(
            next(self._markers),
            listener,
            frame_bytes_max=self._settings.frame_bytes_max,
            on_imported=self._learn,
        )
        listener.connection_begun(connection)
        return connection

    def request(self, conversation_id: str, **session: Any) -> wire.Open:
        """Return the request that opens a session of this pool's agent."""
        settings = self._settings
        return wire.Open(
            conversation_id,
            options=dict(settings.agent_options),
            data_dir=self._data_dir,
            question_timeout_s=settings.timeouts.question_s,
            **session,
        )

    def _command(self, **more: str) -> Command:
        settings = self._settings
        return Command(
            argv=(
                settings.worker_python,
                "-P",
                str(WORKER_PROGRAM),
                settings.agent,
                str(settings.frame_bytes_max),
                *settings.agent_paths,
            ),
            env={**self._environment, **more},
            cwd=self._cwd,
        )
