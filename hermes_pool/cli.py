"""The command line ``hermes-pool``: look at the supervisors that run, stop a worker, talk from a terminal.

Settings come from the environment: ``HERMES_POOL_`` and the name of a field of ``PoolSettings`` in capitals. Lists of
folders are separated as in ``PATH``, mappings are JSON objects.

What is slow to import is imported where it is used: ``hermes-pool ps`` is typed often, and by the impatient.
"""

import asyncio
import dataclasses
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import typing
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self

import typer

from hermes_pool import control
from hermes_pool.breakers import BreakerState
from hermes_pool.errors import HermesPoolError, SettingsError
from hermes_pool.report import DeathReport
from hermes_pool.settings import PoolSettings
from hermes_pool.snapshot import PoolSnapshot, SessionSnapshot
from hermes_pool_worker import wire

if TYPE_CHECKING:
    from hermes_pool.manager import HermesSessionManager
    from hermes_pool.turn import Reply, Turn

VARIABLE_PREFIX: Final = "HERMES_POOL_"
STOP_TIMEOUT_S: Final = 60.0
"""How long ``stop`` waits; a worker is given its graces before it is killed."""
DRAIN_DEADLINE_S: Final = 60.0
"""How long ``drain`` lets turns go on, when nothing else is said."""
STORE_TIMEOUT_S: Final = 5.0
"""How long ``ps`` waits for the database."""

app = typer.Typer(
    help="Shows and steers the Hermes workers of the pools on this machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
StateDir = Annotated[
    Path | None,
    typer.Option("--state-dir", help="Folder of the pool's files; default: HERMES_POOL_STATE_DIR, or the user's own."),
]
Conversation = Annotated[str, typer.Argument(help="The conversation's id.")]
User = Annotated[str | None, typer.Option("--user", help="The user's id, for a session of one user.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version  # noqa: PLC0415

        typer.echo(f"hermes-pool {version('hermes-pool')}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[  # noqa: ARG001 - its callback does the work
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Show and steer the Hermes workers of the pools on this machine."""
    for stream in (sys.stdout, sys.stderr):
        # What a terminal or a locale cannot show is escaped; it must not end the command.
        if reconfigure := getattr(stream, "reconfigure", None):
            reconfigure(errors="backslashreplace")


@app.command()
def ps(
    state_dir: StateDir = None,
    as_json: AsJson = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Also show stored sessions that no supervisor knows at the moment.")
    ] = False,
) -> None:
    """Show the sessions, as the running supervisors see them, or as stored when none runs.

    Exit status 1 when a supervisor runs and does not answer. With --json: {"source": "supervisor" or "stored",
    "supervisors": [{"pid", "version", "started_at", "problem", "pool"}], "sessions": [...]}; a session has the fields
    of SessionSnapshot, a pool those of PoolSnapshot ("condition", "workers", "workers_max", "waiting", "starts", ...),
    times in seconds and memory in bytes, and null for what cannot be known.
    """
    with _errors_told():
        view = look(settings_from(os.environ, state_dir=state_dir), everything=everything)
        if not as_json:
            for supervisor in view.supervisors:
                if supervisor.pool is not None:  # not into the table, which is read by programs, too
                    typer.echo(f"supervisor {supervisor.pid} is {headline(supervisor.pool)}", err=True)
        if as_json:
            typer.echo(json.dumps(view.as_object(), indent=2))
        elif view.sessions:
            if view.source == "stored":
                typer.echo("no supervisor runs; these sessions are stored:", err=True)
            print_sessions(view.sessions)
        else:
            typer.echo("no sessions" if view.supervisors else "no supervisor runs, and nothing is stored yet", err=True)
        _problems_told(view.supervisors)


@app.command()
def stop(conversation: Conversation, user: User = None, state_dir: StateDir = None) -> None:
    """Stop the worker of a conversation. Its next message starts another one, in context."""
    with _errors_told():
        settings = settings_from(os.environ, state_dir=state_dir)
        view = look(settings, stored=False)
        if not view.supervisors:
            raise HermesPoolError(f"no supervisor runs in {settings.state_dir}")
        wanted = (conversation, user)
        if not any((row.conversation_id, row.user_id) == wanted and row.pid is not None for row in view.sessions):
            silent = [f"; supervisor {each.pid} {each.problem}" for each in view.supervisors if each.problem]
            raise HermesPoolError("no worker of it runs" + "".join(silent), conversation_id=conversation)
        request = control.Stop(conversation, user)
        for answer in control.query(settings.state_dir, request, STOP_TIMEOUT_S):
            if isinstance(answer.response, control.Failed):
                raise HermesPoolError(answer.response.text)
            if answer.response is None:
                raise HermesPoolError(f"supervisor {answer.supervisor_pid} {answer.problem}")
        typer.echo("stopped")


Deadline = Annotated[float, typer.Option("--deadline", min=0.0, help="How long turns that run may go on, in seconds.")]


@app.command()
def pause(deadline: Deadline = 0.0, state_dir: StateDir = None) -> None:
    """Begin no more turns: messages wait. Turns that run go on; --deadline says how long to wait for their end."""
    _steer(state_dir, control.Pause(deadline), deadline)


@app.command()
def resume(state_dir: StateDir = None) -> None:
    """Begin turns again, after pause or drain."""
    _steer(state_dir, control.Resume())


@app.command()
def drain(deadline: Deadline = DRAIN_DEADLINE_S, state_dir: StateDir = None) -> None:
    """Finish the messages that are there, refuse new ones, and end at the deadline what is left."""
    _steer(state_dir, control.Drain(deadline), deadline)


@app.command()
def resize(
    workers_max: Annotated[int, typer.Argument(min=1, help="Most workers at once.")], state_dir: StateDir = None
) -> None:
    """Change the number of workers that are allowed. Where there are more, idle ones go; no turn is ended."""
    _steer(state_dir, control.Resize(workers_max))


def _steer(state_dir: Path | None, request: control.Request, deadline_s: float = 0.0) -> None:
    """Have every supervisor of ``state_dir`` do something; print what each did. Exit status 1 if one did not."""
    with _errors_told():
        failed = False
        for answer in asked(settings_from(os.environ, state_dir=state_dir), request, deadline_s + STOP_TIMEOUT_S):
            match answer.response:
                case control.Done(text=text):
                    typer.echo(f"supervisor {answer.supervisor_pid}: {visible(text)}")
                case control.Failed(text=text):
                    _complain(f"supervisor {answer.supervisor_pid}: {text}")
                    failed = True
                case _:
                    _complain(f"supervisor {answer.supervisor_pid} {answer.problem or 'answers something else'}")
                    failed = True
        if failed:
            raise typer.Exit(1)


@app.command()
def deaths(
    report_id: Annotated[str | None, typer.Argument(help="Show this report in full.")] = None,
    state_dir: StateDir = None,
    as_json: AsJson = False,
) -> None:
    """Show how the latest workers died that nobody had asked to go, or all that is known of one death.

    The id of a report is in the error of its turn and in the log. Supervisors keep their latest reports in memory. With
    --json: {"supervisors": [{"pid", "problem", ...}], "deaths": [...]}, with the fields of DeathReport and
    "supervisor_pid". Exit status 1 when there is no such report, or a supervisor does not answer.
    """
    with _errors_told():
        supervisors, found = reported(settings_from(os.environ, state_dir=state_dir))
        if report_id is not None:
            found = [(pid, report) for pid, report in found if report.report_id == report_id]
        if as_json:
            reports = [{**dataclasses.asdict(report), "supervisor_pid": pid} for pid, report in found]
            told = {"supervisors": [dataclasses.asdict(each) for each in supervisors], "deaths": reports}
            typer.echo(json.dumps(told, indent=2))
        elif report_id is not None:
            for _, report in found:
                typer.echo("\n".join(report_lines(report)))
        elif found:
            print_deaths([report for _, report in found])
        elif all(each.problem is None for each in supervisors):
            typer.echo("no worker has died unasked", err=True)
        _problems_told(supervisors)
        if report_id is not None and not found:
            raise HermesPoolError(f"there is no report {report_id}, or none any more: see worker_died in the log")


@app.command()
def reset(
    conversation: Annotated[
        str | None, typer.Argument(help="The conversation's id; without it, the starts of the pool.")
    ] = None,
    user: User = None,
    state_dir: StateDir = None,
) -> None:
    """Let in at once what is refused for a while, because starts have failed or a conversation's workers have died.

    It is for what the pool cannot see was mended; all else it tries again by itself. For a conversation its quarantined
    messages are released, too.
    """
    _steer(state_dir, control.Reset(conversation, user))


@app.command()
def release(
    conversation: Conversation,
    fingerprint: Annotated[str, typer.Argument(help="The message's, from its error or from ps --json.")],
    user: User = None,
    state_dir: StateDir = None,
) -> None:
    """Let a message in again that is quarantined since it has ended too many workers."""
    with _errors_told():
        answers = asked(
            settings_from(os.environ, state_dir=state_dir), control.Release(conversation, fingerprint, user)
        )
        if not any(isinstance(answer.response, control.Done) for answer in answers):  # only one of them can know it
            told = [
                answer.response.text
                if isinstance(answer.response, control.Failed)
                else f"supervisor {answer.supervisor_pid} {answer.problem or 'answers something else'}"
                for answer in answers
            ]
            raise HermesPoolError("; ".join(dict.fromkeys(told)), conversation_id=conversation)
        typer.echo("released")


@app.command()
def chat(
    conversation: Annotated[str, typer.Argument(help="The conversation's id.")] = "terminal",
    agent: Annotated[
        str | None, typer.Option("--agent", help="Who answers: hermes, echo, or package.module:factory.")
    ] = None,
    scripted: Annotated[
        bool, typer.Option("--scripted", help="The real Hermes with a scripted model: no key, no network, no memory.")
    ] = False,
    state_dir: StateDir = None,
) -> None:
    """Talk to a worker from the terminal. Ctrl-C stops an answer, Ctrl-D leaves.

    When the input is no terminal, each of its lines is a message; the exit status is 1 if one of them failed.
    """
    with _errors_told():
        settings = settings_from(os.environ, state_dir=state_dir, agent=agent)
        raise typer.Exit(_chat(settings, conversation, scripted=scripted))


# --- settings and errors ----------------------------------------------------------------------------------------------


def settings_from(environment: Mapping[str, str], **given: Any) -> PoolSettings:
    """Return the settings that ``environment`` names; what is ``given`` and not ``None`` goes first.

    An empty variable counts as unset. ``SettingsError`` names the variable that cannot be read.
    """
    values: dict[str, Any] = {}
    for name, kind in typing.get_type_hints(PoolSettings).items():
        variable = VARIABLE_PREFIX + name.upper()
        if given.get(name) is not None:
            values[name] = given[name]
        elif text := environment.get(variable):
            try:
                values[name] = _converted(kind, text)
                PoolSettings(**{name: values[name]})
            except ValueError as error:  # SettingsError is one, too
                raise SettingsError(f"the environment variable {variable} is {text!r}: {error}") from None
    return PoolSettings(**values)


def _converted(kind: Any, text: str) -> Any:
    if kind in (int, float):
        return kind(text)
    origin = typing.get_origin(kind)
    if origin is tuple:
        return tuple(part for part in text.split(os.pathsep) if part)
    if origin is Mapping:
        value = json.loads(text)
        if not isinstance(value, dict):
            raise ValueError("not a JSON object")
        return value
    return Path(text) if Path in (kind, *typing.get_args(kind)) else text


@contextmanager
def _errors_told() -> Iterator[None]:
    """Turn an error of ours into its text and exit status 1."""
    try:
        yield
    except HermesPoolError as error:
        _complain(str(error))
        raise typer.Exit(1) from None


def _complain(text: str) -> None:
    typer.echo(f"hermes-pool: {visible(text, keep=chr(10))}", err=True)


def _problems_told(supervisors: Sequence["Supervisor"]) -> None:
    """Say who has not answered; exit status 1 where that is anybody."""
    problems = [each for each in supervisors if each.problem is not None]
    for supervisor in problems:
        _complain(f"supervisor {supervisor.pid} {supervisor.problem}")
    if problems:
        raise typer.Exit(1)


# --- what there is to see ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Supervisor:
    """One running supervisor; ``problem`` says in words why it has not told more."""

    pid: int
    version: str | None = None
    started_at: str | None = None
    problem: str | None = None
    pool: PoolSnapshot | None = None


@dataclasses.dataclass(frozen=True)
class View:
    """All that ``ps`` shows. ``source`` is ``stored`` when no supervisor runs."""

    source: Literal["supervisor", "stored"]
    supervisors: list[Supervisor]
    sessions: list[SessionSnapshot]

    def as_object(self) -> dict[str, Any]:
        """Return it in built-in types."""
        return dataclasses.asdict(self)


def look(settings: PoolSettings, *, everything: bool = False, stored: bool = True) -> View:
    """Ask all supervisors of ``state_dir``; where none runs, or for ``everything``, read the store as well."""
    supervisors, sessions = [], []
    for answer in control.query(settings.state_dir, control.Ps()):
        reply = answer.response
        if isinstance(reply, control.PsReply):
            supervisors.append(Supervisor(answer.supervisor_pid, reply.version, reply.started_at, pool=reply.pool))
            sessions += reply.sessions
        else:
            problem = reply.text if isinstance(reply, control.Failed) else answer.problem or "answers something else"
            supervisors.append(Supervisor(answer.supervisor_pid, problem=problem))
    if stored and (everything or not supervisors):
        known = {(row.conversation_id, row.user_id) for row in sessions}
        sessions += [row for row in stored_sessions(settings) if (row.conversation_id, row.user_id) not in known]
    return View("supervisor" if supervisors else "stored", supervisors, sessions)


def asked(settings: PoolSettings, request: control.Request, timeout_s: float = STOP_TIMEOUT_S) -> list[control.Answer]:
    """Ask all supervisors of ``state_dir``; ``HermesPoolError`` where none runs."""
    answers = control.query(settings.state_dir, request, timeout_s)
    if not answers:
        raise HermesPoolError(f"no supervisor runs in {settings.state_dir}")
    return answers


def reported(settings: PoolSettings) -> tuple[list[Supervisor], list[tuple[int, DeathReport]]]:
    """Return all supervisors, and the deaths that they know with the supervisor's pid, the latest first."""
    supervisors, found = [], []
    for answer in asked(settings, control.Deaths(), control.QUERY_TIMEOUT_S):
        reply = answer.response
        if isinstance(reply, control.DeathsReply):
            supervisors.append(Supervisor(answer.supervisor_pid))
            found += [(answer.supervisor_pid, report) for report in reply.reports]
        else:
            problem = reply.text if isinstance(reply, control.Failed) else answer.problem or "answers something else"
            supervisors.append(Supervisor(answer.supervisor_pid, problem=problem))
    return supervisors, sorted(found, key=lambda each: each[1].at, reverse=True)


def stored_sessions(settings: PoolSettings) -> list[SessionSnapshot]:
    """Return what the store holds; nothing, and nothing is made, where there is no database yet."""
    url = settings.store_url
    if url.startswith("sqlite") and not Path(url.partition("///")[2].partition("?")[0]).exists():
        return []
    from hermes_pool import health, store  # noqa: PLC0415

    async def read() -> list[tuple[Any, store.SessionRecord]]:
        database = store.ConversationStore.from_url(url, min(settings.database_timeout_s, STORE_TIMEOUT_S))
        try:
            return list(await database.records())
        finally:
            await database.close()

    rows = []
    for key, record in asyncio.run(read()):
        here = record.host == socket.gethostname()
        seen = None
        if here and record.pid is not None and record.create_time is not None:
            seen = health.look(record.pid, record.create_time)
        lives = seen is not None and seen.health in ("alive", "frozen")
        rows.append(
            SessionSnapshot(
                conversation_id=key.conversation_id,
                user_id=key.user_id,
                session_id=record.session_id,
                state=record.status,
                health="none" if seen is None else seen.health,
                agent=record.agent or "",
                # Of a process that is gone, the pid is nobody's, or somebody else's.
                pid=record.pid if lives else None,
                create_time=record.create_time if lives else None,
                incarnation=record.incarnation,
                idle_s=_since(record.last_used_at),
                rss_bytes=None if seen is None else seen.rss_bytes,
                cpu_s=None if seen is None else seen.cpu_s,
                turns=record.turns,
                restart_count=record.restart_count,
                last_used_at=record.last_used_at,
                last_error=record.last_error,
                host=record.host,
            )
        )
    return rows


def _since(moment: str | None) -> float | None:
    try:
        then = datetime.fromisoformat(moment or "")
    except ValueError:
        return None
    return max(0.0, (datetime.now(UTC) - (then if then.tzinfo else then.replace(tzinfo=UTC))).total_seconds())


# --- the table --------------------------------------------------------------------------------------------------------

_HEADINGS: Final = (
    "conversation", "session", "pid", "state", "up", "idle", "mem", "cpu", "turns", "rst", "last error",
)  # fmt: skip
_RIGHT: Final = frozenset({"pid", "up", "idle", "mem", "cpu", "turns", "rst"})
_COLOURS: Final = {"idle": "green", "healthy": "green", "busy": "yellow", "starting": "yellow", "failed": "red"}
_ID_CELLS_MIN: Final = 6


def headline(pool: PoolSnapshot) -> str:
    """Return the pool in one line of words."""
    parts = [f"{visible(pool.condition)}: {pool.workers} of {pool.workers_max} workers"]
    if pool.waiting:
        wait = "" if pool.expected_wait_s is None else f" (about {duration(pool.expected_wait_s)} for a further one)"
        parts.append(f"{pool.waiting} waiting for one{wait}")
    if pool.held:
        parts.append(f"{pool.held} held until it is resumed")
    told = ", ".join(parts)
    starts = pool.starts
    if starts is None or starts.state == BreakerState.CLOSED:
        return told
    how = "have failed and are tried again"
    if starts.state == BreakerState.OPEN and starts.retry_after_s is not None:
        how = f"are refused for {duration(starts.retry_after_s)}"
    return f"{told}; starts {how}: {visible(starts.last_error or 'it is not known why')}"


def print_sessions(sessions: Sequence[SessionSnapshot]) -> None:
    """Print the table: fitted to a terminal, in full and without colours anywhere else."""
    rows = [_cells(row) for row in sessions]
    if sys.stdout.isatty():
        from rich.console import Console  # noqa: PLC0415

        _print_fitted(Console(file=sys.stdout, highlight=False), rows)
    else:
        typer.echo(plain_table(rows))


def _cells(row: SessionSnapshot) -> list[str]:
    user = "" if row.user_id is None else f" [{row.user_id}]"
    state = row.state if row.health in ("none", "alive") else f"{row.state},{row.health}"
    if row.retry_after_s is not None:  # in one word, as all cells but the last are
        state += f",backoff={duration(row.retry_after_s)}"
    troubles = [f"quarantined: {', '.join(row.quarantined)}"] if row.quarantined else []
    if row.last_error:
        troubles.append(row.last_error)
    return [
        visible(row.conversation_id + user),
        visible(row.session_id or "-"),
        "-" if row.pid is None else str(row.pid),
        visible(state),
        duration(row.uptime_s),
        duration(row.idle_s),
        size(row.rss_bytes),
        duration(row.cpu_s),
        str(row.turns),
        str(row.restart_count),
        visible("; ".join(troubles) or "-"),
    ]


def plain_table(rows: Sequence[Sequence[str]], headings: Sequence[str] = _HEADINGS) -> str:
    """Return all of it, aligned, with two spaces between columns."""
    table = [[heading.upper() for heading in headings], *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(headings))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if heading in _RIGHT else cell.ljust(width)
            for cell, width, heading in zip(row, widths, headings, strict=True)
        ).rstrip()
        for row in table
    )


def _print_fitted(console: Any, rows: Sequence[Sequence[str]]) -> None:
    """Print a table as wide as the terminal: ids are shortened in their middle, errors follow on lines of their own."""
    from rich.cells import cell_len  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    headings = _HEADINGS[:-1]
    wanted = [max(cell_len(row[column]) for row in [headings, *rows]) for column in range(len(headings))]
    left = console.width - sum(wanted[2:]) - (len(headings) - 1)
    session = max(min(wanted[1], max(left // 2, left - wanted[0])), _ID_CELLS_MIN)
    conversation = max(min(wanted[0], left - session), _ID_CELLS_MIN)
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading, justify="right" if heading in _RIGHT else "left", no_wrap=True)
    for row in rows:
        ids = [Text(shortened(row[0], conversation)), Text(shortened(row[1], session))]
        state = Text(row[3], style=_COLOURS.get(row[3], "" if "," not in row[3] else "red"))
        table.add_row(*ids, Text(row[2]), state, *(Text(cell) for cell in row[4:-1]))
    console.print(table)
    for row in rows:
        if row[-1] != "-":
            console.print(Text(shortened(row[0], 40), style="bold").append(f": {row[-1]}", style="not bold red"))


# --- deaths -----------------------------------------------------------------------------------------------------------

_DEATH_HEADINGS: Final = ("when", "report", "conversation", "turn", "exit")


def print_deaths(reports: Sequence[DeathReport]) -> None:
    """Print a table, a line for each: fitted to a terminal, in full anywhere else."""
    rows = [_death_cells(report) for report in reports]
    if sys.stdout.isatty():
        from rich.console import Console  # noqa: PLC0415

        _print_deaths_fitted(Console(file=sys.stdout, highlight=False), rows)
    else:
        typer.echo(plain_table(rows, _DEATH_HEADINGS))


def _death_cells(report: DeathReport) -> list[str]:
    return [
        visible(f"{report.at[:19]}Z"),
        visible(report.report_id),
        visible(report.conversation_id),
        visible(report.turn_id or "-"),
        visible(report.exit),
    ]


def _print_deaths_fitted(console: Any, rows: Sequence[Sequence[str]]) -> None:
    """Print a table as wide as the terminal: ids are shortened, and how it ended goes on in further lines."""
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for heading in _DEATH_HEADINGS[:-1]:
        table.add_column(heading, no_wrap=True)
    table.add_column(_DEATH_HEADINGS[-1], overflow="fold", ratio=1)
    for at, report_id, conversation, turn, ended in rows:
        table.add_row(at, report_id, Text(shortened(conversation, 16)), Text(shortened(turn, 12)), Text(ended))
    console.print(table)


def report_lines(report: DeathReport) -> list[str]:
    """Return all that a report says, for people."""
    turn = "none ran"
    if report.turn_id is not None:
        said = "nothing was heard" if report.last_event is None else f"the last event was {report.last_event}"
        silent = "" if report.silent_s is None else f", {report.silent_s:.1f} s before"
        turn = f"{report.turn_id}, attempt {report.attempt}; {said}{silent}"
    pid = "no process" if report.pid is None else f"pid {report.pid}"
    facts = {
        "report": report.report_id,
        "conversation": report.conversation_id,
        "when": report.at,
        "worker": f"{pid}, number {report.incarnation} of its session, ran for {report.uptime_s:.1f} s",
        "exit": report.exit,
        "turn": turn,
        "open tools": ", ".join(report.tools_open) or "none",
        "verdict": report.verdict or "not judged",
    }
    lines = [f"{name + ':':14}{visible(value)}" for name, value in facts.items()]
    curve = [f"{before_s:8.1f} s before: {size(count)}" for before_s, count in report.memory]
    for name, more in (
        ("memory", curve),
        ("stacks", report.stacks),
        ("last lines on stderr", report.stderr_tail),
    ):
        lines += [f"{name}:", *(f"    {visible(line)}" for line in more)] if more else [f"{name}: none"]
    return lines


# --- words and numbers ------------------------------------------------------------------------------------------------


def visible(text: str, keep: str = "") -> str:
    """Return ``text`` with escapes for all that does not print (control characters, bidi marks, lone surrogates)."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode() for char in text
    )


def shortened(text: str, cells: int) -> str:
    """Return ``text`` in at most ``cells`` columns of a terminal, an ellipsis in place of its middle."""
    from rich.cells import cell_len, chop_cells, set_cell_size  # noqa: PLC0415

    if cell_len(text) <= cells:
        return text
    head = set_cell_size(text, cells // 2).rstrip(" ")
    tail = chop_cells(text[::-1], max(1, cells - cell_len(head) - 1))[0][::-1]
    return f"{head}\N{HORIZONTAL ELLIPSIS}{tail}"


def duration(seconds: float | None) -> str:
    """Return a time in at most six characters: ``45s``, ``12m``, ``3h12m``, ``2d4h``; ``-`` for ``None``."""
    if seconds is None:
        return "-"
    if seconds < 100:
        return f"{max(0, int(seconds))}s"
    minutes = int(seconds) // 60
    if minutes < 100:
        return f"{minutes}m"
    hours = minutes // 60
    if hours < 48:
        return f"{hours}h{minutes % 60:02}m"
    return f"{hours // 24}d{hours % 24}h" if hours < 2400 else f"{hours // 24}d"


def size(count: int | None) -> str:
    """Return a number of bytes in at most five characters, in powers of 1024; ``-`` for ``None``."""
    if count is None:
        return "-"
    amount = float(count)
    for unit in "BKMGT":
        if amount < 1000 or unit == "T":
            break
        amount /= 1024
    return f"{amount:.1f}{unit}" if amount < 10 and unit not in "BK" else f"{amount:.0f}{unit}"


# --- chat -------------------------------------------------------------------------------------------------------------

_LINES_WAITING_MAX: Final = 100
_STOP_TOLD_AFTER_S: Final = 0.5
_INTERRUPTED: Final = 130
"""Exit status of a command that was ended by Ctrl-C."""


def _chat(settings: PoolSettings, conversation: str, *, scripted: bool) -> int:
    """Talk until the input ends; return the exit status."""
    with ExitStack() as stack:
        told = f"conversation {conversation!r}, agent {settings.agent}"
        if scripted:
            from hermes_pool.scripted_model import ScriptedModel, write_hermes_home  # noqa: PLC0415

            home = Path(
                stack.enter_context(tempfile.TemporaryDirectory(prefix="hermes-pool-", ignore_cleanup_errors=True))
            )
            model = stack.enter_context(ScriptedModel())
            # Its sessions live in a folder that is removed at the end: they must not be remembered beyond it.
            settings = dataclasses.replace(
                settings,
                agent="hermes",
                hermes_home=write_hermes_home(home / "hermes", model.url),
                database_url=f"sqlite:///{home / 'hermes-pool.db'}",
            )
            told = (
                f"conversation {conversation!r}, the real Hermes with a SCRIPTED model: no language model answers here"
            )
        try:
            return asyncio.run(_talk(settings, conversation, told))
        except KeyboardInterrupt:  # before the terminal was ours, or after
            return _INTERRUPTED


async def _talk(settings: PoolSettings, conversation: str, told: str) -> int:
    from hermes_pool.manager import HermesSessionManager  # noqa: PLC0415

    status = 0
    async with _Terminal() as terminal:
        terminal.note(told + ("; Ctrl-C stops an answer, Ctrl-D leaves" if terminal.interactive else ""))
        async with HermesSessionManager(settings) as sessions:
            while (text := await terminal.message()) is not None:
                end = await _Exchange(sessions, conversation, text, terminal).run()
                if end == "left":
                    return _INTERRUPTED
                if end == "failed" and not terminal.interactive:
                    status = 1
    return status


class _Terminal:
    """Standard input, output and the interrupt key of a chat.

    A thread reads the input, since a loop can wait neither for a file nor, on some systems, for a terminal. It reads
    the descriptor itself: a thread that sits in ``sys.stdin`` when the interpreter ends would keep it from ending.
    """

    def __init__(self) -> None:
        self.interactive = sys.stdin.isatty()
        self._shows = sys.stdout.isatty()
        self._lines: asyncio.Queue[str | None] = asyncio.Queue()
        self._room = threading.Semaphore(_LINES_WAITING_MAX)
        self._interrupted = asyncio.Event()
        self._leaving = False
        self._ended = False
        self._mid_line = False
        self._handlers: dict[int, Any] = {}
        from rich.console import Console  # noqa: PLC0415

        self._console = Console(file=sys.stdout, highlight=False, markup=False, emoji=False)

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            self._handlers[number] = signal.signal(number, self._signalled)
        threading.Thread(target=self._read, name="hermes-pool-input", daemon=True).start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._start_line()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    # --- input ---

    def _signalled(self, number: int, _frame: FrameType | None) -> None:
        self._leaving = self._leaving or number == signal.SIGTERM
        self._loop.call_soon_threadsafe(self._interrupted.set)

    def _read(self) -> None:
        waiting = b""
        with suppress(OSError, RuntimeError):  # the input is closed; the loop is
            while data := os.read(0, 65536):
                *lines, waiting = (waiting + data).split(b"\n")
                for line in lines:
                    self._hand_over(line)
            if waiting:
                self._hand_over(waiting)
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._lines.put_nowait, None)

    def _hand_over(self, line: bytes) -> None:
        self._room.acquire()  # released when the line is taken, which may be later and elsewhere
        self._loop.call_soon_threadsafe(self._lines.put_nowait, line.decode("utf-8", "replace").rstrip("\r"))

    async def line(self) -> str | None:
        """Return the next line, ``None`` at the end of the input, again and again."""
        if self._ended:
            return None
        line = await self._lines.get()
        if line is None:
            self._ended = True
        else:
            self._room.release()
        return line

    async def message(self) -> str | None:
        """Ask for the next message; ``None`` when the person leaves."""
        while not self._leaving:
            self._interrupted.clear()
            if self.interactive:
                self._start_line()
                self._write("> ", "bold")
            reading = asyncio.ensure_future(self.line())
            if not await self.unless_interrupted(reading):
                reading.cancel()
                return None
            self._mid_line = self.interactive and reading.result() is None
            text = reading.result()
            if text is None or text.strip():
                return text
        return None

    async def unless_interrupted(self, work: Awaitable[Any]) -> bool:
        """Wait for ``work`` or the interrupt key; say whether ``work`` is done. It is not cancelled."""
        task = asyncio.ensure_future(work)
        key = asyncio.ensure_future(self._interrupted.wait())
        try:
            await asyncio.wait({task, key}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            key.cancel()
        self._interrupted.clear()
        return task.done()

    @property
    def leaving(self) -> bool:
        """Whether the process has been asked to end."""
        return self._leaving

    # --- output ---

    def say(self, text: str, style: str = "") -> None:
        """Print a piece of the answer as it comes; only a terminal gets it."""
        if self._shows:
            self._write(visible(text.replace("\r\n", "\n"), keep="\n\t"), style)

    def say_whole(self, text: str) -> None:
        """Print an answer for a program: byte for byte, once it is complete."""
        if not self._shows:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()

    def note(self, text: str) -> None:
        """Print a line that is no part of an answer."""
        line = visible(text, keep="\n")
        if self._shows:
            self._start_line()
            self._write(line + "\n", "dim")
        else:
            sys.stderr.write(line + "\n")
            sys.stderr.flush()

    def complain(self, error: HermesPoolError) -> None:
        """Print an error."""
        self._start_line()
        _complain(str(error))

    def ask(self, text: str) -> None:
        """Print a question, and leave the cursor behind it."""
        self._start_line()
        self._write(visible(text, keep="\n"), "yellow")

    def _start_line(self) -> None:
        if self._mid_line:
            self._write("\n")

    def _write(self, text: str, style: str = "") -> None:
        if not text:
            return
        if self._shows:
            # Not print(): that lays each piece out as a paragraph of its own.
            self._console.out(text, style=style or None, end="", highlight=False)
            sys.stdout.flush()
        elif self.interactive:  # a prompt, while the answers go elsewhere
            sys.stderr.write(text)
            sys.stderr.flush()
        self._mid_line = not text.endswith("\n")


class _Exchange:
    """One message and all that is shown of its answer."""

    def __init__(self, sessions: "HermesSessionManager", conversation: str, text: str, terminal: _Terminal) -> None:
        self._sessions = sessions
        self._conversation = conversation
        self._text = text
        self._terminal = terminal
        self._turn: Turn | None = None
        """The turn, once it has been handed to a worker."""
        self._attempt = 1
        self._shown = ""
        self._asking: set[asyncio.Task[None]] = set()
        self._one_question = asyncio.Lock()

    async def run(self) -> Literal["answered", "stopped", "failed", "left"]:
        """Show the answer; say how it ended. The interrupt key stops it, and once more leaves."""
        work = asyncio.ensure_future(self._follow())
        stopped, left = False, False
        try:
            if not await self._terminal.unless_interrupted(work):
                stopped = True
                self._hush()
                stopping = asyncio.ensure_future(self._turn.cancel()) if self._turn is not None else None
                if stopping is None:
                    work.cancel()
                if not (await asyncio.wait({work}, timeout=_STOP_TOLD_AFTER_S))[0]:
                    self._terminal.note("stopping; Ctrl-C again leaves")
                left = self._terminal.leaving or not await self._terminal.unless_interrupted(work)
                if stopping is not None:
                    stopping.cancel()
        finally:
            self._hush()
            work.cancel()
            await asyncio.wait({work})
        end = self._ended(work, stopped=stopped)
        if stopped:
            self._terminal.note("stopped")
        return "left" if left else end

    def _ended(self, work: "asyncio.Task[Reply]", *, stopped: bool) -> Literal["answered", "stopped", "failed"]:
        try:
            reply = work.result()
        except asyncio.CancelledError:
            return "stopped"
        except HermesPoolError as error:
            if stopped:
                return "stopped"
            self._terminal.complain(error)
            return "failed"
        if not self._shown.endswith(reply.text):
            # Not all of it came in pieces.
            begun = reply.text.startswith(self._shown)
            self._terminal.say(reply.text[len(self._shown) :] if begun else "\n" + reply.text)
        self._terminal.say("" if reply.text.endswith("\n") else "\n")
        self._terminal.say_whole(reply.text)
        if reply.notice:
            self._terminal.note(f"[{reply.notice}]")
        return "stopped" if stopped else "answered"

    async def _follow(self) -> "Reply":
        async with self._sessions.turn(self._conversation, self._text) as turn:
            self._turn = turn
            async for event in turn:
                self._show(turn, event)
            return await turn.reply()

    def _show(self, turn: "Turn", event: wire.Event) -> None:
        terminal = self._terminal
        if event.attempt != self._attempt:
            self._attempt, self._shown = event.attempt, ""
            self._hush()
            terminal.note("[the worker died and another one has taken over; the answer begins anew]")
        match event:
            case wire.TextDelta(text=text):
                self._shown += text
                terminal.say(text)
            case wire.ReasoningDelta(text=text):
                terminal.say(text, "dim italic")
            case wire.ToolStarted(name=name, arguments=arguments):
                terminal.note(f"[{name} {_one_line(arguments)}]")
            case wire.ToolFinished(name=name, ok=False, result=result):
                terminal.note(f"[{name} failed: {_one_line(result)}]")
            case wire.Status(text=text):
                terminal.note(f"[{_one_line(text)}]")
            case wire.Question():
                asking = asyncio.ensure_future(self._ask(turn, event))
                self._asking.add(asking)
                asking.add_done_callback(self._asking.discard)

    def _hush(self) -> None:
        """Ask no more: the turn is over, or its worker is another one."""
        for asking in self._asking:
            asking.cancel()

    async def _ask(self, turn: "Turn", question: wire.Question) -> None:
        async with self._one_question:
            choices = question.choices
            if not self._terminal.interactive:
                # The next line of the input is a message, and must not become somebody's consent.
                self._terminal.note(f"[asked, and nobody is here to answer: {_one_line(question.text)}]")
                refusal = "deny" if question.kind == "approval" else "Nobody is here to answer."
                await turn.answer(question.question_id, refusal)
                return
            what = "may this run?\n  " if question.kind == "approval" else ""
            listed = "".join(f"\n  {number}) {choice}" for number, choice in enumerate(choices, 1))
            while True:
                self._terminal.ask(f"{what}{question.text}{listed}\n? ")
                line = await self._terminal.line()
                if line is None:
                    answer: str | None = "deny" if question.kind == "approval" else ""
                else:
                    answer = _chosen(line.strip(), choices, free=question.kind == "clarify")
                if answer is not None:
                    await turn.answer(question.question_id, answer)
                    return


def _chosen(line: str, choices: Sequence[str], *, free: bool) -> str | None:
    """Return the choice that a line names by number or word; ``None`` for one that names none and is not ``free``."""
    if line.isdecimal() and 0 < int(line) <= len(choices):
        return choices[int(line) - 1]
    for choice in choices:
        if line.casefold() == choice.casefold():
            return choice
    return line if free and line else None


def _one_line(text: str, chars: int = 200) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= chars else f"{flat[: chars - 3]}..."
