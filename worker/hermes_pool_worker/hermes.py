"""Hermes Agent as the agent of a worker.

Only this module, ``hermes_setup`` and ``hermes_history`` import Hermes (0.19.0), and only inside functions, so that an
import of these modules costs nothing. They read the user's Hermes configuration, and write one thing to it, as Hermes
does: the commands that a person has allowed for good.
"""

import contextlib
import json
import logging
import os
import ssl
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal

from hermes_pool_worker.agent import AgentError, Open, Opened, Outcome, RunningTurn
from hermes_pool_worker.hermes_history import EMPTY_REPLY, NOTHING_YET, History, same_text
from hermes_pool_worker.hermes_setup import HermesOptions, adopt_session, build_agent, files_read, import_hermes
from hermes_pool_worker.wire import scrub

__all__ = ["HermesAgent", "HermesOptions"]

APPROVAL_KEY: Final = "hermes-pool"
"""The name under which Hermes keeps the approvals of this process and its one conversation."""
APPROVALS: Final = ("once", "session", "always", "deny")
PREVIEW_CHARS: Final = 500
NOBODY_ANSWERED: Final = (
    "[Nobody answered in time. Continue with the most sensible assumption and say so, or ask again in your reply.]"
)
JOBS_LOOK_S: Final = 1.0
"""How often to check whether background commands have ended, in seconds."""
INTERRUPTED: Final = "Operation interrupted"
"""How the replies start that Hermes makes up for interrupted turns."""

_USAGE: Final = (
    "input_tokens", "output_tokens", "cache_read_tokens", "cache_write_tokens", "reasoning_tokens", "api_calls",
)  # fmt: skip


def preload(options: Mapping[str, Any]) -> Sequence[str]:
    """Import Hermes in a zygote, and read what all workers read alike; return the files that this depends on.

    Construct nothing: Hermes' agent has threads, and a fork would get broken copies of them.
    """
    import_hermes(HermesOptions.of(options))
    from model_tools import get_tool_definitions  # noqa: PLC0415

    logging.disable(logging.WARNING)  # Hermes warns of each tool that is not set up; each worker does so once more
    get_tool_definitions(quiet_mode=True)
    logging.disable(logging.NOTSET)
    ssl.create_default_context()
    return files_read()


class HermesAgent:
    """One conversation in Hermes. Cheap to construct; ``open`` imports Hermes and builds Hermes' own agent."""

    def __init__(self) -> None:
        self._agent: Any = None
        self._database: Any = None
        self._history = History(None, "")
        self._messages: list[dict[str, Any]] = []
        self._mark = NOTHING_YET
        self._task_id = ""
        self._turn: RunningTurn | None = None
        self._tools_started: dict[str, float] = {}
        self._jobs = Jobs()

    # --- the session ---

    def prepare(self, options: Mapping[str, Any]) -> Sequence[str]:
        """Build Hermes' agent before its session is known; return the files that this depends on."""
        checked = HermesOptions.of(options)
        if checked.cwd:
            os.chdir(checked.cwd)
        config = import_hermes(checked)
        from hermes_state import SessionDB  # noqa: PLC0415

        self._database = SessionDB()
        self._agent = build_agent(config, checked, None, self._database, self._callbacks())
        # Otherwise Hermes would mark the session as ended when the worker leaves. It only goes dormant.
        self._agent._end_session_on_close = False  # noqa: SLF001 - Hermes has no public switch for this
        return files_read()

    def open(self, request: Open) -> Opened:
        """Begin or resume a session in Hermes."""
        if self._agent is None:
            self.prepare(request.options)
        session_id, notice = self._find(request)
        if session_id:
            adopt_session(self._agent, session_id, self._database)
        self._history = History(self._database, self._agent.session_id)
        # Constant while the worker lives: Hermes keeps the folder and the shell of the tools under this name.
        self._task_id = self._agent.session_id
        recovered, taken_back = self._tidy(request) if session_id else (None, "")
        self._messages, self._mark = self._history.load(), self._history.mark()
        return Opened(
            session_id=self._agent.session_id,
            resumed=bool(self._messages),
            committed=self._mark,
            recovered=recovered,
            notice=" ".join(filter(None, (notice, taken_back))) or None,
        )

    def _find(self, request: Open) -> tuple[str | None, str]:
        """Return the id of the session to resume, or ``None`` for a new one, and a notice about it or ``""``."""
        if request.session_id is None:
            return None, ""
        session_id = self._database.resolve_resume_session_id(request.session_id)
        row = self._database.get_session(session_id)
        if row is None and request.committed == NOTHING_YET:
            # Hermes stores a session with its first turn. This one had no turns, so nothing is lost.
            return request.session_id, ""
        if row is None:
            return None, f"Hermes does not know the session {request.session_id}, so a new one was started."
        if row.get("ended_at"):
            self._database.reopen_session(session_id)
        return session_id, ""

    def _tidy(self, request: Open) -> tuple[str | None, str]:
        """Remove unfinished turns; return the reply of ``request.unfinished``, if any, and a notice or ``""``."""
        history, said = self._history, ""
        if not history.knows(request.committed):
            said = "Hermes' history of this session ends before the last turn that is known to be complete."
        beyond = history.beyond(request.committed)
        unfinished = request.unfinished
        if unfinished is not None:
            # What follows belongs to the same turn: Hermes inserts messages of its own into long ones.
            own = [at for at, turn in enumerate(beyond) if same_text(turn, unfinished.text)]
            if own and beyond[-1].finished and not request.given_up:
                return scrub(beyond[-1].reply), said
            if own:
                history.rewind(beyond[own[-1]])
                del beyond[own[-1] :]
        while beyond and not beyond[-1].finished:
            turn = beyond.pop()
            history.rewind(turn)
            if turn.acted:
                said += " An unfinished turn was removed from the history; its tools may have acted."
        return None, said.strip()

    def close(self) -> None:
        """Let the session go dormant: end its background commands, and close the database."""
        self._jobs.forget()  # a command that is ended here has no result
        with _reported():
            from tools.process_registry import process_registry  # noqa: PLC0415

            # AIAgent.close ends those of its session only, and finds none: they are listed under another name.
            process_registry.kill_all()
        if self._agent is not None:
            with _reported():
                self._agent.close()
        if self._database is not None:
            with _reported():
                self._database.close()

    # --- a turn ---

    def turn(self, text: str, turn: RunningTurn) -> Outcome:
        """Let Hermes answer."""
        from gateway.session_context import declare_stateless_channel  # noqa: PLC0415
        from tools.approval import set_current_session_key  # noqa: PLC0415

        # Both bind to the current context, and so to the thread that runs the turn. The first makes a delegated task
        # run within its turn: nobody would be here for its result later.
        declare_stateless_channel()
        set_current_session_key(APPROVAL_KEY)
        agent, before, used = self._agent, self._mark, self._usage()
        # An interrupt that came too late for the previous turn would end this one at once.
        agent.clear_interrupt()
        self._turn = turn
        try:
            # Checked after _turn is set: a cancel either is seen here, or finds the turn running and interrupts it.
            if turn.cancelled.is_set():
                return Outcome("", "interrupted", self._history.session_id, before)
            result = agent.run_conversation(
                scrub(text),
                conversation_history=self._messages,
                task_id=self._task_id,
                stream_callback=turn.text,
            )
        except (Exception, SystemExit) as error:
            self._follow(turn)
            self._take_back(before)
            raise AgentError("agent_error", f"{type(error).__name__}: {error}") from error
        finally:
            self._turn = None
            with _reported():
                self._jobs.report(turn)
        self._follow(turn)
        usage = {name: count - used[name] for name, count in self._usage().items() if count > used[name]}
        kind, reply, notice = self._settle(result, before)
        self._mark = self._history.mark()
        return Outcome(reply, kind, self._history.session_id, self._mark, usage, notice)

    def interrupt(self) -> None:
        """End the running turn, if there is one."""
        if self._turn is not None:
            self._agent.interrupt()

    def _settle(
        self, result: Mapping[str, Any], before: str
    ) -> tuple[Literal["completed", "interrupted", "partial"], str, str | None]:
        """Put the history in order after a turn; return how the turn ended, its reply and its notice.

        The order of the checks matters: Hermes may call an interrupted turn completed, and a failed one partial.
        """
        reply = scrub(result.get("final_response") or "")
        why = scrub(str(result.get("error") or result.get("turn_exit_reason") or "Hermes gave no reason"))
        beyond = self._history.beyond(before)
        last = beyond[-1] if beyond else None
        did_nothing = last is None or not (last.acted or last.reply)
        kind: Literal["completed", "interrupted", "partial"] = "completed"
        if result.get("interrupted"):
            kind = "interrupted"
            reply = "" if reply.startswith(INTERRUPTED) else reply
            if did_nothing:
                self._take_back(before)
                return kind, "", None
        elif reply == EMPTY_REPLY or result.get("turn_exit_reason") == "empty_response_exhausted":
            self._take_back(before)
            raise AgentError("empty_response", "the model answered with empty text several times")
        elif result.get("failed") or (not result.get("completed") and did_nothing):
            # Hermes calls some turns partial although nothing was said or done. They failed; the reply is the error.
            self._take_back(before)
            raise AgentError(str(result.get("failure_reason") or "provider_error"), reply or why)
        elif not result.get("completed"):
            kind = "partial"
            reply = scrub(last.reply) if last is not None and reply == why else reply
        if last is not None and not last.finished:
            # Without an answer here, Hermes would merge the next prompt into this one.
            self._history.seal(reply or f"{INTERRUPTED}.")
            self._messages = self._history.load()
        else:
            self._messages = result["messages"] if kind == "completed" else self._history.load()
        return kind, reply, why if kind == "partial" else None

    def _take_back(self, before: str) -> None:
        """Remove what came after this mark from the history and from memory."""
        beyond = self._history.beyond(before)
        if beyond:
            self._history.rewind(beyond[0])
        self._messages = self._history.load()

    def _follow(self, turn: RunningTurn) -> None:
        """Report a new session id, if Hermes has changed it, as it may do in a compaction."""
        if self._agent.session_id != self._history.session_id:
            self._history.session_id = self._agent.session_id
            turn.session_moved(self._agent.session_id)

    def _usage(self) -> dict[str, int]:
        return {key: int(getattr(self._agent, f"session_{key}", 0) or 0) for key in _USAGE}

    # --- what Hermes calls in the middle of a turn ---

    def _callbacks(self) -> dict[str, Callable[..., Any]]:
        from tools.approval import register_gateway_notify  # noqa: PLC0415

        register_gateway_notify(APPROVAL_KEY, self._approve)
        return {
            "reasoning_callback": self._reasoning,
            "tool_start_callback": self._tool_started,
            "tool_complete_callback": self._tool_finished,
            "status_callback": self._status,
            "clarify_callback": self._clarify,
        }

    def _reasoning(self, delta: str | None) -> None:
        if self._turn is not None and delta:
            self._turn.reasoning(delta)

    def _status(self, _kind: str, text: str) -> None:
        if self._turn is not None:
            self._turn.status(scrub(str(text)))

    def _tool_started(self, call_id: str, name: str, arguments: Any) -> None:
        self._tools_started[call_id] = time.monotonic()
        if self._turn is not None:
            self._turn.tool_started(call_id, name, _preview(arguments))

    def _tool_finished(self, call_id: str, name: str, _arguments: Any, result: Any) -> None:
        now = time.monotonic()
        duration_s = now - self._tools_started.pop(call_id, now)
        if self._turn is not None:
            self._turn.tool_finished(
                call_id, name, ok=_succeeded(result), result=_preview(result), duration_s=duration_s
            )

    def _clarify(self, question: str, choices: Sequence[str] | None = None) -> str:
        answer = (
            self._turn.ask("clarify", question, list(choices or ()), _clarify_timeout_s())
            if self._turn is not None
            else None
        )
        return NOBODY_ANSWERED if answer is None else scrub(answer)

    def _approve(self, request: dict[str, Any]) -> None:
        """Ask the caller about a dangerous command. Hermes waits, in the thread that calls this, for ``_resolve``."""
        turn = self._turn

        def ask() -> None:
            choices = [choice for choice in APPROVALS if choice != "always" or request.get("allow_permanent", True)]
            text = f"{request.get('command', '')}\n\n{request.get('description', '')}".strip()
            answer = turn.ask("approval", text, choices, _approval_timeout_s()) if turn is not None else None
            _resolve(request, answer if answer in choices else "deny")

        threading.Thread(target=ask, name="hermes-pool-approval", daemon=True).start()


class Jobs:
    """The commands that Hermes' terminal tool runs in the background, reported so that the pool keeps their worker."""

    def __init__(self) -> None:
        self._open: dict[str, RunningTurn] = {}
        self._lock = threading.Lock()
        self._watched = False

    def report(self, turn: RunningTurn) -> None:
        """Report those that run at the end of this turn and were not reported before."""
        from tools.process_registry import process_registry  # noqa: PLC0415

        running = {
            each["session_id"]: each["command"]
            for each in process_registry.list_sessions()
            if each["status"] == "running"
        }
        with self._lock:
            new = running.keys() - self._open.keys()
            self._open |= dict.fromkeys(new, turn)
            for job_id in new:
                turn.background_started(job_id, scrub(running[job_id]))
            if self._open and not self._watched:
                self._watched = True
                threading.Thread(target=self._watch, name="hermes-pool-jobs", daemon=True).start()

    def forget(self) -> None:
        """Report nothing about them any more."""
        with self._lock:
            self._open.clear()

    def _watch(self) -> None:
        """Report the end of each one: the body of a thread that lives while there are any."""
        from tools.process_registry import process_registry  # noqa: PLC0415

        while True:
            time.sleep(JOBS_LOOK_S)
            # Held, so that none is reported as ended after ``forget``.
            with self._lock:
                for job_id, turn in list(self._open.items()):
                    state = process_registry.poll(job_id)
                    if state["status"] != "running":
                        del self._open[job_id]
                        turn.background_finished(job_id, _outcome(state))
                if not self._open:
                    self._watched = False
                    return


def _outcome(state: Mapping[str, Any]) -> str:
    """Return how a command ended, and the end of its output."""
    said = scrub(str(state.get("output_preview") or "").strip())
    ended = f"exit code {state.get('exit_code')}"
    return f"{ended}: {said[-(PREVIEW_CHARS - len(ended) - 2) :]}" if said else ended


def _resolve(request: dict[str, Any], answer: str) -> None:
    """Give Hermes the answer to exactly this request.

    Hermes' own ``resolve_gateway_approval`` answers the oldest request. If several wait at once, as with parallel
    delegated tasks, that could be another command than the one the caller saw. So this looks up the request by its
    object.
    """
    from tools import approval  # noqa: PLC0415

    with approval._lock:  # noqa: SLF001 - see above
        waiting = [entry for entry in approval._gateway_queues.get(APPROVAL_KEY, ()) if entry.data is request]  # noqa: SLF001
    for entry in waiting:
        entry.result = answer
        entry.event.set()


def _approval_timeout_s() -> float:
    """Return how long Hermes waits for an approval, in seconds (``approvals.timeout`` of its configuration)."""
    from hermes_cli.config import cfg_get, load_config_readonly  # noqa: PLC0415

    return float(cfg_get(load_config_readonly(), "approvals", "timeout", default=60))


def _clarify_timeout_s() -> float:
    from tools.clarify_gateway import get_clarify_timeout  # noqa: PLC0415

    return float(get_clarify_timeout())


def _preview(value: Any) -> str:
    text: str = scrub(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str))
    return text if len(text) <= PREVIEW_CHARS else text[: PREVIEW_CHARS - 1] + "\N{HORIZONTAL ELLIPSIS}"


def _succeeded(result: Any) -> bool:
    """Whether a tool succeeded. A failed one returns JSON with an error, or with an exit code that is not 0."""
    try:
        value = json.loads(result)
    except (TypeError, ValueError):
        return True
    return not (isinstance(value, dict) and (value.get("error") or value.get("exit_code")))


@contextlib.contextmanager
def _reported() -> Iterator[None]:
    """Print the traceback of an exception in this block, and continue."""
    try:
        yield
    except Exception:  # noqa: BLE001
        traceback.print_exc()
