"""Checks what an agent hands over, so that a wrong type fails here, in the agent's turn, and not at the supervisor."""

import msgspec

from hermes_pool_worker import wire
from hermes_pool_worker.agent import Outcome

_BYTES = (bytes, bytearray, memoryview)


def text(value: object) -> str:
    """Return ``value`` if it is text; raise ``TypeError`` otherwise."""
    if not isinstance(value, str):
        raise TypeError(f"an agent must send text, not {type(value).__name__}")
    return value


def name(value: object) -> str:
    """Return text cut to the longest name that the wire allows; raise ``TypeError`` for anything but text."""
    return text(value)[: wire.NAME_CHARS_MAX]


def outcome(value: object) -> Outcome:
    """Return ``value`` if it is an ``Outcome`` with fields of the right types.

    Raise ``TypeError`` or ``msgspec.ValidationError`` otherwise.
    """
    if not isinstance(value, Outcome):
        raise TypeError(f"the agent's turn() must return an Outcome, not {type(value).__name__}")
    session_id, committed = value.session_id, value.committed
    if (  # the usual case, without the cost of a conversion
        type(value.text) is str
        and value.kind == "completed"
        and not value.usage
        and value.notice is None
        and value.kept is None
        and value.model is None
        and value.pending_steer is None
        and (session_id is None or type(session_id) is str)
        and (committed is None or type(committed) is str)
    ):
        return value
    # Bytes stay bytes, and are refused: as "builtins" they would become text in base64.
    return msgspec.convert(msgspec.to_builtins(value, builtin_types=_BYTES), Outcome)
