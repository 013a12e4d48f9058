"""What the tests of faults ask the outside: the process table, the database file, the loop, the host's own memory.

It reads what only Linux has, as these tests do; nothing here is collected elsewhere (see ``tests/conftest.py``).
"""

import asyncio
import gc
import json
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil

from hermes_pool import HermesSessionManager
from hermes_pool.snapshot import SessionSnapshot
from tests.support import until


async def row_of(pool: HermesSessionManager, conversation_id: str) -> SessionSnapshot:
    return next(row for row in await pool.sessions() if row.conversation_id == conversation_id)


async def row_when_stopped(pool: HermesSessionManager, conversation_id: str) -> SessionSnapshot:
    """The row of a conversation whose worker has ended, once the pool has seen it: the process table is quicker."""

    async def stopped() -> SessionSnapshot | None:
        row = await row_of(pool, conversation_id)
        return row if row.state == "stopped" else None

    return await until(stopped, "the pool to see that the worker has ended")


async def process_of(pool: HermesSessionManager, conversation_id: str) -> psutil.Process:
    """The worker of a conversation; psutil knows a process by its pid and create time."""
    row = await row_of(pool, conversation_id)
    assert row.pid is not None, row
    process = psutil.Process(row.pid)
    assert row.create_time is not None
    assert abs(process.create_time() - row.create_time) < 1.5
    return process


def gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def gone_pid(pid: int) -> bool:
    try:
        return gone(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return True


def lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


def sql(state_dir: Path, statement: str, *values: Any) -> list[Any]:
    with closing(sqlite3.connect(state_dir / "hermes-pool.db", timeout=5)) as connection, connection:
        return connection.execute(statement, values).fetchall()


def put_agent_state(state_dir: Path, conversation_id: str, agent_state: str | None) -> None:
    """Store a conversation as somebody else would, before the pool has made its own file."""
    state_dir.mkdir(parents=True, exist_ok=True)
    sql(state_dir, "CREATE TABLE IF NOT EXISTS conversation (id VARCHAR NOT NULL PRIMARY KEY, agent_state JSON)")
    sql(state_dir, "INSERT INTO conversation (id, agent_state) VALUES (?, ?)", conversation_id, agent_state)


def raw_agent_state(state_dir: Path, conversation_id: str) -> str | None:
    found = sql(state_dir, "SELECT agent_state FROM conversation WHERE id = ?", conversation_id)
    return found[0][0] if found else None


def hermes_of(state_dir: Path, conversation_id: str) -> dict[str, Any]:
    """The object ``runtime_state.hermes`` of a row; empty while there is none."""
    if not (state_dir / "hermes-pool.db").exists():
        return {}
    state = json.loads(raw_agent_state(state_dir, conversation_id) or "null") or {}
    hermes: dict[str, Any] = state.get("runtime_state", {}).get("hermes", {})
    return hermes


@asynccontextmanager
async def longest_stall() -> AsyncIterator[SimpleNamespace]:
    """Measure how long the loop was held up at most, as ``seconds``."""
    seen = SimpleNamespace(seconds=0.0)

    async def tick() -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(0.005)
            seen.seconds = max(seen.seconds, time.monotonic() - began - 0.005)

    ticking = asyncio.create_task(tick())
    try:
        yield seen
    finally:
        ticking.cancel()
        await asyncio.wait({ticking})


@contextmanager
def memory_growth() -> Iterator[SimpleNamespace]:
    """Measure by how much this process' resident memory was above where it began, at its peak, as ``mib``."""
    seen = SimpleNamespace(mib=0.0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _peak_kib()
    yield seen
    seen.mib = (_peak_kib() - before) / 1024


def _peak_kib() -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmHWM:"))


@contextmanager
def complaints() -> Iterator[list[dict[str, Any]]]:
    """What reaches the loop's exception handler ("never retrieved" and its like)."""
    loop, seen = asyncio.get_running_loop(), []
    loop.set_exception_handler(lambda _, context: seen.append(context))
    try:
        yield seen
        gc.collect()
    finally:
        loop.set_exception_handler(None)


async def never(fact: Callable[[], Any], seconds: float = 0.5) -> None:
    """Watch that something does not come about."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert not fact()
        await asyncio.sleep(0.02)
