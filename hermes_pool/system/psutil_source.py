"""Reads processes with psutil, on every platform that it supports."""

from collections.abc import Iterable
from typing import Any

import psutil

from hermes_pool.policy.liveness import ProcessState
from hermes_pool.system.samples import Stat


class PsutilSource:
    """Uses psutil. It cannot read all processes of other users; I/O is left out, since some platforms lack it."""

    def pids(self) -> Iterable[int]:
        """See ``Source``."""
        return psutil.pids()

    def stat(self, pid: int) -> Stat | None:
        """See ``Source``. ``started`` is in seconds since the epoch."""
        try:
            process = psutil.Process(pid)
            with process.oneshot():
                parent, started = process.ppid(), process.create_time()
                state = _PSUTIL_STATES.get(process.status(), ProcessState.SLEEPING)
                if state is ProcessState.DEAD:
                    return Stat(state, parent, started, 0.0, 0, 1)
                times = process.cpu_times()
                memory = process.memory_info()
                return Stat(state, parent, started, times.user + times.system, int(memory.rss), process.num_threads())
        except (psutil.Error, OSError):
            return None

    def clock_ns(self, pid: int) -> int | None:
        """See ``Source``: not available."""
        return None

    def create_time(self, stat: Stat, boot_time_s: float) -> float:
        """See ``Source``."""
        return stat.started

    def io_bytes(self, pid: int) -> int | None:
        """See ``Source``: not available."""
        return None

    def unique_bytes(self, pid: int) -> int | None:
        """See ``Source``: the memory that belongs to this process alone (USS)."""
        try:
            memory: Any = psutil.Process(pid).memory_full_info()
            return int(memory.uss)
        except (psutil.Error, OSError):
            return None


_PSUTIL_STATES = {
    psutil.STATUS_RUNNING: ProcessState.RUNNING,
    psutil.STATUS_DISK_SLEEP: ProcessState.UNINTERRUPTIBLE,
    psutil.STATUS_STOPPED: ProcessState.STOPPED,
    psutil.STATUS_TRACING_STOP: ProcessState.STOPPED,
    psutil.STATUS_ZOMBIE: ProcessState.DEAD,
    psutil.STATUS_DEAD: ProcessState.DEAD,
}
