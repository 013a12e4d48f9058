"""What a watcher of a conversation sees beside the events of a turn: its begin, its end, and what was missed."""

from collections.abc import Mapping
from typing import Any, TypeAlias

import msgspec

from hermes_pool.account import ToolUse
from hermes_pool.conversation.reply import Reply
from hermes_pool.errors import HermesPoolError
from hermes_pool_worker import wire
from hermes_pool_worker.plain import Plain


class TurnStarted(msgspec.Struct, Plain, frozen=True, kw_only=True):
    """A worker was given the turn. Once for each turn, however many workers it takes."""

    turn_id: str
    text: str
    """The user's message."""
    metadata: Mapping[str, Any] = {}
    """What the host gave to ``start``."""


class QuestionAnswered(msgspec.Struct, Plain, frozen=True, kw_only=True):
    """A question is not open any more: somebody, or the host's policy, has answered it."""

    turn_id: str
    question_id: str
    text: str | None
    """The answer; ``None`` if nobody was there to answer, and the agent was told so."""


class TurnSteered(msgspec.Struct, Plain, frozen=True, kw_only=True):
    """Somebody has said something to the agent while it works on the turn."""

    turn_id: str
    text: str


class TurnEnded(msgspec.Struct, Plain, frozen=True, kw_only=True):
    """The turn has ended for good. The last event of each turn that a worker was given, and of none other."""

    turn_id: str
    outcome: Reply | HermesPoolError


class TurnSnapshot(msgspec.Struct, Plain, frozen=True, kw_only=True):
    """A running turn as it stands: what all its events so far come to."""

    turn_id: str
    attempt: int
    text: str
    """The user's message."""
    said: str
    """The reply so far, in this attempt."""
    reasoning: str
    """The reasoning so far, in this attempt."""
    tools: tuple[ToolUse, ...]
    questions: tuple[wire.Question, ...]
    """The questions that wait for an answer."""
    metadata: Mapping[str, Any] = {}


class OpenQuestion(msgspec.Struct, Plain, frozen=True, kw_only=True):
    """A question that waits for an answer."""

    conversation_id: str
    user_id: str | None
    question: wire.Question
    left_s: float
    """For how long it still waits, in seconds."""


class EventsMissed(msgspec.Struct, Plain, frozen=True, kw_only=True):
    """Events that the watcher asked for are not kept any more. ``snapshot`` is what to go on from.

    The ``seq`` of this event is that of the last event that the snapshot contains.
    """

    count: int | None
    """How many were missed; ``None`` if that is unknown, since the host has started anew meanwhile."""
    snapshot: TurnSnapshot | None
    """The running turn; ``None`` if none runs."""


ConversationEvent: TypeAlias = wire.TurnEvent | TurnStarted | QuestionAnswered | TurnSteered | TurnEnded | EventsMissed
"""What ``HermesSessionManager.events`` yields, each with its ``seq``."""
