"""Which idle worker goes first when room is needed: pure, and only the ratios of the gains matter."""

from dataclasses import dataclass
from typing import Final

QUICK_START_S: Final = 1.0
"""Starts shorter than this count as equal: the difference is noise, and the wait is short anyway."""
SMALL_BYTES: Final = 64 * 1024 * 1024
"""Workers smaller than this count as equal in memory."""


@dataclass(frozen=True, slots=True)
class Idle:
    """An idle worker; ``None`` means "unknown"."""

    idle_s: float
    start_s: float | None = None
    """How long its last start took, including the resumption of its session."""
    memory_bytes: int | None = None
    """How much memory its end would free."""


def gain(idle: Idle) -> float:
    """Return what ending this worker gains: more, the longer it was idle, the bigger it is and the faster it restarts.

    Idle time stands for how unlikely a next message is. So the gain is memory times idle time, for each second that a
    later start costs.
    """
    memory_bytes = max(idle.memory_bytes or 0, SMALL_BYTES)
    return idle.idle_s * memory_bytes / max(idle.start_s or 0.0, QUICK_START_S)
