"""Tells of a death: gathers its report, and makes the error of the turn that died with it."""

import secrets
from collections.abc import Sequence
from datetime import UTC, datetime
from time import monotonic
from typing import Any

from hermes_pool.conversation.turn import Turn
from hermes_pool.crash_report import DeathReport
from hermes_pool.errors import TurnInterruptedError, WorkerCrashedError, WorkerDiedError
from hermes_pool.process.connection import Death, WorkerConnection
from hermes_pool.settings import SessionKey

TOOLS_TOLD = 20
"""How many tools an error names in its text; all are in its ``tools``."""


def report_of(
    connection: WorkerConnection,
    death: Death,
    turn: Turn | None,
    *,
    key: SessionKey,
    incarnation: int,
    now: float,
    memory: Sequence[tuple[float, int]] = (),
) -> DeathReport:
    """Return the report of ``death``; ``now`` is the event loop's clock, ``turn`` the one that ran."""
    return DeathReport(
        report_id=secrets.token_hex(4),
        conversation_id=key.conversation_id,
        user_id=key.user_id,
        at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        pid=None if connection.process is None else connection.process.pid,
        incarnation=incarnation,
        uptime_s=monotonic() - connection.started_at,
        exit=str(death),
        returncode=death.exit.returncode,
        turn_id=None if turn is None else turn.turn_id,
        attempt=0 if turn is None else turn.attempt,
        last_event=None if turn is None else turn.last_event,
        silent_s=None if turn is None else now - turn.heard_at,
        tools_open=() if turn is None else tuple(turn.tools_open.values()),
        memory=tuple(memory),
        verdict=connection.verdict,
        stacks=connection.stacks,
        stderr_tail=death.stderr_tail,
    )


def crashed(turn: Turn, report: DeathReport, *, replays_always: bool, what_next: str) -> WorkerDiedError:
    """Return the error of a turn that no further worker will run."""
    told: dict[str, Any] = {
        "exit": report.exit,
        "returncode": report.returncode,
        "conversation_id": report.conversation_id,
        "stderr_tail": report.stderr_tail,
        "report": report,
    }
    if turn.tools_started and not replays_always:
        names = list(dict.fromkeys(turn.tools_started))
        tools = ", ".join(names[:TOOLS_TOLD]) + (", ..." if len(names) > TOOLS_TOLD else "")
        return TurnInterruptedError(
            f"the worker {report.exit} after a tool had started ({tools}); its effect may have happened, so the "
            f"message was not run again: look before you send it again (report {report.report_id})",
            tools=turn.tools_started,
            **told,
        )
    times = "once" if turn.deaths == 1 else f"{turn.deaths} times"
    return WorkerCrashedError(
        f"the worker {report.exit}; this message has ended a worker {times}. {what_next} (report {report.report_id})",
        **told,
    )
