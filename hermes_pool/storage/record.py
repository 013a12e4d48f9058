"""What is stored of one session, as a plain value: whoever needs no database need not import SQLAlchemy for it."""

import contextlib
import math
from dataclasses import dataclass, fields
from typing import Any, Literal, Self

SCHEMA = 1
"""The layout of what is stored. A record with a higher number is neither read nor overwritten."""


@dataclass(frozen=True, kw_only=True)
class SessionRecord:
    """What is stored of one session. ``None`` is "not known", and such a member is absent from the stored object.

    So ``restart_count`` and ``status`` are always there, ``session_id`` and ``last_used_at`` from when they are known.
    """

    session_id: str | None = None
    """The agent's own name of the session."""
    last_used_at: str | None = None
    """End of the last turn, ISO 8601 in UTC."""
    restart_count: int = 0
    """Workers that died and were replaced."""
    status: Literal["healthy", "dormant", "failed"] = "dormant"
    """``healthy``: it has a worker. ``dormant``: it has none, and the next message resumes it. ``failed``: no worker
    could be started."""
    committed: str | None = None
    """The agent's mark of the history up to the last turn that ended with a reply."""
    incarnation: int = 0
    """The how-manieth worker it has, or had last."""
    turns: int = 0
    """Turns that ended with a reply."""
    pid: int | None = None
    create_time: float | None = None
    """Of the worker's process, in seconds since the epoch; with the pid, its identity."""
    host: str | None = None
    """The machine that the pid belongs to."""
    agent: str | None = None
    last_error: str | None = None
    schema: int = SCHEMA

    def to_json(self) -> dict[str, Any]:
        """Return what is stored, for any JSON database: a member is ``None`` if it must be absent.

        NUL and halves of surrogate pairs, which not every database takes, become U+FFFD.
        """
        return {each.name: _storable(getattr(self, each.name)) for each in fields(self)}

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> Self:
        """Read a stored object. Unknown members are ignored, and one of a wrong type counts as absent."""
        values = {each.name: _as_declared(each.type, stored.get(each.name)) for each in fields(cls)}
        if values["status"] not in ("healthy", "dormant", "failed"):
            values["status"] = None
        return cls(**{name: value for name, value in values.items() if value is not None})


def _storable(value: Any) -> Any:
    if isinstance(value, str):
        return "".join("\ufffd" if char == "\0" or "\ud800" <= char <= "\udfff" else char for char in value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _as_declared(declared: Any, value: Any) -> Any:
    """Return ``value`` if it is of the type that a field is declared with, else ``None``."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value if isinstance(value, str) and declared not in (int, int | None, float | None) else None
    if declared == float | None:
        with contextlib.suppress(OverflowError):
            return float(value) if math.isfinite(value) else None
        return None
    return value if declared in (int, int | None) and isinstance(value, int) else None
