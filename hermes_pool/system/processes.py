"""What the operating system says of processes, and the last resort of ending them.

Processes come and go between any two system calls, may be zombies, and may belong to somebody else: nothing here
raises for that. What cannot be read is ``None`` or ``unknown``, and what is ``unknown`` is never signalled.

A pid alone names nobody, since the system hands it out again: identity is ``(pid, create_time)``. All functions block
for milliseconds up to the bounds named, and are meant for a worker thread.
"""

import os
import select
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final, Literal

import psutil

from hermes_pool_worker import procfs
from hermes_pool_worker.contract import MARKER_VARIABLE, marker_start

CREATE_TIME_TOLERANCE_S: Final = 1.5
"""How far two readings of one process' create time may lie apart. Linux derives it from a boot time that is told in
whole seconds, and so may jump by one while the clock is being adjusted."""

KILL_WAIT_S: Final = 2.0
"""How long ``kill`` waits for its processes to be gone. Only one that sits in an uninterruptible system call stays."""
CREATE_TIME_STEPS_S: Final = 0.02
"""By how much the time between two processes' begins may be told too small."""

_FROZEN = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
_GONE = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


class IdentityCheck(StrEnum):
    """Who a ``(pid, create_time)`` is now."""

    CURRENT = "current"
    """The same process, and it lives."""
    REPLACED = "replaced"
    """The pid belongs to another process by now."""
    GONE = "gone"
    """There is no such process, or it is a zombie: dead, and only not collected yet."""
    UNKNOWN = "unknown"
    """The system does not tell. Never signal such a one."""


@dataclass(frozen=True, slots=True)
class Look:
    """One process and its descendants at one moment."""

    health: Literal["alive", "frozen", "dead", "unknown"]
    """``frozen`` is stopped by a signal or a debugger; ``dead`` includes a zombie and a pid that is another's now."""
    rss_bytes: int | None = None
    """Resident memory of the whole tree; ``None`` when a part of it cannot be read."""
    cpu_s: float | None = None
    """CPU time, user and system, that the whole living tree has used so far; ``None`` as above."""
    descendants: int = 0
    """How many living descendants there are."""


_DEAD = Look("dead")
_UNKNOWN = Look("unknown")


def identify(pid: int, create_time: float) -> IdentityCheck:
    """Say whether ``pid`` still is the process that was created at ``create_time`` (seconds since the epoch)."""
    return _find(pid, create_time)[0]


def look(pid: int, create_time: float) -> Look:
    """Return the health, memory and CPU time of a process and its descendants."""
    return look_all([(pid, create_time)])[0]


def look_all(identities: Sequence[tuple[int, float]]) -> list[Look]:
    """Return a ``Look`` for each ``(pid, create_time)``, in order, from one pass over the process table."""
    if not identities:
        return []
    children = _children()
    return [_look(pid, create_time, children) for pid, create_time in identities]


def descendants(pid: int, create_time: float) -> list[psutil.Process]:
    """Return the living descendants of a process, nearest first; none when the process itself is gone.

    The children of a dead process are no longer below it: ``marked`` finds those.
    """
    identity, process = _find(pid, create_time)
    if identity is not IdentityCheck.CURRENT or process is None or _childless(pid):
        return []
    return _below(process, _children())


def children_known(pid: int) -> frozenset[int]:
    """Return the pids of the children of a process; on Linux only, where that takes 0.1 ms. None elsewhere."""
    if sys.platform != "linux":
        return frozenset()
    found: set[int] = set()
    try:
        for task in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208 - on the path of every start, where pathlib is slow
            with open(f"/proc/{pid}/task/{task}/children", "rb") as file:  # noqa: PTH123 - as above
                found.update(map(int, file.read().split()))
    except OSError:  # it has ended, or the kernel does not tell
        pass
    return frozenset(found)


def begun_later(pid: int, create_time: float, after_s: float, known: frozenset[int]) -> tuple[str, ...]:
    """Return the names of the living descendants of a process that began ``after_s`` seconds after itself, or later.

    Its children in ``known``, and what is below those, are left out. All times are read in one go, since they may jump
    together; they are told in steps of some 10 ms.
    """
    identity, process = _find(pid, create_time)
    if identity is not IdentityCheck.CURRENT or process is None or _childless(pid):
        return ()
    children = _children()
    children[pid] = [child for child in children.get(pid, ()) if child not in known]
    names = []
    with suppress(psutil.Error):
        from_s = process.create_time() + after_s - CREATE_TIME_STEPS_S
        for each in _below(process, children):
            with suppress(psutil.Error):
                if each.create_time() >= from_s:
                    names.append(each.name())
    return tuple(names)


def marked(marker: str) -> list[psutil.Process]:
    """Return the living processes that were started with ``HERMES_POOL_WORKER=<marker>`` in their environment.

    It is the environment a program was *executed* with: a process that was only forked shows its parent's. Processes
    whose environment may not be read are left out.
    """
    entry = os.fsencode(f"{MARKER_VARIABLE}={marker}")
    found = []
    for pid in psutil.pids():
        if entry in _environment(pid):
            with suppress(psutil.Error):
                found.append(psutil.Process(pid))
    return found


def of_pool(pool: str) -> list[psutil.Process]:
    """Return the living processes that carry any marker of a pool (``<pool>-...``), and what is below those."""
    beginning = os.fsencode(f"{MARKER_VARIABLE}={marker_start(pool)}")
    children = _children()
    found: dict[int, psutil.Process] = {}
    for pid in psutil.pids():
        if any(entry.startswith(beginning) for entry in _environment(pid)):
            with suppress(psutil.Error):
                process = psutil.Process(pid)
                if process.status() not in _GONE:
                    found |= {each.pid: each for each in (process, *_below(process, children))}
    return list(found.values())


def own_tree(pid: int) -> set[int]:
    """Return the pids of a process, of all that it descends from, and of all that descends from it."""
    found = {pid}
    with suppress(psutil.Error, OSError):
        process = psutil.Process(pid)
        found |= {each.pid for each in process.parents()}
        found |= {each.pid for each in _below(process, _children())}
    return found


def is_frozen(pid: int) -> bool:
    """Say whether a process is stopped by a signal or a debugger. Quick (20 us), and meant for a child that lives."""
    if sys.platform == "linux":
        fields = procfs.stat(pid, procfs.STATE)
        return fields is not None and fields[procfs.STATE] in b"Tt"
    try:
        return psutil.Process(pid).status() in _FROZEN
    except (psutil.Error, OSError):
        return False


def create_time(pid: int) -> float | None:
    """Return when a process was created, in seconds since the epoch."""
    try:
        return psutil.Process(pid).create_time()
    except (psutil.Error, OSError):
        return None


def kill(processes: Iterable[psutil.Process], wait_s: float = KILL_WAIT_S) -> list[int]:
    """Send SIGKILL to each that still is the same process; return the pids of those that are gone through it.

    Waits at most ``wait_s`` seconds in all. Never signals this process, pid 1 or a process group. Collects nobody's
    exit status: that is left to whoever started the process.
    """
    dying = []
    for process in processes:
        if process.pid <= 1 or process.pid == os.getpid():
            continue
        pidfd = _pidfd(process.pid)
        if _still(process) and _signal(process, pidfd):
            dying.append((process, pidfd))
        elif pidfd is not None:
            os.close(pidfd)
    deadline = time.monotonic() + wait_s
    return [process.pid for process, pidfd in dying if _ended(process, pidfd, deadline)]


def catches(pid: int, number: int) -> bool:
    """Say whether a process has a handler for a signal, which else would end it. ``False`` where that is not told."""
    if sys.platform != "linux":
        return False
    try:
        status = Path(f"/proc/{pid}/status").read_bytes()
        mask = int(status.partition(b"SigCgt:")[2].split(maxsplit=1)[0], 16)
    except (OSError, ValueError, IndexError):
        return False
    return bool(mask >> (number - 1) & 1)


# --- looking ----------------------------------------------------------------------------------------------------------


def _find(pid: int, create_time: float) -> tuple[IdentityCheck, psutil.Process | None]:
    if pid <= 0:
        return IdentityCheck.GONE, None
    try:
        process = psutil.Process(pid)
        if abs(process.create_time() - create_time) > CREATE_TIME_TOLERANCE_S:
            return IdentityCheck.REPLACED, None
        if process.status() in _GONE:
            return IdentityCheck.GONE, None
    except psutil.NoSuchProcess:  # and ZombieProcess, which is one of it
        return IdentityCheck.GONE, None
    except (psutil.Error, OSError):
        return IdentityCheck.UNKNOWN, None
    return IdentityCheck.CURRENT, process


def _look(pid: int, create_time: float, children: dict[int, list[int]]) -> Look:
    identity, process = _find(pid, create_time)
    if identity is IdentityCheck.UNKNOWN:
        return _UNKNOWN
    if identity is not IdentityCheck.CURRENT or process is None:
        return _DEAD
    try:
        status = process.status()
    except psutil.NoSuchProcess:
        return _DEAD
    except (psutil.Error, OSError):
        return _UNKNOWN
    if status in _GONE:
        return _DEAD
    below = _below(process, children)
    rss_bytes, cpu_s = _used([process, *below])
    return Look("frozen" if status in _FROZEN else "alive", rss_bytes, cpu_s, len(below))


def _used(tree: list[psutil.Process]) -> tuple[int | None, float | None]:
    """Add up memory and CPU time. Who has vanished uses nothing; who may not be read makes the sum unknown."""
    rss_bytes: int | None = 0
    cpu_s: float | None = 0.0
    for process in tree:
        try:
            rss_bytes = None if rss_bytes is None else rss_bytes + process.memory_info().rss
        except psutil.NoSuchProcess:
            pass
        except (psutil.Error, OSError):
            rss_bytes = None
        try:
            times = process.cpu_times()
            cpu_s = None if cpu_s is None else cpu_s + times.user + times.system
        except psutil.NoSuchProcess:
            pass
        except (psutil.Error, OSError):
            cpu_s = None
    return rss_bytes, cpu_s


def _below(root: psutil.Process, children: dict[int, list[int]]) -> list[psutil.Process]:
    """Return the living descendants of ``root`` by a map that may be some milliseconds old."""
    found: list[psutil.Process] = []
    seen = {root.pid}
    parents = [root]
    while parents:
        parent = parents.pop(0)
        for pid in children.get(parent.pid, ()):
            if pid in seen:
                continue
            seen.add(pid)
            with suppress(psutil.Error, OSError):
                child = psutil.Process(pid)
                # A child is never older than its parent: if it is, one of the two pids has changed hands.
                if child.create_time() < parent.create_time() - CREATE_TIME_TOLERANCE_S or child.status() in _GONE:
                    continue
                found.append(child)
                parents.append(child)
    return found


def _children() -> dict[int, list[int]]:
    """Return the pids of the children of every process, from one pass over the process table."""
    children: dict[int, list[int]] = {}
    for pid in psutil.pids():
        parent = _parent(pid)
        if parent is not None:
            children.setdefault(parent, []).append(pid)
    return children


def _childless(pid: int) -> bool:
    """Whether a process surely has no child; 0.1 ms, where a pass over the process table takes several."""
    if sys.platform != "linux":
        return False
    try:
        # A thread that ends meanwhile hands its children to another one, and makes this raise.
        return not any((task / "children").read_bytes() for task in Path(f"/proc/{pid}/task").iterdir())
    except OSError:  # also where the kernel does not tell
        return False


def _parent(pid: int) -> int | None:
    if sys.platform == "linux":
        # A quarter of what psutil takes, which reads the same line but makes an object of it.
        fields = procfs.stat(pid, procfs.PARENT)
        return None if fields is None else int(fields[procfs.PARENT])
    try:
        return psutil.Process(pid).ppid()
    except (psutil.Error, OSError):
        return None


def _environment(pid: int) -> list[bytes]:
    if sys.platform == "linux":
        return procfs.environment(pid)
    try:
        return [os.fsencode(f"{name}={value}") for name, value in psutil.Process(pid).environ().items()]
    except (psutil.Error, OSError):
        return []


# --- killing ----------------------------------------------------------------------------------------------------------


def _pidfd(pid: int) -> int | None:
    """Return a descriptor of the process: what is checked after it is opened cannot change hands before the signal."""
    if sys.platform == "linux":
        with suppress(OSError):
            return os.pidfd_open(pid)
    return None


def _still(process: psutil.Process) -> bool:
    """Say whether the pid still is this process, and it lives."""
    try:
        return process.is_running() and process.status() not in _GONE
    except (psutil.Error, OSError):
        return False


def _signal(process: psutil.Process, pidfd: int | None) -> bool:
    try:
        if sys.platform == "linux" and pidfd is not None:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        else:
            process.kill()
    except (psutil.Error, OSError):
        return False
    return True


def _ended(process: psutil.Process, pidfd: int | None, deadline: float) -> bool:
    """Wait until it is dead. ``psutil.wait_procs`` would take a child's exit status away from whoever awaits it."""
    if pidfd is not None:
        try:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            return bool(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))
        finally:
            os.close(pidfd)
    while alive := _still(process):
        if time.monotonic() >= deadline:
            break
        time.sleep(0.01)
    return not alive


def memory_available() -> float:
    """Return the share of the machine's memory that can be had without swapping, from 0 to 1."""
    memory = psutil.virtual_memory()
    return float(memory.available / memory.total)
