"""The states of a pool as a whole, and the allowed transitions."""

from dataclasses import dataclass
from enum import StrEnum

from hermes_pool_worker.plain import Plain


class PoolState(StrEnum):
    """What the pool as a whole does with messages."""

    NEW = "new"
    """Not opened yet."""
    OPEN = "open"
    PAUSED = "paused"
    """Running turns go on and no other begins: messages wait, up to ``timeouts.wait_s``."""
    DRAINING = "draining"
    """Running turns and waiting messages are finished; new messages are refused."""
    DRAINED = "drained"
    """No turn runs, and new messages are refused."""
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
class Drained(Plain):
    """The result of a drain: how many messages were ``finished`` in time, and how many ``cut`` at the deadline."""

    finished: int
    cut: int
