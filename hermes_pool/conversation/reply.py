"""The answer to one message."""

from typing import Literal

import msgspec


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to one message."""

    text: str
    conversation_id: str
    session_id: str | None
    """The agent's own name of the session (Hermes' ``session_id``)."""
    turn_id: str
    outcome: Literal["completed", "interrupted", "partial"] = "completed"
    """``interrupted``: it was cancelled, and ``text`` is what there was. ``partial``: the agent stopped early."""
    restarts: int = 0
    """How many workers died on the way to this reply and were replaced."""
    usage: dict[str, int] = {}
    """What the agent counted for this turn (``input_tokens``, ``output_tokens``, ...)."""
    notice: str | None = None
    """What a person should know: why it is partial, or that the session could not be resumed."""
    duration_s: float = 0.0
    """From the moment a worker was given the message to the reply."""
