"""A process that is watched and signalled through its pidfd (Linux).

A pidfd stays bound to one process, so a signal can never hit another one that was given the same pid, and the exit is
an event of the loop: no thread, no polling.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from typing import cast

import psutil

from hermes_pool.process.pipes import ChildPipes

HAS_PIDFD = hasattr(os, "pidfd_open") and hasattr(signal, "pidfd_send_signal")
"""Whether this platform supports pidfds."""


class PidfdProcess:
    """A worker process with ``ChildPipes`` and a pidfd; implements ``WorkerProcess``."""

    def __init__(self, pid: int, pidfd: int, pipes: ChildPipes, on_exit: Callable[[int], None]) -> None:
        """Watch the process and take over ``pidfd``.

        The pidfd only shows that the process has ended, not how. ``on_exit`` is called with the pidfd, which is still
        open, and has to find the exit status. Raises ``OSError`` if the process cannot be identified; it is killed,
        and the caller keeps the pidfd.
        """
        self.pid = pid
        self._pidfd: int | None = pidfd
        self._pipes = pipes
        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        try:
            self.create_time = psutil.Process(pid).create_time()
        except psutil.Error as error:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            raise OSError(f"it started, but its process cannot be identified: {error}") from error
        self._loop.add_reader(pidfd, self._ended)

    def _ended(self) -> None:
        pidfd = cast("int", self._pidfd)
        self._loop.remove_reader(pidfd)
        self._pidfd = None
        try:
            self._on_exit(pidfd)
        finally:
            os.close(pidfd)

    def write(self, data: bytes | bytearray) -> None:
        """See ``WorkerProcess``."""
        if self._pipes.writer is not None:
            self._pipes.writer.write(data)

    def pause_reading(self) -> None:
        """See ``WorkerProcess``."""
        if self._pipes.reader is not None:
            self._pipes.reader.pause()

    def resume_reading(self) -> None:
        """See ``WorkerProcess``."""
        if self._pipes.reader is not None:
            self._pipes.reader.resume()

    def send_signal(self, number: int) -> None:
        """See ``WorkerProcess``."""
        if self._pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def close(self) -> None:
        """See ``WorkerProcess``."""
        self._pipes.close()
