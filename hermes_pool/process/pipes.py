"""The three pipes of a worker on Linux, read and written straight from the event loop."""

import asyncio
import contextlib
import os
from collections.abc import Callable
from typing import BinaryIO

from hermes_pool.process.launcher import Listener

PIPE_BYTES = 1024 * 1024
"""Asked for the pipes of the wire (Linux): a 1 MB frame then takes one turn of the loop instead of sixteen."""

_shared_buffer = bytearray(PIPE_BYTES)
_shared_view = memoryview(_shared_buffer)
_large_buffers = (_shared_view,)
_small_buffers = (_shared_view[: 64 * 1024],)


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


def _enlarge(pipe: BinaryIO) -> None:
    import fcntl  # noqa: PLC0415 - exists on POSIX only

    with contextlib.suppress(OSError, AttributeError):  # refused when this user's pipes hold too much already
        fcntl.fcntl(pipe.fileno(), fcntl.F_SETPIPE_SZ, PIPE_BYTES)
