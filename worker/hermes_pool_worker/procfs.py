"""Reads ``/proc``: the one parser of ``/proc/PID/stat`` and ``/proc/PID/environ``. Linux only.

Both sides import this file. It needs nothing but ``os``, and returns plain lists: the sampler reads thousands of
processes a minute with it. Processes come and go at any time, so what cannot be read is ``None`` or empty, and nothing
raises for it.
"""

import os

# The fields of /proc/PID/stat, counted from the one after the name (proc(5) counts from 1 and begins with the pid).
STATE = 0
"""One letter: ``b"R"`` running, ``b"S"`` sleeping, ``b"Z"`` zombie, ..."""
PARENT = 1
GROUP = 2
SESSION = 3
USER_TICKS = 11
"""CPU time in user mode, in clock ticks."""
SYSTEM_TICKS = 12
"""CPU time in the kernel, in clock ticks."""
THREADS = 17
BEGAN = 19
"""When the process began, in clock ticks since boot. With the pid this identifies a process: setting the clock does not
move it."""
RSS_PAGES = 21
"""Resident memory in pages."""
EXIT_STATUS = 49
"""Exit status of a zombie, in the form that ``waitpid`` returns; 0 also for those who may not see it."""

SMALL_BYTES_MAX = 4096
_CHUNK_BYTES = 64 * 1024


def pids() -> list[int]:
    """Return the pids of all processes."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208 - twice as fast as pathlib


def stat(pid: int, last: int = BEGAN) -> list[bytes] | None:
    """Return the fields of ``/proc/PID/stat`` up to index ``last`` (and perhaps one more item, the unparsed rest).

    ``None`` if there is no such process or it cannot be read.
    """
    data = read_small(f"/proc/{pid}/stat")
    return None if data is None else parse_stat(data, last)


def parse_stat(data: bytes, last: int = BEGAN) -> list[bytes] | None:
    """Return the fields that follow the name, as ``stat`` does; ``None`` if ``data`` is no whole line."""
    # The name is in parentheses and may hold anything, also parentheses, spaces and newlines. No later field does.
    name_end = data.rfind(b")")
    fields = data[name_end + 1 :].split(None, last + 1)
    return fields if name_end >= 0 and len(fields) > last else None


def environment(pid: int) -> list[bytes]:
    """Return the environment that a process was executed with, as ``NAME=value`` entries.

    A process that was only forked shows its parent's. Empty if it cannot be read.
    """
    try:
        descriptor = os.open(f"/proc/{pid}/environ", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return []
    data = b""
    try:
        while chunk := os.read(descriptor, _CHUNK_BYTES):
            data += chunk
    except OSError:
        return []
    finally:
        os.close(descriptor)
    return data.split(b"\0")


def read_small(path: str) -> bytes | None:
    """Return the content of a file of at most ``SMALL_BYTES_MAX``; ``None`` if it is empty or cannot be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return os.read(descriptor, SMALL_BYTES_MAX) or None
    except OSError:
        return None
    finally:
        os.close(descriptor)
