"""The wire between a supervisor and one worker: the messages and their codec, used as this one file by both sides.

A frame is a 4-byte big-endian length and that many bytes of MessagePack. A message is a tagged array: the type's name,
then its fields in order; a field that is added later goes last and has a default, so that either side may be older.

The codec does no I/O: bytes go in, messages come out, so the asyncio side and the blocking side share it. It trusts
nothing: a length is checked before anything is allocated for it, and a stream that has failed once has lost its
framing for good; its decoder refuses further bytes, and whoever owns it discards that worker.

Text crosses as UTF-8. Half a surrogate pair, which Python strings can hold and UTF-8 cannot, becomes U+FFFD, by the
same rule in both directions.
"""

import functools
import struct
from typing import Annotated, Any, Final, Generic, Literal, TypeAlias, TypeVar

import msgspec

PROTOCOL: Final = 1
"""Version of this file's messages; ``Hello`` carries it, and a supervisor refuses a worker of another one."""

HEADER_BYTES: Final = 4
FRAME_BYTES_MAX: Final = 64 * 1024 * 1024
"""Default limit of one frame in either direction. It bounds a frame, never a connection."""


NAME_CHARS_MAX: Final = 512
"""Longest name: of a turn, a session, a tool, a call. Names are kept and stored; what is said has no such limit."""
Name: TypeAlias = Annotated[str, msgspec.Meta(max_length=NAME_CHARS_MAX)]
Mark: TypeAlias = Annotated[str, msgspec.Meta(max_length=8 * NAME_CHARS_MAX)]
"""A point of a history, in words of the agent's own."""
Modules: TypeAlias = Annotated[list[Name], msgspec.Meta(max_length=10_000)]


class WireError(Exception):
    """The other side broke the protocol; its stream cannot be trusted any more."""


class FrameTooLargeError(WireError):
    """A frame is over the limit.

    ``size`` and ``limit`` are in bytes. Raised on encoding, where nothing has been sent and the stream is intact, and
    on decoding, where it is the other side's fault.
    """

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(f"a frame of {size:,} bytes is over the limit of {limit:,} bytes (frame_bytes_max)")
        self.size = size
        self.limit = limit


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all messages: immutable, tagged with the type's name."""


class TurnMessage(Message, frozen=True):
    """A message that belongs to one attempt of one turn; whoever awaits another one drops it."""

    turn_id: str
    attempt: int


# --- to the worker ---------------------------------------------------------------------------------------------------


class Turn(TurnMessage, frozen=True):
    """Answer ``text``. ``attempt`` is 1, or more when an earlier worker died with this turn.

    Where nobody watches (``streams`` is false), pieces of text are sent only now and then, as a sign of progress.
    """

    text: str
    streams: bool = True


class Cancel(TurnMessage, frozen=True):
    """End this turn soon; one that is over, or not begun, is left alone."""


class Answer(TurnMessage, frozen=True):
    """The reply to a ``Question`` of this turn."""

    question_id: str
    text: str


class Open(Message, frozen=True):
    """Bind this worker to a conversation: begin a session, or resume ``session_id``.

    ``committed`` is the mark of the last turn that the supervisor knows to be complete (see ``TurnDone``).
    ``unfinished`` is the turn during which the worker before this one died, if one did: an agent that finds it complete
    in its history returns its reply in ``Opened.recovered``; otherwise it takes every trace of it out. So it does also
    with a complete one where it was ``given_up``: its caller has been told that it failed.
    ``options`` are the user's ``agent_options``; ``data_dir`` is a folder where an agent may keep files of its own.
    ``question_timeout_s`` is how long a question of the agent may wait for its answer, if the agent allows more.
    """

    conversation_id: str
    session_id: str | None = None
    committed: str | None = None
    unfinished: Turn | None = None
    options: dict[str, Any] = {}
    data_dir: str | None = None
    question_timeout_s: float | None = None
    given_up: bool = False


class Prepare(Message, frozen=True):
    """Get as ready as is possible without a conversation; ``Open`` follows when one needs a worker. Optional."""

    options: dict[str, Any] = {}
    data_dir: str | None = None


class Ping(Message, frozen=True):
    """Answered by the reader thread with ``Pong``, also in the middle of a turn."""

    number: int


class Close(Message, frozen=True):
    """Finish what runs, put everything away, answer ``Closed`` and exit with status 0."""


# --- from the worker -------------------------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """The first frame of a worker, sent before anything heavy is imported."""

    protocol: int
    pid: int
    agent: str
    versions: dict[str, str]


class Prepared(Message, frozen=True):
    """Everything is ready but the session. ``watched`` are the files whose change makes this worker stale."""

    watched: list[str]


class Opened(Message, frozen=True):
    """The session is ready for turns.

    ``session_id`` is the agent's own name for it. ``resumed`` says whether earlier turns are in context; ``notice``
    says in words what was asked for and could not be had (an unknown session, say). ``committed`` is the mark after
    opening, ``recovered`` the reply of ``Open.unfinished`` when that turn turned out to be complete.
    """

    session_id: Name
    resumed: bool = False
    committed: Mark | None = None
    recovered: str | None = None
    notice: str | None = None


class TextDelta(TurnMessage, frozen=True):
    """A further piece of the reply."""

    text: str


class ReasoningDelta(TurnMessage, frozen=True):
    """A further piece of what the model thinks aloud; no part of the reply."""

    text: str


class ToolStarted(TurnMessage, frozen=True):
    """A tool is about to act on the world; from here on the turn may have had effects."""

    call_id: Name
    name: Name
    arguments: str
    """Preview of the arguments, shortened by the agent."""


class ToolFinished(TurnMessage, frozen=True):
    """That tool is done. ``result`` is a preview, ``duration_s`` its run time in seconds."""

    call_id: Name
    name: Name
    ok: bool
    result: str
    duration_s: float


class Status(TurnMessage, frozen=True):
    """A remark for people about the turn's progress (a retry, a compaction, a restart)."""

    text: str


class Question(TurnMessage, frozen=True):
    """The agent waits for a person: answer with ``Turn.answer(question_id, ...)`` before ``timeout_s`` is over.

    For ``kind="approval"`` the text is the command and the answers are those in ``choices``; without one in time, it is
    denied. For ``kind="clarify"`` any text will do, and ``choices`` are proposals.
    """

    question_id: Name
    kind: Literal["approval", "clarify"]
    text: str
    choices: list[str]
    timeout_s: float


class SessionMoved(TurnMessage, frozen=True):
    """The agent goes on under another session id (Hermes may do so when it compacts a history)."""

    session_id: Name


class TurnDone(TurnMessage, frozen=True):
    """The turn is over and in the agent's history.

    ``outcome`` is ``completed``, ``interrupted`` (by ``Cancel``; ``text`` is what there was) or ``partial`` (the agent
    stopped early; ``notice`` says why). ``committed`` marks this point of the history: an opaque string that only the
    agent reads. ``usage`` holds this turn's counts (``input_tokens``, ``output_tokens``, ...), where known.
    """

    text: str
    session_id: Name
    outcome: Literal["completed", "interrupted", "partial"] = "completed"
    committed: Mark | None = None
    usage: dict[str, int] = {}
    notice: str | None = None


class TurnFailed(TurnMessage, frozen=True):
    """The agent could not answer, and has taken this turn out of its history; the worker lives on.

    ``reason`` is a short word for programs (``rate_limit``, ``server_error``, ``frame_too_large``, ...), ``text`` the
    story for people.
    """

    reason: Name
    text: str
    session_id: Name | None = None
    committed: Mark | None = None


class Pong(Message, frozen=True):
    """The answer to ``Ping`` with the same number."""

    number: int


class Closed(Message, frozen=True):
    """The last frame of a worker that was asked to close."""


class Imported(Message, frozen=True):
    """The modules that this worker had to import after it was forked, told once, when a first turn has ended."""

    modules: Modules


class BackgroundStarted(Message, frozen=True):
    """The agent works on something that may outlast its turn, and wants its worker to live until that has ended."""

    job_id: Name
    name: Name
    """What it is, for people."""


class BackgroundFinished(Message, frozen=True):
    """That work has ended. It belongs to no turn: the turn in which it began is over as a rule."""

    job_id: Name
    result: str = ""
    """Preview of what came out, shortened by the agent."""


# --- between the supervisor and a zygote, one message a datagram ------------------------------------------------------


class Preload(Message, frozen=True):
    """Import the agent, and these modules of which it is known that a first turn needs them."""

    modules: list[str]
    options: dict[str, Any] = {}


class Fork(Message, frozen=True):
    """Fork a worker. Its descriptors 0, 1 and 2 come with the message; ``environment`` is all that it gets."""

    number: int
    environment: dict[str, str]
    cwd: str


class Preloaded(Message, frozen=True):
    """The zygote is ready. ``watched`` are the files whose change makes it stale."""

    pid: int
    modules: int
    watched: list[str]


class Forked(Message, frozen=True):
    """A worker exists, and does nothing before this message was sent; its pidfd comes with it."""

    number: int
    pid: int


class NotForked(Message, frozen=True):
    """No worker was forked. ``retryable`` is false where this zygote will never fork again."""

    number: int
    reason: str
    retryable: bool


class Reaped(Message, frozen=True):
    """The worker of that ``Fork`` has ended, with this status (negative: the signal)."""

    number: int
    returncode: int


ToWorker: TypeAlias = Open | Prepare | Turn | Cancel | Answer | Ping | Close
FromWorker: TypeAlias = (
    Hello
    | Prepared
    | Opened
    | TextDelta
    | ReasoningDelta
    | ToolStarted
    | ToolFinished
    | Status
    | Question
    | SessionMoved
    | TurnDone
    | TurnFailed
    | Pong
    | Closed
    | Imported
    | BackgroundStarted
    | BackgroundFinished
)
ToZygote: TypeAlias = Preload | Fork
FromZygote: TypeAlias = Preloaded | Forked | NotForked | Reaped
Event: TypeAlias = TextDelta | ReasoningDelta | ToolStarted | ToolFinished | Status | Question | SessionMoved
"""What a caller sees of a running turn."""
TurnFrame: TypeAlias = Event | TurnDone | TurnFailed
"""What a worker sends in a turn."""
BackgroundFrame: TypeAlias = BackgroundStarted | BackgroundFinished
"""News of work that outlasts its turn."""
WorkerFrame: TypeAlias = Hello | Prepared | Opened | Pong | Closed | Imported | BackgroundFrame
"""What a worker sends that belongs to no turn."""


def worker_takes(frame_bytes_max: int) -> int:
    """Return the limit of a frame to a worker, in bytes.

    Twice the limit of a message: ``Open`` may carry one, and the agent's options beside it.
    """
    return min(2 * frame_bytes_max, 2**32 - 1)


# --- the codec -------------------------------------------------------------------------------------------------------

KEPT_BYTES_MAX: Final = 4 * 1024 * 1024
"""A larger buffer is not kept for the next frame."""

_encode_into = msgspec.msgpack.Encoder().encode_into
_write_header = struct.Struct(">I").pack_into
T = TypeVar("T")


class FrameEncoder:
    """Turns messages into frames, in a buffer that it keeps: a large frame need not find its memory anew each time."""

    def __init__(self, frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        self._limit = frame_bytes_max
        self._frame = bytearray(HEADER_BYTES)

    def encode(self, message: Any) -> bytearray:
        """Return the frame of ``message``, valid until the next call; ``FrameTooLargeError`` when it is too large."""
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


def encode(message: Any, frame_bytes_max: int = FRAME_BYTES_MAX) -> bytearray:
    """Return the frame of ``message``; ``FrameTooLargeError`` when it is over the limit."""
    return FrameEncoder(frame_bytes_max).encode(message)


def scrub(value: Any) -> Any:
    """Return ``value`` (built-in types) with text that UTF-8 can hold: each lone surrogate becomes U+FFFD."""
    if isinstance(value, str):
        # UTF-16 joins the halves that stand side by side, and gives up only those that stand alone.
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(value, dict):
        return {scrub(key): scrub(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [scrub(item) for item in value]
    return value


class FrameDecoder(Generic[T]):
    """Turns the bytes of one stream into messages of the declared type.

    A frame over the limit, bytes that are no MessagePack, and MessagePack that is no declared message end the stream:
    ``failed`` then says why, and no further message comes out of it. It is a value and no exception, because the
    messages before the fault are good and are still returned.
    """

    def __init__(self, message_type: Any, frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        self._decode = _decoder_for(message_type)
        self._limit = frame_bytes_max
        self._buffer = bytearray()
        self.failed: WireError | None = None

    @property
    def mid_frame(self) -> bool:
        """Whether the bytes so far stop inside a frame: an end of the stream here means that something was lost."""
        return bool(self._buffer)

    @property
    def missing(self) -> int:
        """How many bytes the frame that has begun still lacks, as far as that is known yet."""
        buffer = self._buffer
        if len(buffer) < HEADER_BYTES:
            return 0
        return HEADER_BYTES + int.from_bytes(buffer[:HEADER_BYTES], "big") - len(buffer)

    def feed(self, data: bytes | bytearray | memoryview) -> list[T]:
        """Take the next bytes, wherever they were cut, and return the messages that are now complete.

        ``data`` is not kept: its memory may be used again.
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
        """Take exactly one whole frame, as nearly always: the short way."""
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
    return WireError(f"bytes that are no message of protocol {PROTOCOL}: {error}")
