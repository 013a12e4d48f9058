"""What the sampler reads of a process, and the interface of the sources that it reads from."""

from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple, Protocol

from hermes_pool.policy.liveness import ProcessState


class Attention(StrEnum):
    """How much of a worker is sampled."""

    PASSING = "passing"
    """For a worker without a turn: little is read."""
    CLOSE = "close"
    """For a worker with a turn: everything is read, including I/O, so that it can be diagnosed."""


class Stat(NamedTuple):
    """The state of a process in one read.

    ``started`` is its start time in a unit of the source's own; it never changes, so it identifies the process together
    with the pid. A named tuple, because a frozen dataclass takes three times as long to create, and there are many.
    """

    state: ProcessState
    parent: int
    started: float
    cpu_s: float
    rss_bytes: int
    threads: int


class Source(Protocol):
    """Reads processes from the system, one at a time. ``None``: the process is gone, or the system does not say."""

    def pids(self) -> Iterable[int]:
        """Return the pids of all processes."""

    def stat(self, pid: int) -> Stat | None:
        """Return everything that is cheap to read."""

    def clock_ns(self, pid: int) -> int | None:
        """Return the CPU time of a process in nanoseconds, or ``None`` if that is not much cheaper than ``stat``."""

    def create_time(self, stat: Stat, boot_time_s: float) -> float:
        """Return the create time of a process in seconds since the epoch, equal to psutil's."""

    def io_bytes(self, pid: int) -> int | None:
        """Return how many bytes a process has read and written so far."""

    def unique_bytes(self, pid: int) -> int | None:
        """Return the memory of a process, counting its share of each shared page. Takes milliseconds."""
