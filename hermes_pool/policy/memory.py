"""Decides what to do about the memory and the age of workers: numbers go in, actions come out.

Limits apply to the unique memory of a worker and its descendants, which counts a worker's share of each shared page. If
that is unknown, they apply to resident memory, which is never less. Forked workers share most of their memory with the
zygote, and resident memory counts all of it for each of them.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Generic, TypeVar

from hermes_pool.settings import MemoryLimits

K = TypeVar("K")

AGE_JITTER: Final = 0.1
"""Each worker's age limit differs from ``worker_age_max_s`` by up to this share, so that workers that were started
together do not all leave together."""
WARN_AGAIN_BELOW: Final = 0.9
"""A warning is repeated only after the worker was below this share of ``memory.warn_bytes``."""
TOTAL_LOW: Final = 0.9
"""Above ``memory.total_bytes``, idle workers are stopped until the rest use less than this share of it."""


class Activity(StrEnum):
    """Whether a worker can be stopped at once."""

    IDLE = "idle"
    IN_TURN = "in_turn"


class Action(StrEnum):
    """What to do with one worker."""

    NONE = "none"
    WARN = "warn"
    """Log a warning, once."""
    RECYCLE_AFTER_TURN = "recycle_after_turn"
    """Stop it after its turn; the next message gets a new worker."""
    RECYCLE_NOW = "recycle_now"
    """Stop it now: it is idle."""
    KILL = "kill"
    """Kill it now, whatever it is doing, and report it."""


class Mode(StrEnum):
    """Whether the pool as a whole is within its memory limit."""

    CALM = "calm"
    SHEDDING = "shedding"
    """It was above ``memory.total_bytes`` and is not yet below the lower mark."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage(Generic[K]):
    """One worker at one moment. ``worker`` identifies it; the key is never reused for another worker."""

    worker: K
    activity: Activity
    age_s: float
    unique_bytes: int | None = None
    rss_bytes: int | None = None

    @property
    def measured_bytes(self) -> int | None:
        """The memory that limits apply to; ``None`` if nothing is known."""
        return self.rss_bytes if self.unique_bytes is None else self.unique_bytes


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do with one worker. ``reason`` is a phrase that follows "the worker"."""

    action: Action
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Plan(Generic[K]):
    """What to do now."""

    workers: dict[K, Decision]
    """Only the workers for which there is something to do."""
    shed: tuple[K, ...]
    """Idle workers to stop to make room, the least valuable first; excludes those that are recycled anyway."""
    mode: Mode
    total_bytes: int


class MemoryPolicy(Generic[K]):
    """Decides for one pool, one pass of the sampler after another."""

    def __init__(self, limits: MemoryLimits, worker_age_max_s: float | None = None) -> None:
        self.limits = limits
        self._worker_age_max_s = worker_age_max_s
        self.mode = Mode.CALM
        self._warned: set[K] = set()

    @property
    def unique_above_bytes(self) -> int | None:
        """The resident memory above which the unique memory of a worker must be measured; ``None``: never.

        While resident memory is within the lowest limit, so is unique memory, which costs much more to measure. The sum
        of resident memory is above any reasonable total, so with a total limit each worker must be measured.
        """
        limits = self.limits
        if limits.total_bytes is not None:
            return 0
        each = (limits.warn_bytes, limits.recycle_bytes, limits.kill_bytes)
        return min((limit for limit in each if limit is not None), default=None)

    def decide(self, workers: Sequence[Usage[K]], value: Callable[[K], float]) -> Plan[K]:
        """Return what to do. ``value`` returns how much an idle worker is worth; the least valuable goes first."""
        self._warned &= {usage.worker for usage in workers}
        decided = {}
        for usage in workers:
            decision = self._decide(usage)
            if decision.action is not Action.NONE:
                decided[usage.worker] = decision
        leaving = {
            worker for worker, decision in decided.items() if decision.action in (Action.RECYCLE_NOW, Action.KILL)
        }
        total_bytes = sum(usage.measured_bytes or 0 for usage in workers)
        leaving_bytes = sum(usage.measured_bytes or 0 for usage in workers if usage.worker in leaving)
        staying = [usage for usage in workers if usage.worker not in leaving]
        shed = self._shed(staying, total_bytes, total_bytes - leaving_bytes, value)
        return Plan(decided, shed, self.mode, total_bytes)

    def _decide(self, usage: Usage[K]) -> Decision:
        limits, used = self.limits, usage.measured_bytes
        if used is not None:
            if limits.kill_bytes is not None and used > limits.kill_bytes:
                return Decision(Action.KILL, _uses(used, "memory.kill_bytes", limits.kill_bytes))
            if limits.recycle_bytes is not None and used > limits.recycle_bytes:
                return Decision(_recycle(usage), _uses(used, "memory.recycle_bytes", limits.recycle_bytes))
        age_max_s = self.age_max_s(usage.worker)
        if age_max_s is not None and usage.age_s > age_max_s:
            return Decision(
                _recycle(usage), f"is {usage.age_s:.0f} s old, over its limit of {age_max_s:.0f} s (worker_age_max_s)"
            )
        return self._warn(usage.worker, used)

    def _warn(self, worker: K, used: int | None) -> Decision:
        limit = self.limits.warn_bytes
        if limit is None or used is None:
            return Decision(Action.NONE)
        if used > limit and worker not in self._warned:
            self._warned.add(worker)
            return Decision(Action.WARN, _uses(used, "memory.warn_bytes", limit))
        if used < WARN_AGAIN_BELOW * limit:
            self._warned.discard(worker)
        return Decision(Action.NONE)

    def age_max_s(self, worker: K) -> float | None:
        """Return the age limit of one worker in seconds. It is derived from the key, so it is the same each time."""
        if self._worker_age_max_s is None:
            return None
        share = zlib.crc32(repr(worker).encode()) / 2**32  # from 0 to 1
        return self._worker_age_max_s * (1 + AGE_JITTER * (2 * share - 1))

    def _shed(
        self, staying: list[Usage[K]], total_bytes: int, left_bytes: int, value: Callable[[K], float]
    ) -> tuple[K, ...]:
        """Choose idle workers to stop, from above the total until below the lower mark, so that it does not oscillate.

        If too few are idle, it continues in the next pass with those that have become idle.
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
