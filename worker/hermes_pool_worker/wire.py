"""The wire between a supervisor and one worker: the messages and their codec. Both sides use this one file.

A frame is a 4-byte big-endian length, followed by that many bytes of MessagePack. A message is a tagged array: the name
of its type, then its fields in order. New fields are added at the end and have a default, so either side may be older
than the other.

The codec does no I/O. Bytes go in and messages come out, so the asyncio side and the blocking side can share it. It
trusts nothing: it checks a length before it allocates memory for it. A stream that has failed once has lost its framing
for good; its decoder refuses further bytes, and the owner of the stream discards the worker.

Text crosses the wire as UTF-8. Half of a surrogate pair, which a Python string can hold and UTF-8 cannot, becomes
U+FFFD in either direction.
"""

import functools
import struct
from typing import Annotated, Any, Final, Generic, Literal, TypeAlias, TypeVar

import msgspec

from hermes_pool_worker.plain import Plain, without_halves

PROTOCOL: Final = 1
"""Version of the messages in this file. ``Hello`` carries it; a supervisor refuses a worker with another version."""

HEADER_BYTES: Final = 4
FRAME_BYTES_MAX: Final = 64 * 1024 * 1024
"""Default limit of one frame in either direction, in bytes. It limits a frame, not a connection."""

NAME_CHARS_MAX: Final = 512
"""Longest name (of a turn, a session, a tool, a call). Names are stored; text has no such limit."""
Name: TypeAlias = Annotated[str, msgspec.Meta(max_length=NAME_CHARS_MAX)]
Mark: TypeAlias = Annotated[str, msgspec.Meta(max_length=8 * NAME_CHARS_MAX)]
"""A point in an agent's history, in a format that only the agent knows."""
Modules: TypeAlias = Annotated[list[Name], msgspec.Meta(max_length=10_000)]


class WireError(Exception):
    """The other side broke the protocol; its stream can no longer be trusted."""


class FrameTooLargeError(WireError):
    """A frame is over the limit. ``size`` and ``limit`` are in bytes.

    When encoding raises it, nothing has been sent and the stream is intact. A decoder that reports it has received it
    from the other side, and its stream has failed.
    """

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(f"a frame of {size:,} bytes is over the limit of {limit:,} bytes (frame_bytes_max)")
        self.size = size
        self.limit = limit


class Message(msgspec.Struct, Plain, frozen=True, array_like=True, tag=True):
    """Base of all messages: immutable, and tagged with the name of the type.

    They are arrays on the wire, and have named fields for everybody else: see ``Plain``.
    """


class TurnMessage(Message, frozen=True):
    """Base of the messages that belong to one attempt of one turn. The receiver drops those of any other attempt."""

    turn_id: str
    attempt: int


# --- to the worker ---------------------------------------------------------------------------------------------------


class Turn(TurnMessage, frozen=True):
    """Answer ``text``. ``attempt`` starts at 1 and grows with each worker that dies during this turn.

    If nobody watches the turn (``streams`` is false), the worker sends a piece of text only now and then, as a sign of
    progress.
    """

    text: str
    streams: bool = True


class Cancel(TurnMessage, frozen=True):
    """End this turn soon. Without effect on a turn that is over or that the worker does not know.

    If ``keep`` is true, what was said and done so far stays in the history, and the model is told ``why`` it ended
    there; a turn of which nothing was seen leaves no trace. Otherwise every trace of the turn is removed.
    """

    keep: bool = False
    why: str = ""


class Answer(TurnMessage, frozen=True):
    """The answer to a ``Question`` of this turn. If ``nobody`` is true, nobody can answer, and there is no ``text``."""

    question_id: str
    text: str
    nobody: bool = False


class Steer(TurnMessage, frozen=True):
    """A remark of the user for the running turn. What the agent cannot use comes back in ``TurnDone``."""

    text: str


class Said(msgspec.Struct, frozen=True, array_like=True):
    """One message of a conversation that somebody else than this agent has held so far."""

    role: Literal["user", "assistant"]
    text: str


class Open(Message, frozen=True):
    """Bind this worker to a conversation: begin a session, or resume ``session_id``.

    ``committed`` is the mark of the last turn that the supervisor knows to be complete (see ``TurnDone``).

    ``unfinished`` is the turn during which the previous worker died, if it did. An agent that finds this turn complete
    in its history returns the reply in ``Opened.recovered``; otherwise it removes every trace of the turn. If the turn
    was ``given_up``, its caller has been told that it failed, and its reply is not wanted any more.

    What of an unfinished turn may stay depends on ``keep``. If it is true, a turn in which a tool may have acted that
    is not among ``safe_tools``, or of which somebody has seen ``said``, stays in the history, and the model is told
    ``why`` it ended there; ``Opened.kept`` then says so. Every other unfinished turn is removed.

    ``earlier`` is what was said in the conversation before this agent came to it, for a session that is new.

    ``user_id`` is set if the session is one user's part of the conversation. ``options`` are the ``agent_options`` of
    the settings. ``data_dir`` is a folder for the agent's own files.
    ``question_timeout_s`` is the longest time that a question may wait for its answer, in seconds.
    ``lock_file`` is to be locked first, for as long as the worker lives: see ``lock``.
    """

    conversation_id: str
    session_id: str | None = None
    committed: str | None = None
    unfinished: Turn | None = None
    options: dict[str, Any] = {}
    data_dir: str | None = None
    question_timeout_s: float | None = None
    given_up: bool = False
    keep: bool = False
    said: str = ""
    why: str = ""
    safe_tools: list[str] = []
    earlier: list[Said] = []
    user_id: str | None = None
    lock_file: str | None = None


class Prepare(Message, frozen=True):
    """Get as ready as possible without a conversation. Optional; ``Open`` follows when a conversation comes."""

    options: dict[str, Any] = {}
    data_dir: str | None = None


class Ping(Message, frozen=True):
    """Answer with ``Pong``, even in the middle of a turn."""

    number: int


class Flush(Message, frozen=True):
    """Write to the history what could not be written before. Answer with ``Flushed``. Sent between turns only."""


class ReadTurns(Message, frozen=True):
    """Return the turns of the history after the mark ``after`` (``None``: from the beginning), the oldest first.

    Answer with ``TurnsRead``. At most ``limit`` turns are wanted. Sent between turns only.
    """

    after: str | None = None
    limit: int = 100


class Close(Message, frozen=True):
    """Finish the work at hand, close the agent, answer ``Closed`` and exit with status 0."""


# --- from the worker -------------------------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """The first frame of a worker, sent before it imports anything heavy."""

    protocol: int
    pid: int
    agent: str
    versions: dict[str, str]


class Prepared(Message, frozen=True):
    """Everything but the session is ready. A change to any of the files in ``watched`` makes this worker stale."""

    watched: list[str]


class Opened(Message, frozen=True):
    """The session is ready for turns.

    ``session_id`` is the agent's own name for the session. ``resumed`` is true if earlier turns are in context.
    ``committed`` is the mark after opening. ``recovered`` is the reply of ``Open.unfinished``, if that turn turned out
    to be complete. ``notice`` tells people about something that could not be done, such as resuming an unknown session.
    ``kept`` is true if ``Open.unfinished`` stays in the history without being complete; ``acted`` are then the names of
    the tools in it that may have acted, as far as the history shows.
    """

    session_id: Name
    resumed: bool = False
    committed: Mark | None = None
    recovered: str | None = None
    notice: str | None = None
    kept: bool = False
    acted: list[Name] = []


class TextDelta(TurnMessage, frozen=True, gc=False):
    """The next piece of the reply."""

    text: str


class ReasoningDelta(TurnMessage, frozen=True, gc=False):
    """The next piece of the model's reasoning, which is not part of the reply."""

    text: str


class ToolStarted(TurnMessage, frozen=True):
    """A tool is about to act. From here on the turn may have had effects."""

    call_id: Name
    name: Name
    arguments: str
    """A preview, shortened by the agent."""


class ToolFinished(TurnMessage, frozen=True):
    """The tool is done. ``result`` is a preview, ``duration_s`` its run time in seconds."""

    call_id: Name
    name: Name
    ok: bool
    result: str
    duration_s: float


class Status(TurnMessage, frozen=True):
    """A remark for people about the progress of the turn (a retry, a compaction, a restart)."""

    text: str


class Question(TurnMessage, frozen=True):
    """The agent waits for a person. Answer with ``answer(question_id, ...)`` within ``timeout_s`` seconds.

    The id is unique in the conversation. For ``kind="approval"``, ``text`` is a command, and the answer must be one of
    ``choices``; without one in time, the command is denied. For ``kind="clarify"``, any text is an answer, and
    ``choices`` are suggestions.
    """

    question_id: Name
    kind: Literal["approval", "clarify"]
    text: str
    choices: list[str]
    timeout_s: float


class SessionMoved(TurnMessage, frozen=True):
    """The session continues under another id, as Hermes may do when it compacts a history."""

    session_id: Name


class TurnDone(TurnMessage, frozen=True):
    """The turn is over and in the agent's history.

    ``outcome`` is ``completed``, ``interrupted`` (by ``Cancel``; ``text`` is the reply so far) or ``partial`` (the
    agent stopped early; ``notice`` says why). ``committed`` marks this point in the history; it is opaque to all but
    the agent. ``usage`` holds the counts of this turn (``input_tokens``, ``output_tokens``, ...), if they are known.

    ``kept`` tells whether the turn is in the history. If it is false although the turn was ``completed``, the history
    could not be written (``notice`` says why), and only this worker's memory has the turn: see ``Flush``. An
    ``interrupted`` turn is kept as ``Cancel`` demands. ``model`` names the model that answered. ``pending_steer`` is
    the text of a ``Steer`` that came too late.
    """

    text: str
    session_id: Name
    outcome: Literal["completed", "interrupted", "partial"] = "completed"
    committed: Mark | None = None
    usage: dict[str, int] = {}
    notice: str | None = None
    kept: bool = True
    model: Name | None = None
    pending_steer: str | None = None


class TurnFailed(TurnMessage, frozen=True):
    """The agent could not answer. The worker lives on.

    ``reason`` is a short word for programs (``rate_limit``, ``server_error``, ``frame_too_large``, ...), ``text`` is
    the explanation for people. ``retryable`` is whether the same message may succeed with nothing fixed (``None``: what
    the reason implies), and ``retry_after_s`` when, in seconds, where the provider says so.

    The agent has removed the turn from its history, unless a tool may have acted in it: then the turn is ``kept``, and
    the model is told that it failed. ``said`` is the reply so far. ``usage`` and ``model`` are those of ``TurnDone``.
    """

    reason: Name
    text: str
    session_id: Name | None = None
    committed: Mark | None = None
    kept: bool = False
    said: str = ""
    usage: dict[str, int] = {}
    model: Name | None = None
    retryable: bool | None = None
    retry_after_s: float | None = None


class Flushed(Message, frozen=True):
    """The history is as the agent has it, up to ``committed``; or it is not, and ``error`` says why."""

    committed: Mark | None = None
    error: str | None = None


class PastTurn(msgspec.Struct, Plain, frozen=True, array_like=True):
    """One turn of the history: what the user said, the reply, and the mark of the history after it."""

    committed: Mark
    text: str
    reply: str
    tools: list[Name] = []
    at: float | None = None
    """When the user's message was stored, in seconds since the epoch."""
    turn_id: str | None = None
    """The turn's id, where the host's ``on_turn`` is told the turn that has just run; ``None`` elsewhere."""


class TurnsRead(Message, frozen=True):
    """The answer to ``ReadTurns``. ``error`` says why there is none: an unknown mark, or an agent without a history."""

    turns: list[PastTurn] = []
    error: str | None = None


class Pong(Message, frozen=True):
    """The answer to the ``Ping`` with the same number."""

    number: int


class Closed(Message, frozen=True):
    """The last frame of a worker that was asked to close."""


class Imported(Message, frozen=True):
    """The modules that this worker had to import after it was forked. Sent once, after its first turn."""

    modules: Modules


class BackgroundStarted(Message, frozen=True):
    """The agent has started a job that may outlast its turn, and needs its worker until the job has ended."""

    job_id: Name
    name: Name
    """What the job is, for people."""


class BackgroundFinished(Message, frozen=True):
    """The job has ended. This frame belongs to no turn: the turn that started the job is usually over."""

    job_id: Name
    result: str = ""
    """A preview, shortened by the agent."""


# --- between the supervisor and a zygote, one message a datagram ------------------------------------------------------


class Preload(Message, frozen=True):
    """Import the agent, and the modules that a first turn is known to need."""

    modules: list[str]
    options: dict[str, Any] = {}


class Fork(Message, frozen=True):
    """Fork a worker. The message comes with its descriptors 0, 1 and 2; ``environment`` is its whole environment."""

    number: int
    environment: dict[str, str]
    cwd: str


class Preloaded(Message, frozen=True):
    """The zygote is ready. A change to any of the files in ``watched`` makes it stale."""

    pid: int
    modules: int
    watched: list[str]


class Forked(Message, frozen=True):
    """A worker exists; it does nothing until this message has been sent. The message comes with its pidfd."""

    number: int
    pid: int


class NotForked(Message, frozen=True):
    """No worker was forked. ``retryable`` is false if this zygote will never fork again."""

    number: int
    reason: str
    retryable: bool


class Reaped(Message, frozen=True):
    """The worker of the ``Fork`` with this number has ended. A negative ``returncode`` is a signal."""

    number: int
    returncode: int


ToWorker: TypeAlias = Open | Prepare | Turn | Cancel | Answer | Steer | Flush | ReadTurns | Ping | Close
StartFrame: TypeAlias = Hello | Prepared | Opened
"""What a worker answers while it starts."""
TurnEvent: TypeAlias = TextDelta | ReasoningDelta | ToolStarted | ToolFinished | Status | Question | SessionMoved
"""What a caller sees of a running turn."""
TurnEnd: TypeAlias = TurnDone | TurnFailed
"""The last frame of a turn."""
TurnFrame: TypeAlias = TurnEvent | TurnEnd
"""Every frame that belongs to one attempt of one turn."""
BackgroundFrame: TypeAlias = BackgroundStarted | BackgroundFinished
"""News of work that outlasts its turn."""
HistoryFrame: TypeAlias = Flushed | TurnsRead
"""What a worker answers about its history, between turns."""
WorkerFrame: TypeAlias = StartFrame | BackgroundFrame | HistoryFrame | Pong | Imported | Closed
"""Every frame that belongs to no turn."""
FromWorker: TypeAlias = TurnFrame | WorkerFrame
ToZygote: TypeAlias = Preload | Fork
FromZygote: TypeAlias = Preloaded | Forked | NotForked | Reaped


def worker_takes(frame_bytes_max: int) -> int:
    """Return the limit of a frame to a worker, in bytes.

    It is twice the limit of a message, because ``Open`` may carry a message and the agent's options besides.
    """
    return min(2 * frame_bytes_max, 2**32 - 1)


# --- the codec -------------------------------------------------------------------------------------------------------

KEPT_BYTES_MAX: Final = 4 * 1024 * 1024
"""A buffer larger than this is not kept for the next frame."""

_encode_into = msgspec.msgpack.Encoder().encode_into
_write_header = struct.Struct(">I").pack_into
T = TypeVar("T")


class FrameEncoder:
    """Turns messages into frames, in a buffer that it keeps, so that not every frame has to allocate memory."""

    def __init__(self, frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        self._limit = frame_bytes_max
        self._frame = bytearray(HEADER_BYTES)

    def encode(self, message: object) -> bytearray:
        """Return the frame of ``message``, valid until the next call; raise ``FrameTooLargeError`` over the limit."""
        frame = self._frame
        try:
            _encode_into(message, frame, HEADER_BYTES)
        except UnicodeEncodeError:
            _encode_into(scrub(msgspec.to_builtins(message)), frame, HEADER_BYTES)
        size = len(frame) - HEADER_BYTES
        if size > KEPT_BYTES_MAX:
            self._frame = bytearray(HEADER_BYTES)
        if size > self._limit:
            raise FrameTooLargeError(size, self._limit)
        _write_header(frame, 0, size)
        return frame


def encode(message: object, frame_bytes_max: int = FRAME_BYTES_MAX) -> bytearray:
    """Return the frame of ``message``; raise ``FrameTooLargeError`` over the limit."""
    return FrameEncoder(frame_bytes_max).encode(message)


def scrub(value: Any) -> Any:
    """Return ``value`` (of built-in types) with each lone surrogate in its text replaced by U+FFFD."""
    if isinstance(value, str):
        return without_halves(value)
    if isinstance(value, dict):
        return {scrub(key): scrub(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [scrub(item) for item in value]
    return value


class FrameDecoder(Generic[T]):
    """Turns the bytes of one stream into messages of the declared type.

    The stream fails at a frame over the limit, at bytes that are not MessagePack, and at MessagePack that is not a
    declared message. ``failed`` then says why, and no further messages come out. It is an attribute, not an exception,
    because the messages before the fault are good and are still returned.
    """

    # The type checker does not accept a union as ``type[T]``.
    def __init__(self, message_type: Any, frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        self._decode = _decoder_for(message_type)
        self._limit = frame_bytes_max
        self._buffer = bytearray()
        self.failed: WireError | None = None

    @property
    def mid_frame(self) -> bool:
        """Whether the bytes so far end inside a frame. If the stream ends here, something was lost."""
        return bool(self._buffer)

    @property
    def missing(self) -> int:
        """How many bytes the current frame still lacks; 0 while its length is not known yet."""
        buffer = self._buffer
        if len(buffer) < HEADER_BYTES:
            return 0
        return HEADER_BYTES + int.from_bytes(buffer[:HEADER_BYTES], "big") - len(buffer)

    def feed(self, data: bytes | bytearray | memoryview) -> list[T]:
        """Take the next bytes, cut anywhere, and return the messages that are now complete.

        ``data`` is not kept; its memory may be reused.
        """
        if self.failed is not None:
            return []
        buffer = self._buffer
        if not buffer and len(data) - HEADER_BYTES == int.from_bytes(data[:HEADER_BYTES], "big") <= self._limit:
            return self._feed_one(data)
        messages: list[T] = []
        if buffer:
            buffer += data
            data = buffer
        start, have = 0, len(data)
        with memoryview(data) as view:
            try:
                while have - start >= HEADER_BYTES:
                    body = start + HEADER_BYTES
                    size = int.from_bytes(view[start:body], "big")
                    if size > self._limit:
                        raise FrameTooLargeError(size, self._limit)
                    if body + size > have:
                        break
                    messages.append(self._decode(view[body : body + size]))
                    start = body + size
            except FrameTooLargeError as error:
                self.failed = error
            except _UNDECODABLE as error:
                self.failed = _no_message(error)
            if not buffer and start < have and self.failed is None:
                buffer += view[start:]
                start = 0
        if self.failed is not None:
            buffer.clear()
        elif start and buffer:
            del buffer[:start]
        return messages

    def _feed_one(self, data: bytes | bytearray | memoryview) -> list[T]:
        """Take exactly one whole frame: the fast path, and by far the most frequent one."""
        try:
            with memoryview(data) as view:
                return [self._decode(view[HEADER_BYTES:])]
        except _UNDECODABLE as error:
            self.failed = _no_message(error)
            return []


@functools.cache
def _decoder_for(message_type: Any) -> Any:
    return msgspec.msgpack.Decoder(message_type).decode


_UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def _no_message(error: Exception) -> WireError:
    return WireError(f"bytes that are not a message of protocol {PROTOCOL}: {error}")
