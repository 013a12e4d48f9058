"""The answer to one message."""

from typing import Literal

import msgspec

from hermes_pool.account import ToolUse
from hermes_pool_worker.plain import Plain


class Reply(msgspec.Struct, Plain, frozen=True, kw_only=True):
    """The answer to one message."""

    text: str
    conversation_id: str
    session_id: str | None
    """The agent's own id of the session (Hermes' ``session_id``)."""
    turn_id: str
    outcome: Literal["completed", "interrupted", "partial"] = "completed"
    """``interrupted``: it was cancelled, and ``text`` is the reply so far. ``partial``: the agent stopped early."""
    restarts: int = 0
    """How many workers died on the way to this reply."""
    usage: dict[str, int] = {}
    """The agent's figures for this turn (``input_tokens``, ``output_tokens``, ...)."""
    notice: str | None = None
    """What a person should know: why the reply is partial, or that the session could not be resumed."""
    duration_s: float = 0.0
    """The time from when a worker was given the message to the reply, in seconds."""
    tools: tuple[ToolUse, ...] = ()
    """The tools that were used, over all attempts, in the order in which they started."""
    attempts: int = 1
    """How many times the turn was begun."""
    kept: bool = True
    """Whether the turn is in the conversation's history, so that later prompts carry it. If a completed turn is not,
    the history could not be written; ``notice`` says why, and the pool tries again before the worker goes."""
    model: str | None = None
    """The model that answered, where the agent names it."""
    pending_steer: str | None = None
    """What was said with ``steer`` and came too late to be used."""
