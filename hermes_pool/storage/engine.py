"""Database engines: which URLs are accepted, how the store makes its own engine, and how a transaction is bounded.

Every transaction has two time limits. The caller stops waiting at its deadline. The database gets a little less, so
that it usually gives up first and says why.
"""

import contextlib
import importlib.util
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, IntegrityError, ProgrammingError, SQLAlchemyError
from sqlalchemy.schema import CreateTable

from hermes_pool.errors import SettingsError
from hermes_pool.storage.json_sql import BY_DIALECT

T = TypeVar("T")

CONCURRENCY = {"postgresql": 4, "sqlite": 2}
"""Operations of one store that run at the same time; further ones wait. SQLite has a single writer, and more threads
would only compete with the event loop for the interpreter's lock."""
_DATABASE_SHARE = 0.9
"""Share of the time limit that the database gets."""
_CLOSE_ENOUGH = 0.9
_LIMIT_MS = "hermes_pool_limit_ms"
"""Key in ``Connection.info`` under which a connection of the store's own SQLite engine keeps its busy timeout."""


def check_dialect(name: str) -> None:
    """Raise ``SettingsError`` for a database that is not supported."""
    if name not in BY_DIALECT:
        raise SettingsError(f"{name} is not supported as a store: use SQLite or PostgreSQL")


def supported_url(url: str | sa.URL) -> sa.URL:
    """Return the URL with its driver filled in.

    Raises ``SettingsError`` for a database or driver that is not supported or not installed. The message never contains
    the URL, which may hold a password.
    """
    try:
        parsed = sa.make_url(url)
    except (SQLAlchemyError, ValueError):
        # Without the cause, which quotes the URL.
        raise SettingsError(
            "the database URL cannot be parsed: it should look like sqlite:////var/lib/jarvis/pool.db or "
            "postgresql://user@host/database"
        ) from None
    if parsed.drivername == "postgres":
        parsed = parsed.set(drivername="postgresql")
    backend, _, driver = parsed.drivername.partition("+")
    check_dialect(backend)
    if backend == "postgresql":
        parsed = parsed.set(drivername=f"postgresql+{driver or 'psycopg'}")
        driver = driver or "psycopg"
        if driver not in ("psycopg", "psycopg2"):
            raise SettingsError(
                f"the driver {driver} cannot be used in a database URL: use psycopg, or pass your own engine to "
                "ConversationStore"
            )
        if importlib.util.find_spec(driver) is None:
            raise SettingsError(f"PostgreSQL needs {driver}: pip install 'hermes-pool[postgresql]'")
    elif driver not in ("", "pysqlite"):
        raise SettingsError(
            f"the driver {driver} cannot be used in a database URL: leave it out, or pass your own engine to "
            "ConversationStore"
        )
    elif parsed.database in (None, "", ":memory:"):
        raise SettingsError(
            "an in-memory SQLite database would forget all sessions: name a file, as in sqlite:////path/pool.db"
        )
    return parsed


def make_engine(url: sa.URL, table: sa.Table, timeout_s: float) -> sa.Engine:
    """Return a new engine. Creates the database file, its folder and ``table`` where they are missing."""
    backend = url.get_backend_name()
    if backend == "sqlite":
        Path(str(url.database)).absolute().parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        options: dict[str, Any] = {"timeout": timeout_s * _DATABASE_SHARE}
    else:
        options = {"connect_timeout": math.ceil(timeout_s)}
        if "tcp_user_timeout" not in url.query:
            options["tcp_user_timeout"] = int(timeout_s * 1000)  # TCP alone takes minutes to notice a vanished peer
    engine = sa.create_engine(
        url,
        connect_args=options,
        pool_size=CONCURRENCY[backend],
        max_overflow=0,
        pool_timeout=timeout_s,
        pool_pre_ping=backend != "sqlite",  # a file does not hang up
    )
    try:
        if backend == "sqlite":
            limit_ms = options["timeout"] * 1000
            sa.event.listen(engine, "connect", lambda _, record: record.info.update({_LIMIT_MS: limit_ms}))
            # With WAL, readers and the writer do not block each other. The mode is kept in the file, so a failure here
            # can be ignored: the next process tries again.
            with contextlib.suppress(DBAPIError), engine.connect() as connection:
                connection.exec_driver_sql("PRAGMA journal_mode=WAL")
        create = CreateTable(table, if_not_exists=True)
        try:
            with engine.begin() as connection:
                connection.execute(create)
        except (IntegrityError, ProgrammingError):
            # When two create one table at once, PostgreSQL may let both get past "if not exists". The later one fails,
            # with one error or the other, depending on the catalogue in which it finds the name taken.
            with engine.begin() as connection:
                connection.execute(create)
    except BaseException:
        engine.dispose()
        raise
    return engine


def run_in_transaction(connection: sa.Connection, work: Callable[[sa.Connection], T], deadline: float) -> T:
    """Do ``work`` and commit. ``TimeoutError`` if ``deadline`` (of ``time.monotonic``) has passed already."""
    remaining_ms = int((deadline - time.monotonic()) * _DATABASE_SHARE * 1000)
    if remaining_ms <= 0:
        raise TimeoutError  # the caller has given up, and so late a write could undo a newer one
    with _time_limit(connection, remaining_ms):
        result = work(connection)
        connection.commit()
        return result


@contextlib.contextmanager
def _time_limit(connection: sa.Connection, limit_ms: int) -> Any:
    """Make the database give up after ``limit_ms``, for this transaction only."""
    if connection.dialect.name == "postgresql":
        connection.execute(
            sa.text("SELECT set_config('statement_timeout', :limit, true), set_config('lock_timeout', :limit, true)"),
            {"limit": f"{limit_ms}ms"},
        )
        yield
        return
    if limit_ms >= _CLOSE_ENOUGH * connection.info.get(_LIMIT_MS, math.inf):
        yield  # its own busy timeout is about the same
        return
    before = connection.exec_driver_sql("PRAGMA busy_timeout").scalar_one()
    connection.exec_driver_sql(f"PRAGMA busy_timeout={limit_ms}")
    try:
        yield
    finally:
        with contextlib.suppress(SQLAlchemyError):
            connection.exec_driver_sql(f"PRAGMA busy_timeout={int(before)}")
