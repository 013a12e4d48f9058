"""The turn that runs, as its agent sees it: ``agent.RunningTurn``, put on the wire."""

import math
import queue
import sys
import threading
import time
from collections.abc import Sequence
from typing import Literal

from hermes_pool_worker import checks, wire
from hermes_pool_worker.sender import FrameSender

PROGRESS_SIGN_S = 1.0
"""How often a turn that nobody watches still sends a piece of its text, as a sign of progress, in seconds."""
JOB_RESULT_CHARS_MAX = 500
"""A longer result of a background job is cut to this."""


class WireTurn:
    """``agent.RunningTurn`` on the wire. The loop makes one for each turn; it also cancels it and passes on answers."""

    __slots__ = (
        "_cancelled", "_lock", "_next_sign_at", "_question_timeout_s", "_questions", "_questions_asked", "_sender",
        "_streams",
        "attempt", "is_cancelled", "keep", "pending_steer", "request", "session_id", "turn_id", "was_seen",
        "why",
    )  # fmt: skip

    def __init__(self, request: wire.Turn, sender: FrameSender, question_timeout_s: float = math.inf) -> None:
        self.turn_id = request.turn_id
        self.attempt = request.attempt
        self.request = request
        self.session_id: str | None = None
        """The session id that the agent moved to in this turn, if it did."""
        self.is_cancelled = False
        self.keep = False
        self.why = ""
        self.pending_steer: list[str] = []
        """What was said with ``Steer`` and not used."""
        self.was_seen = False
        """Whether anything was sent that a person can have seen: a piece of the reply, or a tool."""
        self._sender = sender
        self._streams = request.streams
        self._next_sign_at = 0.0 if self._streams else time.monotonic() + PROGRESS_SIGN_S
        self._questions: dict[str, queue.SimpleQueue[str | None]] = {}
        self._questions_asked = 0
        self._question_timeout_s = question_timeout_s
        self._lock = threading.Lock()
        self._cancelled: threading.Event | None = None

    # --- for the agent: see ``RunningTurn`` ---

    @property
    def cancelled(self) -> threading.Event:
        """See ``RunningTurn``. The event is made when it is first asked for: most turns never ask."""
        with self._lock:
            if self._cancelled is None:
                self._cancelled = threading.Event()
                if self.is_cancelled:
                    self._cancelled.set()
            return self._cancelled

    def text(self, delta: str) -> None:
        """See ``RunningTurn``."""
        if delta:
            self.was_seen = True
            if self._streams or self._sign_is_due():
                self._send_piece(wire.TextDelta(self.turn_id, self.attempt, checks.text(delta)))

    def reasoning(self, delta: str) -> None:
        """See ``RunningTurn``."""
        if delta and (self._streams or self._sign_is_due()):
            self._send_piece(wire.ReasoningDelta(self.turn_id, self.attempt, checks.text(delta)))

    def tool_started(self, call_id: str, name: str, arguments: str = "") -> None:
        """See ``RunningTurn``."""
        self.was_seen = True
        self._send(
            wire.ToolStarted(
                self.turn_id, self.attempt, checks.name(call_id), checks.name(name), checks.text(arguments)
            )
        )

    def tool_finished(
        self, call_id: str, name: str, *, ok: bool = True, result: str = "", duration_s: float = 0.0
    ) -> None:
        """See ``RunningTurn``."""
        self._send(
            wire.ToolFinished(
                self.turn_id,
                self.attempt,
                checks.name(call_id),
                checks.name(name),
                bool(ok),
                checks.text(result),
                float(duration_s),
            )
        )

    def status(self, text: str) -> None:
        """See ``RunningTurn``."""
        self._send(wire.Status(self.turn_id, self.attempt, checks.text(text)))

    def session_moved(self, session_id: str) -> None:
        """See ``RunningTurn``."""
        self.session_id = session_id
        self._send(wire.SessionMoved(self.turn_id, self.attempt, checks.text(session_id)))

    def ask(
        self, kind: Literal["approval", "clarify"], text: str, choices: Sequence[str] = (), timeout_s: float = 60.0
    ) -> str | None:
        """See ``RunningTurn``."""
        timeout_s = min(timeout_s, self._question_timeout_s)
        answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        with self._lock:
            self._questions_asked += 1
            question_id = f"{self.turn_id}.{self.attempt}.q{self._questions_asked}"
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
        """See ``RunningTurn``."""
        self._send(wire.BackgroundStarted(checks.name(job_id), checks.name(name)))

    def background_finished(self, job_id: str, result: str = "") -> None:
        """See ``RunningTurn``."""
        # Cut, because a result that does not fit would not be sent, and the job would never end.
        self._send(wire.BackgroundFinished(checks.name(job_id), checks.text(result)[:JOB_RESULT_CHARS_MAX]))

    # --- for the loop ---

    def answer(self, question_id: str, text: str | None) -> None:
        """Pass an answer to the thread that asked (``None``: nobody can answer); ignore one that comes too late."""
        with self._lock:
            answers = self._questions.get(question_id)
        if answers is not None:
            answers.put(text)

    def cancel(self) -> None:
        """Mark the turn as cancelled, and release every thread that waits for an answer."""
        with self._lock:
            self.is_cancelled = True
            if self._cancelled is not None:
                self._cancelled.set()
            for answers in self._questions.values():
                answers.put(None)

    # --- sending ---

    def _sign_is_due(self) -> bool:
        now = time.monotonic()
        if now < self._next_sign_at:
            return False
        self._next_sign_at = now + PROGRESS_SIGN_S
        return True

    def _send(self, message: wire.TurnEvent | wire.BackgroundFrame) -> None:
        try:
            self._sender.send(message)
        except wire.FrameTooLargeError as error:
            _report_unsent(message, error)

    def _send_piece(self, message: wire.TextDelta | wire.ReasoningDelta) -> None:
        try:
            self._sender.send_piece(message)
        except wire.FrameTooLargeError as error:
            _report_unsent(message, error)


def _report_unsent(message: wire.Message, error: wire.FrameTooLargeError) -> None:
    # A lost event harms no turn: the reply comes whole with TurnDone, or fails there for everyone to see.
    print(f"hermes-pool worker: {type(message).__name__} was not sent: {error}", file=sys.stderr)
