"""What a worker runs: the ``Agent`` protocol. Write your own and name it in ``PoolSettings.agent``.

A factory is named ``"package.module:factory"`` and is called once, without arguments, in the worker's main thread:

    class Parrot:
        def open(self, request: Open) -> Opened:
            return Opened(session_id=request.session_id or "parrot-1")

        def turn(self, text: str, turn: RunningTurn) -> Outcome:
            turn.text(text)
            return Outcome(text)

        def interrupt(self) -> None: ...
        def close(self) -> None: ...

    # PoolSettings(agent="parrots:Parrot", agent_paths=("/path/of/the/folder/with/parrots.py",))

``print`` is safe: descriptors 0 and 1 are no longer the wire by the time that any agent's code runs.
"""

import threading
from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec

from hermes_pool_worker.wire import Open, Opened

__all__ = ["Agent", "AgentError", "MissingDependencyError", "Open", "Opened", "Outcome", "RunningTurn"]


class AgentError(Exception):
    """The agent could not answer this turn, and has taken it out of its history.

    ``reason`` is a short word for programs, the text is for people. Any other exception out of ``Agent.turn`` is
    reported as reason ``agent_error``, with its traceback in the worker's log.
    """

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class MissingDependencyError(Exception):
    """Something that is not installed or not configured keeps this agent from ever starting; the text is the remedy.

    The worker exits with status 78 (``EX_CONFIG``), and the supervisor does not try again.
    """


class Outcome(msgspec.Struct, frozen=True, kw_only=False):
    """How a turn ended. The fields are those of ``wire.TurnDone``."""

    text: str
    kind: Literal["completed", "interrupted", "partial"] = "completed"
    session_id: str | None = None
    """The agent's session id after this turn, where it has changed."""
    committed: str | None = None
    usage: dict[str, int] = {}
    notice: str | None = None


class RunningTurn(Protocol):
    """The turn that runs, as its agent sees it. Every method may be called from any thread, and is cheap."""

    turn_id: str
    attempt: int

    @property
    def cancelled(self) -> threading.Event:
        """Set when the caller has cancelled; ``Agent.interrupt`` is called right after."""

    def text(self, delta: str) -> None:
        """Send a further piece of the reply to the caller."""

    def reasoning(self, delta: str) -> None:
        """Send a further piece of the model's reasoning."""

    def tool_started(self, call_id: str, name: str, arguments: str = "") -> None:
        """Say that a tool is about to act. Say it *before* it acts: it decides whether a crash may be retried."""

    def tool_finished(
        self, call_id: str, name: str, *, ok: bool = True, result: str = "", duration_s: float = 0.0
    ) -> None:
        """Say that a tool has ended."""

    def status(self, text: str) -> None:
        """Send a remark for people."""

    def session_moved(self, session_id: str) -> None:
        """Say that the session goes on under another id."""

    def ask(
        self, kind: Literal["approval", "clarify"], text: str, choices: Sequence[str] = (), timeout_s: float = 60.0
    ) -> str | None:
        """Ask the caller and wait; ``None`` when nobody answered in ``timeout_s`` seconds or the turn was cancelled."""

    def background_started(self, job_id: str, name: str) -> None:
        """Say that work goes on that may outlast the turn; say it before the turn ends, or the worker may go.

        Until every job has ended, but at most ``timeouts.background_s`` after the turn's end, the worker does not count
        as idle. ``job_id`` is any text that tells one job from another; up to 100 jobs are kept at a time. This method
        and the next one may be called after the turn's end as well.
        """

    def background_finished(self, job_id: str, result: str = "") -> None:
        """Say that a job has ended; ``result`` is a preview for ``HermesSessionManager(on_background=...)``."""


class Agent(Protocol):
    """One conversation's agent. All calls come from the worker's main thread, one at a time, except ``interrupt``.

    Two more are optional, and make starts quick. ``preload(options)``, a function of the agent's *module*, is called
    once in the process from which workers are forked: it imports and reads what all of them need, and constructs
    nothing (no thread, no open file). ``prepare(options)``, a method, is called in a spare worker before any
    conversation is known. Both return the paths of the files that went into it: a change of one makes it stale.
    """

    def open(self, request: Open) -> Opened:
        """Begin or resume a session. Heavy imports belong here or in the factory.

        Raise ``MissingDependencyError`` for what trying again cannot mend.
        """

    def turn(self, text: str, turn: RunningTurn) -> Outcome:
        """Answer ``text``. Raise ``AgentError`` for a turn that failed and has left no trace in the history."""

    def interrupt(self) -> None:
        """End the running turn soon. Called from another thread, and only while a turn runs."""

    def close(self) -> None:
        """Put everything away: the process exits next, and the session may be resumed by another one."""
