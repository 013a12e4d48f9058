"""Describes a death: its report, and the error of the turn that ended with it."""

import secrets
from collections.abc import Sequence
from datetime import UTC, datetime
from time import monotonic
from typing import Any

from hermes_pool.conversation.active_turn import ActiveTurn
from hermes_pool.crash_report import DeathReport
from hermes_pool.errors import TurnInterruptedError, WorkerCrashedError
from hermes_pool.policy.recovery import Decision
from hermes_pool.process.connection import WorkerConnection
from hermes_pool.process.death import Death
from hermes_pool.settings import SessionKey

TOOLS_NAMED = 20
"""How many tools the text of an error names. The attribute ``tools`` has all of them."""


def report_of(
    connection: WorkerConnection,
    death: Death,
    turn: ActiveTurn | None,
    *,
    key: SessionKey,
    incarnation: int,
    now: float,
    memory: Sequence[tuple[float, int]],
) -> DeathReport:
    """Return the report of ``death``. ``now`` is the time on the event loop's clock; ``turn`` was running, if any."""
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


def died_with(
    turn: ActiveTurn, report: DeathReport, decision: Decision, what_next: str = "The next message gets a new worker"
) -> TurnInterruptedError | WorkerCrashedError:
    """Return the error of a turn that is given up: an interruption or a crash, by ``decision``."""
    facts: dict[str, Any] = {
        "exit": report.exit,
        "returncode": report.returncode,
        "conversation_id": report.conversation_id,
        "stderr_tail": report.stderr_tail,
        "report": report,
    }
    if decision is Decision.INTERRUPT:
        names = list(dict.fromkeys(tool.name for tool in turn.tools if tool.may_have_acted))
        tools = ", ".join(names[:TOOLS_NAMED]) + (", ..." if len(names) > TOOLS_NAMED else "")
        return TurnInterruptedError(
            f"the worker {report.exit} after a tool had started ({tools}). The tool may have acted, so the "
            f"message was not run again: check what it did before you send it again (report {report.report_id})",
            **facts,
        )
    times = "once" if turn.deaths == 1 else f"{turn.deaths} times"
    return WorkerCrashedError(
        f"the worker {report.exit}. This message has lost its worker {times}. {what_next} (report {report.report_id})",
        **facts,
    )
