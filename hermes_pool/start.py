"""Starts a worker for a session: what is run, in which environment, and what happens when that fails."""

import asyncio
import secrets
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import hermes_pool_worker
from hermes_pool.environment import worker_environment
from hermes_pool.errors import WorkerStartError
from hermes_pool.health import MARKER_VARIABLE
from hermes_pool.link import WorkerLink
from hermes_pool.process import Command, Launcher
from hermes_pool.settings import PoolSettings
from hermes_pool_worker import wire

LAUNCHES_MAX = 2
"""How many workers one start may try: a start that failed once may have had bad luck, twice has a reason."""
WORKER_PROGRAM = Path(hermes_pool_worker.__file__).with_name("__main__.py")


class Starter:
    """Starts the workers of one pool."""

    def __init__(self, settings: PoolSettings, launcher: Launcher, host_environment: Mapping[str, str]) -> None:
        self._settings = settings
        self._launcher = launcher
        self._host_environment = host_environment
        pool = secrets.token_hex(8)
        self._markers = (f"{pool}-{number}" for number in count(1))

    async def start(
        self, request: wire.Open, new_link: Callable[[str], WorkerLink], on_failure: Callable[[WorkerStartError], None]
    ) -> WorkerLink:
        """Return a worker that has opened ``request``, within ``start_timeout_s`` and two launches.

        ``new_link`` makes the link of each launch from the marker of its process; ``on_failure`` hears of those that
        failed. Raises ``WorkerStartError``, and ``WorkerUnusableError`` at once where a second try is useless.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._settings.start_timeout_s
        for tries_left in reversed(range(LAUNCHES_MAX)):
            marker = next(self._markers)
            link = new_link(marker)
            try:
                await link.start(self._launcher, self._command(marker), request, deadline)
            except WorkerStartError as error:
                on_failure(error)
                if not tries_left or not error.retryable or loop.time() >= deadline:
                    raise
            else:
                if link.death is None:
                    return link
        raise WorkerStartError("the worker died as soon as it was ready", step="open")

    def request(self, conversation_id: str, **session: Any) -> wire.Open:
        """Return the request that opens a session of this pool's agent."""
        settings = self._settings
        return wire.Open(
            conversation_id,
            options=dict(settings.agent_options),
            data_dir=str(settings.state_dir / "agents" / settings.agent.replace(":", "_")),
            **session,
        )

    def _command(self, marker: str) -> Command:
        settings = self._settings
        cwd = settings.worker_cwd
        if cwd is None:
            cwd = settings.state_dir / "workspace"
            cwd.mkdir(parents=True, exist_ok=True)
        return Command(
            argv=(
                settings.worker_python, "-P", str(WORKER_PROGRAM), settings.agent, str(settings.frame_bytes_max),
                *settings.agent_paths,
            ),
            env={**worker_environment(settings, self._host_environment), MARKER_VARIABLE: marker},
            cwd=cwd,
        )  # fmt: skip
