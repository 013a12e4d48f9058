"""The three pipes of a worker on Linux, read and written directly from the event loop."""

import asyncio
import contextlib
import os
from collections.abc import Callable
from typing import BinaryIO

from hermes_pool.process.launcher import ProcessListener

PIPE_BYTES = 1024 * 1024
"""Capacity requested for the pipes of the wire: a 1 MB frame then takes one pass of the loop instead of sixteen."""

_DRAIN_READS = 4

_shared_buffer = bytearray(PIPE_BYTES)
_shared_view = memoryview(_shared_buffer)
_large_buffers = (_shared_view,)
_small_buffers = (_shared_view[: 64 * 1024],)


class PipeReader:
    """The reading end of one pipe. All readers in this process share one buffer.

    asyncio's own transport would allocate a quarter of a megabyte for each read and add latency to each frame.
    """

    def __init__(
        self, file: BinaryIO, received: Callable[[memoryview], bool | None], ended: Callable[[], None]
    ) -> None:
        """Start reading. ``received`` gets the bytes and returns whether frames are large; ``ended`` reports EOF."""
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
            # Use the large buffer for large frames only: a megabyte of small ones would hold up the loop for too long.
            self._buffers = _large_buffers if self._received(_shared_view[:size]) else _small_buffers
        else:
            self.close()
            self._ended()

    def pause(self) -> None:
        """Stop reading for now."""
        if not self._paused and not self._file.closed:
            self._paused = True
            self._loop.remove_reader(self._file.fileno())

    def resume(self) -> None:
        """Resume reading."""
        if self._paused and not self._file.closed:
            self._paused = False
            self._loop.add_reader(self._file.fileno(), self._read)

    def drain(self) -> None:
        """Read what is already in the pipe, up to a few buffers."""
        for _ in range(_DRAIN_READS):
            if self._file.closed:
                return
            self._read()

    def close(self) -> None:
        """Stop reading for good."""
        if not self._file.closed:
            self._loop.remove_reader(self._file.fileno())
            self._file.close()


class PipeWriter:
    """The writing end of one pipe. Bytes that do not fit are copied, queued and written later."""

    def __init__(self, file: BinaryIO, ended: Callable[[], None]) -> None:
        """Prepare to write. ``ended`` is called once the other end is closed."""
        os.set_blocking(file.fileno(), False)
        self._file = file
        self._descriptor = file.fileno()
        self._ended = ended
        self._queue = bytearray()
        self._loop = asyncio.get_running_loop()

    def write(self, data: bytes | bytearray) -> None:
        """Write bytes. Never raises: a closed pipe is reported through ``ended``."""
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
        """Stop writing for good and drop what is queued."""
        if not self._file.closed:
            self._loop.remove_writer(self._descriptor)
            self._file.close()
            self._queue.clear()


class ChildPipes:
    """The three pipes of a worker: plain files on the child's side, ``PipeReader`` and ``PipeWriter`` on ours.

    ``reader`` (its stdout) and ``writer`` (its stdin) exist once ``connect`` was called.
    """

    def __init__(self) -> None:
        """Create the pipes. Raises ``OSError`` if the system has no descriptors left."""
        self._files: list[BinaryIO] = []
        self.reader: PipeReader | None = None
        self.writer: PipeWriter | None = None
        self._stderr_reader: PipeReader | None = None
        try:
            self._child_stdin, self._our_stdin = self._pipe()
            self._our_stdout, self._child_stdout = self._pipe()
            self._our_stderr, self._child_stderr = self._pipe()
        except BaseException:
            self.close()
            raise
        for end in (self._child_stdin, self._child_stdout):
            _enlarge(end)

    def _pipe(self) -> tuple[BinaryIO, BinaryIO]:
        ends = os.pipe()
        files = os.fdopen(ends[0], "rb", 0), os.fdopen(ends[1], "wb", 0)
        self._files += files
        return files

    def child_ends(self) -> tuple[int, int, int]:
        """Return the descriptors that become 0, 1 and 2 of the child."""
        return self._child_stdin.fileno(), self._child_stdout.fileno(), self._child_stderr.fileno()

    def connect(self, listener: ProcessListener) -> None:
        """Close the child's ends, and pass everything that arrives at ours to ``listener`` from now on."""
        for end in (self._child_stdin, self._child_stdout, self._child_stderr):
            end.close()
        self.writer = PipeWriter(self._our_stdin, listener.stdin_ended)
        self.reader = PipeReader(self._our_stdout, listener.stdout_received, listener.stdout_ended)
        self._stderr_reader = PipeReader(self._our_stderr, listener.stderr_received, lambda: None)

    def close(self) -> None:
        """Close everything and drop what was not sent. The last lines on stderr still reach the listener."""
        if self._stderr_reader is not None:
            self._stderr_reader.drain()
        for end in (self.reader, self._stderr_reader, self.writer):
            if end is not None:
                end.close()
        for file in self._files:
            file.close()
        self._files.clear()


def _enlarge(pipe: BinaryIO) -> None:
    import fcntl  # noqa: PLC0415 - exists on POSIX only

    with contextlib.suppress(OSError, AttributeError):  # refused once this user's pipes hold too much memory
        fcntl.fcntl(pipe.fileno(), fcntl.F_SETPIPE_SZ, PIPE_BYTES)
