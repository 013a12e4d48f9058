"""The condition of a pool as a whole, and how it may change."""

from dataclasses import dataclass
from enum import StrEnum


class Condition(StrEnum):
    """What the pool as a whole does with messages."""

    NEW = "new"
    """Not entered yet."""
    OPEN = "open"
    PAUSED = "paused"
    """Turns that run go on, none is begun: messages wait, up to ``wait_timeout_s``."""
    DRAINING = "draining"
    """Turns that run, and messages in line, are finished; new ones are refused."""
    DRAINED = "drained"
    """Nothing runs, and new messages are refused."""
    CLOSED = "closed"


MAY_BECOME: dict[Condition, frozenset[Condition]] = {
    Condition.NEW: frozenset({Condition.OPEN, Condition.CLOSED}),
    Condition.OPEN: frozenset({Condition.PAUSED, Condition.DRAINING, Condition.CLOSED}),
    Condition.PAUSED: frozenset({Condition.OPEN, Condition.DRAINING, Condition.CLOSED}),
    Condition.DRAINING: frozenset({Condition.OPEN, Condition.DRAINED, Condition.CLOSED}),
    Condition.DRAINED: frozenset({Condition.OPEN, Condition.CLOSED}),
    Condition.CLOSED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class Drained:
    """What a drain took: messages that were ``finished`` in time, and those that were ``cut`` at the deadline."""

    finished: int
    cut: int
