"""The outcome of a turn as JSON, and back: what a host that starts anew answers to a message that was sent before."""

import hashlib
from typing import Any

import msgspec

from hermes_pool import errors
from hermes_pool.account import ToolUse
from hermes_pool.conversation.reply import Reply
from hermes_pool.errors import HermesPoolError, TurnError

TEXT_CHARS_MAX = 1024 * 1024
"""A longer reply is cut to this where it is recorded."""
CUT = "\n[The rest of this reply was too long to be recorded.]"
_LEFT_OUT = {"report", "stacks", "stderr_tail"}
"""Attributes of errors that are of no use after a restart."""


def recorded(outcome: Reply | HermesPoolError) -> str | None:
    """Return an outcome as JSON; ``None`` if the same message may run again, so that nothing is to be remembered."""
    if isinstance(outcome, Reply):
        text = outcome.text if len(outcome.text) <= TEXT_CHARS_MAX else outcome.text[:TEXT_CHARS_MAX] + CUT
        return _json({"reply": msgspec.to_builtins(msgspec.structs.replace(outcome, text=text))})
    if outcome.retryable or not outcome.sent:
        return None
    attributes = {name: value for name, value in vars(outcome).items() if name not in _LEFT_OUT}
    return _json({"error": type(outcome).__name__, "attributes": msgspec.to_builtins(attributes, enc_hook=str)})


def restored(text: str) -> Reply | HermesPoolError:
    """Return the outcome that ``recorded`` wrote; a ``TurnError`` if this version does not know it."""
    try:
        stored: dict[str, Any] = msgspec.json.decode(text)
        if "reply" in stored:
            return msgspec.convert(stored["reply"], Reply)
        attributes = stored["attributes"]
        kind = getattr(errors, stored["error"])
        if not issubclass(kind, HermesPoolError):
            raise TypeError
        error: HermesPoolError = kind.__new__(kind, attributes["message"])
        if isinstance(error, TurnError):
            attributes["tools"] = tuple(msgspec.convert(attributes.get("tools", ()), list[ToolUse]))
        vars(error).update(attributes)
    except (AttributeError, KeyError, TypeError, ValueError, msgspec.MsgspecError):
        return TurnError("this message was answered before, by a version that wrote the outcome in another way")
    return error


def digest_of(text: str) -> str:
    """Return a digest of a message, which tells it from another one with the same id."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def storable(text: str) -> str:
    """Return the text as every database can store it: NUL and halves of surrogate pairs become U+FFFD."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").replace("\0", "\ufffd")


def _json(value: dict[str, Any]) -> str:
    return msgspec.json.encode(value).decode()
