"""Starts worker processes, carries bytes to and from them, and tells of their end.

The one seam to the operating system: the rest of the pool asks a ``Launcher`` to launch, and a ``WorkerProcess`` to
write, to signal and to close; it hears of bytes and of the exit through a ``Listener``. Killing is an action here and
dying is an event: no method says "it is dead now".

Two launchers. ``SpawnLauncher`` (Linux) makes the pipes itself and watches the exit by a pidfd: no thread, no polling,
no race with a recycled pid. ``PortableLauncher`` is asyncio's own subprocess support, for everything else.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol, cast

import psutil

PIPE_BYTES = 1024 * 1024
"""Asked for the pipes of the wire (Linux): a 1 MB frame then takes one turn of the loop instead of sixteen."""


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
        hint = ", possibly because the machine is out of memory" if name == "SIGKILL" else ""
        return f"was killed by {name} (signal {-self.returncode}){hint}"


class Listener(Protocol):
    """Who hears of a process. Called on the event loop's thread; ``exited`` comes exactly once."""

    def stdout_received(self, data: bytes) -> None:
        """Take the next bytes of the wire."""

    def stdout_ended(self) -> None:
        """Nothing more will come; the process may still live."""

    def stderr_received(self, data: bytes) -> None:
        """Take the next bytes of its log."""

    def exited(self, status: Exit) -> None:
        """Take note of the end of the process; bytes that it wrote before may still come."""


class WorkerProcess(Protocol):
    """A process that was started. Its identity is the pair of ``pid`` and ``create_time`` (seconds since the epoch)."""

    pid: int
    create_time: float

    def write(self, data: bytes | bytearray) -> None:
        """Send bytes; they are queued if need be. Never raises: a process that is gone is told of by ``exited``."""

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


def launcher_for(choice: Literal["auto", "spawn", "portable"]) -> Launcher:
    """Return the launcher of a setting; ``spawn`` and ``auto`` become the portable one where there is no pidfd."""
    if choice != "portable" and hasattr(os, "pidfd_open") and hasattr(signal, "pidfd_send_signal"):
        return SpawnLauncher()
    return PortableLauncher()


# --- Linux -----------------------------------------------------------------------------------------------------------


class _PipeProtocol(asyncio.Protocol):
    """The reading end of one pipe, between its transport and a listener's method."""

    def __init__(self, received: Callable[[bytes], None], ended: Callable[[], None]) -> None:
        self._received = received
        self._ended = ended

    def data_received(self, data: bytes) -> None:
        self._received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended()


class SpawnLauncher:
    """Pipes of our own, ``subprocess`` (vfork and exec, so threads of the host do no harm), and a pidfd."""

    async def launch(self, command: Command, listener: Listener) -> WorkerProcess:
        """Start a process in a session of its own, with nothing inherited but its three standard descriptors."""
        loop = asyncio.get_running_loop()
        with contextlib.ExitStack() as unwind:

            def pipe() -> tuple[BinaryIO, BinaryIO]:
                read_end, write_end = os.pipe()
                return unwind.enter_context(os.fdopen(read_end, "rb", 0)), unwind.enter_context(
                    os.fdopen(write_end, "wb", 0)
                )

            child_in, our_out = pipe()
            our_in, child_out = pipe()
            our_err, child_err = pipe()
            for end in (child_in, child_out):
                _enlarge(end)
            popen = subprocess.Popen(  # noqa: ASYNC220 - 0.3 ms; a thread would cost as much
                command.argv, stdin=child_in, stdout=child_out, stderr=child_err, env=command.env, cwd=command.cwd,
                start_new_session=True,
            )  # fmt: skip
            for end in (child_in, child_out, child_err):
                end.close()
            process = _SpawnedProcess(popen, listener, loop)
            try:
                process.reader, _ = await loop.connect_read_pipe(
                    lambda: _PipeProtocol(listener.stdout_received, listener.stdout_ended), our_in
                )
                process.stderr, _ = await loop.connect_read_pipe(
                    lambda: _PipeProtocol(listener.stderr_received, lambda: None), our_err
                )
                process.writer, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, our_out)
            except BaseException:
                process.send_signal(signal.SIGKILL)
                process.close()
                raise
            unwind.pop_all()  # the transports own the descriptors now
        return process


class _SpawnedProcess:
    """A child of this process, watched by its pidfd."""

    reader: asyncio.ReadTransport | None = None
    stderr: asyncio.ReadTransport | None = None
    writer: asyncio.WriteTransport | None = None

    def __init__(self, popen: "subprocess.Popen[bytes]", listener: Listener, loop: asyncio.AbstractEventLoop) -> None:
        self.pid = popen.pid
        self._popen = popen
        self._listener = listener
        self._loop = loop
        self._pidfd: int | None = None
        try:
            self._pidfd = os.pidfd_open(popen.pid)
            self.create_time = psutil.Process(popen.pid).create_time()
        except (OSError, psutil.Error) as error:
            popen.kill()
            popen.wait()
            if self._pidfd is not None:
                os.close(self._pidfd)
            raise OSError(f"the worker, once started, could not be watched: {error}") from error
        loop.add_reader(self._pidfd, self._reap)

    def _reap(self) -> None:
        pidfd = cast("int", self._pidfd)
        self._loop.remove_reader(pidfd)
        self._pidfd = None
        try:
            found = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
        except ChildProcessError:  # the host ignores SIGCHLD, or waits for any child
            status = None
        else:
            exited = found is not None and found.si_code == os.CLD_EXITED
            status = None if found is None else (found.si_status if exited else -found.si_status)
        os.close(pidfd)
        # subprocess must not wait again: the pid may soon be somebody else's.
        self._popen.returncode = status if status is not None else 0
        self._listener.exited(Exit(status))

    def write(self, data: bytes | bytearray) -> None:
        if self.writer is not None and not self.writer.is_closing():
            self.writer.write(data)

    def pause_reading(self) -> None:
        if self.reader is not None and not self.reader.is_closing():
            self.reader.pause_reading()

    def resume_reading(self) -> None:
        if self.reader is not None and not self.reader.is_closing():
            self.reader.resume_reading()

    def send_signal(self, number: int) -> None:
        if self._pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def close(self) -> None:
        # A transport whose other end is gone has closed by itself, and does not take it twice.
        if self.writer is not None and not self.writer.is_closing():
            self.writer.abort()
        for reader in (self.reader, self.stderr):
            if reader is not None and not reader.is_closing():
                reader.close()


def _enlarge(pipe: BinaryIO) -> None:
    import fcntl  # noqa: PLC0415 - exists on POSIX only

    with contextlib.suppress(OSError, AttributeError):  # refused when this user's pipes hold too much already
        fcntl.fcntl(pipe.fileno(), fcntl.F_SETPIPE_SZ, PIPE_BYTES)


# --- everywhere else -------------------------------------------------------------------------------------------------


class PortableLauncher:
    """asyncio's own subprocesses: macOS, Windows, and a Linux without pidfd. Untested on the first two."""

    async def launch(self, command: Command, listener: Listener) -> WorkerProcess:
        """Start a process in a session (POSIX) or a process group (Windows) of its own."""
        loop = asyncio.get_running_loop()
        group: dict[str, Any] = {"start_new_session": True}
        if sys.platform == "win32":
            group = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP | subprocess.CREATE_NO_WINDOW}
        try:
            transport, protocol = await loop.subprocess_exec(
                lambda: _PortableProcess(listener), *command.argv, env=command.env, cwd=command.cwd, **group
            )
        except NotImplementedError as error:
            raise OSError(
                f"{type(loop).__name__} cannot start subprocesses; on Windows use asyncio's ProactorEventLoop "
                "(uvicorn: without --reload)"
            ) from error
        try:
            protocol.create_time = psutil.Process(transport.get_pid()).create_time()
        except psutil.Error as error:
            transport.kill()
            transport.close()
            raise OSError(f"the worker, once started, could not be watched: {error}") from error
        return protocol


class _PortableProcess(asyncio.SubprocessProtocol):
    """A child behind asyncio's transport."""

    create_time: float

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._transport: asyncio.SubprocessTransport | None = None
        self.pid = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.SubprocessTransport", transport)
        self.pid = self._transport.get_pid()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        if fd == 1:
            self._listener.stdout_received(data)
        else:
            self._listener.stderr_received(data)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        if fd == 1:
            self._listener.stdout_ended()

    def process_exited(self) -> None:
        status = self._transport.get_returncode() if self._transport is not None else None
        # asyncio reports 255 for a child that something else has waited for.
        self._listener.exited(Exit(None if status == _UNKNOWN_TO_ASYNCIO else status))

    def write(self, data: bytes | bytearray) -> None:
        pipe = self._pipe(0)
        if pipe is not None and not pipe.is_closing():
            cast("asyncio.WriteTransport", pipe).write(data)

    def pause_reading(self) -> None:
        pipe = self._pipe(1)
        if pipe is not None and not pipe.is_closing():
            cast("asyncio.ReadTransport", pipe).pause_reading()

    def resume_reading(self) -> None:
        pipe = self._pipe(1)
        if pipe is not None and not pipe.is_closing():
            cast("asyncio.ReadTransport", pipe).resume_reading()

    def send_signal(self, number: int) -> None:
        if self._transport is not None:
            with contextlib.suppress(ProcessLookupError):
                self._transport.send_signal(number)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _pipe(self, fd: int) -> asyncio.BaseTransport | None:
        return None if self._transport is None else self._transport.get_pipe_transport(fd)


_UNKNOWN_TO_ASYNCIO = 255
