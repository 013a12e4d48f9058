"""What one look at a process tells, and the interface of those who look."""

from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple, Protocol

from hermes_pool.policy.liveness import ProcessState


class Attention(StrEnum):
    """How closely a worker is looked at."""

    PASSING = "passing"
    """For one without a turn."""
    CLOSE = "close"
    """For one with a turn: everything is read, the I/O too, so that it can be judged."""


class Stat(NamedTuple):
    """What one read tells of a process. ``started`` names it for good: no change of the system's time changes it.

    A tuple, since there are many: a frozen dataclass takes three times as long to make.
    """

    state: ProcessState
    parent: int
    started: float
    cpu_s: float
    rss_bytes: int
    threads: int


class Source(Protocol):
    """Where it is read: one process at a time, ``None`` where there is none or it does not tell."""

    def pids(self) -> Iterable[int]:
        """Return the pids of all processes."""

    def stat(self, pid: int) -> Stat | None:
        """Return what can be had cheaply."""

    def clock_ns(self, pid: int) -> int | None:
        """Return the CPU time of a process in nanoseconds, if that is much cheaper than ``stat``."""

    def create_time(self, stat: Stat, boot_time_s: float) -> float:
        """Return when a process began, in seconds since the epoch, as psutil tells it."""

    def io_bytes(self, pid: int) -> int | None:
        """Return how many bytes a process has read and written so far."""

    def unique_bytes(self, pid: int) -> int | None:
        """Return the memory of a process, shared pages by its share of them; takes milliseconds."""
