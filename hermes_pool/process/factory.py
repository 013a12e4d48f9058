"""Starts workers for sessions: what is run, in which environment, and what happens when a start fails."""

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
from hermes_pool.process.pidfd import HAS_PIDFD
from hermes_pool.process.portable import PortableLauncher
from hermes_pool.process.spares import Spares
from hermes_pool.process.spawn import SpawnLauncher
from hermes_pool.process.zygote_launcher import ZygoteLauncher
from hermes_pool.settings import PoolSettings
from hermes_pool.system.file_stamps import stamps_of
from hermes_pool.system.state_dir import WORKSPACE, lock_file_of
from hermes_pool.system.threads import in_thread
from hermes_pool_worker import wire
from hermes_pool_worker.contract import GUARDIAN, GUARDIAN_OPTION, MARKER_VARIABLE, ZYGOTE, marker

LAUNCHES_MAX = 2
"""How many workers one start may launch: one failure may be bad luck, two have a reason."""
LAUNCHES_PER_CPU = 2
"""How many processes per CPU may be between their launch and their hello at the same time."""
GATE_S = 0.5
"""How long a process counts against ``LAUNCHES_PER_CPU`` at most."""
WORKER_PROGRAM = Path(hermes_pool_worker.__file__).with_name("__main__.py")


class WorkerFactory:
    """Starts the workers of one pool, and owns what that takes: the launcher, the spares, the lifeline, the breaker."""

    def __init__(self, settings: PoolSettings, host_environment: Mapping[str, str], log: Any) -> None:
        self._settings = settings
        self._environment = worker_environment(settings, host_environment)
        self._cwd = settings.worker_cwd or settings.state_dir / WORKSPACE
        self._data_dir = str(settings.state_dir / "agents" / settings.agent.replace(":", "_"))
        self._log = log
        self._pool_id = secrets.token_hex(8)
        self._markers = (marker(self._pool_id, number) for number in count(1))
        self._orphans = Orphans(settings.state_dir, self._pool_id, log)
        self._sweeps: set[asyncio.Task[None]] = set()
        self._lifeline = Lifeline(
            # The host's own interpreter: the one of the workers may be of any kind.
            (sys.executable, "-I", "-S", str(WORKER_PROGRAM), GUARDIAN_OPTION, self._pool_id),
            {MARKER_VARIABLE: marker(self._pool_id, GUARDIAN)},
            log,
        )
        self._launcher = self._choose_launcher(log)
        self._launch_gate = asyncio.Semaphore(LAUNCHES_PER_CPU * (os.cpu_count() or 1))
        self.breaker = StartBreaker(
            settings.starts, monotonic, random.random, self._dependencies, start_timeout_s=settings.timeouts.start_s
        )
        self.spares = Spares(settings.spares, self._start_spare, log)

    def _choose_launcher(self, log: Any) -> Launcher:
        settings = self._settings
        if settings.launcher == "portable" or not HAS_PIDFD:
            return PortableLauncher()
        if settings.launcher == "spawn":
            return SpawnLauncher(self._lifeline.inherit)
        return ZygoteLauncher(
            self._command(**{MARKER_VARIABLE: marker(self._pool_id, ZYGOTE)}),
            settings.agent_options,
            settings.state_dir / "preload",
            settings.timeouts.start_s / 2,  # so that the same start still has time to spawn
            log,
            lifeline=self._lifeline.inherit,
            on_exit_without_zygote=self._end_session,
        )

    def warm_up(self) -> None:
        """Record this process as the owner of the pool, sweep up orphans, and prepare for quick starts.

        Returns at once; the sweep, the zygote and the spares go on in the background.
        """
        self._orphans.record()
        self._in_background(self._orphans.sweep)
        if isinstance(self._launcher, ZygoteLauncher):
            self._launcher.warm_up()
        self.spares.refill()

    async def close(self) -> None:
        """End what is kept for starts, and everything else that is left of the pool's processes."""
        await self.spares.close()
        await self._launcher.close()
        await self._lifeline.close()
        if self._sweeps:
            await asyncio.wait(self._sweeps)
        self._orphans.forget()

    def _end_session(self, worker: WorkerProcess) -> None:
        self._in_background(partial(end_session, worker.pid, worker.create_time, self._pool_id))

    def _in_background(self, work: Callable[[], object]) -> None:
        async def run() -> None:
            try:
                await in_thread(work)
            except OSError as error:
                self._log.warning("orphan_sweep_failed", error=str(error))

        task = asyncio.get_running_loop().create_task(run())
        self._sweeps.add(task)
        task.add_done_callback(self._sweeps.discard)

    def _learn_preload(self, modules: Sequence[str]) -> None:
        if isinstance(self._launcher, ZygoteLauncher):
            self._launcher.learn(modules)

    def _dependencies(self) -> object:
        """Return the state of the files that a start depends on. If it changes, a failure may have been fixed."""
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
        """Return a worker that has opened a session, within ``timeouts.start_s``: a spare or a newly launched one.

        ``request`` returns the session to open. It may be slow (it reads the database), so the process is started at
        the same time. At most ``LAUNCHES_MAX`` workers are launched; ``on_failure`` is called for each one that fails.
        Raises ``WorkerStartError``; at once, as ``WorkerUnusableError``, if another launch is useless. Raises what
        ``request`` raises.
        """
        deadline = asyncio.get_running_loop().time() + self._settings.timeouts.start_s
        request_future = asyncio.ensure_future(request)
        try:
            with self.breaker.start(conversation_id):
                return await self._start(request_future, listener, on_failure, deadline)
        finally:
            # Await nothing after a success: if the worker died meanwhile, the caller would not hear of it.
            if not request_future.done():
                request_future.cancel()
                await asyncio.wait({request_future})
            if not request_future.cancelled():
                request_future.exception()  # mark it as retrieved, even if the launch failed first

    async def _start(
        self,
        request_future: "asyncio.Future[wire.Open]",
        listener: ConnectionListener,
        on_failure: Callable[[WorkerStartError], None],
        deadline: float,
    ) -> WorkerConnection:
        if (spare := self.spares.take()) is not None:
            spare.listener = listener
            listener.connection_begun(spare)
            try:
                await spare.open(request_future, deadline)
            except WorkerStartError as error:
                on_failure(error)
            else:
                if spare.death is None:
                    return spare
        for launches_left in reversed(range(LAUNCHES_MAX)):
            connection = self._new_connection(listener)
            try:
                await self._launch(connection, deadline)
                await connection.open(request_future, deadline)
            except WorkerStartError as error:
                on_failure(error)
                if not launches_left or not error.retryable or asyncio.get_running_loop().time() >= deadline:
                    raise
            else:
                if connection.death is None:
                    return connection
        raise WorkerStartError("the worker died as soon as it was ready", step="open")

    async def _start_spare(self, listener: ConnectionListener) -> tuple[WorkerConnection, list[str]]:
        """Return a prepared worker, and the files that make it stale when they change."""
        deadline = asyncio.get_running_loop().time() + self._settings.timeouts.start_s
        connection = self._new_connection(listener)
        await self._launch(connection, deadline)
        prepared = await connection.prepare(wire.Prepare(dict(self._settings.agent_options), self._data_dir), deadline)
        return connection, prepared.watched

    async def _launch(self, connection: WorkerConnection, deadline: float) -> None:
        """Launch a process and wait for its hello. Only a few do so at a time: more would starve the event loop.

        A slow one stops counting after ``GATE_S``, so that a worker that hangs does not hold up the next.
        """
        loop = asyncio.get_running_loop()
        await self._launch_gate.acquire()
        leaves_gate = loop.call_later(GATE_S, self._launch_gate.release)
        try:
            await connection.launch(self._launcher, self._command(**{MARKER_VARIABLE: connection.marker}), deadline)
        finally:
            if leaves_gate.when() > loop.time():
                leaves_gate.cancel()
                self._launch_gate.release()

    def _new_connection(self, listener: ConnectionListener) -> WorkerConnection:
        connection = WorkerConnection(
            next(self._markers),
            listener,
            frame_bytes_max=self._settings.frame_bytes_max,
            on_imported=self._learn_preload,
        )
        listener.connection_begun(connection)
        return connection

    def request(self, conversation_id: str, **session: Any) -> wire.Open:
        """Return the request that opens a session of this pool's agent."""
        settings = self._settings
        lock_file = None
        if settings.cluster != "alone":
            lock_file = str(lock_file_of(settings.state_dir, conversation_id, session.get("user_id")))
        return wire.Open(
            conversation_id,
            lock_file=lock_file,
            options=dict(settings.agent_options),
            data_dir=self._data_dir,
            question_timeout_s=settings.timeouts.question_s,
            safe_tools=list(settings.safe_tools),
            **session,
        )

    def _command(self, **variables: str) -> Command:
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
            env={**self._environment, **variables},
            cwd=self._cwd,
        )
