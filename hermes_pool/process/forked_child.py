"""A worker that a zygote has forked, until its exit is reported."""

import asyncio
import os
import signal
from collections.abc import Callable

from hermes_pool.process.launcher import Exit, ProcessListener, WorkerProcess

STATUS_S = 0.5
"""How long to wait for the zygote to report the exit status, after the pidfd has shown the exit."""

_EXIT_CODE = 49
"""Index of the exit code among the fields of /proc/PID/stat, counted from the field after the name."""


class ForkedChild:
    """Joins the two halves of an exit: the pidfd shows that the worker ended, and the zygote reports how.

    The zygote is the parent, so only it can collect the exit status. Either half may come first.
    """

    def __init__(self, number: int, listener: ProcessListener, on_exit: "Callable[[ForkedChild], None]") -> None:
        """Await the fork request ``number``. ``on_exit`` is called right before the listener hears of the exit."""
        self.number = number
        self.process: WorkerProcess | None = None
        self._listener = listener
        self._on_exit = on_exit
        self._ended = False
        self._status: Exit | None = None
        self._status_timer: asyncio.TimerHandle | None = None

    def ended(self, pidfd: int) -> None:
        """Handle the exit of the process, as its pidfd has shown it."""
        self._ended = True
        if self._status is None and self.process is not None:
            self._status = _status_of_zombie(self.process.pid, pidfd)
        if self._status is not None:
            self._report(self._status)
        else:
            self._status_timer = asyncio.get_running_loop().call_later(STATUS_S, self.status_lost)

    def reaped(self, returncode: int) -> None:
        """Handle the exit status that the zygote reports."""
        self._status = self._status or Exit(returncode)
        if self._ended:
            self._report(self._status)

    def status_lost(self) -> None:
        """Give up waiting for the exit status: nothing will report it any more."""
        self._status = self._status or Exit(None)
        if self._ended:
            self._report(self._status)

    def _report(self, status: Exit) -> None:
        if self._status_timer is not None:
            self._status_timer.cancel()
        self._on_exit(self)
        self._listener.exited(status)


def _status_of_zombie(pid: int, pidfd: int) -> Exit | None:
    """Return the status of a process that is not reaped yet, or ``None`` if the zygote has to report it.

    Waking the zygote for the status would double the time until a death is known.
    """
    try:
        stat = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
        try:
            fields = os.read(stat, 4096).rpartition(b")")[2].split()
        finally:
            os.close(stat)
        signal.pidfd_send_signal(pidfd, 0)  # it still exists, so what was read is not of another process
        status = int(fields[_EXIT_CODE])
    except (OSError, IndexError, ValueError):
        return None
    # The kernel also shows 0 to a reader without permission.
    return Exit(os.waitstatus_to_exitcode(status)) if fields[0] == b"Z" and status else None
