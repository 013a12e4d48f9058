"""What is kept of each session in a database, inside the JSON column ``agent_state`` that Jarvis writes too.

The pool's own table, or one of Jarvis' (its engine, its model, its column), on SQLite or PostgreSQL. Only the object
``runtime_state.hermes`` and the word ``runtime`` are ever written, each by one atomic statement (``json_sql``).
"""

import asyncio
import contextlib
import importlib.util
import json
import math
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self, TypeVar, cast

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, IntegrityError, NoInspectionAvailable, ProgrammingError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.orm import registry
from sqlalchemy.schema import CreateTable
from sqlmodel import Field, SQLModel

from hermes_pool.errors import InvalidKeyError, SettingsError, StateNotWritableError, StoreError
from hermes_pool.settings import SessionKey
from hermes_pool.storage.json_sql import BY_DIALECT, JsonSql, path
from hermes_pool.storage.record import SCHEMA, SessionRecord
from hermes_pool.system.threads import in_thread

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine  # it needs greenlet, which who has no such engine need not have

T = TypeVar("T")

_AT_ONCE = {"postgresql": 4, "sqlite": 2}
"""Operations of one store that run at the same time; the others wait in line. SQLite has one writer, and each further
thread would only compete with the event loop for the interpreter's lock."""
_DATABASE_SHARE = 0.9  # of the time limit: the database should give up first, since it can say why


class _OwnTables(SQLModel, registry=registry()):
    """Keeps the table below out of ``SQLModel.metadata``, where Jarvis may have a ``conversation`` of its own."""


class Conversation(_OwnTables, table=True):
    """The pool's own table, for when Jarvis gives it none."""

    id: str = Field(primary_key=True)
    """The conversation's id."""
    agent_state: dict[str, Any] | None = Field(default=None, sa_column=sa.Column(sa.JSON, nullable=True))
    """``{"runtime": ..., "runtime_state": {"hermes": ...}}``."""


class ConversationStore:
    """The sessions in one table. Coroutines of one event loop at a time; every operation ends within ``timeout_s``.

    ``engine`` is yours, sync or async, and stays so: ``close`` leaves it alone (``from_url`` makes one of its own).
    ``model`` is a mapped class, of which ``id_column`` and ``state_column`` name attributes or columns. With
    ``create_rows`` a conversation that has no row gets one; that is for a table in which all other columns may be empty
    or have a default in the database. Without, saving to a missing row is ``StateNotWritableError``.

    ``StoreError`` where the database does not answer in time or refuses; ``StateNotWritableError`` where what is
    stored is not ours to change; ``SettingsError`` for an engine or a model that cannot be used.
    """

    def __init__(
        self,
        engine: "sa.Engine | AsyncEngine | sa.URL",
        model: type[Any] = Conversation,
        *,
        id_column: str = "id",
        state_column: str = "agent_state",
        create_rows: bool,
        timeout_s: float = 10.0,
    ) -> None:
        if not timeout_s > 0:
            raise SettingsError(f"timeout_s must be over 0, not {timeout_s!r}")
        url, dialect = (engine, engine.get_dialect()()) if isinstance(engine, sa.URL) else (engine.url, engine.dialect)
        _check_dialect(dialect.name)
        self._own_url = engine if isinstance(engine, sa.URL) else None
        self._engine = None if isinstance(engine, sa.URL) else engine
        self._password = None if url.password is None else str(url.password)
        self._id = _column_of(model, id_column)
        self._sql = _sql_for(dialect, self._id, _column_of(model, state_column))
        self._create_rows = create_rows
        self._timeout_s = timeout_s
        self._at_once = _AT_ONCE[dialect.name]
        self._slots = asyncio.Semaphore(self._at_once)
        self._texts: dict[str, Any] = {}
        self._making = threading.Lock()
        self._closed = False

    @classmethod
    def from_url(cls, url: str | sa.URL, timeout_s: float = 10.0) -> Self:
        """Return a store with an engine and a table (``Conversation``) of its own, both made at first use.

        ``sqlite:///path`` (its folder is made, and WAL is switched on) or ``postgresql://...`` (psycopg).
        ``SettingsError`` for any other URL, or a driver that is not installed.
        """
        return cls(_usable_url(url), create_rows=True, timeout_s=timeout_s)

    async def prepare(self) -> None:
        """Connect, and make what is missing (of the store's own: file, folder and table)."""
        await self._run(lambda _: None)

    async def load(self, key: SessionKey) -> SessionRecord | None:
        """Return what is stored of a session; ``None`` where nothing is.

        ``StateNotWritableError`` where something is there that cannot be understood: an ``agent_state`` that is no
        object, or a record of a newer version. So a session is never silently taken for a new one.
        """

        def work(connection: sa.Connection) -> SessionRecord | None:
            row = connection.execute(self._text(self._sql.load(key.user_id)), self._parameters(key)).one_or_none()
            if row is None:
                return None
            fine, stored = row
            if not fine:
                self._refuse(connection, key.conversation_id, path(key.user_id))
            return None if stored is None else SessionRecord.from_json(_parsed(stored))

        return await self._run(work, key.conversation_id)

    async def save(self, key: SessionKey, record: SessionRecord) -> None:
        """Store ``record``; whatever else is in ``agent_state`` stays as it is, also unknown members of the session.

        With a first completed turn (``turns`` over 0) ``runtime`` becomes "hermes" where none is named.
        """
        ours = record.to_json()
        claim = {"runtime": "hermes"} if record.turns > 0 else {}
        fresh: Any = {name: value for name, value in ours.items() if value is not None}
        for name in reversed(path(key.user_id)):
            fresh = {name: fresh}
        values = self._parameters(key) | {"ours": _dumped(ours), "claim": _dumped(claim)}
        sql = self._sql.save(key.user_id, create=self._create_rows)
        await self._write(sql, values, claim | fresh, key.conversation_id, path(key.user_id))

    async def set_runtime(self, conversation_id: str, runtime: Literal["hermes", "jarvis"]) -> None:
        """Say who answers this conversation: writes ``runtime`` and nothing else."""
        claim = {"runtime": runtime}
        values = {"id": self._row_id(conversation_id), "claim": _dumped(claim)}
        sql = self._sql.set_runtime(create=self._create_rows)
        await self._write(sql, values, claim, conversation_id, ())

    async def records(self, limit: int = 1000) -> list[tuple[SessionKey, SessionRecord]]:
        """Return the stored sessions, last used first, at most ``limit``. What cannot be understood is left out."""

        def work(connection: sa.Connection) -> list[tuple[SessionKey, SessionRecord]]:
            statement = sa.text(self._sql.records()).columns(
                sa.column("id", self._id.type), sa.column("user_id"), sa.column("value"), sa.column("used")
            )
            found = []
            for conversation_id, user_id, value, _ in connection.execute(statement, {"most": limit}):
                with contextlib.suppress(InvalidKeyError, ValueError):
                    record = SessionRecord.from_json(_parsed(value))
                    if record.schema <= SCHEMA:
                        found.append((SessionKey(str(conversation_id), user_id), record))
            return found

        return await self._run(work)

    async def close(self) -> None:
        """Wait for what still runs, within ``timeout_s``, and close the store's own connections."""
        self._closed = True
        taken = 0
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._timeout_s):
                    while taken < self._at_once:
                        await self._slots.acquire()
                        taken += 1
            if self._own_url is not None and isinstance(self._engine, sa.Engine):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._timeout_s):
                        await in_thread(self._engine.dispose, lambda: None)
        finally:
            for _ in range(taken):
                self._slots.release()

    # --- one operation ---

    async def _write(
        self, sql: str, values: dict[str, Any], fresh: dict[str, Any], conversation_id: str, keys: tuple[str, ...]
    ) -> None:
        if self._create_rows:
            values["fresh"] = _dumped(fresh)

        def work(connection: sa.Connection) -> None:
            if connection.execute(self._text(sql), values).rowcount == 0:
                self._refuse(connection, conversation_id, keys)

        await self._run(work, conversation_id)

    def _refuse(self, connection: sa.Connection, conversation_id: str, keys: tuple[str, ...]) -> NoReturn:
        """Raise the error that names why the guard of a statement refused."""
        row = connection.execute(self._text(self._sql.look()), {"id": self._row_id(conversation_id)}).one_or_none()
        if row is None:
            raise StateNotWritableError(
                "there is no row for it: store the conversation before its first message",
                conversation_id=conversation_id,
            )
        reason = why_not_writable(row[0], keys)
        if reason is None:
            raise StoreError("its row was changed at this moment; try again", conversation_id=conversation_id)
        raise StateNotWritableError(reason, conversation_id=conversation_id)

    async def _run(self, work: Callable[[sa.Connection], T], conversation_id: str | None = None) -> T:
        """Do ``work`` in one transaction, off the event loop's thread, in time, and with our own errors only."""
        if self._closed:
            raise StoreError("the store is closed", conversation_id=conversation_id)
        deadline = time.monotonic() + self._timeout_s
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._slots.acquire()
                if self._engine is None or isinstance(self._engine, sa.Engine):
                    return await in_thread(lambda: self._with_sync_engine(work, deadline), self._slots.release)
                try:
                    async with self._engine.connect() as connection:
                        return await connection.run_sync(_in_transaction, work, deadline)
                finally:
                    self._slots.release()
        except TimeoutError as error:
            raise self._too_late(conversation_id) from error
        except (SQLAlchemyError, OSError) as error:
            raise self._translated(error, conversation_id) from error

    def _with_sync_engine(self, work: Callable[[sa.Connection], T], deadline: float) -> T:
        """Do ``work``, in a thread."""
        engine = self._engine if isinstance(self._engine, sa.Engine) else self._own_engine(deadline)
        with engine.connect() as connection:
            try:
                return _in_transaction(connection, work, deadline)
            finally:
                if self._closed and self._own_url is not None:
                    connection.invalidate()  # the pool that it would go back to may be closed already

    def _own_engine(self, deadline: float) -> sa.Engine:
        if not self._making.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise TimeoutError
        try:
            if self._engine is None and self._own_url is not None:
                self._engine = _made_engine(self._own_url, self._timeout_s)
            return cast(sa.Engine, self._engine)
        finally:
            self._making.release()

    def _text(self, sql: str) -> Any:
        text = self._texts.get(sql)
        if text is None:
            text = self._texts[sql] = sa.text(sql).bindparams(sa.bindparam("id", type_=self._id.type))
        return text

    def _parameters(self, key: SessionKey) -> dict[str, Any]:
        leaf = path(key.user_id)[-1]
        return {"id": self._row_id(key.conversation_id), "leaf": leaf, "schema": SCHEMA}

    def _row_id(self, conversation_id: str) -> Any:
        """Return the id as the column's type has it; Jarvis' ids may be UUIDs or numbers."""
        kind: Any = None
        with contextlib.suppress(NotImplementedError):
            kind = self._id.type.python_type
        if kind not in (int, uuid.UUID):
            return conversation_id
        with contextlib.suppress(ValueError):
            if str(converted := kind(conversation_id)) == conversation_id:  # else two ids could mean one row
                return converted
        raise InvalidKeyError(f"no {kind.__name__}, as the ids of this table are", conversation_id=conversation_id)

    # --- errors ---

    def _too_late(self, conversation_id: str | None) -> StoreError:
        return StoreError(
            f"the database did not answer within {self._timeout_s:g} s; is it up, and does a transaction of somebody "
            "else hold a lock?",
            conversation_id=conversation_id,
        )

    def _translated(self, error: Exception, conversation_id: str | None) -> StoreError:
        """Return our error for one of SQLAlchemy's or the driver's, whose words may quote the URL's password."""
        cause = getattr(error, "orig", None) or error
        code = getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None)
        if code in ("22P02", "22P05"):
            return StateNotWritableError(
                r"agent_state is not JSON, or holds \u0000 or half a surrogate pair, which PostgreSQL cannot process: "
                "it is left as it is, and has to be mended before anything can be stored",
                conversation_id=conversation_id,
            )
        said = f"{type(cause).__name__}: {(str(cause).strip().splitlines() or [''])[0][:200]}"
        if self._password:
            said = said.replace(self._password, "***")
        if isinstance(error, IntegrityError):
            return StateNotWritableError(
                f"its row is missing and cannot be made, since the table demands more ({said}): store the conversation "
                "before its first message",
                conversation_id=conversation_id,
            )
        if isinstance(error, PoolTimeoutError):
            return StoreError(
                "no connection became free in time: give the engine a larger pool", conversation_id=conversation_id
            )
        no_folder = isinstance(error, OSError) and error.filename is not None
        if self._own_url is not None and (no_folder or "unable to open database file" in str(cause)):
            return StoreError(
                f"the database file {self._own_url.database} cannot be opened ({said}): it must be a file, in a "
                "folder that this user can write; name another one with database_url",
                conversation_id=conversation_id,
            )
        # 55P03 is lock_timeout, 57014 statement_timeout; SQLite has words only.
        if code in ("55P03", "57014") or (isinstance(error, DBAPIError) and "locked" in str(cause)):
            return self._too_late(conversation_id)
        return StoreError(
            f"the database refused ({said}): check that it is up and has the table", conversation_id=conversation_id
        )


# --- engines --------------------------------------------------------------------------------------------------------


def _check_dialect(name: str) -> None:
    if name not in BY_DIALECT:
        raise SettingsError(f"{name} is not supported as a store: use SQLite or PostgreSQL")


def _usable_url(url: str | sa.URL) -> sa.URL:
    try:
        parsed = sa.make_url(url)
    except (SQLAlchemyError, ValueError):
        # Without the cause, which quotes the URL and so its password.
        raise SettingsError(
            "the database URL cannot be read; one looks like sqlite:////var/lib/jarvis/pool.db"
        ) from None
    if parsed.drivername == "postgres":
        parsed = parsed.set(drivername="postgresql")
    backend, _, driver = parsed.drivername.partition("+")
    _check_dialect(backend)
    if backend == "postgresql":
        parsed = parsed.set(drivername=f"postgresql+{driver or 'psycopg'}")
        driver = driver or "psycopg"
        if driver not in ("psycopg", "psycopg2"):
            raise SettingsError(f"{driver} in a URL: name psycopg, or pass an engine of yours to ConversationStore")
        if importlib.util.find_spec(driver) is None:
            raise SettingsError(f"PostgreSQL needs {driver}: pip install 'hermes-pool[postgresql]'")
    elif driver not in ("", "pysqlite"):
        raise SettingsError(f"{driver} in a URL: leave it out, or pass an engine of yours to ConversationStore")
    elif parsed.database in (None, "", ":memory:"):
        raise SettingsError(
            "an SQLite database in memory forgets all sessions: name a file, as in sqlite:////path/pool.db"
        )
    return parsed


def _made_engine(url: sa.URL, timeout_s: float) -> sa.Engine:
    """Make the engine, and what is missing of file, folder and table."""
    backend = url.get_backend_name()
    if backend == "sqlite":
        Path(str(url.database)).absolute().parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        options: dict[str, Any] = {"timeout": timeout_s * _DATABASE_SHARE}
    else:
        options = {"connect_timeout": math.ceil(timeout_s)}
        if "tcp_user_timeout" not in url.query:
            options["tcp_user_timeout"] = int(timeout_s * 1000)  # else a peer that is gone is waited for for minutes
    engine = sa.create_engine(
        url,
        connect_args=options,
        pool_size=_AT_ONCE[backend],
        max_overflow=0,
        pool_timeout=timeout_s,
        pool_pre_ping=backend != "sqlite",  # a file does not hang up
    )
    try:
        if backend == "sqlite":
            limit_ms = options["timeout"] * 1000
            sa.event.listen(engine, "connect", lambda _, record: record.info.update({_LIMIT_MS: limit_ms}))
            # Readers and the writer do not wait for each other then. It lasts, so who fails now need not care.
            with contextlib.suppress(DBAPIError), engine.connect() as connection:
                connection.exec_driver_sql("PRAGMA journal_mode=WAL")
        create = CreateTable(Conversation.__table__, if_not_exists=True)  # type: ignore[attr-defined]
        try:
            with engine.begin() as connection:
                connection.execute(create)
        except (IntegrityError, ProgrammingError):
            # On PostgreSQL two that create one table at once may both get past "if not exists"; it tells the later one
            # that the name is taken, in one of its catalogues or the other.
            with engine.begin() as connection:
                connection.execute(create)
    except BaseException:
        engine.dispose()
        raise
    return engine


def _in_transaction(connection: sa.Connection, work: Callable[[sa.Connection], T], deadline: float) -> T:
    left_ms = int((deadline - time.monotonic()) * _DATABASE_SHARE * 1000)
    if left_ms <= 0:
        raise TimeoutError  # the caller has given up, and a write that comes this late could undo a newer one
    with _limited(connection, left_ms):
        result = work(connection)
        connection.commit()
        return result


_NEARLY = 0.9
_LIMIT_MS = "hermes_pool_limit_ms"
"""Where a connection of the store's own engine (SQLite) keeps the time limit that it was made with."""


@contextlib.contextmanager
def _limited(connection: sa.Connection, limit_ms: int) -> Any:
    """Make the database give up after ``limit_ms``, here and on no later use of the connection."""
    if connection.dialect.name == "postgresql":
        connection.execute(
            sa.text("SELECT set_config('statement_timeout', :limit, true), set_config('lock_timeout', :limit, true)"),
            {"limit": f"{limit_ms}ms"},
        )
        yield
        return
    if limit_ms >= _NEARLY * connection.info.get(_LIMIT_MS, math.inf):
        yield  # it has about this limit from the start
        return
    before = connection.exec_driver_sql("PRAGMA busy_timeout").scalar_one()
    connection.exec_driver_sql(f"PRAGMA busy_timeout={limit_ms}")
    try:
        yield
    finally:
        with contextlib.suppress(SQLAlchemyError):
            connection.exec_driver_sql(f"PRAGMA busy_timeout={int(before)}")


def _column_of(model: type[Any], name: str) -> sa.Column[Any]:
    """Return the column of an attribute, or of that name."""
    try:
        mapper = sa.inspect(model)
    except NoInspectionAvailable:
        raise SettingsError(f"{model!r} is no mapped class: give a SQLModel with table=True") from None
    for columns in (mapper.columns, mapper.local_table.c):
        if isinstance(found := columns.get(name), sa.Column):
            return found
    raise SettingsError(f"{model.__name__} has no column {name!r}; it has {', '.join(mapper.columns.keys())}")


def _sql_for(dialect: sa.Dialect, id_column: sa.Column[Any], state_column: sa.Column[Any]) -> JsonSql:
    quote = dialect.identifier_preparer
    names = [quote.format_table(id_column.table), quote.format_column(id_column), quote.format_column(state_column)]
    if quote.quote("%") != '"%"':
        names = [name.replace("%%", "%") for name in names]  # text() doubles them for the driver once more
    return BY_DIALECT[dialect.name](*(name.replace(":", r"\:") for name in names))  # a colon begins a parameter


# --- values ---------------------------------------------------------------------------------------------------------


_KINDS = {list: "list", str: "text", bool: "truth value", int: "number", float: "number"}


def why_not_writable(stored: str | bytes | None, keys: tuple[str, ...]) -> str | None:
    """Say what keeps a column from taking an object at ``keys``; ``None`` if nothing does."""
    try:
        value = _parsed(stored.decode() if isinstance(stored, bytes) else stored) if stored is not None else None
    except (ValueError, RecursionError):
        return "agent_state is not JSON: it is left as it is, and has to be mended before anything can be stored"
    name = "agent_state"
    for key in (*keys, None):
        if value is not None and not isinstance(value, dict):
            return (
                f"{name} is a {_KINDS[type(value)]} and no object: it is left as it is, and nothing can be stored there"
            )
        if key is not None:
            value = (value or {}).get(key)
            name = f"{name}.{key}"
    schema = (value or {}).get("schema")
    if isinstance(schema, int) and schema > SCHEMA:
        return f"{name} was written by a newer hermes-pool (schema {schema}; this one knows {SCHEMA}): update this one"
    return None


def _parsed(value: str) -> Any:
    def refuse(constant: str) -> NoReturn:
        raise ValueError(constant)  # NaN and Infinity, which Python writes and no database reads

    # A number of more digits than Python converts is no reason to call a document broken.
    return json.loads(
        value, parse_constant=refuse, parse_int=lambda digits: int(digits) if len(digits) < 1000 else None
    )


def _dumped(value: dict[str, Any]) -> str:
    # Whatever else a caller may put in (bytes, a date) is kept as its text, rather than losing the record over it.
    return json.dumps(value, allow_nan=False, default=str)
