"""What the commands show: the answers of all supervisors, or what the store holds."""

import dataclasses
import socket
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal

from hermes_pool.control import client, messages
from hermes_pool.crash_report import DeathReport
from hermes_pool.errors import HermesPoolError
from hermes_pool.settings import PoolSettings, SessionKey
from hermes_pool.snapshot import PoolSnapshot, SessionSnapshot
from hermes_pool.storage.record import SessionRecord

COMMAND_TIMEOUT_S: Final = 60.0
"""How long a command waits for the supervisors: a worker gets its grace periods before it is killed."""
STORE_TIMEOUT_S: Final = 5.0
"""How long ``ps`` waits for the database, at most."""


@dataclasses.dataclass(frozen=True)
class Supervisor:
    """One running supervisor. ``problem`` says why the rest is missing; it follows "supervisor 123" in a sentence."""

    pid: int
    version: str | None = None
    started_at: str | None = None
    problem: str | None = None
    pool: PoolSnapshot | None = None


@dataclasses.dataclass(frozen=True)
class View:
    """All that ``ps`` shows. ``source`` is ``stored`` if no supervisor is running."""

    source: Literal["supervisor", "stored"]
    supervisors: list[Supervisor]
    sessions: list[SessionSnapshot]

    def as_object(self) -> dict[str, Any]:
        """Return it in built-in types, for JSON."""
        return dataclasses.asdict(self)


def list_sessions(settings: PoolSettings, *, everything: bool = False, stored: bool = True) -> View:
    """Query all supervisors of ``state_dir``.

    With ``stored``, the sessions in the store are added if no supervisor is running, or ``everything`` is wanted.
    """
    supervisors, sessions = [], []
    for result in client.query(settings.state_dir, messages.Ps()):
        reply = result.response
        if isinstance(reply, messages.PsReply):
            supervisors.append(Supervisor(result.supervisor_pid, reply.version, reply.started_at, pool=reply.pool))
            sessions += reply.sessions
        else:
            supervisors.append(Supervisor(result.supervisor_pid, problem=problem_of(result)))
    if stored and (everything or not supervisors):
        known = {(row.conversation_id, row.user_id) for row in sessions}
        sessions += [row for row in stored_sessions(settings) if (row.conversation_id, row.user_id) not in known]
    return View("supervisor" if supervisors else "stored", supervisors, sessions)


def list_deaths(settings: PoolSettings) -> tuple[list[Supervisor], list[tuple[int, DeathReport]]]:
    """Return all supervisors, and the deaths that they remember, latest first, each with its supervisor's pid."""
    supervisors, found = [], []
    for result in query_running(settings, messages.Deaths(), client.QUERY_TIMEOUT_S):
        reply = result.response
        if isinstance(reply, messages.DeathsReply):
            supervisors.append(Supervisor(result.supervisor_pid))
            found += [(result.supervisor_pid, report) for report in reply.reports]
        else:
            supervisors.append(Supervisor(result.supervisor_pid, problem=problem_of(result)))
    return supervisors, sorted(found, key=lambda each: each[1].at, reverse=True)


def query_running(
    settings: PoolSettings, request: messages.Request, timeout_s: float = COMMAND_TIMEOUT_S
) -> list[client.QueryResult]:
    """Query all supervisors of ``state_dir``. Raises ``HermesPoolError`` if none is running."""
    results = client.query(settings.state_dir, request, timeout_s)
    if not results:
        raise none_running(settings)
    return results


def none_running(settings: PoolSettings) -> HermesPoolError:
    """Return the error for a command that needs a supervisor where none is running."""
    return HermesPoolError(f"no supervisor is running for {settings.state_dir}: start one, or check --state-dir")


def problem_of(result: client.QueryResult) -> str:
    """Return why a supervisor did not do what it was asked, to follow "supervisor 123" in a sentence."""
    if isinstance(result.response, messages.Failed):
        return f"reports: {result.response.text}"
    return result.problem or "sent an unexpected response (perhaps its hermes-pool has another version)"


def stored_sessions(settings: PoolSettings) -> list[SessionSnapshot]:
    """Return the sessions in the store. Empty if there is no database yet; none is created."""
    url = settings.store_url
    if url.startswith("sqlite") and not Path(url.partition("///")[2].partition("?")[0]).exists():
        return []
    import asyncio  # noqa: PLC0415 - like the two below, slow to import, and needed here only

    from hermes_pool.storage.store import ConversationStore  # noqa: PLC0415
    from hermes_pool.system import processes  # noqa: PLC0415

    async def read() -> list[tuple[SessionKey, SessionRecord]]:
        database = ConversationStore.from_url(url, min(settings.timeouts.database_s, STORE_TIMEOUT_S))
        try:
            return list(await database.records())
        finally:
            await database.close()

    rows = []
    for key, record in asyncio.run(read()):
        here = record.host == socket.gethostname()
        seen = None
        if here and record.pid is not None and record.create_time is not None:
            seen = processes.inspect_tree(record.pid, record.create_time)
        is_alive = seen is not None and seen.health in ("alive", "frozen")
        rows.append(
            SessionSnapshot(
                conversation_id=key.conversation_id,
                user_id=key.user_id,
                session_id=record.session_id,
                state=record.status,
                health="none" if seen is None else seen.health,
                agent=record.agent or "",
                # The pid of a process that is gone may belong to another one by now.
                pid=record.pid if is_alive else None,
                create_time=record.create_time if is_alive else None,
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
