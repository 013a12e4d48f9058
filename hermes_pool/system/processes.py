"""Inspects the processes of the operating system, and kills them as a last resort.

A process may come or go between any two system calls, be a zombie, or belong to another user. Nothing here raises for
that: what cannot be read is ``None`` or ``unknown``, and an ``unknown`` process is never signalled.

The system reuses pids, so a pid alone identifies nothing: identity is ``(pid, create_time)``. Functions block, for
milliseconds or up to the stated limit, and are meant to run in a thread.
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
"""How far two readings of the create time of one process may differ. Linux derives it from a boot time in whole
seconds, which may jump by one while the clock is being adjusted."""

KILL_WAIT_S: Final = 2.0
"""How long ``kill`` waits for processes to end. Only one in an uninterruptible system call takes longer."""
CREATE_TIME_STEPS_S: Final = 0.02
"""By how much the difference of two create times may be too small, since they are counted in ticks."""

_FROZEN = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
_GONE = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


class IdentityCheck(StrEnum):
    """What a ``(pid, create_time)`` refers to now."""

    CURRENT = "current"
    """The same process, and it is alive."""
    REPLACED = "replaced"
    """The pid belongs to another process now."""
    GONE = "gone"
    """There is no such process, or it is a zombie: dead, but not reaped yet."""
    UNKNOWN = "unknown"
    """The system does not say. Never signal such a process."""


@dataclass(frozen=True, slots=True)
class TreeInfo:
    """A process and its descendants at one moment."""

    health: Literal["alive", "frozen", "dead", "unknown"]
    """``frozen``: stopped by a signal or a debugger. ``dead`` includes zombies and pids that were reused."""
    rss_bytes: int | None = None
    """Resident memory of the entire tree; ``None`` if a part of it cannot be read."""
    cpu_s: float | None = None
    """CPU time, user and system, used so far by the processes that are alive; ``None`` as above."""
    descendants: int = 0
    """Number of living descendants."""


_DEAD = TreeInfo("dead")
_UNKNOWN = TreeInfo("unknown")


def identify(pid: int, create_time: float) -> IdentityCheck:
    """Check whether ``pid`` is still the process that was created at ``create_time`` (seconds since the epoch)."""
    return _find(pid, create_time)[0]


def inspect_tree(pid: int, create_time: float) -> TreeInfo:
    """Return the health, memory and CPU time of a process and its descendants."""
    return inspect_trees([(pid, create_time)])[0]


def inspect_trees(identities: Sequence[tuple[int, float]]) -> list[TreeInfo]:
    """Return a ``TreeInfo`` for each ``(pid, create_time)``, in order, from one pass over the process table."""
    if not identities:
        return []
    children = _children_by_pid()
    return [_inspect(pid, create_time, children) for pid, create_time in identities]


def descendants(pid: int, create_time: float) -> list[psutil.Process]:
    """Return the living descendants of a process, nearest first; none if the process itself is gone.

    The children of a dead process get another parent; use ``find_by_marker`` to find those.
    """
    identity, process = _find(pid, create_time)
    if identity is not IdentityCheck.CURRENT or process is None or _has_no_children(pid):
        return []
    return _descendants(process, _children_by_pid())


def child_pids(pid: int) -> frozenset[int]:
    """Return the pids of the children of a process. Takes 0.1 ms on Linux; returns none elsewhere."""
    if sys.platform != "linux":
        return frozenset()
    found: set[int] = set()
    try:
        for task in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208 - on the path of every start, where pathlib is slow
            with open(f"/proc/{pid}/task/{task}/children", "rb") as file:  # noqa: PTH123 - as above
                found.update(map(int, file.read().split()))
    except OSError:  # it has ended, or the kernel does not provide the list
        pass
    return frozenset(found)


def descendants_started_after(pid: int, create_time: float, after_s: float, known: frozenset[int]) -> tuple[str, ...]:
    """Return the names of the living descendants that started at least ``after_s`` seconds after the process itself.

    Leaves out the children in ``known`` and their descendants. All times are read in one pass, since a clock adjustment
    moves them together; their resolution is some 10 ms.
    """
    identity, process = _find(pid, create_time)
    if identity is not IdentityCheck.CURRENT or process is None or _has_no_children(pid):
        return ()
    children = _children_by_pid()
    children[pid] = [child for child in children.get(pid, ()) if child not in known]
    names = []
    with suppress(psutil.Error):
        from_s = process.create_time() + after_s - CREATE_TIME_STEPS_S
        for each in _descendants(process, children):
            with suppress(psutil.Error):
                if each.create_time() >= from_s:
                    names.append(each.name())
    return tuple(names)


def find_by_marker(marker: str) -> list[psutil.Process]:
    """Return the living processes that were started with ``HERMES_POOL_WORKER=<marker>`` in their environment.

    The system shows the environment that a program was *executed* with; a process that was only forked shows its
    parent's. Leaves out processes whose environment cannot be read.
    """
    entry = os.fsencode(f"{MARKER_VARIABLE}={marker}")
    found = []
    for pid in psutil.pids():
        if entry in _environment(pid):
            with suppress(psutil.Error):
                found.append(psutil.Process(pid))
    return found


def find_by_pool(pool: str) -> list[psutil.Process]:
    """Return the living processes that carry any marker of a pool (``<pool>-...``), and their descendants."""
    prefix = os.fsencode(f"{MARKER_VARIABLE}={marker_start(pool)}")
    children = _children_by_pid()
    found: dict[int, psutil.Process] = {}
    for pid in psutil.pids():
        if any(entry.startswith(prefix) for entry in _environment(pid)):
            with suppress(psutil.Error):
                process = psutil.Process(pid)
                if process.status() not in _GONE:
                    found |= {each.pid: each for each in (process, *_descendants(process, children))}
    return list(found.values())


def relatives(pid: int) -> set[int]:
    """Return the pids of a process, its ancestors and its living descendants."""
    found = {pid}
    with suppress(psutil.Error, OSError):
        process = psutil.Process(pid)
        found |= {each.pid for each in process.parents()}
        found |= {each.pid for each in _descendants(process, _children_by_pid())}
    return found


def is_frozen(pid: int) -> bool:
    """Return whether a process is stopped by a signal or a debugger. Takes 20 us; does not check the identity."""
    if sys.platform == "linux":
        fields = procfs.stat(pid, procfs.STATE)
        return fields is not None and fields[procfs.STATE] in b"Tt"
    try:
        return psutil.Process(pid).status() in _FROZEN
    except (psutil.Error, OSError):
        return False


def create_time(pid: int) -> float | None:
    """Return when a process was created, in seconds since the epoch, or ``None`` if it is gone or unknown."""
    try:
        return psutil.Process(pid).create_time()
    except (psutil.Error, OSError):
        return None


def kill(processes: Iterable[psutil.Process], wait_s: float = KILL_WAIT_S) -> list[int]:
    """Send SIGKILL to each process that is still the same one; return the pids of those that ended.

    Waits at most ``wait_s`` seconds in total. Never signals this process, pid 1 or a process group. Reaps nothing: the
    exit status is left to the parent.
    """
    dying = []
    for process in processes:
        if process.pid <= 1 or process.pid == os.getpid():
            continue
        pidfd = _pidfd(process.pid)
        if _is_alive(process) and _signal(process, pidfd):
            dying.append((process, pidfd))
        elif pidfd is not None:
            os.close(pidfd)
    deadline = time.monotonic() + wait_s
    return [process.pid for process, pidfd in dying if _wait_until_dead(process, pidfd, deadline)]


def catches(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal. ``False`` if the system does not say."""
    if sys.platform != "linux":
        return False
    try:
        status = Path(f"/proc/{pid}/status").read_bytes()
        mask = int(status.partition(b"SigCgt:")[2].split(maxsplit=1)[0], 16)
    except (OSError, ValueError, IndexError):
        return False
    return bool(mask >> (number - 1) & 1)


def memory_available() -> float:
    """Return the share of the machine's memory that is available without swapping, from 0 to 1."""
    memory = psutil.virtual_memory()
    return float(memory.available / memory.total)


# --- inspecting -------------------------------------------------------------------------------------------------------


def _find(pid: int, create_time: float) -> tuple[IdentityCheck, psutil.Process | None]:
    if pid <= 0:
        return IdentityCheck.GONE, None
    try:
        process = psutil.Process(pid)
        if abs(process.create_time() - create_time) > CREATE_TIME_TOLERANCE_S:
            return IdentityCheck.REPLACED, None
        if process.status() in _GONE:
            return IdentityCheck.GONE, None
    except psutil.NoSuchProcess:  # including its subclass ZombieProcess
        return IdentityCheck.GONE, None
    except (psutil.Error, OSError):
        return IdentityCheck.UNKNOWN, None
    return IdentityCheck.CURRENT, process


def _inspect(pid: int, create_time: float, children: dict[int, list[int]]) -> TreeInfo:
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
    below = _descendants(process, children)
    rss_bytes, cpu_s = _usage([process, *below])
    return TreeInfo("frozen" if status in _FROZEN else "alive", rss_bytes, cpu_s, len(below))


def _usage(tree: list[psutil.Process]) -> tuple[int | None, float | None]:
    """Add up memory and CPU time. A process that is gone adds nothing; an unreadable one makes the sum ``None``."""
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


def _descendants(root: psutil.Process, children: dict[int, list[int]]) -> list[psutil.Process]:
    """Return the living descendants of ``root``. The map of children may be some milliseconds old."""
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
                # A child is never older than its parent; if it seems to be, one of the two pids was reused.
                if child.create_time() < parent.create_time() - CREATE_TIME_TOLERANCE_S or child.status() in _GONE:
                    continue
                found.append(child)
                parents.append(child)
    return found


def _children_by_pid() -> dict[int, list[int]]:
    """Return the pids of each process's children, from one pass over the process table."""
    children: dict[int, list[int]] = {}
    for pid in psutil.pids():
        parent = _parent(pid)
        if parent is not None:
            children.setdefault(parent, []).append(pid)
    return children


def _has_no_children(pid: int) -> bool:
    """Return whether a process certainly has no child. Takes 0.1 ms; a pass over the process table takes several."""
    if sys.platform != "linux":
        return False
    try:
        # A thread that ends meanwhile passes its children to another thread, and makes this raise.
        return not any((task / "children").read_bytes() for task in Path(f"/proc/{pid}/task").iterdir())
    except OSError:  # including a kernel that does not provide the list
        return False


def _parent(pid: int) -> int | None:
    if sys.platform == "linux":
        # Four times as fast as psutil, which reads the same line but builds an object from it.
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
    """Return a pidfd, or ``None``. What is checked after it is opened still holds when the signal is sent."""
    if sys.platform == "linux":
        with suppress(OSError):
            return os.pidfd_open(pid)
    return None


def _is_alive(process: psutil.Process) -> bool:
    """Return whether the pid still belongs to this process, and it is alive."""
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


def _wait_until_dead(process: psutil.Process, pidfd: int | None, deadline: float) -> bool:
    """Wait until it is dead; return whether it is. ``psutil.wait_procs`` would reap a child and so take its status."""
    if pidfd is not None:
        try:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            return bool(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))
        finally:
            os.close(pidfd)
    while alive := _is_alive(process):
        if time.monotonic() >= deadline:
            break
        time.sleep(0.01)
    return not alive
