"""The seam to the operating system: how the pool starts worker processes, talks to them and learns that they ended.

The rest of the pool asks a ``Launcher`` to start a ``WorkerProcess``, writes to it, signals it and closes it. It hears
of bytes and of the exit through a ``ProcessListener``. Killing is an action and dying is an event, so no method here
claims that a process is dead.

Three launchers implement the interface: ``zygote_launcher`` forks workers from a warm process (Linux, the default),
``spawn`` starts each one afresh (Linux), and ``portable`` uses asyncio's subprocesses (everywhere else). The first two
share ``pipes``, which carries the bytes, and ``pidfd``, which watches for the exit.
"""

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hermes_pool_worker.plain import Plain


@dataclass(frozen=True, slots=True)
class Command:
    """A program to start. ``env`` is its entire environment; nothing is inherited from the host."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: Path


@dataclass(frozen=True, slots=True)
class Exit(Plain):
    """How a process ended.

    ``returncode`` is its exit status, or the negated number of the signal that killed it. ``None`` means that the
    status is lost: something other than the pool collected it.
    """

    returncode: int | None

    def __str__(self) -> str:
        """Describe it as a phrase that follows "the worker"."""
        if self.returncode is None:
            return "ended with an unknown status (something else in the host process collected it)"
        if self.returncode >= 0:
            return f"exited with status {self.returncode}"
        try:
            name = signal.Signals(-self.returncode).name
        except ValueError:
            name = "an unnamed signal"
        return f"was killed by {name} (signal {-self.returncode})"


class ProcessListener(Protocol):
    """Receives what a process writes, and its exit. All calls come on the event loop's thread."""

    def stdout_received(self, data: bytes | memoryview) -> bool:
        """Handle bytes from the wire; return whether its frames are large at present.

        The memory is reused after the call, so copy what must be kept.
        """

    def stdout_ended(self) -> None:
        """Handle the end of its output. The process may still be alive."""

    def stdin_ended(self) -> None:
        """Handle that it closed its input, so nothing reaches it any more. The process may still be alive."""

    def stderr_received(self, data: bytes | memoryview) -> None:
        """Handle bytes from its log. The memory is reused after the call, so copy what must be kept."""

    def exited(self, status: Exit) -> None:
        """Handle the exit of the process. Called exactly once; bytes written before the exit may still follow."""


class WorkerProcess(Protocol):
    """A process that was started, identified by ``pid`` and ``create_time`` (seconds since the epoch)."""

    pid: int
    create_time: float

    def write(self, data: bytes | bytearray) -> None:
        """Write to its stdin; copy and queue what does not fit into the pipe.

        Never raises: if the process is gone, ``exited`` reports it.
        """

    def pause_reading(self) -> None:
        """Stop reading its stdout for now. Once the pipe is full, the process blocks when it writes."""

    def resume_reading(self) -> None:
        """Resume reading its stdout."""

    def send_signal(self, number: int) -> None:
        """Send it a signal; do nothing if it has ended. Never hits another process that was given the same pid."""

    def close(self) -> None:
        """Close all pipes. A process that is still alive sees the end of its input."""


class Launcher(Protocol):
    """Starts worker processes."""

    async def launch(self, command: Command, listener: ProcessListener) -> WorkerProcess:
        """Start one process. Raises ``OSError`` if that is impossible."""

    async def close(self) -> None:
        """End whatever is kept for later launches. Running workers are left alone."""
