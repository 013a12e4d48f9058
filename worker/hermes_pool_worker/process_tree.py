"""Finds and ends the processes that a worker's tools have started. Linux only.

A tool's process may have left its process group, its session and its parent, but two ties remain. Its environment holds
the marker of its worker, unless it cleared its environment. And it is below its worker, which adopts each process below
it that loses its parent; once the worker is dead, it is below the zygote. A process that was forked and has executed no
program of its own shows the environment of its ancestor.

See ``contract.marker`` for the form of a marker.
"""

import os
import signal
import time
from collections.abc import Callable, Collection, Iterable

from hermes_pool_worker import procfs
from hermes_pool_worker.contract import MARKER_VARIABLE, ZYGOTE, marker, marker_start

ROUNDS_MAX = 50
"""How often to look again, at most: a process that is being killed may still fork."""
FREEZE_S = 0.3
"""How long to wait for all processes of a pool to stand still before they are ended while they move, in seconds."""
_PR_SET_CHILD_SUBREAPER = 36


class Process:
    """One process, as ``/proc/PID/stat`` shows it. Its pid and ``began`` (ticks since boot) together identify it.

    Not a named tuple: ``typing`` would be a fifth of a guardian's memory.
    """

    __slots__ = ("began", "group", "parent", "session", "state")

    def __init__(self, fields: list[bytes]) -> None:
        self.state = fields[procfs.STATE]
        self.parent = int(fields[procfs.PARENT])
        self.group = int(fields[procfs.GROUP])
        self.session = int(fields[procfs.SESSION])
        self.began = int(fields[procfs.BEGAN])


def adopt_orphans() -> None:
    """Become the parent of every process below this one that loses its own. Does nothing if the kernel refuses."""
    import ctypes  # noqa: PLC0415 - takes 3 ms, which the guardian need not pay

    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap_adopted() -> None:
    """Reap the adopted processes that have ended. Those that this process started itself are left to their own code.

    Session and process group tell them apart: a child that this process started has the same as this process, or leads
    its own. An adopted process that looks like one stays a zombie until this process ends.
    """
    if not has_children():
        return
    own = os.getpid(), os.getpgrp(), os.getsid(0)
    for pid, process in _table().items():
        if process.parent != own[0] or process.state != b"Z":
            continue
        if process.session not in (own[2], pid) or process.group not in (own[1], pid):
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                continue


def has_children() -> bool:
    """Whether this process has any child, dead ones included. Takes one system call."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def end_descendants() -> None:
    """End every process below this one."""
    if has_children():
        _end_all(lambda: _living(below(_table(), {os.getpid()})))


def end_hidden_descendants() -> list[int]:
    """End the processes below this one that show no worker's marker; return their pids.

    The supervisor ends the others, but cannot find these.
    """
    if not has_children():
        return []
    return _end_all(lambda: _hidden(below(_table(), {os.getpid()})))


def end_orphans(leader: int, workers: Collection[int]) -> None:
    """End what a dead worker left in its session, and what it left to this process that the supervisor cannot find.

    ``leader`` is the pid of the worker, which is not reaped yet, so the pid is still its own. ``workers`` are the
    living workers. Any other child of this process was left by a dead worker, since a living one adopts its orphans.
    """

    def found() -> dict[int, int]:
        table = _table()
        here = os.getpid()
        adopted = {
            pid: each for pid, each in table.items() if each.parent == here and pid != leader and pid not in workers
        }
        family = {**adopted, **below(table, adopted)}
        in_session = {pid: each for pid, each in table.items() if each.session == leader and pid != leader}
        return {**_hidden(family), **_living(in_session)}

    _end_all(found)


def end_marked(own: str) -> None:
    """End every other process that carries ``own``, the marker of this worker, and everything below this process."""
    entry = f"{MARKER_VARIABLE}={own}".encode()

    def found() -> dict[int, int]:
        table = _table()
        here = os.getpid()
        marked = {pid: each for pid, each in table.items() if pid != here and entry in procfs.environment(pid)}
        return _living({**marked, **below(table, {here})})

    _end_all(found)


def end_pool(pool: str) -> None:
    """End every other process of a pool, and everything below those.

    They are made to stand still first, because a running process may fork meanwhile, and because what is below a dead
    worker can no longer be found.
    """
    start = f"{MARKER_VARIABLE}={marker_start(pool)}".encode()
    here = os.getpid()

    def found() -> dict[int, int]:
        table = _table()
        owned = {pid: each for pid, each in table.items() if pid != here and _has_entry(pid, start)}
        family = {**owned, **below(table, owned)}
        family.pop(here, None)
        return _living(family)

    frozen: dict[int, int] = {}
    until = time.monotonic() + FREEZE_S
    while time.monotonic() < until:
        moving = {pid: began for pid, began in found().items() if frozen.get(pid) != began}
        if not moving:
            break
        for pid, began in moving.items():
            _signal(pid, began, signal.SIGSTOP)
        frozen |= moving
    for pid, began in frozen.items():
        _signal(pid, began, signal.SIGKILL)
    _end_all(found)


def below(table: dict[int, Process], roots: Iterable[int]) -> dict[int, Process]:
    """Return the descendants of the processes ``roots``. Zombies count, because their children are below them."""
    known = set(roots)
    found: dict[int, Process] = {}
    while children := {pid: each for pid, each in table.items() if each.parent in known and pid not in known}:
        known |= children.keys()
        found |= children
    return found


def _end_all(find: Callable[[], dict[int, int]]) -> list[int]:
    """Kill what ``find`` returns, until it finds nothing more; return the pids."""
    ended: dict[int, int] = {}
    for _ in range(ROUNDS_MAX):
        found = find()
        if not found:
            break
        for pid, began in found.items():
            _signal(pid, began, signal.SIGKILL)
        ended |= found
    return list(ended)


def _signal(pid: int, began: int, number: int) -> None:
    """Signal a process, unless its pid belongs to another process by now."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return
    try:
        if (process := _process(pid)) is not None and process.began == began:
            signal.pidfd_send_signal(pidfd, number)
    except OSError:
        pass
    finally:
        os.close(pidfd)


def _living(processes: dict[int, Process]) -> dict[int, int]:
    """Return the living ones, as a map from pid to ``began``."""
    return {pid: process.began for pid, process in processes.items() if process.state not in b"ZX" and pid > 1}


def _hidden(processes: dict[int, Process]) -> dict[int, int]:
    """Return the living ones that show no worker's marker. A process that was only forked may show the zygote's."""
    found = {}
    for pid, began in _living(processes).items():
        shown = _marker(pid)
        if shown is None or shown.endswith(marker("", ZYGOTE).encode()):
            found[pid] = began
    return found


def _table() -> dict[int, Process]:
    return {pid: process for pid in procfs.pids() if (process := _process(pid)) is not None}


def _process(pid: int) -> Process | None:
    fields = procfs.stat(pid)
    return None if fields is None else Process(fields)


def _has_entry(pid: int, start: bytes) -> bool:
    """Whether an entry of this process's environment starts with these bytes."""
    return any(each.startswith(start) for each in procfs.environment(pid))


def _marker(pid: int) -> bytes | None:
    name = f"{MARKER_VARIABLE}=".encode()
    return next((each.removeprefix(name) for each in procfs.environment(pid) if each.startswith(name)), None)
