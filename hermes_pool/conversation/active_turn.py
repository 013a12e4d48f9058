"""One turn as its session runs it: its state, what is known about it, and its events on the way to the caller.

The turn is passive. Its session feeds it from callbacks of the event loop, whether the caller listens or not, and
settles it exactly once. So a caller that is slow, gone or cancelled can block nothing but its own stream.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

from hermes_pool.account import ToolUse, TurnAccount
from hermes_pool.conversation.event_log import EventLog
from hermes_pool.conversation.events import TurnEnded, TurnSnapshot, TurnStarted
from hermes_pool.conversation.reply import Reply
from hermes_pool.errors import HermesPoolError, InvalidUseError
from hermes_pool.lifecycle import TURN, TurnChange, TurnState
from hermes_pool.settings import OnCancel, SessionKey
from hermes_pool_worker import wire

CALLS_KEPT = 1000
"""How many tool calls, and open questions, of one turn are kept. A turn with more is an attack, or out of control."""
USES_KEPT = 100
"""How many uses of tools a turn tells afterwards. Of one that has more, and so is out of control, the first ones."""
ARGUMENTS_CHARS_KEPT = 500
"""How much of the arguments of each; Hermes shortens them to this as well."""
EVENTS_WAITING_MAX = 1024
"""How many events may wait for a slow consumer. At this number the pool stops reading, which slows the worker down."""
EVENT_BYTES_WAITING_MAX = 4 * 1024 * 1024
"""How many bytes those events may hold, approximately."""
SAID_CHARS_MAX = 1024 * 1024
"""How much of the reply so far, and of the reasoning, is kept while the turn runs. What comes after that is not."""
_QUEUED, _SETTLED = TurnState.QUEUED, TurnChange.SETTLED  # looked up once: every turn uses them

Ending = HermesPoolError | Literal["cancelled"]
"""Why a turn was to end before its reply. An error is what its caller gets."""
QuestionPolicy: TypeAlias = Callable[[SessionKey, wire.Question], str | Awaitable[str | None] | None]
"""Answers a question in the place of a person; ``None`` leaves it to those who watch."""
Face: TypeAlias = Literal["send", "turn", "start"]
"""By which verb of the manager a message came: it decides who can see its events, and who can answer its questions."""


class Asked(NamedTuple):
    """A question, and when the worker stops waiting for its answer, on the loop's clock."""

    question: wire.Question
    until: float


class ActiveTurn:
    """One message on its way to a reply. It is also the stream of its events."""

    __slots__ = (
        "_bytes_waiting", "_drained", "_events", "_is_awaited", "_left", "_on_settled", "_reasoned",
        "_reasoned_chars", "_safe_tools", "_said", "_said_chars", "_tool_at", "_waiters", "attempt", "began_at",
        "beginning", "deaths", "end", "ending", "face", "heard_at", "is_clients", "kept", "lags", "last_event",
        "log", "metadata", "on_cancel", "on_question", "outcome", "questions", "started_seq", "state", "streams",
        "text", "tools", "tools_open", "turn_id",
    )  # fmt: skip

    def __init__(  # noqa: PLR0915 - many attributes, one line each
        self,
        turn_id: str,
        text: str,
        *,
        log: EventLog,
        drained: Callable[["ActiveTurn"], None],
        left: Callable[["ActiveTurn"], None],
        on_settled: Callable[["ActiveTurn"], None],
        face: Face = "turn",
        is_clients: bool = False,
        metadata: Mapping[str, Any] | None = None,
        on_cancel: OnCancel = "keep",
        on_question: QuestionPolicy | None = None,
        safe_tools: frozenset[str] = frozenset(),
    ) -> None:
        self.turn_id = turn_id
        self.text = text
        self.face = face
        self.is_clients = is_clients
        """Whether the host chose the id, so that it may come again."""
        self.metadata = metadata or {}
        self.on_cancel = on_cancel
        self.on_question = on_question
        self.streams = face != "send" or log.watchers > 0
        """Whether anybody wants the events. Decided again when it begins."""
        self.state = _QUEUED
        self.started_seq: int | None = None
        """The number of the event before its first one, among those of the conversation; ``None``: it has none."""
        self.beginning: asyncio.Task[None] | None = None
        """The task that brings it to a worker, if it has to wait."""
        self.attempt = 1
        self.deaths = 0
        """How many workers have died with it."""
        self.tools: list[ToolUse] = []
        """Its uses of tools over all attempts, in the order in which they started."""
        self.tools_open: dict[str, str] = {}
        """The names of the running tools, by call id."""
        self.questions: dict[str, Asked] = {}
        """The unanswered questions, by their ids. The worker may wait no more for the answer: see ``until``."""
        self.began_at = 0.0
        """When a worker was first given it, on the loop's clock."""
        self.heard_at = 0.0
        """When its worker last made progress, as far as known, on the loop's clock."""
        self.last_event: str | None = None
        """The type of the last event from its worker."""
        self.ending: Ending | None = None
        self.end: wire.TurnEnd | None = None
        """The last frame from its worker, if there was one."""
        self.kept = False
        """Whether it is in the history, as far as known once it has ended."""
        self.outcome: Reply | HermesPoolError | None = None
        """How it ended; ``None`` until then."""
        self.lags = False
        """Whether too many events wait: nothing more is read from the worker until they are consumed."""
        self.log = log
        """The events of its conversation."""
        self._drained = drained
        self._left = left
        self._on_settled = on_settled
        self._safe_tools = safe_tools
        self._tool_at: dict[str, int] = {}
        self._said: list[str] = []
        self._said_chars = 0
        self._reasoned: list[str] = []
        self._reasoned_chars = 0
        self._events: deque[wire.TurnEvent] | None = deque() if face == "turn" else None
        self._bytes_waiting = 0
        self._is_awaited = False
        self._waiters: tuple[asyncio.Future[None], ...] = ()

    # --- the session's side ---

    @property
    def is_new(self) -> bool:
        """Whether it was not started yet."""
        return self.state is _QUEUED and self.beginning is None

    @property
    def is_heard(self) -> bool:
        """Whether its caller reads its events."""
        return self._events is not None

    @property
    def said(self) -> str:
        """The reply so far, in this attempt."""
        return "".join(self._said)

    @property
    def may_have_acted(self) -> bool:
        """Whether a tool was used that is not named safe."""
        return any(tool.may_have_acted for tool in self.tools)

    @property
    def was_seen(self) -> bool:
        """Whether anybody can have seen anything of it: a piece of the reply, or a tool."""
        return bool(self._said or self.tools)

    def started(self) -> None:
        """Tell those who watch the conversation that the turn has begun."""
        self.streams = self.streams or self.log.watchers > 0
        log = self.log
        self.started_seq = log.turn_seq = log.last_seq
        log.append(TurnStarted(turn_id=self.turn_id, text=self.text, metadata=self.metadata), len(self.text))

    def push(self, event: wire.TurnEvent) -> None:
        """Tell an event to those who watch the conversation, and to the caller, if the caller still listens."""
        if type(event) is wire.ReasoningDelta and self._reasoned_chars < SAID_CHARS_MAX:
            self._reasoned.append(event.text)
            self._reasoned_chars += len(event.text)
        size = _size(event)
        self._tell((event,), (size,), size)

    def push_texts(self, pieces: Sequence[wire.TextDelta]) -> None:
        """Tell pieces of text in the same way. They come many at a time: there may be thousands in a second."""
        texts = [piece.text for piece in pieces]
        sizes = [*map(len, texts)]
        size = sum(sizes)
        if self._said_chars < SAID_CHARS_MAX:
            self._said += texts
            self._said_chars += size
        self._tell(pieces, sizes, size)

    def _tell(self, events: Sequence[wire.TurnEvent], sizes: Sequence[int], size: int) -> None:
        self.log.extend(events, sizes, size)
        waiting = self._events
        if waiting is not None:
            waiting += events
            self._bytes_waiting += size
            if len(waiting) >= EVENTS_WAITING_MAX or self._bytes_waiting >= EVENT_BYTES_WAITING_MAX:
                self.lags = True
            if self._waiters:
                self._wake()

    def tool_started(self, frame: wire.ToolStarted) -> None:
        """Record a tool. From here on the turn may have had effects."""
        use = ToolUse(
            call_id=frame.call_id,
            name=frame.name,
            arguments=frame.arguments[:ARGUMENTS_CHARS_KEPT],
            may_have_acted=frame.name not in self._safe_tools,
        )
        if len(self.tools) < USES_KEPT:
            self._tool_at[frame.call_id] = len(self.tools)
            self.tools.append(use)
        elif use.may_have_acted and not self.may_have_acted:
            self.tools[-1] = use  # that one may have acted must not be lost
        if len(self.tools_open) < CALLS_KEPT:
            self.tools_open[frame.call_id] = frame.name

    def tool_finished(self, frame: wire.ToolFinished) -> None:
        """Record that a tool has ended."""
        self.tools_open.pop(frame.call_id, None)
        at = self._tool_at.pop(frame.call_id, None)
        if at is not None:
            self.tools[at] = msgspec.structs.replace(self.tools[at], finished=True, ok=frame.ok)

    def acted(self, names: list[str]) -> None:
        """Record tools that the history shows, if they were not reported when they started."""
        known = [tool.name for tool in self.tools]
        for name in names[:CALLS_KEPT]:
            if name in known:
                known.remove(name)
            else:
                self.tools.append(ToolUse(name=name, may_have_acted=name not in self._safe_tools))

    def asked(self, question: wire.Question, until: float) -> None:
        """Record a question that waits for its answer until ``until``, on the loop's clock."""
        if len(self.questions) < CALLS_KEPT:
            self.questions[question.question_id] = Asked(question, until)

    def answered(self, question_id: str, now: float) -> bool:
        """Forget a question; return whether it was open."""
        asked = self.questions.pop(question_id, None)
        return asked is not None and asked.until > now

    def worker_died(self) -> None:
        """Count the death, and forget what ended with the worker."""
        self.deaths += 1
        self._forget_open()

    def runs_again(self) -> None:
        """Begin another attempt: its reply starts from the beginning."""
        self.attempt += 1
        self._said, self._said_chars = [], 0
        self._reasoned, self._reasoned_chars = [], 0

    def account(self) -> TurnAccount:
        """Return what is known about the turn."""
        end = self.end
        told = None if end is None else end.text if isinstance(end, wire.TurnDone) else end.said or None
        said = self.said if told is None else told
        return TurnAccount(
            tools=tuple(self.tools),
            text=said,
            usage={} if end is None else end.usage,
            attempts=self.attempt if self.began_at else 0,
            kept=self.kept,
            model=None if end is None else end.model,
        )

    def snapshot(self, now: float) -> TurnSnapshot:
        """Return the running turn as it stands."""
        return TurnSnapshot(
            turn_id=self.turn_id,
            attempt=self.attempt,
            text=self.text,
            said=self.said,
            reasoning="".join(self._reasoned),
            tools=tuple(self.tools),
            questions=tuple(asked.question for asked in self.questions.values() if asked.until > now),
            metadata=self.metadata,
        )

    def settle(self, outcome: Reply | HermesPoolError) -> None:
        """End the turn with its outcome, once and for good."""
        self.state = TURN[self.state][_SETTLED]
        self.outcome = outcome
        if self.tools_open or self.questions:
            self._forget_open()
        if self.started_seq is not None:
            said = outcome.text if isinstance(outcome, Reply) else outcome.message
            self.log.append(TurnEnded(turn_id=self.turn_id, outcome=outcome), len(said))
            self.log.turn_seq = None
        if self.is_clients:
            self._on_settled(self)
        if self._waiters:
            self._wake()

    def _forget_open(self) -> None:
        self.tools_open.clear()
        self.questions.clear()

    # --- the caller's side ---

    def __aiter__(self) -> AsyncIterator[wire.TurnEvent]:
        """Iterate over the events until the turn ends."""
        return self

    async def __anext__(self) -> wire.TurnEvent:
        """Return the next event."""
        while self._events is not None:
            if self._events:
                event = self._events.popleft()
                self._bytes_waiting -= len(event.text) if type(event) is wire.TextDelta else _size(event)
                if self.lags:
                    self._consumed()
                return event
            if self.outcome is not None:
                self._events = None
                break
            if self._is_awaited:
                raise InvalidUseError(
                    f"another task waits for the next event of turn {self.turn_id!r}: "
                    "use sessions.events() for another reader"
                )
            self._is_awaited = True
            try:
                await self._change()
            finally:
                self._is_awaited = False
        raise StopAsyncIteration

    async def settled(self) -> Reply | HermesPoolError:
        """Wait for the outcome and return it. Unread events are dropped."""
        if self._events is not None or self.lags:
            self.drop_events()
        while self.outcome is None:
            await self._change()
        return self.outcome

    async def begun(self) -> None:
        """Wait until a worker has the turn, or it has settled."""
        while self.outcome is None and not self.began_at:
            await self._change()

    def handed_over(self, now: float) -> None:
        """Record that a worker was given the turn."""
        self.heard_at = now
        if not self.began_at:
            self.began_at = now
            if self._waiters:
                self._wake()

    def drop_events(self) -> None:
        """Stop listening."""
        if self._events is not None:
            self._events = None
            if self.questions:
                self._left(self)
        if self.lags:
            self._consumed()

    def _consumed(self) -> None:
        events = self._events
        if events is None or (
            len(events) <= EVENTS_WAITING_MAX // 2 and self._bytes_waiting <= EVENT_BYTES_WAITING_MAX // 2
        ):
            self.lags = False
            self._drained(self)

    def _change(self) -> "asyncio.Future[None]":
        """Return a future that the next event or the outcome completes. It need not be awaited."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters = (*self._waiters, waiter)
        return waiter

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, ()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


def _size(event: wire.TurnEvent) -> int:
    """Return approximately how many bytes an event holds. Too slow for pieces of text: there may be thousands."""
    return sum(len(value) for value in msgspec.structs.astuple(event) if isinstance(value, str | list))
