"""What two processes of one pool say to each other: the one where a message has arrived, and the one that answers it.

The first one connects to the other's door and makes a request. A connection carries one turn, one watcher or one call
at a time, and is kept for the next: so the kernel's own flow control slows down exactly what is read too slowly, and
the end of a connection means that the other process is gone. They travel as frames of the wire.
"""

from typing import Any, Final, Literal, TypeAlias

import msgspec

from hermes_pool import errors
from hermes_pool.account import ToolUse
from hermes_pool.conversation.active_turn import Face
from hermes_pool.conversation.events import (
    ConversationEvent,
    EventsMissed,
    QuestionAnswered,
    TurnEnded,
    TurnStarted,
    TurnSteered,
)
from hermes_pool.conversation.reply import Reply
from hermes_pool.crash_report import DeathReport
from hermes_pool.errors import HermesPoolError, TurnError
from hermes_pool_worker import wire

FRAME_BYTES_MAX: Final = 64 * 1024 * 1024
"""Largest frame: a message or a reply, and as much again around it."""
_WITHOUT = {"what"}


class _Message(msgspec.Struct, frozen=True, tag=True):
    """Base of all messages. They are maps that are tagged with the type's name, so fields can be added anywhere."""


# --- from the process where a message has arrived ---


class Run(_Message, frozen=True):
    """Run a turn. Answered with ``Begun``, ``Told`` for each event, and ``Ended``; or with ``Ended`` alone."""

    conversation_id: str
    user_id: str | None
    face: Face
    turn_id: str
    is_clients: bool
    """Whether the id is the host's, so that the message runs once."""
    text: str
    metadata: dict[str, Any] = {}
    on_cancel: Literal["keep", "discard"] | None = None
    asks: bool = False
    """Whether questions are to be asked of the caller: it has a policy of its own for them."""
    after_death: bool = False
    """Whether an owner has died in this turn, so that the history may have a part of it."""


class Cancel(_Message, frozen=True):
    """End the turn of this connection, as ``Session.cancel`` does; ``outcome`` is the error to end it with, if any."""

    outcome: dict[str, Any] | None = None


class Steer(_Message, frozen=True):
    """Say something to the agent in the turn of this connection."""

    text: str


class AnswerQuestion(_Message, frozen=True):
    """Answer a question of the turn of this connection; ``None``: the caller's policy leaves it to others."""

    question_id: str
    text: str | None


class Watch(_Message, frozen=True):
    """Watch a conversation. Answered with ``Seen`` for each event, until the connection ends."""

    conversation_id: str
    user_id: str | None
    after: int | None


class Call(_Message, frozen=True):
    """Call a verb of the manager. Answered with ``Result`` or ``Ended``."""

    verb: Literal["answer", "cancel", "steer", "stop", "transcript"]
    conversation_id: str
    user_id: str | None
    arguments: dict[str, Any] = {}


# --- from the owner ---


class Begun(_Message, frozen=True):
    """A worker has the turn."""


class Told(_Message, frozen=True):
    """An event of the turn."""

    event: wire.TurnEvent


class Asked(_Message, frozen=True):
    """A question that the caller's policy is to answer."""

    question: wire.Question


class Ended(_Message, frozen=True):
    """The turn has ended, or the call has failed."""

    outcome: dict[str, Any]


class Seen(_Message, frozen=True):
    """An event of the watched conversation: ``told`` for one of a turn, else ``kind`` and its ``fields``."""

    seq: int
    told: wire.TurnEvent | None = None
    kind: str = ""
    fields: dict[str, Any] = {}


class Result(_Message, frozen=True):
    """What a call returned, in built-in types."""

    value: Any = None


Request: TypeAlias = Run | Cancel | Steer | AnswerQuestion | Watch | Call
Answer: TypeAlias = Begun | Told | Asked | Ended | Seen | Result


# --- values that are no messages ---


def packed(outcome: Reply | HermesPoolError) -> dict[str, Any]:
    """Return an outcome in built-in types, with everything that it has."""
    if isinstance(outcome, Reply):
        return {"reply": msgspec.to_builtins(outcome)}
    attributes = {name: value for name, value in vars(outcome).items() if name not in _WITHOUT}
    return {"error": type(outcome).__name__, "attributes": msgspec.to_builtins(attributes, enc_hook=str)}


def unpacked(value: dict[str, Any]) -> Reply | HermesPoolError:
    """Return the outcome that ``packed`` took apart. One that this version does not know becomes its parent."""
    try:
        if "reply" in value:
            return msgspec.convert(value["reply"], Reply)
        attributes = dict(value["attributes"])
        kind = getattr(errors, value["error"], HermesPoolError)
        if not (isinstance(kind, type) and issubclass(kind, HermesPoolError)):
            kind = HermesPoolError
        error: HermesPoolError = kind.__new__(kind, attributes["message"])
        if isinstance(error, TurnError):
            attributes["tools"] = tuple(msgspec.convert(attributes.get("tools", ()), list[ToolUse]))
        if attributes.get("report") is not None:
            attributes["report"] = msgspec.convert(attributes["report"], DeathReport)
        for name in ("stderr_tail", "stacks"):
            if isinstance(attributes.get(name), list):
                attributes[name] = tuple(attributes[name])
        vars(error).update(attributes)
    except (KeyError, TypeError, ValueError, msgspec.MsgspecError):
        return TurnError(
            "the owner of the conversation told the end of the turn in a way that this version cannot read"
        )
    return error


_KINDS: dict[str, Any] = {kind.__name__: kind for kind in (TurnStarted, QuestionAnswered, TurnSteered, EventsMissed)}


def seen(seq: int, event: ConversationEvent) -> Seen:
    """Return an event of a conversation as a message."""
    if isinstance(event, wire.TurnMessage):
        return Seen(seq, told=event)
    if isinstance(event, TurnEnded):
        return Seen(seq, kind="TurnEnded", fields={"turn_id": event.turn_id, "outcome": packed(event.outcome)})
    return Seen(seq, kind=type(event).__name__, fields=msgspec.to_builtins(event))


def event_of(message: Seen) -> ConversationEvent:
    """Return the event of such a message. Raises ``msgspec.MsgspecError`` or ``KeyError`` for what is none."""
    if message.told is not None:
        return message.told
    if message.kind == "TurnEnded":
        return TurnEnded(turn_id=message.fields["turn_id"], outcome=unpacked(message.fields["outcome"]))
    event: ConversationEvent = msgspec.convert(message.fields, _KINDS[message.kind])
    return event
