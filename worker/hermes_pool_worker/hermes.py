"""Hermes Agent as the agent of a worker.

Only this module, ``hermes_setup`` and ``hermes_history`` import Hermes (0.19.0), and only inside functions, so that an
import of these modules costs nothing. They read the user's Hermes configuration, and write one thing to it, as Hermes
does: the commands that a person has allowed for good.
"""

import contextlib
import hashlib
import json
import logging
import os
import sqlite3
import ssl
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from hermes_pool_worker.agent import AgentError, Open, Opened, Outcome, RunningTurn
from hermes_pool_worker.hermes_failures import LastFailure
from hermes_pool_worker.hermes_history import (
    NOTHING_YET,
    History,
    Row,
    TurnNote,
    is_finished,
    last_words,
    may_have_acted,
    named_session,
    past_turns,
    reply_of,
    sealed,
    text_digest,
    text_of,
    unsaid,
)
from hermes_pool_worker.hermes_setup import (
    PLATFORM,
    HermesOptions,
    adopt_session,
    build_agent,
    files_read,
    import_hermes,
)
from hermes_pool_worker.wire import PastTurn, Said, scrub

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
        self._said: list[str] = []
        """The reply so far of the running turn, as it was streamed."""
        self._said_since_tool: list[str] = []
        """The same since the last tool: Hermes has not stored this yet."""
        self._safe_tools: frozenset[str] = frozenset()
        self._name: str | None = None
        """The conversation's name, until it is noted in Hermes' database beside its first turn."""
        self._failures = LastFailure()
        self._started: list[str] = []
        """The names of the tools that were started in the running turn."""
        self._asked = ""
        """What the user said in the running turn, as Hermes keeps it."""
        self._unwritten: list[dict[str, Any]] = []
        """The messages of turns that the history does not have."""
        self._behind = False
        """Whether the history could not be changed as it should: what this process wrote after ``_mark`` is to be
        replaced by ``_unwritten``. Until then only ``_messages`` is right."""
        self._jobs = Jobs()

    # --- the session ---

    def prepare(self, options: Mapping[str, Any]) -> Sequence[str]:
        """Build Hermes' agent before its session is known; return the files that this depends on."""
        checked = HermesOptions.of(options)
        if checked.cwd:
            os.chdir(checked.cwd)
        config = import_hermes(checked)
        from hermes_state import SessionDB  # noqa: PLC0415

        self._failures.watch()
        self._database = SessionDB()
        self._agent = build_agent(config, checked, None, self._database, self._callbacks())
        # Otherwise Hermes would mark the session as ended when the worker leaves. It only goes dormant.
        self._agent._end_session_on_close = False  # noqa: SLF001 - Hermes has no public switch for this
        return files_read()

    def open(self, request: Open) -> Opened:
        """Begin or resume a session in Hermes."""
        if self._agent is None:
            self.prepare(request.options)
        self._safe_tools = frozenset(request.safe_tools)
        self._name = _name_of(request)
        session_id, notice = self._find(request)
        if session_id:
            adopt_session(self._agent, session_id, self._database)
        self._history = History(self._database, self._agent.session_id)
        self._history.watch()
        # Constant while the worker lives: Hermes keeps the folder and the shell of the tools under this name.
        self._task_id = self._agent.session_id
        left = Left()
        if session_id:
            left = self._tidy(request)
        elif request.earlier:
            self._begin_with(request.earlier)
        self._messages, self._mark = self._history.load(), self._history.mark()
        return Opened(
            session_id=self._agent.session_id,
            resumed=bool(self._messages),
            committed=self._mark,
            recovered=left.recovered,
            notice=" ".join(filter(None, (notice, left.notice))) or None,
            kept=left.kept,
            acted=left.acted,
        )

    def _find(self, request: Open) -> tuple[str | None, str]:
        """Return the id of the session to resume, or ``None`` for a new one, and a notice about it or ``""``."""
        if request.session_id is None:
            named = named_session(self._database, self._name or "")
            session_id = None if named is None else self._database.resolve_resume_session_id(named)
            if session_id is None or self._database.get_session(session_id) is None:
                return None, ""
            return session_id, "The record of this conversation was lost; its session was found in Hermes' database."
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

    def _tidy(self, request: Open) -> "Left":
        """Deal with what the last worker left of its last turn; return what became of it."""
        history, notice = self._history, ""
        if not history.knows(request.committed):
            notice = "Hermes' history of this session ends before the last turn that is known to be complete."
        unfinished = request.unfinished
        note = history.noted(history.session_id, request.session_id or "")
        if note is None and unfinished is not None and request.committed is not None:  # it died before it could note
            note = TurnNote(unfinished.turn_id, request.committed, text_digest(unfinished.text))
        is_ours = note is not None and unfinished is not None and note.turn_id == unfinished.turn_id
        if note is None or (note.ended is not None and not is_ours):
            return Left(notice=notice)
        rows = history.beyond(note.began, note.digest)
        if note.ended is not None and (later := history.beyond(note.ended)):
            rows = rows[: -len(later)]  # another program has written them since
        if is_finished(rows) and not (is_ours and request.given_up and not request.keep):
            if is_ours and request.given_up:  # it was complete, or sealed already
                return Left(kept=True, acted=may_have_acted(rows, self._safe_tools)[:100], notice=notice)
            return Left(recovered=scrub(reply_of(rows)) if is_ours else None, notice=notice)
        acted = may_have_acted(rows, self._safe_tools)
        said = scrub(request.said) if is_ours else ""
        if rows and (acted or (said and request.given_up)) and (request.keep or not is_ours):
            why = request.why if is_ours and request.why else "the worker died"
            history.seal(rows, _ended(unsaid(rows, said), why, acted=bool(acted)))
            if not is_ours:
                notice = f"{notice} An unfinished turn is in the history: its tools may have acted.".strip()
            kept = True
        else:
            history.take_back(rows)
            kept = False
        history.note_ended(note, history.mark())
        return Left(kept=kept and is_ours, acted=acted[:100] if kept and is_ours else [], notice=notice)

    def _begin_with(self, earlier: Sequence[Said]) -> None:
        """Write what was said before this agent came to the conversation into the new session."""
        self._database.create_session(self._agent.session_id, PLATFORM, model=str(self._agent.model or ""))
        role, texts = "", list[str]()
        for said in [*earlier, None]:
            if said is not None and said.role == role:
                texts.append(scrub(said.text))
                continue
            if texts:
                self._history.write([{"role": role, "content": "\n\n".join(texts), "finish_reason": "stop"}])
            if said is not None:
                role, texts = said.role, [scrub(said.text)]
        if role == "user":
            self._history.seal([], "[This message was not answered.]")

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
        # A subagent runs in a thread that has no part of this context; there Hermes looks into the environment.
        os.environ["HERMES_SESSION_KEY"] = APPROVAL_KEY
        self._catch_up()
        agent, before, used = self._agent, self._mark, self._usage()
        note = TurnNote(turn.turn_id, before, text_digest(text))
        self._history.note_began(turn.turn_id, text, before)
        if self._name is not None:
            self._history.note_name(self._name)
            self._name = None
        self._said, self._said_since_tool, self._started, self._asked = [], [], [], scrub(text)
        self._failures.forget()
        if not self._behind:
            self._history.forget_written()
        # An interrupt that came too late for the previous turn would end this one at once.
        agent.clear_interrupt()
        self._turn = turn
        try:
            # Checked after _turn is set: a cancel either is seen here, or finds the turn running and interrupts it.
            if turn.cancelled.is_set():
                self._history.note_ended(note, before)
                return Outcome("", "interrupted", self._history.session_id, before, kept=False)
            result = agent.run_conversation(
                self._asked,
                conversation_history=self._messages,
                task_id=self._task_id,
                stream_callback=self._text,
            )
        except (Exception, SystemExit) as error:
            self._follow(turn)
            raise self._failed(note, "agent_error", f"{type(error).__name__}: {error}", used, {}) from error
        finally:
            self._turn = None
            with _reported():
                self._jobs.report(turn)
        self._follow(turn)
        return self._settle(result, note, turn, used)

    def interrupt(self) -> None:
        """End the running turn, if there is one."""
        if self._turn is not None:
            self._agent.interrupt()

    def steer(self, text: str) -> bool:
        """Pass a remark of the user to Hermes, which shows it to the model after the next tool."""
        return self._turn is not None and bool(self._agent.steer(scrub(text)))

    def turns(self, after: str | None, limit: int) -> list[PastTurn]:
        """Return the turns of the history after a mark."""
        return past_turns(self._history.rows(), after, limit)

    def flush(self) -> str:
        """Make the history what it should be, where that was not possible before; return the mark.

        Raises what the database raises.
        """
        if self._behind:
            self._history.take_back_own(self._mark)
            self._history.write(self._unwritten)
            mark, messages = self._history.mark(), self._history.load()
            self._behind, self._unwritten, self._mark, self._messages = False, [], mark, messages
        return self._mark

    def _catch_up(self) -> None:
        """Take in what another program has written to the session, and write what could not be written before."""
        with contextlib.suppress(sqlite3.Error):
            if self._behind:
                self.flush()
            elif (mark := self._history.mark()) != self._mark:
                self._messages, self._mark = self._history.load(), mark

    def _settle(self, result: Mapping[str, Any], note: TurnNote, turn: RunningTurn, used: Mapping[str, int]) -> Outcome:
        """Put the history in order after a turn, and return how it ended. Raise ``AgentError`` if it failed.

        The order of the checks matters: Hermes may call an interrupted turn completed, and a failed one partial.
        """
        reply, said = scrub(result.get("final_response") or ""), scrub("".join(self._said))
        why = scrub(str(result.get("error") or result.get("turn_exit_reason") or "Hermes gave no reason"))
        rows = self._own(note)
        acted = bool(may_have_acted(rows, ()) or self._started)
        if result.get("interrupted"):
            if turn.keep and (said or acted):
                answer = _ended(self._unwritten_words(rows, note, result), turn.why, acted=acted)
                notice = self._seal(rows, answer, note, result)
                return self._ended(note, used, Outcome(said, "interrupted", kept=notice is None, notice=notice), result)
            self._take_back(rows)
            return self._ended(note, used, Outcome(said, "interrupted", kept=False), result)
        if result.get("turn_exit_reason") == "empty_response_exhausted":
            empty = "the model answered with empty text several times"
            raise self._failed(note, "empty_response", empty, used, result)
        did_nothing = not (said or acted or reply_of(rows))
        if result.get("failed") or (not result.get("completed") and did_nothing):
            # Hermes calls some turns partial although nothing was said or done. They failed; the reply is the error.
            reason = str(result.get("failure_reason") or "provider_error")
            raise self._failed(note, reason, reply or why, used, result)
        if not result.get("completed"):
            notice = None
            if not is_finished(rows):
                # Without an answer here, Hermes would merge the next prompt into this turn.
                notice = self._seal(
                    rows, reply or _ended(self._unwritten_words(rows, note, result), why, acted=acted), note, result
                )
            else:
                self._reload()
            if reply == why and rows:
                reply = scrub(reply_of(rows)) or reply
            notices = " ".join(filter(None, (why, notice)))
            return self._ended(note, used, Outcome(reply, "partial", kept=notice is None, notice=notices), result)
        if not is_finished(rows):  # Hermes could not write it
            turn_messages = self._of_turn(result, note) or sealed([self._question()], reply)
            notice = self._remember(turn_messages, result["messages"])
            return self._ended(note, used, Outcome(reply, kept=notice is None, notice=notice), result)
        if self._history.shared:
            self._reload()
        else:
            self._messages = result["messages"]
        return self._ended(note, used, Outcome(reply), result)

    def _own(self, note: TurnNote) -> list[Row]:
        """Return the rows of the turn that is noted. What other programs have written is not among them."""
        if self._behind:
            return []
        try:
            return self._history.own(note)
        except sqlite3.Error:
            self._behind = True
            return []

    def _failed(
        self, note: TurnNote, reason: str, why: str, used: Mapping[str, int], result: Mapping[str, Any]
    ) -> AgentError:
        """Put the history in order after a failed turn, and return the error to raise.

        If a tool may have acted, the turn stays, so that the model knows. Otherwise it leaves no trace.
        """
        failure = self._failures.failure
        if failure is not None and reason != "empty_response":
            reason = failure.reason
        rows = self._own(note)
        kept = False
        if may_have_acted(rows, self._safe_tools) or not self._safe_tools.issuperset(self._started):
            words = self._unwritten_words(rows, note, result)
            answer = _ended(words, f"it failed: {reason}", acted=True)
            kept = self._seal(rows, answer, note, result) is None
        else:
            self._take_back(rows)
        self._note_ended(note)
        return AgentError(
            reason,
            why,
            retry_after_s=None if failure is None else failure.retry_after_s,
            kept=kept,
            said=scrub("".join(self._said)),
            usage=self._used(used),
            model=self._model(),
            committed=self._mark,
        )

    def _ended(self, note: TurnNote, used: Mapping[str, int], outcome: Outcome, result: Mapping[str, Any]) -> Outcome:
        """Note the end of a turn, and complete its outcome."""
        self._note_ended(note)
        steer = result.get("pending_steer")
        return msgspec.structs.replace(
            outcome,
            session_id=self._history.session_id,
            committed=self._mark,
            usage=self._used(used),
            model=str(result.get("model") or "") or self._model(),
            pending_steer=scrub(str(steer)) if steer else None,
        )

    def _note_ended(self, note: TurnNote) -> None:
        if not self._behind:
            with _reported():
                self._mark = self._history.mark()
        self._history.note_ended(note, self._mark)

    def _seal(self, rows: Sequence[Row], answer: str, note: TurnNote, result: Mapping[str, Any]) -> str | None:
        """End a turn that stays with this answer; return a notice if it is not in the history."""
        if rows:
            with contextlib.suppress(sqlite3.Error):
                self._history.seal(rows, answer)
                self._reload()
                return None
        turn = sealed(self._of_turn(result, note) or [self._question()], answer)
        return self._remember(turn, [*self._messages, *turn])

    def _remember(self, turn: Sequence[dict[str, Any]], messages: list[dict[str, Any]]) -> str | None:
        """Keep a turn that could not be written, and try once more; return a notice if only this process knows it."""
        self._unwritten += [dict(each) for each in turn]
        self._messages, self._behind = messages, True
        try:
            self.flush()
        except Exception as error:  # noqa: BLE001 - whatever it is, the reply is there
            return f"The history could not be written, so this turn may be forgotten later ({error})."
        return None

    def _take_back(self, rows: Sequence[Row]) -> None:
        """Remove rows from the history, and from memory. If that fails, it is tried again later."""
        if self._behind:
            return
        try:
            self._history.take_back(rows)
            self._reload()
        except sqlite3.Error:
            traceback.print_exc()
            self._behind = True

    def _reload(self) -> None:
        self._messages = self._history.load()

    def _of_turn(self, result: Mapping[str, Any], note: TurnNote) -> list[dict[str, Any]]:
        """Return the messages of a turn as Hermes has them in memory; none if it does not tell them."""
        messages = list(result.get("messages") or ())
        begin = len(self._messages)
        if begin < len(messages) and _is_asked(messages[begin], note):
            return messages[begin:]
        # A compaction, or a repair of the history, has moved it.
        begins = [at for at, each in enumerate(messages) if _is_asked(each, note)]
        return messages[begins[-1] :] if begins else []

    def _unwritten_words(self, rows: Sequence[Row], note: TurnNote, result: Mapping[str, Any]) -> str:
        """Return what was streamed since the last tool and Hermes has not written. It writes some of it, at times."""
        return unsaid(last_words(rows or self._of_turn(result, note)), scrub("".join(self._said_since_tool)))

    def _question(self) -> dict[str, Any]:
        return {"role": "user", "content": self._asked}

    def _used(self, before: Mapping[str, int]) -> dict[str, int]:
        return {name: count - before[name] for name, count in self._usage().items() if count > before[name]}

    def _model(self) -> str | None:
        return str(getattr(self._agent, "model", "") or "") or None

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

    def _text(self, delta: str | None) -> None:
        if delta and not self._said:
            delta = delta.lstrip("\n")  # Hermes puts an empty line after a tool, also where nothing was said before
        if self._turn is not None and delta:
            self._failures.forget()  # the model answers again
            self._said.append(delta)
            self._said_since_tool.append(delta)
            self._turn.text(delta)

    def _reasoning(self, delta: str | None) -> None:
        if self._turn is not None and delta:
            self._turn.reasoning(delta)

    def _status(self, _kind: str, text: str) -> None:
        if self._turn is not None:
            self._turn.status(scrub(str(text)))

    def _tool_started(self, call_id: str, name: str, arguments: Any) -> None:
        self._tools_started[call_id] = time.monotonic()
        self._said_since_tool = []
        self._failures.forget()
        self._started.append(name)
        if self._turn is not None:
            self._turn.tool_started(call_id, name, _preview(arguments))

    def _tool_finished(self, call_id: str, name: str, _arguments: Any, result: Any) -> None:
        now = time.monotonic()
        duration_s = now - self._tools_started.pop(call_id, now)
        self._failures.forget()  # that of a subagent
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


class Left(msgspec.Struct, frozen=True):
    """What became of the turn that the last worker had left unfinished."""

    recovered: str | None = None
    kept: bool = False
    acted: list[str] = []
    notice: str = ""


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


def _ended(said: str, why: str, *, acted: bool) -> str:
    """Return the answer that seals a turn that ended early: what was said, and what the model must know."""
    why = why or "it was cancelled"
    note = f"[This turn ended here: {why}." + (" The tools above may have acted.]" if acted else "]")
    return f"{said}\n\n{note}" if said else note


def _name_of(request: Open) -> str:
    """Return the name of a conversation, which is that of no other pool's: several may share one home of Hermes."""
    parts = json.dumps([request.data_dir, request.conversation_id, request.user_id])
    return hashlib.sha256(parts.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _is_asked(message: Mapping[str, Any], note: TurnNote) -> bool:
    return message.get("role") == "user" and text_digest(text_of(dict(message))) == note.digest


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
