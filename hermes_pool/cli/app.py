"""The command line ``hermes-pool``: inspect the running supervisors, control them, chat from a terminal.

Settings come from the environment, as ``PoolSettings.from_env`` reads it.

Slow imports are local to the commands that need them, so that ``hermes-pool ps`` starts fast.
"""

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from hermes_pool.cli.render import headline, print_deaths, print_error, print_sessions, report_lines, visible
from hermes_pool.cli.view import (
    COMMAND_TIMEOUT_S,
    Supervisor,
    list_deaths,
    list_sessions,
    none_running,
    problem_of,
    query_running,
)
from hermes_pool.control import client, messages
from hermes_pool.errors import HermesPoolError
from hermes_pool.settings import PoolSettings

DRAIN_DEADLINE_S: Final = 60.0
"""Default ``--deadline`` of ``drain``."""

INSPECT, CONVERSATIONS, POOL = "Inspect", "Control a conversation", "Control the pool"

app = typer.Typer(
    help="Inspect and control the Hermes workers on this machine, through the supervisors that run them.",
    epilog="Exit status: 0 on success, 1 on failure, 2 if the command line is wrong, 130 if interrupted.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
StateDir = Annotated[
    Path | None,
    typer.Option(
        "--state-dir",
        help="The state_dir of the pool. Default: HERMES_POOL_STATE_DIR, or hermes-pool in your own state folder.",
    ),
]
Conversation = Annotated[str, typer.Argument(help="Id of the conversation.")]
User = Annotated[str | None, typer.Option("--user", help="Id of the user, if each user has a session of their own.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object, for programs.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version  # noqa: PLC0415

        typer.echo(f"hermes-pool {version('hermes-pool')}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[  # noqa: ARG001 - its callback does the work
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Inspect and control the Hermes workers on this machine, through the supervisors that run them."""
    for stream in (sys.stdout, sys.stderr):
        # Escape what a terminal or locale cannot show, instead of failing.
        if reconfigure := getattr(stream, "reconfigure", None):
            reconfigure(errors="backslashreplace")


@app.command(rich_help_panel=INSPECT)
def ps(
    state_dir: StateDir = None,
    as_json: AsJson = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Also list stored sessions that no running supervisor knows.")
    ] = False,
) -> None:
    """List the sessions of all running supervisors; if none is running, the stored ones.

    Exit status 1 if a supervisor is not responding.

    The object that --json prints has three members:

    - "source": "supervisor", or "stored" if no supervisor is running

    - "supervisors": for each its "pid", "version", "started_at", "problem" (why it did not answer, or null) and "pool",
      with the fields of PoolSnapshot: "state", "workers", "workers_max", "waiting", "starts", ...

    - "sessions": for each the fields of SessionSnapshot

    Times are in seconds and memory in bytes. What is not known is null.
    """
    with _errors_reported():
        view = list_sessions(_settings(state_dir), everything=everything)
        if not as_json:
            for supervisor in view.supervisors:
                if supervisor.pool is not None:  # on stderr, because scripts read the table
                    typer.echo(f"supervisor {supervisor.pid} is {headline(supervisor.pool)}", err=True)
        if as_json:
            typer.echo(json.dumps(view.as_object(), indent=2))
        elif view.sessions:
            if view.source == "stored":
                typer.echo("no supervisor is running; these are the stored sessions:", err=True)
            print_sessions(view.sessions)
        else:
            text = "no sessions" if view.supervisors else "no supervisor is running, and no session is stored"
            typer.echo(text, err=True)
        _report_problems(view.supervisors)


@app.command(rich_help_panel=INSPECT)
def deaths(
    report_id: Annotated[str | None, typer.Argument(help="Show this report in full.")] = None,
    state_dir: StateDir = None,
    as_json: AsJson = False,
) -> None:
    """List the latest unexpected deaths of workers, or show one report in full.

    The id of a report is also in the error of its turn, and in the log (`worker_died`). Each supervisor keeps its
    latest reports in memory. Exit status 1 if there is no such report, or a supervisor is not responding.

    The object that --json prints has two members:

    - "supervisors": for each its "pid" and "problem" (why it did not answer, or null)

    - "deaths": for each the fields of DeathReport, and "supervisor_pid"
    """
    with _errors_reported():
        supervisors, found = list_deaths(_settings(state_dir))
        if report_id is not None:
            found = [(pid, report) for pid, report in found if report.report_id == report_id]
        if as_json:
            reports = [{**dataclasses.asdict(report), "supervisor_pid": pid} for pid, report in found]
            answer = {"supervisors": [dataclasses.asdict(each) for each in supervisors], "deaths": reports}
            typer.echo(json.dumps(answer, indent=2))
        elif report_id is not None:
            for _, report in found:
                typer.echo("\n".join(report_lines(report)))
        elif found:
            print_deaths([report for _, report in found])
        elif all(each.problem is None for each in supervisors):
            typer.echo("no worker has died unexpectedly", err=True)
        _report_problems(supervisors)
        if report_id is not None and not found:
            raise HermesPoolError(
                f"no report {report_id} is kept: check the id, or look for worker_died in the log of the supervisor"
            )


@app.command(rich_help_panel=CONVERSATIONS)
def stop(conversation: Conversation, user: User = None, state_dir: StateDir = None) -> None:
    """Stop the worker of a conversation. The next message starts a new worker, which resumes the session."""
    with _errors_reported():
        settings = _settings(state_dir)
        view = list_sessions(settings, stored=False)
        if not view.supervisors:
            raise none_running(settings)
        wanted = (conversation, user)
        if not any((row.conversation_id, row.user_id) == wanted and row.pid is not None for row in view.sessions):
            silent = [f"; supervisor {each.pid} {each.problem}" for each in view.supervisors if each.problem]
            raise HermesPoolError("it has no running worker" + "".join(silent), conversation_id=conversation)
        request = messages.Stop(conversation, user)
        for result in client.query(settings.state_dir, request, COMMAND_TIMEOUT_S):
            if isinstance(result.response, messages.Failed):
                raise HermesPoolError(result.response.text)
            if result.response is None:
                raise HermesPoolError(f"supervisor {result.supervisor_pid} {result.problem}")
        typer.echo("stopped")


@app.command(rich_help_panel=CONVERSATIONS)
def reset(
    conversation: Annotated[
        str | None, typer.Argument(help="Id of the conversation. Without it: worker starts of the whole pool.")
    ] = None,
    user: User = None,
    state_dir: StateDir = None,
) -> None:
    """Lift a refusal now: of worker starts after failures, or of one conversation after deaths of its workers.

    Use it after a repair that the pool cannot detect; otherwise the pool retries by itself. For a conversation, it ends
    the back-off and releases all quarantined messages.
    """
    _control(state_dir, messages.Reset(conversation, user))


@app.command(rich_help_panel=CONVERSATIONS)
def release(
    conversation: Conversation,
    fingerprint: Annotated[str, typer.Argument(help="Fingerprint of the message, as in its error and in ps.")],
    user: User = None,
    state_dir: StateDir = None,
) -> None:
    """Release a message from quarantine. A message is quarantined after it has killed several workers."""
    with _errors_reported():
        results = query_running(_settings(state_dir), messages.Release(conversation, fingerprint, user))
        if not any(isinstance(result.response, messages.Done) for result in results):  # only one supervisor knows it
            reasons = [
                result.response.text
                if isinstance(result.response, messages.Failed)
                else f"supervisor {result.supervisor_pid} {problem_of(result)}"
                for result in results
            ]
            raise HermesPoolError("; ".join(dict.fromkeys(reasons)), conversation_id=conversation)
        typer.echo("released")


@app.command(rich_help_panel=POOL)
def pause(
    deadline: Annotated[
        float, typer.Option("--deadline", min=0.0, help="How long to wait for running turns, in seconds.")
    ] = 0.0,
    state_dir: StateDir = None,
) -> None:
    """Begin no more turns: new messages wait until resume. Running turns continue."""
    _control(state_dir, messages.Pause(deadline), deadline)


@app.command(rich_help_panel=POOL)
def resume(state_dir: StateDir = None) -> None:
    """Begin turns again, after pause or drain."""
    _control(state_dir, messages.Resume())


@app.command(rich_help_panel=POOL)
def drain(
    deadline: Annotated[
        float, typer.Option("--deadline", min=0.0, help="When to cancel unfinished turns, in seconds from now.")
    ] = DRAIN_DEADLINE_S,
    state_dir: StateDir = None,
) -> None:
    """Refuse new messages, finish accepted ones, and cancel what is left at the deadline."""
    _control(state_dir, messages.Drain(deadline), deadline)


@app.command(rich_help_panel=POOL)
def resize(
    workers_max: Annotated[int, typer.Argument(min=1, help="The most workers that may run at once.")],
    state_dir: StateDir = None,
) -> None:
    """Change the limit of workers. Idle workers above it are stopped; running turns are not interrupted."""
    _control(state_dir, messages.Resize(workers_max))


def _control(state_dir: Path | None, request: messages.Request, deadline_s: float = 0.0) -> None:
    """Send a request to every supervisor and print each answer. Exit status 1 if one of them failed."""
    with _errors_reported():
        failed = False
        settings = _settings(state_dir)
        for result in query_running(settings, request, deadline_s + COMMAND_TIMEOUT_S):
            match result.response:
                case messages.Done(text=text):
                    typer.echo(f"supervisor {result.supervisor_pid}: {visible(text)}")
                case messages.Failed(text=text):
                    print_error(f"supervisor {result.supervisor_pid}: {text}")
                    failed = True
                case _:
                    print_error(f"supervisor {result.supervisor_pid} {problem_of(result)}")
                    failed = True
        if failed:
            raise typer.Exit(1)


@app.command(rich_help_panel=CONVERSATIONS)
def chat(
    conversation: Annotated[str, typer.Argument(help="Id of the conversation.")] = "terminal",
    agent: Annotated[
        str | None,
        typer.Option(
            "--agent",
            help="The agent: hermes, echo, or package.module:factory. Default: HERMES_POOL_AGENT, or hermes.",
        ),
    ] = None,
    scripted: Annotated[
        bool,
        typer.Option(
            "--scripted", help="Run the real Hermes on a scripted model: no key, no network, nothing is kept."
        ),
    ] = False,
    state_dir: StateDir = None,
) -> None:
    """Chat with an agent in the terminal. Ctrl-C stops the answer, Ctrl-D leaves.

    If the input is not a terminal, each line of it is a message. Exit status 1 if one of them failed.
    """
    with _errors_reported():
        settings = _settings(state_dir, agent=agent)
        from hermes_pool.cli.chat import talk  # noqa: PLC0415 - no other command needs it

        raise typer.Exit(talk(settings, conversation, scripted=scripted))


def _settings(state_dir: Path | None, **given: str | None) -> PoolSettings:
    """Return the settings of the environment; an option of the command line goes first."""
    options: dict[str, Any] = {"state_dir": state_dir, **given}
    return PoolSettings.from_env(**{name: value for name, value in options.items() if value is not None})


@contextmanager
def _errors_reported() -> Iterator[None]:
    """Turn one of our errors into one message on stderr and exit status 1."""
    try:
        yield
    except HermesPoolError as error:
        print_error(str(error))
        raise typer.Exit(1) from None


def _report_problems(supervisors: Sequence["Supervisor"]) -> None:
    """Print which supervisors did not answer. Exit status 1 if there is one."""
    problems = [each for each in supervisors if each.problem is not None]
    for supervisor in problems:
        print_error(f"supervisor {supervisor.pid} {supervisor.problem}")
    if problems:
        raise typer.Exit(1)
