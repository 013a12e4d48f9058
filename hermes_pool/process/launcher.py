"""Starts worker processes, carries bytes to and from them, and tells of their end.

The one seam to the operating system: the rest of the pool asks a ``Launcher`` to launch, and a ``WorkerProcess`` to
write, to signal and to close; it hears of bytes and of the exit through a ``Listener``. Killing is an action here and
dying is an event: no method says "it is dead now".

Two launchers are here. ``SpawnLauncher`` (Linux) makes the pipes itself and watches the exit by a pidfd: no thread, no
polling, no race with a recycled pid. ``PortableLauncher`` is asyncio's own subprocess support, for everything else. The
third, which forks, is in ``zygote``.
"""

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Command:
    """A program to start. ``env`` is its whole environment."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: Path


@dataclass(frozen=True, slots=True)
class Exit:
    """How a process ended. ``returncode`` is its status; negative: the signal; ``None``: nobody can know any more."""

    returncode: int | None

    def __str__(self) -> str:
        """Say it in words."""
        if self.returncode is None:
            return "ended with a status that something else in this process has taken (unknown)"
        if self.returncode >= 0:
            return f"exited with status {self.returncode}"
        try:
            name = signal.Signals(-self.returncode).name
        except ValueError:
            name = "an unnamed signal"
        return f"was killed by {name} (signal {-self.returncode})"


class Listener(Protocol):
    """Who hears of a process. Called on the event loop's thread; ``exited`` comes exactly once."""

    def stdout_received(self, data: bytes | memoryview) -> bool:
        """Take the next bytes of the wire; say whether frames are large. Their memory is used again afterwards."""

    def stdout_ended(self) -> None:
        """Nothing more will come; the process may still live."""

    def stdin_ended(self) -> None:
        """Take note that nothing reaches it any more: it has closed its input; it may still live."""

    def stderr_received(self, data: bytes | memoryview) -> None:
        """Take the next bytes of its log. Their memory is used again afterwards."""

    def exited(self, status: Exit) -> None:
        """Take note of the end of the process; bytes that it wrote before may still come."""


class WorkerProcess(Protocol):
    """A process that was started. Its identity is the pair of ``pid`` and ``create_time`` (seconds since the epoch)."""

    pid: int
    create_time: float

    def write(self, data: bytes | bytearray) -> None:
        """Send bytes; what the pipe does not take is copied and queued. Never raises: ``exited`` tells of the end."""

    def pause_reading(self) -> None:
        """Read no more of its stdout for now, which slows its writer down once the pipe is full."""

    def resume_reading(self) -> None:
        """Read on."""

    def send_signal(self, number: int) -> None:
        """Signal it, and nothing else that may have taken its pid; no-op when it has ended."""

    def close(self) -> None:
        """Let go of all pipes; the process, if it lives, sees the end of its input."""


class Launcher(Protocol):
    """Starts processes."""

    async def launch(self, command: Command, listener: Listener) -> WorkerProcess:
        """Start one; ``OSError`` when that is impossible."""

    async def close(self) -> None:
        """End what is kept for further launches; workers that run are left alone."""
