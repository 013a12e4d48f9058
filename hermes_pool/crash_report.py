"""The report of one death: the same, under one id, in the error, in the log and from outside."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class DeathReport:
    """How a worker died that nobody had asked to go, and what was going on. Times are in seconds."""

    report_id: str
    """Names it, also in the log and in the text of the error."""
    conversation_id: str
    user_id: str | None = None
    at: str
    """ISO 8601 in UTC."""
    pid: int | None
    incarnation: int
    """The how-manieth worker of the session in this supervisor."""
    uptime_s: float
    exit: str
    """In words: its status or signal, what the pool did to it where it did, and the likely reason."""
    returncode: int | None
    """Its status; negative: the signal; ``None``: nobody can know."""
    turn_id: str | None = None
    """The turn in which it died; ``None`` between turns."""
    attempt: int = 0
    last_event: str | None = None
    """The kind of the last message of that turn (``TextDelta``, ``ToolStarted``, ...)."""
    silent_s: float | None = None
    """How long before its death that was, or the hand-over where there was none."""
    tools_open: tuple[str, ...] = ()
    """Tools that had started and not ended."""
    memory: tuple[tuple[float, int], ...] = ()
    """Its last looks at memory: seconds before the death, and bytes."""
    verdict: str | None = None
    """What was judged of it before it was killed, where it was judged."""
    stacks: tuple[str, ...] = ()
    """The Python stacks of all its threads, taken before the kill, where it was killed for being stuck."""
    stderr_tail: tuple[str, ...] = ()
