"""What happens to a turn whose worker died: pure decisions from facts.

Replacing the worker and running the turn again are two separate decisions. A dead worker is replaced while the turn's
budget lasts. The turn runs again only if it cannot have had any effect.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

Replay = Literal["until_tool", "always", "never"]
"""Which turns run again: those in which no tool had started, all, or none."""


class Decision(StrEnum):
    """What happens to the turn next."""

    REPLACE = "replace"
    """Start another worker; then decide again."""
    REPLAY = "replay"
    """Hand the turn to the new worker."""
    DELIVER = "deliver"
    """Settle it with the reply that the dead worker had completed and the new one found in the history."""
    END = "end"
    """Settle it as requested before its worker died."""
    INTERRUPT = "interrupt"
    """Settle it with ``TurnInterruptedError``: a tool may have acted."""
    CRASH = "crash"
    """Settle it with ``WorkerCrashedError``."""
    REFUSE = "refuse"
    """Settle it with the error of the failed start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnFacts:
    """What is known about the turn."""

    deaths: int
    """How many workers have died with it so far."""
    tools_started: bool
    """Whether a tool may have acted that is not named safe, in any attempt."""
    end_wanted: bool
    """Whether it was to end anyway: cancelled, stopped, or over a time limit."""
    replay: Replay
    replacements_max: int
    """How many dead workers may be replaced for one turn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Replacement:
    """The outcome of starting another worker."""

    alive: bool = True
    """Whether the new worker is still alive."""
    recovered: bool = False
    """Whether it found the turn complete in the history."""
    kept: bool = False
    """Whether the turn stays in the history, since a tool may have acted in it, whether that was heard of or not."""


def after_death(turn: TurnFacts) -> Decision:
    """Decide after a worker died in a turn."""
    if turn.end_wanted:
        return Decision.END
    if turn.deaths > turn.replacements_max:
        return _failure(turn)
    return Decision.REPLACE


def after_replacement(turn: TurnFacts, replacement: Replacement) -> Decision:
    """Decide after another worker opened the session."""
    if replacement.recovered:
        return Decision.DELIVER
    if turn.end_wanted:
        return Decision.END
    if replacement.kept:
        return Decision.INTERRUPT
    if not replacement.alive:
        return _failure(turn)
    if turn.replay == "always" or (turn.replay == "until_tool" and not turn.tools_started):
        return Decision.REPLAY
    return _failure(turn)


def after_failed_start(turn: TurnFacts, *, backing_off: bool) -> Decision:
    """Decide after no other worker could be started. ``backing_off``: none was even tried, too many had died.

    That a tool may have acted, or that workers keep dying, matters more to the caller than why the start failed.
    """
    if turn.end_wanted:
        return Decision.END
    if turn.tools_started or backing_off:
        return _failure(turn)
    return Decision.REFUSE


def _failure(turn: TurnFacts) -> Decision:
    """Return which error it is. With ``replay="always"`` the host allows effects to be repeated."""
    return Decision.INTERRUPT if turn.tools_started and turn.replay != "always" else Decision.CRASH
