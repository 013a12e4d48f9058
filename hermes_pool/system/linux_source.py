"""Reads processes from ``/proc``."""

import os
import time
from collections.abc import Iterable

from hermes_pool.policy.liveness import ProcessState
from hermes_pool.system.samples import Stat


class LinuxSource:
    """Reads ``/proc`` directly, four times as fast as psutil."""

    def __init__(self) -> None:
        self._ticks = os.sysconf("SC_CLK_TCK")
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")

    def pids(self) -> Iterable[int]:
        """See ``Source``."""
        return (int(name) for name in os.listdir("/proc") if name.isdigit())  # noqa: PTH208 - twice as fast

    def stat(self, pid: int) -> Stat | None:
        """See ``Source``. ``started`` is in ticks since boot."""
        data = _file(f"/proc/{pid}/stat")
        if not data:
            return None
        # Skip the name, which is in parentheses and may contain anything.
        fields = data[data.rindex(b")") + 2 :].split(None, 22)
        return Stat(
            state=_STATES.get(fields[0], ProcessState.UNKNOWN),
            parent=int(fields[1]),
            started=int(fields[19]),
            cpu_s=(int(fields[11]) + int(fields[12])) / self._ticks,
            rss_bytes=int(fields[21]) * self._page_bytes,
            threads=int(fields[17]),
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
        data = _file(f"/proc/{pid}/io")
        if not data:
            return None
        fields = data.split(None, 10)
        return int(fields[1]) + int(fields[3]) + int(fields[9])

    def unique_bytes(self, pid: int) -> int | None:
        """See ``Source``: PSS plus its swapped-out part."""
        data = _file(f"/proc/{pid}/smaps_rollup")
        if not data:
            return None
        lines = data.splitlines()
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith((b"Pss:", b"SwapPss:")))


def _file(path: str) -> bytes | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return os.read(descriptor, 4096)
    except OSError:
        return None
    finally:
        os.close(descriptor)


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
