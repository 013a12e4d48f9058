"""What the command line prints: tables, fitted to a terminal or in full for a program, and readable numbers."""

import re
import sys
from collections.abc import Sequence
from typing import Any, Final

import typer

from hermes_pool.crash_report import DeathReport
from hermes_pool.snapshot import BreakerState, PoolSnapshot, SessionSnapshot

# --- the table --------------------------------------------------------------------------------------------------------

_HEADINGS: Final = (
    "conversation", "session", "pid", "state", "up", "idle", "mem", "cpu", "turns", "rst", "last error",
)  # fmt: skip
_RIGHT: Final = frozenset({"pid", "up", "idle", "mem", "cpu", "turns", "rst"})
_COLOURS: Final = {"idle": "green", "healthy": "green", "busy": "yellow", "starting": "yellow", "failed": "red"}
_WITH_JOBS: Final = re.compile(r",jobs=\d+")
_ID_CELLS_MIN: Final = 6


def headline(pool: PoolSnapshot) -> str:
    """Return the state of the pool in one line."""
    parts = [f"{visible(pool.state)}: {pool.workers} of {pool.workers_max} workers"]
    if pool.waiting:
        wait = "" if pool.expected_wait_s is None else f" (a new one would wait about {duration(pool.expected_wait_s)})"
        parts.append(f"{_messages(pool.waiting)} waiting for a worker{wait}")
    if pool.held:
        parts.append(f"{_messages(pool.held)} held until resume")
    text = ", ".join(parts)
    starts = pool.starts
    if starts is None or starts.state == BreakerState.CLOSED:
        return text
    how = "have failed and are being retried"
    if starts.state == BreakerState.OPEN and starts.retry_after_s is not None:
        how = f"are refused for {duration(starts.retry_after_s)}"
    return f"{text}; worker starts {how}: {visible(starts.last_error or 'reason unknown')}"


def _messages(count: int) -> str:
    return f"{count} message" if count == 1 else f"{count} messages"


def print_sessions(sessions: Sequence[SessionSnapshot]) -> None:
    """Print the table: fitted to a terminal; in full and without colours to anything else."""
    rows = [_cells(row) for row in sessions]
    if sys.stdout.isatty():
        from rich.console import Console  # noqa: PLC0415

        _print_fitted(Console(file=sys.stdout, highlight=False), rows)
    else:
        typer.echo(plain_table(rows))


def _cells(row: SessionSnapshot) -> list[str]:
    user = "" if row.user_id is None else f" [{row.user_id}]"
    state = row.state if row.health in ("none", "alive") else f"{row.state},{row.health}"
    if row.jobs:
        state += f",jobs={len(row.jobs)}"
    if row.retry_after_s is not None:  # without spaces: scripts split the line into words
        state += f",backoff={duration(row.retry_after_s)}"
    problems = [f"quarantined: {', '.join(row.quarantined)}"] if row.quarantined else []
    if row.last_error:
        problems.append(row.last_error)
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
        visible("; ".join(problems) or "-"),
    ]


def _colour(state: str) -> str:
    plain = _WITH_JOBS.sub("", state)  # background jobs are nothing to worry about
    return _COLOURS.get(plain, "" if "," not in plain else "red")


def plain_table(rows: Sequence[Sequence[str]], headings: Sequence[str] = _HEADINGS) -> str:
    """Return a table that is cut nowhere: aligned, with two spaces between columns."""
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
    """Print a table that fits the terminal: long ids are shortened in the middle, errors follow below the table."""
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
        state = Text(row[3], style=_colour(row[3]))
        table.add_row(*ids, Text(row[2]), state, *(Text(cell) for cell in row[4:-1]))
    console.print(table)
    for row in rows:
        if row[-1] != "-":
            console.print(Text(shortened(row[0], 40), style="bold").append(f": {row[-1]}", style="not bold red"))


# --- deaths -----------------------------------------------------------------------------------------------------------

_DEATH_HEADINGS: Final = ("when", "report", "conversation", "turn", "exit")


def print_deaths(reports: Sequence[DeathReport]) -> None:
    """Print a table, one line for each death: fitted to a terminal, in full to anything else."""
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
    """Print a table that fits the terminal: long ids are shortened, and the exit wraps."""
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
    """Return the whole report as lines of text."""
    turn = "none was running"
    if report.turn_id is not None:
        event = "no event received" if report.last_event is None else f"last event {report.last_event}"
        silence = "" if report.silent_s is None else f", {report.silent_s:.1f} s before the death"
        turn = f"{report.turn_id}, attempt {report.attempt}; {event}{silence}"
    pid = "no process" if report.pid is None else f"pid {report.pid}"
    facts = {
        "report": report.report_id,
        "conversation": report.conversation_id,
        "when": report.at,
        "worker": f"{pid}, incarnation {report.incarnation}, ran for {report.uptime_s:.1f} s",
        "exit": report.exit,
        "turn": turn,
        "open tools": ", ".join(report.tools_open) or "none",
        "verdict": report.verdict or "none",
    }
    lines = [f"{name + ':':14}{visible(value)}" for name, value in facts.items()]
    curve = [f"{before_s:8.1f} s before: {size(count)}" for before_s, count in report.memory]
    for name, content in (
        ("memory", curve),
        ("stacks", report.stacks),
        ("last lines on stderr", report.stderr_tail),
    ):
        lines += [f"{name}:", *(f"    {visible(line)}" for line in content)] if content else [f"{name}: none"]
    return lines


def print_error(text: str) -> None:
    """Print an error to stderr."""
    typer.echo(f"hermes-pool: {visible(text, keep=chr(10))}", err=True)


# --- text and numbers -------------------------------------------------------------------------------------------------


def visible(text: str, keep: str = "") -> str:
    """Return ``text`` with everything unprintable escaped (control characters, bidi marks, lone surrogates)."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode() for char in text
    )


def shortened(text: str, cells: int) -> str:
    """Return ``text`` in at most ``cells`` columns of a terminal, with an ellipsis for the middle if it is longer."""
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
