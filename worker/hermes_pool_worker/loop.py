"""The worker's loop: the main thread runs the agent, and a second thread reads the wire meanwhile.

So a cancel, a ping, an answer and the end of the wire are seen in the middle of a turn. While nothing runs, the main
thread reads the wire itself: to wake another thread for each frame would double the cost of a short turn. The end of
the wire is the end of the worker, because nobody is left to take its reply.
"""

import math
import os
import queue
import select
import sys
import threading
import time
import traceback
from typing import NoReturn, TypeAlias, assert_never

import msgspec

from hermes_pool_worker import checks, lock, memory, signals, stdio, wire
from hermes_pool_worker.agent import Agent, AgentError, MissingDependencyError, Outcome
from hermes_pool_worker.contract import EXIT_OK, EXIT_SOFTWARE, EXIT_UNUSABLE, MARKER_VARIABLE
from hermes_pool_worker.imports import import_agent, imported_since
from hermes_pool_worker.running_turn import WireTurn
from hermes_pool_worker.sender import FrameSender

READ_BYTES = 16 * 1024
READ_BYTES_LARGE = 1024 * 1024
WATCH_AFTER_S = 0.01
"""How long work may take until the watch thread takes over the reading, if the work comes after a pause. In seconds."""
WATCH_AFTER_MOST_S = 0.16
"""The same while short turns follow each other closely: the watch thread then looks less and less often, down to this.
A cancel right at the start of such a turn waits as long. To look 100 times a second would cost as much as the turns."""
WATCH_LOOKS = 10
"""After how many looks without work the watch thread goes to sleep. That takes about a second."""
ORPHANED_GRACE_S = 2.0
"""How long a turn may take to end once the supervisor is gone. After that the process ends without it. In seconds."""

_HAS_READV = hasattr(os, "readv")
"""False on Windows."""

Work: TypeAlias = wire.Open | wire.Prepare | WireTurn | wire.Flush | wire.ReadTurns | wire.Close | None
"""What the main thread does, in the order in which it came; ``None`` is the end of the wire."""


def serve(
    wire_in: int, wire_out: int, agent_name: str, frame_bytes_max: int, born_with: frozenset[str] | None = None
) -> int:
    """Serve one conversation over the two descriptors until told to close; return the exit status.

    ``born_with`` are the modules that a forked worker had from the start. After its first turn it reports what it
    imported beyond them, so that the next zygote imports those as well.
    """
    if born_with is None:  # a forked worker has the zygote's signal handling
        signals.reset()
    signals.serve(wire_in)
    sender = FrameSender(wire_out, frame_bytes_max)
    versions = {"python": sys.version.split()[0], "msgspec": msgspec.__version__}
    sender.send(wire.Hello(wire.PROTOCOL, os.getpid(), agent_name, versions))
    try:
        _, factory = import_agent(agent_name)
        Worker(factory(), sender, wire_in, frame_bytes_max, born_with).run()
    except MissingDependencyError as error:
        print(f"hermes-pool worker: {error}", file=sys.stderr)
        return EXIT_UNUSABLE
    except Exception:  # noqa: BLE001 - whatever an agent raises while it starts, the supervisor must get to read it
        traceback.print_exc()
        return EXIT_SOFTWARE
    return EXIT_OK


class Worker:
    """One agent between the wire and the main thread. The thread that reads the wire holds ``_reading``."""

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
        # Kept, because allocating a buffer for each frame costs more than a small frame itself. It grows with the first
        # large frame: a worker that gets none must not pay for it.
        self._buffer = bytearray(READ_BYTES)
        self._view = memoryview(self._buffer)
        self._decoder: wire.FrameDecoder[wire.ToWorker] = wire.FrameDecoder(
            wire.ToWorker, wire.worker_takes(frame_bytes_max)
        )
        self._inbox: queue.SimpleQueue[Work] = queue.SimpleQueue()
        self._turns: dict[tuple[str, int], WireTurn] = {}
        self._running: WireTurn | None = None
        # Held during an interrupt, so that it can never hit the turn that follows the one it is meant for.
        self._turn_lock = threading.Lock()
        self._reading = threading.Lock()
        self._watch_wakes = threading.Event()
        self._hand_back, self._ask_back = os.pipe()
        self._taken_back: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._session_id = ""
        self._committed: str | None = None
        self._question_timeout_s = math.inf

    # --- reading the wire, in either thread ---

    def _read(self) -> None:
        """Wait for bytes and handle the frames in them. At the end of the wire, make sure that the process ends."""
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
        last_resort = threading.Timer(ORPHANED_GRACE_S, _leave_orphaned)
        last_resort.daemon = True
        last_resort.start()

    def _take(self, message: wire.ToWorker) -> None:
        match message:
            case wire.Turn():
                turn = self._turns[message.turn_id, message.attempt] = WireTurn(
                    message, self._sender, self._question_timeout_s
                )
                self._inbox.put(turn)
            case wire.Cancel():
                if (cancelled := self._turns.get((message.turn_id, message.attempt))) is not None:
                    cancelled.keep, cancelled.why = message.keep, message.why
                    self._cancel(cancelled)
            case wire.Answer():
                if (asking := self._turns.get((message.turn_id, message.attempt))) is not None:
                    asking.answer(message.question_id, None if message.nobody else message.text)
            case wire.Steer():
                if (steered := self._turns.get((message.turn_id, message.attempt))) is not None:
                    self._steer(steered, message.text)
            case wire.Ping():
                self._sender.send(wire.Pong(message.number))
            case wire.Open() | wire.Prepare() | wire.Flush() | wire.ReadTurns() | wire.Close():
                if isinstance(message, wire.Close):
                    signals.closing()
                self._inbox.put(message)
            case _:
                assert_never(message)

    def _cancel(self, turn: WireTurn) -> None:
        with self._turn_lock:
            turn.cancel()
            if self._running is turn:
                try:
                    self._agent.interrupt()
                except Exception:  # noqa: BLE001 - reading must go on; the supervisor has other means for deaf agents
                    traceback.print_exc()

    def _steer(self, turn: WireTurn, text: str) -> None:
        """Pass a remark to the agent; what it cannot use comes back with the end of the turn."""
        with self._turn_lock:
            steer = getattr(self._agent, "steer", None)
            used = False
            if self._running is turn and steer is not None:
                try:
                    used = bool(steer(text))
                except Exception:  # noqa: BLE001 - as for an interrupt
                    traceback.print_exc()
            if not used:
                turn.pending_steer.append(text)

    # --- the watch thread ---

    def _watch(self) -> None:
        """Read the wire during work that takes longer than a moment; the body of the second thread.

        It sleeps while nothing happens. Once woken it looks by itself, after ``WATCH_AFTER_S`` and then less and less
        often, so that short turns that follow each other closely need not wake it each time. Before it goes back to
        sleep, it tidies up.
        """
        while True:
            self._watch_wakes.wait()
            idle_looks, pause_s = 0, WATCH_AFTER_S
            while idle_looks < WATCH_LOOKS:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, WATCH_AFTER_MOST_S)
                # The lock is free only while the main thread works.
                if self._reading.acquire(blocking=False):
                    self._read_until_asked_back()
                    self._reading.release()
                    self._taken_back.get()  # otherwise this thread could look again first, and keep the lock for good
                    idle_looks, pause_s = 0, WATCH_AFTER_S
                else:
                    idle_looks += 1
            self._watch_wakes.clear()
            if not self._reading.locked():  # work has begun since the last look, and did not need to wake this thread
                self._watch_wakes.set()
            else:
                memory.give_back()
                _reap_adopted()

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
        """Read the wire to its end: the body of the second thread where pipes cannot be polled (Windows)."""
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
            signals.at_rest = shares
            while shares and self._inbox.empty():
                self._read()
            signals.at_rest = False
            goes_on = do(self._inbox.get())  # in no variable: the work may be large, and so may be the next one

    def _do_watched(self, work: Work) -> bool:
        """Do the work, and let the watch thread read meanwhile if it takes long enough."""
        self._reading.release()
        if not self._watch_wakes.is_set():
            self._watch_wakes.set()
        goes_on = self._do(work)
        if not self._reading.acquire(blocking=False):
            os.write(self._ask_back, b"!")
            self._reading.acquire()
            self._taken_back.put(None)
        return goes_on

    def _do(self, work: Work) -> bool:
        """Do the work; return whether there may be more."""
        match work:
            case WireTurn():
                self._finish(work, self._run_turn(work))
                if self._born_with is not None:
                    self._sender.send(wire.Imported(imported_since(self._born_with)))
                    self._born_with = None
            case wire.Open():
                if work.question_timeout_s is not None:
                    self._question_timeout_s = work.question_timeout_s
                if work.lock_file is not None:
                    lock.take(work.lock_file)
                opened = self._agent.open(work)
                self._session_id, self._committed = opened.session_id, opened.committed
                self._sender.send(opened)
            case wire.Prepare():
                prepare = getattr(self._agent, "prepare", None)
                self._sender.send(wire.Prepared(list(prepare(work.options)) if prepare is not None else []))
            case wire.Flush():
                self._sender.send(self._flush())
            case wire.ReadTurns():
                self._sender.send(self._read_turns(work))
            case wire.Close():
                self._close_agent()
                lock.drop()
                self._sender.send(wire.Closed())
                return False
            case None:
                self._close_agent()
                _leave_orphaned()
            case _:
                assert_never(work)
        return True

    def _flush(self) -> wire.Flushed:
        try:
            flush = getattr(self._agent, "flush", None)
            if flush is not None:
                self._committed = flush() or self._committed
        except Exception as error:  # noqa: BLE001 - the supervisor decides what follows
            return wire.Flushed(self._committed, f"{type(error).__name__}: {error}")
        return wire.Flushed(self._committed)

    def _read_turns(self, request: wire.ReadTurns) -> wire.TurnsRead:
        turns = getattr(self._agent, "turns", None)
        if turns is None:
            return wire.TurnsRead(error="this agent does not tell its history")
        try:
            return wire.TurnsRead(list(turns(request.after, request.limit)))
        except Exception as error:  # noqa: BLE001 - an agent's bug fails the question, not its worker
            traceback.print_exc()
            return wire.TurnsRead(error=f"{type(error).__name__}: {error}")

    def _close_agent(self) -> None:
        try:
            self._agent.close()
        except Exception:  # noqa: BLE001 - the process ends in any case
            traceback.print_exc()

    def _run_turn(self, turn: WireTurn) -> wire.TurnEnd:
        with self._turn_lock:
            if turn.is_cancelled:
                return self._done(turn, Outcome("", "interrupted"))
            self._running = turn
        try:
            outcome = checks.outcome(self._agent.turn(turn.request.text, turn))
        except AgentError as error:
            return self._failed(turn, error)
        except Exception as error:  # noqa: BLE001 - an agent's bug fails its turn, not its worker
            traceback.print_exc()
            return self._failed(turn, AgentError("agent_error", f"{type(error).__name__}: {error}"))
        finally:
            with self._turn_lock:
                self._running = None
        return self._done(turn, outcome)

    def _finish(self, turn: WireTurn, message: wire.TurnEnd) -> None:
        # Forgotten first: once the supervisor has the last frame, nothing can refer to this turn any more.
        self._turns.pop((turn.turn_id, turn.attempt), None)
        try:
            self._sender.send(message)
        except wire.FrameTooLargeError as error:
            failure = AgentError("frame_too_large", f"the reply does not fit on the wire: {error}", kept=message.kept)
            self._sender.send(self._failed(turn, failure))

    def _done(self, turn: WireTurn, outcome: Outcome) -> wire.TurnDone:
        self._session_id = outcome.session_id or self._session_id
        self._committed = outcome.committed or self._committed
        kept = outcome.kept
        if kept is None:
            kept = outcome.kind != "interrupted" or (turn.keep and turn.was_seen)
        pending_steer = "\n".join([*filter(None, [outcome.pending_steer]), *turn.pending_steer]) or None
        return wire.TurnDone(
            turn.turn_id, turn.attempt, outcome.text, self._session_id, outcome.kind, self._committed, outcome.usage,
            outcome.notice, kept, outcome.model, pending_steer,
        )  # fmt: skip

    def _failed(self, turn: WireTurn, error: AgentError) -> wire.TurnFailed:
        self._session_id = turn.session_id or self._session_id
        self._committed = error.committed or self._committed
        return wire.TurnFailed(
            turn.turn_id, turn.attempt, checks.name(error.reason), str(error), self._session_id, self._committed,
            error.kept, error.said, error.usage, error.model, error.retryable, error.retry_after_s,
        )  # fmt: skip


def _reap_adopted() -> None:
    """Reap the processes that this one adopted and that have ended (see ``process_tree``)."""
    if sys.platform == "linux":
        from hermes_pool_worker import process_tree  # noqa: PLC0415 - exists on Linux only

        process_tree.reap_adopted()


def _leave_orphaned() -> NoReturn:
    """End this process, whose supervisor is gone, and everything that its agent's tools have left running."""
    if sys.platform == "linux":
        from hermes_pool_worker import process_tree  # noqa: PLC0415 - seldom needed

        if marker := os.environ.get(MARKER_VARIABLE):
            process_tree.end_marked(marker)
    stdio.leave(EXIT_OK)
