"""Finds and ends what a worker's tools have started, when the supervisor is gone and nobody else will. Linux only.

A tool may have left its process group, its session and its parent; two ties remain. Its environment holds the worker's
marker, unless it cleared it; and it is below the zygote, which adopts whatever loses its parent there. What was forked
without a program of its own has the zygote's environment to show, but then it is in the worker's session.
"""

import ctypes
import os
import signal
from collections.abc import Callable

MARKER_VARIABLE = "HERMES_POOL_WORKER"
ROUNDS_MAX = 50
"""How often it is looked again: what is being killed may still fork."""
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Become the parent of every process below this one that loses its own; no-op where the kernel refuses."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_descendants() -> None:
    """End everything below this process."""
    _end_all(_descendants)


def end_session(leader: int) -> None:
    """End everything in the session of a process that has ended but was not waited for, so its pid is still its own."""
    _end_all(lambda: {pid: began for pid, began in _processes().items() if pid != leader and _session(pid) == leader})


def end_marked(marker: str) -> None:
    """End every other process whose environment carries this worker's marker."""
    entry = f"{MARKER_VARIABLE}={marker}".encode()
    _end_all(lambda: {pid: began for pid, began in _processes().items() if pid != os.getpid() and _carries(pid, entry)})


def _end_all(find: Callable[[], dict[int, str]]) -> None:
    for _ in range(ROUNDS_MAX):
        found = find()
        if not found:
            return
        for pid, began in found.items():
            _end(pid, began)


def _end(pid: int, began: str) -> None:
    """End a process, unless its pid has become another one's meanwhile."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return
    try:
        if (status := _status(pid)) is not None and status[2] == began:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except OSError:
        pass
    finally:
        os.close(pidfd)


def _descendants() -> dict[int, str]:
    processes = {pid: status for pid in _pids() if (status := _status(pid)) is not None}
    below = {os.getpid()}
    found: dict[int, str] = {}
    while True:
        children = {pid for pid, (_, parent, _) in processes.items() if parent in below and pid not in below}
        if not children:
            return found
        below |= children
        found.update({pid: processes[pid][2] for pid in children if processes[pid][0] != "Z"})


def _processes() -> dict[int, str]:
    return {pid: status[2] for pid in _pids() if (status := _status(pid)) is not None and status[0] != "Z"}


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208 - no pathlib in a zygote


def _status(pid: int) -> tuple[str, int, str] | None:
    """Return a process's state letter, parent and start time (in ticks, as text)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123
            # After the name, which is in parentheses and may hold anything.
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return fields[0].decode(), int(fields[1]), fields[19].decode()


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None


def _carries(pid: int, entry: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:  # noqa: PTH123
            return entry in file.read().split(b"\0")
    except OSError:
        return False
