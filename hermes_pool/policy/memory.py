"""What is done about the memory and the age of workers: pure decisions, from numbers to actions.

The measure is the unique memory of a worker and all its descendants where it is known (each shared page counted by its
share), else their resident memory, which is never less. Forked workers share most of theirs with the zygote: resident
memory counts that once for each of them.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Generic, TypeVar

from hermes_pool.settings import MemoryLimits

K = TypeVar("K")

AGE_JITTER: Final = 0.1
"""A worker's own limit of age lies this much around ``worker_age_max_s``, so that those started together do not all
leave together."""
WARN_AGAIN_BELOW: Final = 0.9
"""A worker is warned of again only after it has been below this share of ``memory.warn_bytes``."""
TOTAL_LOW: Final = 0.9
"""Above ``memory.total_bytes``, idle workers go until the rest is below this share of it."""


class Activity(StrEnum):
    """Whether a worker could be let go at once."""

    IDLE = "idle"
    IN_TURN = "in_turn"


class Action(StrEnum):
    """What is to be done with one worker."""

    NONE = "none"
    WARN = "warn"
    """Say so, once."""
    RECYCLE_AFTER_TURN = "recycle_after_turn"
    """Let it go when its turn has ended; its next message gets a new one."""
    RECYCLE_NOW = "recycle_now"
    """Let it go: it is idle."""
    KILL = "kill"
    """End it now, whatever it does, and report it."""


class Mode(StrEnum):
    """Whether the pool as a whole is within its memory."""

    CALM = "calm"
    SHEDDING = "shedding"
    """It was above ``memory.total_bytes`` and is not yet below the lower mark."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage(Generic[K]):
    """One worker at one moment. ``worker`` names it, differently from every other worker that there ever was."""

    worker: K
    activity: Activity
    age_s: float
    unique_bytes: int | None = None
    rss_bytes: int | None = None

    @property
    def measured_bytes(self) -> int | None:
        """The measure that limits are held against; ``None`` when nothing is known."""
        return self.rss_bytes if self.unique_bytes is None else self.unique_bytes


@dataclass(frozen=True, slots=True)
class Decided:
    """What is to be done with one worker, and why, in words that follow "the worker"."""

    action: Action
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Plan(Generic[K]):
    """What is to be done now."""

    workers: dict[K, Decided]
    """Of those only for which there is something to do."""
    shed: tuple[K, ...]
    """Idle workers to let go for the sake of the others, the least valuable first; none that is recycled anyway."""
    mode: Mode
    total_bytes: int


class MemoryPolicy(Generic[K]):
    """Decides, look by look, for one pool."""

    def __init__(self, limits: MemoryLimits, worker_age_max_s: float | None = None) -> None:
        self.limits = limits
        self._worker_age_max_s = worker_age_max_s
        self.mode = Mode.CALM
        self._warned: set[K] = set()

    @property
    def unique_above_bytes(self) -> int | None:
        """From which resident memory on the unique memory of a worker matters; ``None``: never.

        As long as the resident memory is within the lowest limit, so is the unique memory, which costs much more to
        measure. A total is exceeded by resident memory alone all the time, so for that it always matters.
        """
        limits = self.limits
        if limits.total_bytes is not None:
            return 0
        each = (limits.warn_bytes, limits.recycle_bytes, limits.kill_bytes)
        return min((limit for limit in each if limit is not None), default=None)

    def decide(self, workers: Sequence[Usage[K]], value: Callable[[K], float]) -> Plan[K]:
        """Say what is to be done. ``value`` tells how much an idle worker is worth keeping; the least goes first."""
        self._warned &= {usage.worker for usage in workers}
        decided = {}
        for usage in workers:
            one = self._decide(usage)
            if one.action is not Action.NONE:
                decided[usage.worker] = one
        leaving = {worker for worker, one in decided.items() if one.action in (Action.RECYCLE_NOW, Action.KILL)}
        total_bytes = sum(usage.measured_bytes or 0 for usage in workers)
        leaving_bytes = sum(usage.measured_bytes or 0 for usage in workers if usage.worker in leaving)
        staying = [usage for usage in workers if usage.worker not in leaving]
        shed = self._shed(staying, total_bytes, total_bytes - leaving_bytes, value)
        return Plan(decided, shed, self.mode, total_bytes)

    def _decide(self, usage: Usage[K]) -> Decided:
        limits, used = self.limits, usage.measured_bytes
        if used is not None:
            if limits.kill_bytes is not None and used > limits.kill_bytes:
                return Decided(Action.KILL, _uses(used, "memory.kill_bytes", limits.kill_bytes))
            if limits.recycle_bytes is not None and used > limits.recycle_bytes:
                return Decided(_recycle(usage), _uses(used, "memory.recycle_bytes", limits.recycle_bytes))
        age_max_s = self.age_max_s(usage.worker)
        if age_max_s is not None and usage.age_s > age_max_s:
            return Decided(
                _recycle(usage), f"is {usage.age_s:.0f} s old, over its limit of {age_max_s:.0f} s (worker_age_max_s)"
            )
        return self._warn(usage.worker, used)

    def _warn(self, worker: K, used: int | None) -> Decided:
        limit = self.limits.warn_bytes
        if limit is None or used is None:
            return Decided(Action.NONE)
        if used > limit and worker not in self._warned:
            self._warned.add(worker)
            return Decided(Action.WARN, _uses(used, "memory.warn_bytes", limit))
        if used < WARN_AGAIN_BELOW * limit:
            self._warned.discard(worker)
        return Decided(Action.NONE)

    def age_max_s(self, worker: K) -> float | None:
        """Return a worker's own limit of age: always the same for the same one, drawn from its name."""
        if self._worker_age_max_s is None:
            return None
        share = zlib.crc32(repr(worker).encode()) / 2**32  # from 0 to 1
        return self._worker_age_max_s * (1 + AGE_JITTER * (2 * share - 1))

    def _shed(
        self, staying: list[Usage[K]], total_bytes: int, left_bytes: int, value: Callable[[K], float]
    ) -> tuple[K, ...]:
        """Choose who goes: from above the total until below the lower mark, so that it does not begin again at once.

        Where too few are idle, it goes on with those that become idle at the next look.
        """
        limit = self.limits.total_bytes
        if limit is None:
            return ()
        low = TOTAL_LOW * limit
        if total_bytes > limit:
            self.mode = Mode.SHEDDING
        elif total_bytes <= low:
            self.mode = Mode.CALM
        if self.mode is Mode.CALM:
            return ()
        shed = []
        idle = [usage for usage in staying if usage.activity is Activity.IDLE and usage.measured_bytes]
        for usage in sorted(idle, key=lambda usage: value(usage.worker)):
            if left_bytes <= low:
                break
            shed.append(usage.worker)
            left_bytes -= usage.measured_bytes or 0
        return tuple(shed)


def _recycle(usage: Usage[K]) -> Action:
    return Action.RECYCLE_NOW if usage.activity is Activity.IDLE else Action.RECYCLE_AFTER_TURN


def _uses(used: int, name: str, limit: int) -> str:
    return f"uses {used / 2**20:,.0f} MiB, over {name} ({limit / 2**20:,.0f} MiB)"
