"""Reads processes from ``/proc``."""

import os
import time
from collections.abc import Iterable

from hermes_pool.policy.liveness import ProcessState
from hermes_pool.system.samples import Stat
from hermes_pool_worker import procfs
from hermes_pool_worker.procfs import BEGAN, PARENT, RSS_PAGES, STATE, SYSTEM_TICKS, THREADS, USER_TICKS


class LinuxSource:
    """Reads ``/proc`` directly, four times as fast as psutil."""

    def __init__(self) -> None:
        self._ticks = os.sysconf("SC_CLK_TCK")
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")

    def pids(self) -> Iterable[int]:
        """See ``Source``."""
        return procfs.pids()

    def stat(self, pid: int) -> Stat | None:
        """See ``Source``. ``started`` is in ticks since boot."""
        fields = procfs.stat(pid, RSS_PAGES)
        if fields is None:
            return None
        return Stat(
            state=_STATES.get(fields[STATE], ProcessState.UNKNOWN),
            parent=int(fields[PARENT]),
            started=int(fields[BEGAN]),
            cpu_s=(int(fields[USER_TICKS]) + int(fields[SYSTEM_TICKS])) / self._ticks,
            rss_bytes=int(fields[RSS_PAGES]) * self._page_bytes,
            threads=int(fields[THREADS]),
        )

    def clock_ns(self, pid: int) -> int | None:
        """See ``Source``. The id of a process's CPU clock is computed from its pid, as in ``clock_getcpuclockid``."""
        try:
            return time.clock_gettime_ns(~pid << 3 | 2)
        except OSError:
            return None

    def create_time(self, stat: Stat, boot_time_s: float) -> float:
        """See ``Source``."""
        return stat.started / self._ticks + boot_time_s

    def io_bytes(self, pid: int) -> int | None:
        """See ``Source``: bytes requested (rchar, wchar) and bytes fetched from disk for mapped memory (read_bytes)."""
        data = procfs.read_small(f"/proc/{pid}/io")
        if data is None:
            return None
        fields = data.split(None, 10)
        return int(fields[1]) + int(fields[3]) + int(fields[9])

    def unique_bytes(self, pid: int) -> int | None:
        """See ``Source``: PSS plus its swapped-out part."""
        data = procfs.read_small(f"/proc/{pid}/smaps_rollup")
        if data is None:
            return None
        lines = data.splitlines()
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith((b"Pss:", b"SwapPss:")))


_STATES = {
    b"R": ProcessState.RUNNING,
    b"S": ProcessState.SLEEPING,
    b"I": ProcessState.SLEEPING,
    b"D": ProcessState.UNINTERRUPTIBLE,
    b"T": ProcessState.STOPPED,
    b"t": ProcessState.STOPPED,
    b"Z": ProcessState.DEAD,
    b"X": ProcessState.DEAD,
}
