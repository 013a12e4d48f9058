"""What the commands know: the answers of all supervisors, or what the store holds."""

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

STOP_TIMEOUT_S: Final = 60.0
"""How long ``stop`` waits; a worker is given its graces before it is killed."""
STORE_TIMEOUT_S: Final = 5.0
"""How long ``ps`` waits for the database."""


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
    for answer in client.query(settings.state_dir, messages.Ps()):
        reply = answer.response
        if isinstance(reply, messages.PsReply):
            supervisors.append(Supervisor(answer.supervisor_pid, reply.version, reply.started_at, pool=reply.pool))
            sessions += reply.sessions
        else:
            problem = reply.text if isinstance(reply, messages.Failed) else answer.problem or "answers something else"
            supervisors.append(Supervisor(answer.supervisor_pid, problem=problem))
    if stored and (everything or not supervisors):
        known = {(row.conversation_id, row.user_id) for row in sessions}
        sessions += [row for row in stored_sessions(settings) if (row.conversation_id, row.user_id) not in known]
    return View("supervisor" if supervisors else "stored", supervisors, sessions)


def asked(settings: PoolSettings, request: messages.Request, timeout_s: float = STOP_TIMEOUT_S) -> list[client.Answer]:
    """Ask all supervisors of ``state_dir``; ``HermesPoolError`` where none runs."""
    answers = client.query(settings.state_dir, request, timeout_s)
    if not answers:
        raise HermesPoolError(f"no supervisor runs in {settings.state_dir}")
    return answers


def reported(settings: PoolSettings) -> tuple[list[Supervisor], list[tuple[int, DeathReport]]]:
    """Return all supervisors, and the deaths that they know with the supervisor's pid, the latest first."""
    supervisors, found = [], []
    for answer in asked(settings, messages.Deaths(), client.QUERY_TIMEOUT_S):
        reply = answer.response
        if isinstance(reply, messages.DeathsReply):
            supervisors.append(Supervisor(answer.supervisor_pid))
            found += [(answer.supervisor_pid, report) for report in reply.reports]
        else:
            problem = reply.text if isinstance(reply, messages.Failed) else answer.problem or "answers something else"
            supervisors.append(Supervisor(answer.supervisor_pid, problem=problem))
    return supervisors, sorted(found, key=lambda each: each[1].at, reverse=True)


def stored_sessions(settings: PoolSettings) -> list[SessionSnapshot]:
    """Return what the store holds; nothing, and nothing is made, where there is no database yet."""
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
