"""The worker's loop: the main thread runs the agent, a second thread watches the wire meanwhile.

So a cancel, a ping, an answer and the end of the wire are seen in the middle of a turn. While nothing runs, the main
thread reads the wire itself: waking another thread for each frame would double the cost of a short turn. All writes go
through one lock. The end of the wire is the end of the worker: nobody is left who could want its reply.
"""

import gc
import importlib
import math
import os
import queue
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from functools import cache
from itertools import islice
from types import ModuleType
from typing import Any, Literal, NoReturn

import msgspec

from hermes_pool_worker import stdio, wire
from hermes_pool_worker.agent import Agent, AgentError, MissingDependencyError, Outcome
from hermes_pool_worker.contract import EXIT_OK, EXIT_SOFTWARE, EXIT_UNUSABLE, MARKER_VARIABLE

READ_BYTES = 16 * 1024
READ_BYTES_LARGE = 1024 * 1024
PROGRESS_SIGN_S = 1.0
"""How often a turn that nobody watches still shows that it gets on."""
WATCH_AFTER_S = 0.01
"""How long work may take before the watch takes over the reading, when work comes after a pause."""
WATCH_AFTER_MOST_S = 0.16
"""The same while short work comes thick and fast: then the watch looks less and less often, down to this. A cancel at
the very begin of such a turn waits as long; looking 100 times a second would cost as much as the turns themselves."""
WATCH_LOOKS = 10
"""How many looks without work it takes until the watch goes to sleep: a second or so."""
BURST_PIECES = 32
"""So many small pieces go out at once, one by one, however quickly they come; those after them are gathered."""
FLUSH_AFTER_S = 0.001
"""How long a small piece of text may be held back, so that more go with it."""
HELD_BYTES_MAX = 32 * 1024
"""What is held back at most: half of a pipe that could not be enlarged."""
ORPHANED_GRACE_S = 2.0
"""How long a turn may take to notice that the supervisor is gone, before the process ends without it."""

JOB_RESULT_CHARS_MAX = 500
"""Of what a job in the background brings, no more than this crosses the wire."""

_HAS_READV = hasattr(os, "readv")
"""Not on Windows."""

BUILT_IN_AGENTS = {
    "echo": "hermes_pool_worker.echo:EchoAgent",
    "hermes": "hermes_pool_worker.hermes:HermesAgent",
}


def serve(
    wire_in: int, wire_out: int, agent_name: str, frame_bytes_max: int, born_with: frozenset[str] | None = None
) -> int:
    """Serve one conversation over the two descriptors until told to close; return the exit status.

    ``born_with`` are the modules that a forked worker had from the start; what it has to import beyond them it tells
    after its first turn, so that the next zygote has those as well.
    """
    if born_with is None:  # a zygote's have its signals
        set_signals()
    sender = FrameSender(wire_out, frame_bytes_max)
    versions = {"python": sys.version.split()[0], "msgspec": msgspec.__version__}
    sender.send(wire.Hello(wire.PROTOCOL, os.getpid(), agent_name, versions))
    try:
        _, factory = import_agent(agent_name)
        Worker(factory(), sender, wire_in, frame_bytes_max, born_with).run()
    except MissingDependencyError as error:
        print(f"hermes-pool worker: {error}", file=sys.stderr)
        return EXIT_UNUSABLE
    except Exception:  # noqa: BLE001 - whatever an agent's start raises, the supervisor shall read it
        traceback.print_exc()
        return EXIT_SOFTWARE
    return EXIT_OK


def set_signals() -> None:
    """Undo what a host may have left to its children: one that ignores SIGCHLD, say, or was started by nohup.

    In its own session no terminal reaches a worker; a stray SIGINT must not cut a turn all the same. A function and not
    SIG_IGN, which the agent's tools would inherit.
    """
    if sys.platform != "win32":
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, lambda *_: None)


def import_agent(name: str) -> tuple[ModuleType, Callable[[], Agent]]:
    """Return the module and the factory of ``echo``, ``hermes`` or ``package.module:factory``.

    ``MissingDependencyError`` where there is none.
    """
    module_name, _, factory_name = BUILT_IN_AGENTS.get(name, name).partition(":")
    try:
        module = importlib.import_module(module_name)
        factory: Callable[[], Agent] = getattr(module, factory_name)
    except (ModuleNotFoundError, AttributeError) as error:
        traceback.print_exc()
        raise MissingDependencyError(
            f"the agent {name!r} cannot be imported: {error}. Check the setting 'agent'; the folder of its module "
            f"belongs into 'agent_paths', what it imports into the environment of {sys.executable}"
        ) from error
    return module, factory


def imported_since(born_with: frozenset[str]) -> list[str]:
    """Return the modules that were imported meanwhile, as far as an import statement finds them by their names."""
    # They were added last. To touch all the others would copy their pages of memory, which are shared with the zygote.
    latest = islice(reversed(sys.modules), max(0, len(sys.modules) - len(born_with)))
    return sorted(
        name
        for name in list(latest)
        if name not in born_with and getattr(getattr(sys.modules[name], "__spec__", None), "name", None) == name
    )


def give_back_memory() -> None:
    """Collect garbage and return free memory to the system: an idle Hermes shrinks to what it had after its first turn.

    Measured with Hermes 0.19.0: without this 90 MB grow to 124 MB by turn 150, and never shrink.
    """
    gc.collect()
    _trim()(0)


@cache
def _trim() -> Callable[[int], object]:
    # Only where it is loaded anyway: small agents have little to give back, and ctypes would cost them more.
    ctypes = sys.modules.get("ctypes")
    if ctypes is None or sys.platform != "linux":
        return lambda _: None
    return getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)  # the GNU C library's


def take_leave_of_the_dead() -> None:
    """Collect the processes that this one has adopted and that have ended (see ``process_tree``)."""
    if sys.platform == "linux":
        from hermes_pool_worker import process_tree  # noqa: PLC0415 - exists on Linux only

        process_tree.reap_adopted()


def leave_orphaned() -> NoReturn:
    """End a process whose supervisor is gone, and with it all that its agent's tools have left running."""
    if sys.platform == "linux":
        from hermes_pool_worker import process_tree  # noqa: PLC0415 - seldom needed

        if marker := os.environ.get(MARKER_VARIABLE):
            process_tree.end_marked(marker)
    stdio.leave(EXIT_OK)


def _checked(outcome: Any) -> Outcome:
    """Return what an agent returned, if it is one; a wrong type would otherwise only be seen on the other side."""
    if not isinstance(outcome, Outcome):
        raise TypeError(f"the agent's turn returned {type(outcome).__name__} and not an Outcome")
    session_id, committed = outcome.session_id, outcome.committed
    if (  # the plain case, quickly
        type(outcome.text) is str
        and outcome.kind == "completed"
        and not outcome.usage
        and outcome.notice is None
        and (session_id is None or type(session_id) is str)
        and (committed is None or type(committed) is str)
    ):
        return outcome
    return msgspec.convert(msgspec.to_builtins(outcome), Outcome)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"an agent sends text, not {type(value).__name__}")
    return value


def _name(value: Any) -> str:
    return _text(value)[: wire.NAME_CHARS_MAX]


class FrameSender:
    """Writes whole frames from any thread, in order."""

    def __init__(self, descriptor: int, frame_bytes_max: int) -> None:
        self._descriptor = descriptor
        self._encoder = wire.FrameEncoder(frame_bytes_max)
        self._lock = threading.Lock()
        self._held = bytearray()
        self._last_at = 0.0
        self._burst = 0
        self._flush_wanted: threading.Event | None = None

    def send(self, message: wire.Message) -> None:
        """Send a message; ``FrameTooLargeError`` when it is over the limit, and then nothing was sent.

        When nobody reads any more, the message has no addressee: it is dropped, and the reader ends the process.
        """
        with self._lock:
            frame = self._encoder.encode(message)
            if self._held:
                self._flush()
            self._write(frame)

    def send_piece(self, message: wire.Message) -> None:
        """Send one of many small messages: at once, unless they come thick and fast; then with its neighbours.

        What is held back is held for ``FLUSH_AFTER_S`` at most. Errors as for ``send``.
        """
        with self._lock:
            frame = self._encoder.encode(message)
            now = time.monotonic()
            if now - self._last_at >= FLUSH_AFTER_S and not self._held:
                self._burst = 0
            self._burst += 1
            if self._burst <= BURST_PIECES:
                self._last_at = now
                self._write(frame)
                return
            self._held += frame
            if len(self._held) >= HELD_BYTES_MAX or now - self._last_at >= FLUSH_AFTER_S:
                self._last_at = now
                self._flush()
            elif self._flush_wanted is None:
                self._flush_wanted = threading.Event()
                self._flush_wanted.set()
                threading.Thread(target=self._flush_later, name="hermes-pool-flush", daemon=True).start()
            elif not self._flush_wanted.is_set():
                self._flush_wanted.set()

    def _flush_later(self) -> None:
        """See that nothing is held for long; the body of a thread that exists once pieces have come thick and fast."""
        wanted = self._flush_wanted
        assert wanted is not None  # noqa: S101 - for the type checker
        while True:
            wanted.wait()
            time.sleep(FLUSH_AFTER_S)
            wanted.clear()
            with self._lock:
                self._flush()

    def _flush(self) -> None:
        if self._held:
            self._write(self._held)
            self._held.clear()

    def _write(self, data: bytearray) -> None:
        try:
            sent = os.write(self._descriptor, data)
            while sent < len(data):
                with memoryview(data) as view:
                    sent += os.write(self._descriptor, view[sent:])
        except BrokenPipeError:
            pass


class Turn:
    """The turn that runs: what ``agent.RunningTurn`` promises, on the wire."""

    __slots__ = (
        "_cancelled", "_lock", "_next_sign_at", "_question_timeout_s", "_questions", "_questions_asked", "_sender",
        "_streams",
        "attempt", "is_cancelled", "request", "session_id", "turn_id",
    )  # fmt: skip

    def __init__(self, request: wire.Turn, sender: FrameSender, question_timeout_s: float = math.inf) -> None:
        self.turn_id = request.turn_id
        self.attempt = request.attempt
        self.request = request
        self.session_id: str | None = None  # the one that the turn has moved to
        self.is_cancelled = False
        self._sender = sender
        self._streams = request.streams
        self._next_sign_at = 0.0 if self._streams else time.monotonic() + PROGRESS_SIGN_S
        self._questions: dict[str, queue.SimpleQueue[str | None]] = {}
        self._questions_asked = 0
        self._question_timeout_s = question_timeout_s
        self._lock = threading.Lock()
        self._cancelled: threading.Event | None = None

    @property
    def cancelled(self) -> threading.Event:
        """Set when the caller has cancelled; made when first asked for, since most turns never ask."""
        with self._lock:
            if self._cancelled is None:
                self._cancelled = threading.Event()
                if self.is_cancelled:
                    self._cancelled.set()
            return self._cancelled

    def text(self, delta: str) -> None:
        """Send a piece of the reply."""
        if delta and (self._streams or self._sign_is_due()):
            self._send_piece(wire.TextDelta(self.turn_id, self.attempt, _text(delta)))

    def reasoning(self, delta: str) -> None:
        """Send a piece of the reasoning."""
        if delta and (self._streams or self._sign_is_due()):
            self._send_piece(wire.ReasoningDelta(self.turn_id, self.attempt, _text(delta)))

    def tool_started(self, call_id: str, name: str, arguments: str = "") -> None:
        """Say that a tool is about to act."""
        self._send(wire.ToolStarted(self.turn_id, self.attempt, _name(call_id), _name(name), _text(arguments)))

    def tool_finished(
        self, call_id: str, name: str, *, ok: bool = True, result: str = "", duration_s: float = 0.0
    ) -> None:
        """Say that a tool has ended."""
        self._send(
            wire.ToolFinished(
                self.turn_id, self.attempt, _name(call_id), _name(name), bool(ok), _text(result), float(duration_s)
            )
        )

    def status(self, text: str) -> None:
        """Send a remark for people."""
        self._send(wire.Status(self.turn_id, self.attempt, _text(text)))

    def session_moved(self, session_id: str) -> None:
        """Say that the session goes on under another id."""
        self.session_id = session_id
        self._send(wire.SessionMoved(self.turn_id, self.attempt, _text(session_id)))

    def ask(
        self, kind: Literal["approval", "clarify"], text: str, choices: Sequence[str] = (), timeout_s: float = 60.0
    ) -> str | None:
        """Ask the caller; ``None`` when nobody answered in time or the turn was cancelled."""
        timeout_s = min(timeout_s, self._question_timeout_s)
        answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        with self._lock:
            self._questions_asked += 1
            question_id = f"q{self._questions_asked}"
            self._questions[question_id] = answers
        try:
            if self.is_cancelled:
                return None
            self._send(wire.Question(self.turn_id, self.attempt, question_id, kind, text, list(choices), timeout_s))
            return answers.get(timeout=timeout_s)
        except queue.Empty:
            return None
        finally:
            with self._lock:
                self._questions.pop(question_id, None)

    def background_started(self, job_id: str, name: str) -> None:
        """Say that work goes on that may outlast the turn."""
        self._send(wire.BackgroundStarted(_name(job_id), _name(name)))

    def background_finished(self, job_id: str, result: str = "") -> None:
        """Say that a job has ended, also after the turn's end."""
        # Cut, for one that does not fit would not be sent, and the job would never end.
        self._send(wire.BackgroundFinished(_name(job_id), _text(result)[:JOB_RESULT_CHARS_MAX]))

    def answer(self, question_id: str, text: str) -> None:
        """Hand the caller's answer to whoever waits for it; an unknown question is one that is over."""
        with self._lock:
            answers = self._questions.get(question_id)
        if answers is not None:
            answers.put(text)

    def cancel(self) -> None:
        """Mark as cancelled and release whoever waits for an answer."""
        with self._lock:
            self.is_cancelled = True
            if self._cancelled is not None:
                self._cancelled.set()
            for answers in self._questions.values():
                answers.put(None)

    def _sign_is_due(self) -> bool:
        now = time.monotonic()
        if now < self._next_sign_at:
            return False
        self._next_sign_at = now + PROGRESS_SIGN_S
        return True

    def _send(self, message: wire.Message) -> None:
        try:
            self._sender.send(message)
        except wire.FrameTooLargeError as error:
            _not_sent(message, error)

    def _send_piece(self, message: wire.TurnMessage) -> None:
        try:
            self._sender.send_piece(message)
        except wire.FrameTooLargeError as error:
            _not_sent(message, error)


def _not_sent(message: wire.Message, error: wire.FrameTooLargeError) -> None:
    # Events are for watching; the reply comes whole with TurnDone, or fails there for everybody to see.
    print(f"hermes-pool worker: {type(message).__name__} was not sent: {error}", file=sys.stderr)


class Worker:
    """One agent between the wire and the main thread. Whoever reads the wire holds ``_reading``."""

    def __init__(
        self,
        agent: Agent,
        sender: FrameSender,
        wire_in: int,
        frame_bytes_max: int,
        born_with: frozenset[str] | None = None,
    ) -> None:
        self._agent = agent
        self._born_with = born_with
        self._sender = sender
        self._wire_in = wire_in
        self._wire_ended = False
        # Kept: to get and give back a buffer for each frame costs more than a small frame itself. It grows with the
        # first large one: a worker that has none must not pay for it.
        self._buffer = bytearray(READ_BYTES)
        self._view = memoryview(self._buffer)
        self._decoder: wire.FrameDecoder[wire.ToWorker] = wire.FrameDecoder(
            wire.ToWorker, wire.worker_takes(frame_bytes_max)
        )
        self._inbox: queue.SimpleQueue[wire.Open | wire.Prepare | Turn | wire.Close | None] = queue.SimpleQueue()
        self._turns: dict[tuple[str, int], Turn] = {}
        self._running: Turn | None = None
        # Held while an interrupt is under way, so that it can never reach the turn after the one that it is meant for.
        self._turn_lock = threading.Lock()
        self._reading = threading.Lock()
        self._watch_wakes = threading.Event()
        self._hand_back, self._ask_back = os.pipe()
        self._taken_back: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._session_id = ""
        self._committed: str | None = None
        self._question_timeout_s = math.inf

    # --- the wire, for whoever reads it ---

    def _read(self) -> None:
        """Wait for bytes and take what they hold; at the end of the wire, see to it that the process ends."""
        if _HAS_READV:
            size = os.readv(self._wire_in, (self._buffer,))
            data: bytes | memoryview = self._view[:size]
            if size == READ_BYTES:
                self._buffer = bytearray(READ_BYTES_LARGE)
                self._view = memoryview(self._buffer)
        else:
            data = os.read(self._wire_in, READ_BYTES_LARGE)
        for message in self._decoder.feed(data):
            self._take(message)
        if data and self._decoder.failed is None:
            return
        self._wire_ended = True
        if self._decoder.failed is not None:
            print(f"hermes-pool worker: the supervisor sent {self._decoder.failed}", file=sys.stderr)
        self._inbox.put(None)
        for turn in list(self._turns.values()):
            self._cancel(turn)
        last_resort = threading.Timer(ORPHANED_GRACE_S, leave_orphaned)
        last_resort.daemon = True
        last_resort.start()

    def _take(self, message: wire.ToWorker) -> None:
        match message:
            case wire.Turn():
                turn = self._turns[message.turn_id, message.attempt] = Turn(
                    message, self._sender, self._question_timeout_s
                )
                self._inbox.put(turn)
            case wire.Cancel():
                if (cancelled := self._turns.get((message.turn_id, message.attempt))) is not None:
                    self._cancel(cancelled)
            case wire.Answer():
                if (asking := self._turns.get((message.turn_id, message.attempt))) is not None:
                    asking.answer(message.question_id, message.text)
            case wire.Ping():
                self._sender.send(wire.Pong(message.number))
            case wire.Open() | wire.Prepare() | wire.Close():
                self._inbox.put(message)

    def _cancel(self, turn: Turn) -> None:
        with self._turn_lock:
            turn.cancel()
            if self._running is turn:
                try:
                    self._agent.interrupt()
                except Exception:  # noqa: BLE001 - the reader must live; the supervisor has a ladder for deaf agents
                    traceback.print_exc()

    # --- the watch ---

    def _watch(self) -> None:
        """Read the wire during work that takes longer than a moment; the body of the second thread.

        It sleeps while nothing happens. Once woken it looks by itself, after ``WATCH_AFTER_S`` and then less and less
        often, so that work which comes thick and fast need not wake it each time. Before it goes to sleep, it tidies
        up.
        """
        while True:
            self._watch_wakes.wait()
            idle_looks, pause_s = 0, WATCH_AFTER_S
            while idle_looks < WATCH_LOOKS:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, WATCH_AFTER_MOST_S)
                # It can be had only while the main thread works: nobody else holds it then.
                if self._reading.acquire(blocking=False):
                    self._read_until_asked_back()
                    self._reading.release()
                    self._taken_back.get()  # or a look could come before the main thread does, and keep it for good
                    idle_looks, pause_s = 0, WATCH_AFTER_S
                else:
                    idle_looks += 1
            self._watch_wakes.clear()
            if not self._reading.locked():  # work has begun since the last look, and found the watch awake
                self._watch_wakes.set()
            else:
                give_back_memory()
                take_leave_of_the_dead()

    def _read_until_asked_back(self) -> None:
        both = select.poll()
        both.register(self._hand_back, select.POLLIN)
        both.register(self._wire_in, select.POLLIN)
        while True:
            for descriptor, _ in both.poll():
                if descriptor == self._hand_back:
                    os.read(self._hand_back, 1)
                    return
                self._read()
                if self._wire_ended:
                    both.unregister(self._wire_in)

    def _read_always(self) -> None:
        """Read the wire for good: the second thread where pipes cannot be polled (Windows)."""
        while not self._wire_ended:
            self._read()

    # --- the main thread ---

    def run(self) -> None:
        """Work through what comes, until a ``Close`` or the end of the wire."""
        shares = hasattr(select, "poll")
        if shares:
            self._reading.acquire()
        watch = self._watch if shares else self._read_always
        threading.Thread(target=watch, name="hermes-pool-watch", daemon=True).start()
        do = self._do_watched if shares else self._do
        goes_on = True
        while goes_on:
            while shares and self._inbox.empty():
                self._read()
            goes_on = do(self._inbox.get())  # kept in no variable here: it may be large, and so may be the next one

    def _do_watched(self, work: wire.Open | wire.Prepare | Turn | wire.Close | None) -> bool:
        """Let the watch have the reading while the work is done, should it take long enough."""
        self._reading.release()
        if not self._watch_wakes.is_set():
            self._watch_wakes.set()
        goes_on = self._do(work)
        if not self._reading.acquire(blocking=False):
            os.write(self._ask_back, b"!")
            self._reading.acquire()
            self._taken_back.put(None)
        return goes_on

    def _do(self, work: wire.Open | wire.Prepare | Turn | wire.Close | None) -> bool:
        """Do what has come; say whether there is more to come."""
        match work:
            case Turn():
                self._finish(work, self._run_turn(work))
                if self._born_with is not None:
                    self._sender.send(wire.Imported(imported_since(self._born_with)))
                    self._born_with = None
            case wire.Open():
                if work.question_timeout_s is not None:
                    self._question_timeout_s = work.question_timeout_s
                opened = self._agent.open(work)
                self._session_id, self._committed = opened.session_id, opened.committed
                self._sender.send(opened)
            case wire.Prepare():
                prepare = getattr(self._agent, "prepare", None)
                self._sender.send(wire.Prepared(list(prepare(work.options)) if prepare is not None else []))
            case wire.Close():
                self._put_away()
                self._sender.send(wire.Closed())
                return False
            case None:
                self._put_away()
                leave_orphaned()
        return True

    def _put_away(self) -> None:
        try:
            self._agent.close()
        except Exception:  # noqa: BLE001 - it leaves in any case
            traceback.print_exc()

    def _run_turn(self, turn: Turn) -> wire.TurnDone | wire.TurnFailed:
        with self._turn_lock:
            if turn.is_cancelled:
                return self._done(turn, Outcome("", "interrupted"))
            self._running = turn
        try:
            outcome = _checked(self._agent.turn(turn.request.text, turn))
        except AgentError as error:
            return self._failed(turn, error.reason, str(error))
        except Exception as error:  # noqa: BLE001 - a bug of an agent fails its turn, not its worker
            traceback.print_exc()
            return self._failed(turn, "agent_error", f"{type(error).__name__}: {error}")
        finally:
            with self._turn_lock:
                self._running = None
        return self._done(turn, outcome)

    def _finish(self, turn: Turn, message: wire.TurnDone | wire.TurnFailed) -> None:
        # Forgotten first: once the supervisor has the last frame, nothing may refer to this turn any more.
        self._turns.pop((turn.turn_id, turn.attempt), None)
        try:
            self._sender.send(message)
        except wire.FrameTooLargeError as error:
            self._sender.send(self._failed(turn, "frame_too_large", f"the reply does not fit on the wire: {error}"))

    def _done(self, turn: Turn, outcome: Outcome) -> wire.TurnDone:
        self._session_id = outcome.session_id or self._session_id
        self._committed = outcome.committed or self._committed
        return wire.TurnDone(
            turn.turn_id, turn.attempt, outcome.text, self._session_id, outcome.kind, self._committed, outcome.usage,
            outcome.notice,
        )  # fmt: skip

    def _failed(self, turn: Turn, reason: str, text: str) -> wire.TurnFailed:
        self._session_id = turn.session_id or self._session_id
        return wire.TurnFailed(turn.turn_id, turn.attempt, _name(reason), text, self._session_id, self._committed)
