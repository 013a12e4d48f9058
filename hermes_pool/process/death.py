"""How a worker ended, how it was ended, and what is left of it."""

import signal
from dataclasses import dataclass
from typing import Literal

import psutil

from hermes_pool.process.launcher import Exit
from hermes_pool.system import processes
from hermes_pool_worker.plain import Plain

SIGKILL = getattr(signal, "SIGKILL", signal.SIGTERM)
"""Windows has no SIGKILL; its SIGTERM cannot be ignored."""
STRAYS_ROUNDS_MAX = 3
"""How often to search for processes with a stopped worker's marker: they may still fork while they are killed."""

How = Literal["closed", "terminated", "killed"]
"""What ended a worker: its own exit, SIGTERM or SIGKILL."""
ProcessTree = dict[int, psutil.Process]
"""The processes below a worker, by pid."""


@dataclass(frozen=True, slots=True)
class Death:
    """The end of a worker's process. It is reported exactly once.

    ``cause`` is why the pool killed it, if it did (a broken protocol, a limit). ``wanted`` means that the pool had
    decided to end it before the first signal.
    """

    exit: Exit
    stderr_tail: tuple[str, ...]
    cause: str | None = None
    wanted: bool = False

    def __str__(self) -> str:
        """Describe the end, worded to follow "the worker"."""
        if self.cause:
            return f"{self.cause} and {self.exit}"
        if self.exit.returncode == -SIGKILL and not self.wanted:
            return f"{self.exit}, possibly because the machine is out of memory"
        return str(self.exit)


@dataclass(frozen=True, slots=True)
class Stopped(Plain):
    """How a worker was stopped, what ended with it, and what is left."""

    exit: Exit
    how: How
    """``closed``: it exited by itself. ``terminated``: by SIGTERM. ``killed``: by SIGKILL."""
    strays: tuple[int, ...] = ()
    """Pids of processes that its tools had left running. All have ended: the pool killed them, or the worker did."""
    worker: tuple[int, float] | None = None
    """Pid and create time (seconds since the epoch); ``None`` if no process was ever started."""
    left: tuple[int, ...] = ()
    """Pids that are or may be alive, by the process table: the worker, its descendants from when its end began, and
    processes with its marker. Empty, except for a process that the kernel itself cannot end."""


def end_tree(worker: tuple[int, float], marker: str, tree: ProcessTree) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Kill what is left of a stopped worker; return the pids that are gone, and those that are not. Blocks."""
    processes.kill(tree.values())
    left = {pid for pid, each in tree.items() if _may_live(pid, each.create_time())}
    strays = set(tree) - left
    marked = processes.find_by_marker(marker)
    for _ in range(STRAYS_ROUNDS_MAX):
        if not marked:
            break
        strays |= set(processes.kill(marked))
        marked = processes.find_by_marker(marker)
    left |= {each.pid for each in marked}
    if _may_live(*worker):
        left.add(worker[0])
    return tuple(sorted(strays - left - {worker[0]})), tuple(sorted(left))


def _may_live(pid: int, create_time: float) -> bool:
    return processes.identify(pid, create_time) in (processes.IdentityCheck.CURRENT, processes.IdentityCheck.UNKNOWN)
