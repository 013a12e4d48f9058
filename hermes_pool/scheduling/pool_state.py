"""The state of a pool as a whole, and how it may change."""

from dataclasses import dataclass
from enum import StrEnum


class PoolState(StrEnum):
    """What the pool as a whole does with messages."""

    NEW = "new"
    """Not entered yet."""
    OPEN = "open"
    PAUSED = "paused"
    """Turns that run go on, none is begun: messages wait, up to ``timeouts.wait_s``."""
    DRAINING = "draining"
    """Turns that run, and messages in line, are finished; new ones are refused."""
    DRAINED = "drained"
    """Nothing runs, and new messages are refused."""
    CLOSED = "closed"


MAY_BECOME: dict[PoolState, frozenset[PoolState]] = {
    PoolState.NEW: frozenset({PoolState.OPEN, PoolState.CLOSED}),
    PoolState.OPEN: frozenset({PoolState.PAUSED, PoolState.DRAINING, PoolState.CLOSED}),
    PoolState.PAUSED: frozenset({PoolState.OPEN, PoolState.DRAINING, PoolState.CLOSED}),
    PoolState.DRAINING: frozenset({PoolState.OPEN, PoolState.DRAINED, PoolState.CLOSED}),
    PoolState.DRAINED: frozenset({PoolState.OPEN, PoolState.CLOSED}),
    PoolState.CLOSED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class Drained:
    """What a drain took: messages that were ``finished`` in time, and those that were ``cut`` at the deadline."""

    finished: int
    cut: int
