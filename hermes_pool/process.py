"""Starts worker processes, carries bytes to and from them, and tells of their end.

The one seam to the operating system: the rest of the pool asks a ``Launcher`` to launch, and a ``WorkerProcess`` to
write, to signal and to close; it hears of bytes and of the exit through a ``Listener``. Killing is an action here and
dying is an event: no method says "it is dead now".

Two launchers are here. ``SpawnLauncher`` (Linux) makes the pipes itself and watches the exit by a pidfd: no thread, no
polling, no race with a recycled pid. ``PortableLauncher`` is asyncio's own subprocess support, for everything else. The
third, which forks, is in ``zygote``.
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
from typing import Any, BinaryIO, Protocol, cast

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


# --- Linux -----------------------------------------------------------------------------------------------------------


class PipeReader:
    """The reading end of one pipe. What it reads lies in a buffer that all readers of the process share.

    Not asyncio's transport: that one allocates a quarter of a megabyte for each read, and takes a longer way to
    whoever waits for a frame.
    """

    def __init__(
        self, file: BinaryIO, received: Callable[[memoryview], bool | None], ended: Callable[[], None]
    ) -> None:
        os.set_blocking(file.fileno(), False)
        self._file = file
        self._descriptor = file.fileno()
        self._received = received
        self._buffers = _small_buffers
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(file.fileno(), self._read)
        self._paused = False

    def _read(self) -> None:
        try:
            size = os.readv(self._descriptor, self._buffers)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            size = 0
        if size:
            # A megabyte of small frames would keep the loop from everybody else for too long.
            self._buffers = _large_buffers if self._received(_shared_view[:size]) else _small_buffers
        else:
            self.close()
            self._ended()

    def pause(self) -> None:
        """Read no more for now."""
        if not self._paused and not self._file.closed:
            self._paused = True
            self._loop.remove_reader(self._file.fileno())

    def resume(self) -> None:
        """Read on."""
        if self._paused and not self._file.closed:
            self._paused = False
            self._loop.add_reader(self._file.fileno(), self._read)

    def drain(self) -> None:
        """Read what is there already."""
        for _ in range(_DRAIN_READS):
            if self._file.closed:
                return
            self._read()

    def close(self) -> None:
        """Read no more, ever."""
        if not self._file.closed:
            self._loop.remove_reader(self._file.fileno())
            self._file.close()


class PipeWriter:
    """The writing end of one pipe. What the pipe does not take at once is copied, queued, and written later."""

    def __init__(self, file: BinaryIO, ended: Callable[[], None]) -> None:
        os.set_blocking(file.fileno(), False)
        self._file = file
        self._descriptor = file.fileno()
        self._ended = ended
        self._queue = bytearray()
        self._loop = asyncio.get_running_loop()

    def write(self, data: bytes | bytearray) -> None:
        """Send bytes. Never raises: whoever reads no more has ended, which others tell."""
        if self._file.closed:
            return
        if self._queue:
            self._queue += data
            return
        try:
            sent = os.write(self._descriptor, data)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            self.close()
            self._ended()
            return
        if sent < len(data):
            with memoryview(data) as view:
                self._queue += view[sent:]
            self._loop.add_writer(self._descriptor, self._write_queue)

    def _write_queue(self) -> None:
        try:
            del self._queue[: os.write(self._descriptor, self._queue)]
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.close()
            self._ended()
            return
        if not self._queue:
            self._loop.remove_writer(self._descriptor)

    def close(self) -> None:
        """Write no more, ever; what is queued is dropped."""
        if not self._file.closed:
            self._loop.remove_writer(self._descriptor)
            self._file.close()
            self._queue.clear()


_DRAIN_READS = 4
_shared_buffer = bytearray(PIPE_BYTES)
_shared_view = memoryview(_shared_buffer)
_large_buffers = (_shared_view,)
_small_buffers = (_shared_view[: 64 * 1024],)


class ChildPipes:
    """The three pipes of a worker: the child's ends as plain files, ours for the event loop once they are connected."""

    def __init__(self) -> None:
        self._files: list[BinaryIO] = []
        self.reader: PipeReader | None = None
        self.writer: PipeWriter | None = None
        self._stderr_reader: PipeReader | None = None
        try:
            self._stdin, self._our_out = self._pipe()
            self._our_in, self._stdout = self._pipe()
            self._our_err, self._stderr = self._pipe()
        except BaseException:
            self.close()
            raise
        for end in (self._stdin, self._stdout):
            _enlarge(end)

    def _pipe(self) -> tuple[BinaryIO, BinaryIO]:
        ends = os.pipe()
        files = os.fdopen(ends[0], "rb", 0), os.fdopen(ends[1], "wb", 0)
        self._files += files
        return files

    def child_ends(self) -> tuple[int, int, int]:
        """Return the descriptors that become the child's 0, 1 and 2."""
        return self._stdin.fileno(), self._stdout.fileno(), self._stderr.fileno()

    def connect(self, listener: Listener) -> None:
        """Let go of the child's ends, and hand what comes through ours to the listener from now on."""
        for end in (self._stdin, self._stdout, self._stderr):
            end.close()
        self.writer = PipeWriter(self._our_out, listener.stdin_ended)
        self.reader = PipeReader(self._our_in, listener.stdout_received, listener.stdout_ended)
        self._stderr_reader = PipeReader(self._our_err, listener.stderr_received, lambda: None)

    def close(self) -> None:
        """Let go of everything; what was not sent is dropped. Last words on stderr are still heard."""
        if self._stderr_reader is not None:
            self._stderr_reader.drain()
        for end in (self.reader, self._stderr_reader, self.writer):
            if end is not None:
                end.close()
        for file in self._files:
            file.close()
        self._files.clear()


class PidfdProcess:
    """A process that is written to through ``ChildPipes`` and watched, and signalled, through its pidfd.

    Whoever makes it says in ``take_status`` how its exit status is learnt: the pidfd only tells that it is over.
    """

    def __init__(self, pid: int, pidfd: int, pipes: ChildPipes, take_status: Callable[[int], None]) -> None:
        self.pid = pid
        self._pidfd: int | None = pidfd
        self._pipes = pipes
        self._take_status = take_status
        self._loop = asyncio.get_running_loop()
        try:
            self.create_time = psutil.Process(pid).create_time()
        except psutil.Error as error:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            raise OSError(f"the worker, once started, could not be watched: {error}") from error
        self._loop.add_reader(pidfd, self._over)

    def _over(self) -> None:
        pidfd = cast("int", self._pidfd)
        self._loop.remove_reader(pidfd)
        self._pidfd = None
        try:
            self._take_status(pidfd)
        finally:
            os.close(pidfd)

    def write(self, data: bytes | bytearray) -> None:
        """Send bytes."""
        if self._pipes.writer is not None:
            self._pipes.writer.write(data)

    def pause_reading(self) -> None:
        """Read no more for now."""
        if self._pipes.reader is not None:
            self._pipes.reader.pause()

    def resume_reading(self) -> None:
        """Read on."""
        if self._pipes.reader is not None:
            self._pipes.reader.resume()

    def send_signal(self, number: int) -> None:
        """Signal it."""
        if self._pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def close(self) -> None:
        """Let go of the pipes."""
        self._pipes.close()


LIFELINE_VARIABLE = "HERMES_POOL_LIFELINE"
"""The environment variable that tells a process which of its descriptors is the lifeline."""


def with_lifeline(environment: Mapping[str, str], descriptor: int | None) -> dict[str, Any]:
    """Return the arguments of ``subprocess`` that give a process its environment and, if there is one, the lifeline."""
    if descriptor is None:
        return {"env": environment}
    return {"env": {**environment, LIFELINE_VARIABLE: str(descriptor)}, "pass_fds": (descriptor,)}


class SpawnLauncher:
    """Pipes of our own, ``subprocess`` (vfork and exec, so threads of the host do no harm), and a pidfd."""

    def __init__(self, lifeline: Callable[[], int | None] = lambda: None) -> None:
        """Prepare. ``lifeline`` returns the descriptor that a worker has to inherit, to die with the supervisor."""
        self._lifeline = lifeline

    async def launch(self, command: Command, listener: Listener) -> WorkerProcess:
        """Start a process in a session of its own. It inherits its three standard descriptors and the lifeline."""
        pipes = ChildPipes()
        process: PidfdProcess | None = None
        try:
            stdin, stdout, stderr = pipes.child_ends()
            popen = subprocess.Popen(  # noqa: ASYNC220 - 0.3 ms; a thread would cost as much
                command.argv,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                cwd=command.cwd,
                start_new_session=True,
                **with_lifeline(command.env, self._lifeline()),
            )
            process = self._watched(popen, pipes, listener)
            pipes.connect(listener)
        except BaseException:
            if process is not None:
                process.send_signal(signal.SIGKILL)
            pipes.close()
            raise
        return process

    async def close(self) -> None:
        """Nothing is kept between launches."""

    def _watched(self, popen: "subprocess.Popen[bytes]", pipes: ChildPipes, listener: Listener) -> PidfdProcess:
        def take_status(pidfd: int) -> None:
            try:
                found = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
            except ChildProcessError:  # the host ignores SIGCHLD, or waits for any child
                found = None
            status = None
            if found is not None:
                status = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
            # subprocess must not wait again: the pid may soon be somebody else's.
            popen.returncode = status if status is not None else 0
            listener.exited(Exit(status))

        try:
            return PidfdProcess(popen.pid, os.pidfd_open(popen.pid), pipes, take_status)
        except OSError:
            popen.kill()
            popen.wait()
            raise


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

    async def close(self) -> None:
        """Nothing is kept between launches."""


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
        elif fd == 0:
            self._listener.stdin_ended()

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


HAS_PIDFD = hasattr(os, "pidfd_open") and hasattr(signal, "pidfd_send_signal")
"""Whether this platform has what ``SpawnLauncher`` needs."""
