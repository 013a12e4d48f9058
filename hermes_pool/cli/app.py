"""The command line ``hermes-pool``: look at the supervisors that run, stop a worker, talk from a terminal.

Settings come from the environment, as ``PoolSettings.from_env`` reads it.

What is slow to import is imported where it is used: ``hermes-pool ps`` is typed often, and by the impatient.
"""

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from hermes_pool.cli.render import complain, headline, print_deaths, print_sessions, report_lines, visible
from hermes_pool.cli.view import STOP_TIMEOUT_S, Supervisor, asked, look, reported
from hermes_pool.control import client, messages
from hermes_pool.errors import HermesPoolError
from hermes_pool.settings import PoolSettings

DRAIN_DEADLINE_S: Final = 60.0
"""How long ``drain`` lets turns go on, when nothing else is said."""

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
        view = look(_settings(state_dir), everything=everything)
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
        settings = _settings(state_dir)
        view = look(settings, stored=False)
        if not view.supervisors:
            raise HermesPoolError(f"no supervisor runs in {settings.state_dir}")
        wanted = (conversation, user)
        if not any((row.conversation_id, row.user_id) == wanted and row.pid is not None for row in view.sessions):
            silent = [f"; supervisor {each.pid} {each.problem}" for each in view.supervisors if each.problem]
            raise HermesPoolError("no worker of it runs" + "".join(silent), conversation_id=conversation)
        request = messages.Stop(conversation, user)
        for answer in client.query(settings.state_dir, request, STOP_TIMEOUT_S):
            if isinstance(answer.response, messages.Failed):
                raise HermesPoolError(answer.response.text)
            if answer.response is None:
                raise HermesPoolError(f"supervisor {answer.supervisor_pid} {answer.problem}")
        typer.echo("stopped")


Deadline = Annotated[float, typer.Option("--deadline", min=0.0, help="How long turns that run may go on, in seconds.")]


@app.command()
def pause(deadline: Deadline = 0.0, state_dir: StateDir = None) -> None:
    """Begin no more turns: messages wait. Turns that run go on; --deadline says how long to wait for their end."""
    _steer(state_dir, messages.Pause(deadline), deadline)


@app.command()
def resume(state_dir: StateDir = None) -> None:
    """Begin turns again, after pause or drain."""
    _steer(state_dir, messages.Resume())


@app.command()
def drain(deadline: Deadline = DRAIN_DEADLINE_S, state_dir: StateDir = None) -> None:
    """Finish the messages that are there, refuse new ones, and end at the deadline what is left."""
    _steer(state_dir, messages.Drain(deadline), deadline)


@app.command()
def resize(
    workers_max: Annotated[int, typer.Argument(min=1, help="Most workers at once.")], state_dir: StateDir = None
) -> None:
    """Change the number of workers that are allowed. Where there are more, idle ones go; no turn is ended."""
    _steer(state_dir, messages.Resize(workers_max))


def _steer(state_dir: Path | None, request: messages.Request, deadline_s: float = 0.0) -> None:
    """Have every supervisor of ``state_dir`` do something; print what each did. Exit status 1 if one did not."""
    with _errors_told():
        failed = False
        for answer in asked(_settings(state_dir), request, deadline_s + STOP_TIMEOUT_S):
            match answer.response:
                case messages.Done(text=text):
                    typer.echo(f"supervisor {answer.supervisor_pid}: {visible(text)}")
                case messages.Failed(text=text):
                    complain(f"supervisor {answer.supervisor_pid}: {text}")
                    failed = True
                case _:
                    complain(f"supervisor {answer.supervisor_pid} {answer.problem or 'answers something else'}")
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
        supervisors, found = reported(_settings(state_dir))
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
    _steer(state_dir, messages.Reset(conversation, user))


@app.command()
def release(
    conversation: Conversation,
    fingerprint: Annotated[str, typer.Argument(help="The message's, from its error or from ps --json.")],
    user: User = None,
    state_dir: StateDir = None,
) -> None:
    """Let a message in again that is quarantined since it has ended too many workers."""
    with _errors_told():
        answers = asked(_settings(state_dir), messages.Release(conversation, fingerprint, user))
        if not any(isinstance(answer.response, messages.Done) for answer in answers):  # only one of them can know it
            told = [
                answer.response.text
                if isinstance(answer.response, messages.Failed)
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
        settings = _settings(state_dir, agent=agent)
        from hermes_pool.cli.chat import talk  # noqa: PLC0415 - nobody else needs it

        raise typer.Exit(talk(settings, conversation, scripted=scripted))


def _settings(state_dir: Path | None, **given: str | None) -> PoolSettings:
    """Return the settings of the environment; an option of the command line goes first."""
    options: dict[str, Any] = {"state_dir": state_dir, **given}
    return PoolSettings.from_env(**{name: value for name, value in options.items() if value is not None})


@contextmanager
def _errors_told() -> Iterator[None]:
    """Turn an error of ours into its text and exit status 1."""
    try:
        yield
    except HermesPoolError as error:
        complain(str(error))
        raise typer.Exit(1) from None


def _problems_told(supervisors: Sequence["Supervisor"]) -> None:
    """Say who has not answered; exit status 1 where that is anybody."""
    problems = [each for each in supervisors if each.problem is not None]
    for supervisor in problems:
        complain(f"supervisor {supervisor.pid} {supervisor.problem}")
    if problems:
        raise typer.Exit(1)
