"""The interface for agents. Write a class with these four methods, and name it in ``PoolSettings.agent``.

A complete agent, in ``parrots.py``:

    from hermes_pool_worker.agent import Open, Opened, Outcome, RunningTurn

    class Parrot:
        def open(self, request: Open) -> Opened:
            return Opened(session_id=request.session_id or "parrot-1")

        def turn(self, text: str, turn: RunningTurn) -> Outcome:
            turn.text(text)
            return Outcome(text)

        def interrupt(self) -> None: ...
        def close(self) -> None: ...

And the settings that run it:

    PoolSettings(agent="parrots:Parrot", agent_paths=("/path/of/the/folder/with/parrots.py",))

``agent`` names a module and a factory in it (``"package.module:factory"``). Each worker calls the factory once, without
arguments, in its main thread, and then ``open`` once. ``agent_options`` of the settings arrive in ``Open.options``.

One worker serves one conversation. It may end at any time: it was idle, it crashed, the host was restarted. The next
worker of the conversation gets the ``session_id`` that the last one reported, and has to resume that session. So keep
the history where a later process finds it, for instance in ``Open.data_dir``.

``print`` is safe in agents. By the time that their code runs, descriptors 0 and 1 are no longer the wire: what they
print goes to the worker's log, and what they read from standard input is empty.

Of hermes-pool, an agent may import this package and nothing else. The package need not be installed in the workers'
environment, because the supervisor brings it along; it only needs msgspec there.
"""

import threading
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

import msgspec

from hermes_pool_worker.wire import Open, Opened

__all__ = ["Agent", "AgentError", "MissingDependencyError", "Open", "Opened", "Outcome", "RunningTurn"]


class AgentError(Exception):
    """Raise this from ``Agent.turn`` for a turn that failed.

    ``reason`` is a short word for programs, such as ``"rate_limit"``; the text is for people. ``retryable`` is whether
    the same message may succeed with nothing fixed (``None``: what the reason implies), ``retry_after_s`` when, in
    seconds. ``kept`` is whether the turn is in the agent's history, because a tool may have acted; by default it has
    left no trace there. ``said`` is the reply so far; ``usage``, ``model`` and ``committed`` are those of ``Outcome``.

    Any other exception out of ``Agent.turn`` fails the turn with the reason ``"agent_error"``, and its traceback goes
    to the worker's log.
    """

    def __init__(
        self,
        reason: str,
        text: str,
        *,
        retryable: bool | None = None,
        retry_after_s: float | None = None,
        kept: bool = False,
        said: str = "",
        usage: Mapping[str, int] | None = None,
        model: str | None = None,
        committed: str | None = None,
    ) -> None:
        super().__init__(text)
        self.reason = reason
        self.retryable = retryable
        self.retry_after_s = retry_after_s
        self.kept = kept
        self.said = said
        self.usage = dict(usage or {})
        self.model = model
        self.committed = committed


class MissingDependencyError(Exception):
    """Raise this when the agent can never start like this: something is not installed, or not configured.

    The text is the remedy, in one line, and the caller gets to read it. It may be raised by the factory, ``open``,
    ``prepare`` and ``preload``. The worker exits with status 78 (``EX_CONFIG``), and the supervisor does not try again.
    """


class Outcome(msgspec.Struct, frozen=True, kw_only=False):
    """How a turn ended, as ``Agent.turn`` returns it."""

    text: str
    """The whole reply, including the pieces that were sent before."""
    kind: Literal["completed", "interrupted", "partial"] = "completed"
    """``interrupted``: the caller cancelled, and ``text`` is the reply so far. ``partial``: the agent stopped early for
    another reason, and ``notice`` says which."""
    session_id: str | None = None
    """The session id after this turn, if it has changed."""
    committed: str | None = None
    """A mark of this point in the agent's history, in any format. The next worker gets it as ``Open.committed``, and
    removes from the history what comes after it: the rest of a turn that a crash cut off."""
    usage: dict[str, int] = {}
    """Counts of this turn, such as ``input_tokens`` and ``output_tokens``."""
    notice: str | None = None
    """A remark for people about this turn."""
    kept: bool | None = None
    """Whether the turn is in the agent's history. ``None``: it is, unless it was interrupted and either nothing of it
    had been sent or ``RunningTurn.keep`` was false. A completed turn that is not kept could not be written: ``notice``
    says why, and ``flush`` tries again."""
    model: str | None = None
    """The model that answered."""
    pending_steer: str | None = None
    """What the user said in the turn (see ``Agent.steer``) and the agent had no more use for."""


class RunningTurn(Protocol):
    """The running turn, as its agent sees it. All methods are cheap, and may be called from any thread.

    What is sent here is for watching. An event that does not fit on the wire is dropped, with a line in the worker's
    log, and the turn goes on. ``TypeError`` is raised for text that is not ``str``.
    """

    turn_id: str
    """The same for each attempt at a turn."""
    attempt: int
    """1, or more if an earlier worker died during this turn."""

    keep: bool
    """Once the turn is cancelled: whether what was said and done so far is to stay in the history."""
    why: str
    """Once the turn is cancelled: why, in words that the model may be told."""

    @property
    def cancelled(self) -> threading.Event:
        """Set once the caller has cancelled. ``Agent.interrupt`` is called right after that."""

    def text(self, delta: str) -> None:
        """Send the next piece of the reply."""

    def reasoning(self, delta: str) -> None:
        """Send the next piece of the model's reasoning, which is not part of the reply."""

    def tool_started(self, call_id: str, name: str, arguments: str = "") -> None:
        """Report that a tool is about to act.

        Call this *before* the tool acts. After a crash, a turn is run again only if no tool can have had an effect, and
        this is how the supervisor knows. ``call_id`` is any text that tells this call from the others of the turn;
        ``arguments`` is a preview for people.
        """

    def tool_finished(
        self, call_id: str, name: str, *, ok: bool = True, result: str = "", duration_s: float = 0.0
    ) -> None:
        """Report that a tool has ended. ``result`` is a preview for people, ``duration_s`` its run time in seconds."""

    def status(self, text: str) -> None:
        """Send a remark for people about the progress of the turn, such as a retry."""

    def session_moved(self, session_id: str) -> None:
        """Report that the session continues under another id. A worker that resumes it gets the new one."""

    def ask(
        self, kind: Literal["approval", "clarify"], text: str, choices: Sequence[str] = (), timeout_s: float = 60.0
    ) -> str | None:
        """Ask the caller, and wait for the answer.

        An ``approval`` asks whether to run the command ``text``, and the answer should be one of ``choices``. For
        ``clarify``, any text is an answer, and ``choices`` are suggestions. Check the answer: the caller may send
        anything.

        Returns ``None`` if no answer came within ``timeout_s`` seconds (the settings may allow less), or if the turn
        was cancelled.
        """

    def background_started(self, job_id: str, name: str) -> None:
        """Report a job that may outlast the turn. Call this before the turn ends, or the worker may be stopped.

        Until every job has ended, but at most ``timeouts.background_s`` after the turn's end, the worker does not count
        as idle. ``job_id`` is any text that tells one job from another; up to 100 jobs are kept at a time. This method
        and the next one may be called after the turn's end as well.
        """

    def background_finished(self, job_id: str, result: str = "") -> None:
        """Report that a job has ended. ``result`` is a preview, cut to 500 characters.

        The host receives it in ``HermesSessionManager(on_background=...)``.
        """


class Agent(Protocol):
    """The agent of one conversation.

    The worker calls everything from its main thread, one call at a time, except ``interrupt``.

    Three optional methods add to what the host can do. ``steer(text)`` takes a remark of the user in the middle of a
    turn, in another thread as ``interrupt``, and returns whether it will be used. ``turns(after, limit)`` returns the
    turns of the history after a mark, as a list of ``wire.PastTurn``, the oldest first; ``ValueError`` for a mark that
    is not there. ``flush()`` writes to the history what could not be written before, and returns the mark, or raises.

    Two optional functions make starts faster. ``preload(options)``, a function of the agent's *module*, is called once
    in the zygote, the process from which workers are forked. It imports and reads what all workers need, and must not
    construct anything that a fork cannot share: no threads, no open files. ``prepare(options)``, a method, is called in
    a spare worker before its conversation is known. ``options`` are the ``agent_options`` of the settings. Both return
    the paths of the files that they depend on; once one of these changes, the process is replaced.
    """

    def open(self, request: Open) -> Opened:
        """Begin a session, or resume ``request.session_id``. Called once, before the first turn.

        Do heavy imports here or in the factory. If the session cannot be resumed, begin a new one and say so in
        ``Opened.notice``. If the previous worker died, ``request.committed`` and ``request.unfinished`` tell what to
        remove from the history, or to keep there (see ``Open``). ``request.earlier`` is what was said before a session
        that is new.

        Raise ``MissingDependencyError`` for a problem that another attempt cannot solve.
        """

    def turn(self, text: str, turn: RunningTurn) -> Outcome:
        """Answer ``text``, and keep the turn in the history. Raise ``AgentError`` for a turn that failed.

        A turn that fails must leave no trace in the history: its text must not appear in the next prompt. If a tool
        may have acted, though, the turn should stay, and say that it failed: the model must know what it has done.
        """

    def interrupt(self) -> None:
        """Make the running turn end soon. Called from another thread, and only while a turn runs.

        It must return at once. The turn then returns an ``Outcome`` of the kind ``interrupted``. An agent that does not
        react in time is killed. What of the turn stays in the history is ``RunningTurn.keep``.
        """

    def close(self) -> None:
        """Release everything. The process exits next, and another one may resume the session."""
