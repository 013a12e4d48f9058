"""The report of one death: the error, the log and ``hermes-pool deaths`` show the same one, under one id."""

from dataclasses import dataclass

from hermes_pool_worker.plain import Plain


@dataclass(frozen=True, kw_only=True, slots=True)
class DeathReport(Plain):
    """How a worker died unexpectedly, and what was going on. Times are in seconds."""

    report_id: str
    """Identifies the report, also in the log and in the text of the error."""
    conversation_id: str
    user_id: str | None = None
    at: str
    """When it died, ISO 8601 in UTC."""
    pid: int | None
    incarnation: int
    """The number of the worker, counted from 1 in this supervisor."""
    uptime_s: float
    exit: str
    """How it ended, in words: status or signal, what the pool did to it, if anything, and the likely reason."""
    returncode: int | None
    """The exit status; negative: the signal; ``None``: unknown."""
    turn_id: str | None = None
    """The turn in which it died; ``None`` if it died between turns."""
    attempt: int = 0
    last_event: str | None = None
    """The type of the last event of that turn (``TextDelta``, ``ToolStarted``, ...)."""
    silent_s: float | None = None
    """The time from that event, or from the hand-over if there was none, to the death."""
    tools_open: tuple[str, ...] = ()
    """Tools that had started and not finished."""
    memory: tuple[tuple[float, int], ...] = ()
    """The last samples of its memory: seconds before the death, and bytes."""
    verdict: str | None = None
    """The diagnosis for which it was killed, if any."""
    stacks: tuple[str, ...] = ()
    """The Python stacks of all its threads, taken before the kill, if it was killed because it was stuck."""
    stderr_tail: tuple[str, ...] = ()
