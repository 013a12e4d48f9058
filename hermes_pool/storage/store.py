"""What the pool keeps of each session in a database, inside the JSON column ``agent_state`` that Jarvis writes too.

The table is the pool's own or one of Jarvis' (its engine, its model, its column), on SQLite or PostgreSQL. Only two
members are ever written, ``runtime_state.hermes`` and ``runtime``, each by one atomic statement (``json_sql``). What
recovery needs is kept in tables of the pool's own as well (``own_tables``).
"""

import asyncio
import contextlib
import json
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self, TypeVar, cast

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, IntegrityError, NoInspectionAvailable, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.orm import registry
from sqlmodel import Field, SQLModel

from hermes_pool.errors import InvalidKeyError, InvalidMessageError, SettingsError, StateNotWritableError, StoreError
from hermes_pool.settings import SessionKey
from hermes_pool.storage.engine import CONCURRENCY, check_dialect, make_engine, run_in_transaction, supported_url
from hermes_pool.storage.json_sql import BY_DIALECT, JsonSql, leaf_path
from hermes_pool.storage.own_tables import OwnTables, RecordedTurn
from hermes_pool.storage.record import SCHEMA, SessionRecord
from hermes_pool.system.log import logger
from hermes_pool.system.threads import in_thread

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine  # needs greenlet, which hosts without such an engine may lack

T = TypeVar("T")


class _OwnTables(SQLModel, registry=registry()):
    """Keeps the table below out of ``SQLModel.metadata``, where Jarvis may have its own ``conversation``."""


class Conversation(_OwnTables, table=True):
    """The pool's own table, used where Jarvis provides none."""

    id: str = Field(primary_key=True)
    """The conversation's id."""
    agent_state: dict[str, Any] | None = Field(default=None, sa_column=sa.Column(sa.JSON, nullable=True))
    """``{"runtime": ..., "runtime_state": {"hermes": ...}}``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundSession:
    """What is stored of a session."""

    record: SessionRecord | None = None
    notice: str | None = None
    """What a person should know about it."""
    open_turn: RecordedTurn | None = None
    """A turn with an id of the host's in which the host ended."""
    refusal: "StateNotWritableError | None" = None
    """Why what is stored cannot be understood."""


class ConversationStore:
    """The sessions in one table. Used by one event loop at a time; every operation ends within ``timeout_s`` seconds.

    ``engine`` is yours, sync or async, and ``close`` leaves it open (``from_url`` makes one of its own). ``model`` is a
    mapped class; ``id_column`` and ``state_column`` name two of its attributes or columns. With ``create_rows`` a
    conversation that has no row gets one, which requires that all other columns are nullable or have a default in the
    database. Without it, saving to a missing row raises ``StateNotWritableError``.

    Operations raise ``StoreError`` if the database does not answer in time or reports an error, and
    ``StateNotWritableError`` if the stored value must not be changed. The constructor raises ``SettingsError`` for an
    engine or a model that cannot be used.
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
            raise SettingsError(f"timeout_s must be greater than 0, not {timeout_s!r}")
        url, dialect = (engine, engine.get_dialect()()) if isinstance(engine, sa.URL) else (engine.url, engine.dialect)
        check_dialect(dialect.name)
        self._own_url = engine if isinstance(engine, sa.URL) else None
        self._engine = None if isinstance(engine, sa.URL) else engine
        self._password = None if url.password is None else str(url.password)
        self._id = _column_of(model, id_column)
        self._sql = _sql_for(dialect, self._id, _column_of(model, state_column))
        self._create_rows = create_rows
        self._timeout_s = timeout_s
        self._concurrency = CONCURRENCY[dialect.name]
        self._slots = asyncio.Semaphore(self._concurrency)
        self._statements: dict[str, Any] = {}
        self._making_engine = threading.Lock()
        self._closed = False
        self._own = OwnTables()
        self._told = False  # that they cannot be made

    @classmethod
    def from_url(cls, url: str | sa.URL, timeout_s: float = 10.0) -> Self:
        """Return a store with its own engine and table (``Conversation``), both created at first use.

        ``url`` is ``sqlite:///path`` (the folder is created and WAL switched on) or ``postgresql://...`` (psycopg).
        Raises ``SettingsError`` for any other URL, or a driver that is not installed.
        """
        return cls(supported_url(url), create_rows=True, timeout_s=timeout_s)

    async def prepare(self) -> None:
        """Connect, and create what is missing of the store's own file, folder and table."""
        await self._run(lambda _: None)

    async def load(self, key: SessionKey) -> SessionRecord | None:
        """Return the record of a session, or ``None`` if there is none.

        Raises ``StateNotWritableError`` if what is stored cannot be understood: an ``agent_state`` that is not an
        object, or a record of a newer version. A known session is therefore never mistaken for a new one.
        """

        def work(connection: sa.Connection) -> SessionRecord | None:
            row = connection.execute(self._statement(self._sql.load(key.user_id)), self._parameters(key)).one_or_none()
            if row is None:
                return None
            is_readable, stored = row
            if not is_readable:
                self._raise_refusal(connection, key.conversation_id, leaf_path(key.user_id))
            return None if stored is None else SessionRecord.from_json(_parsed(stored))

        return await self._run(work, key.conversation_id)

    async def find(self, key: SessionKey) -> FoundSession:
        """Return what is stored of a session: in ``agent_state`` or, where that has lost it or is older, in our table.

        Raises what ``load`` raises.
        """
        return await self._run(lambda connection: self._find(connection, key), key.conversation_id)

    def find_within(self, connection: sa.Connection, key: SessionKey) -> FoundSession:
        """Do the same in a transaction of ``within``; what ``find`` raises for what is stored is the ``refusal``."""
        try:
            return self._find(connection, key)
        except StateNotWritableError as error:
            return FoundSession(refusal=error)

    def _find(self, connection: sa.Connection, key: SessionKey) -> FoundSession:
        row = connection.execute(self._statement(self._sql.load(key.user_id)), self._parameters(key)).one_or_none()
        if row is not None and not row[0]:
            self._raise_refusal(connection, key.conversation_id, leaf_path(key.user_id))
        stored = None if row is None or row[1] is None else SessionRecord.from_json(_parsed(row[1]))
        if not self._own.ready_to_read(connection):
            return FoundSession(record=stored)
        text = self._own.load(connection, key)
        own = None if text is None else SessionRecord.from_json(_parsed(text))
        open_turn = self._own.open_turn(connection, key)
        if own is None or own.session_id is None or own.schema > SCHEMA:
            return FoundSession(record=stored, open_turn=open_turn)
        if stored is None or stored.session_id is None:
            return FoundSession(record=own, notice=_LOST, open_turn=open_turn)
        if stored.turns < own.turns:
            return FoundSession(record=own, notice=_STALE, open_turn=open_turn)
        return FoundSession(record=stored, open_turn=open_turn)

    async def within(self, work: Callable[[sa.Connection], T], conversation_id: str | None = None) -> T:
        """Do ``work`` in one transaction, off the event loop's thread, and return its result. Raises ``StoreError``."""
        return await self._run(work, conversation_id)

    async def begin_turn(self, key: SessionKey, turn_id: str, digest: str, text: str) -> RecordedTurn | None:
        """Record that a turn with an id of the host's is about to run; return what is recorded if the id is not new."""

        def work(connection: sa.Connection) -> RecordedTurn | None:
            if not self._own.ready_to_write(connection) or self._own.begin_turn(connection, key, turn_id, digest, text):
                return None
            return self._own.turn(connection, key, turn_id)

        return await self._run(work, key.conversation_id)

    async def end_turn(self, key: SessionKey, turn_id: str, outcome: str | None) -> None:
        """Record the outcome of such a turn, as JSON; ``None`` forgets it, so that it may run again."""

        def work(connection: sa.Connection) -> None:
            if self._own.ready_to_write(connection):
                self._own.end_turn(connection, key, turn_id, outcome)

        await self._run(work, key.conversation_id)

    async def merge(self, conversation_id: str, state: Mapping[str, Any]) -> None:
        """Merge ``state`` into ``runtime_state``, in one atomic statement: ``{"jarvis": {"mood": "calm"}}``.

        Objects are merged at every level, any other value replaces what is there, and ``None`` removes a member (RFC
        7396). All else in the column stays as it is, whoever writes it meanwhile. Raises ``InvalidMessageError`` for
        the member ``hermes``, which is the pool's, and what ``save`` raises.
        """
        if "hermes" in state:
            raise InvalidMessageError(
                "runtime_state.hermes is the pool's: write beside it", conversation_id=conversation_id
            )
        document = {"runtime_state": dict(state)}
        sql, values = self._sql.merge(document, create=self._create_rows)
        await self._write(
            sql,
            {"id": self._row_id(conversation_id), **values},
            _without_none(document),
            conversation_id,
            ("runtime_state",),
        )

    async def save(self, key: SessionKey, record: SessionRecord) -> None:
        """Store ``record``. Everything else in ``agent_state`` is kept, unknown members of the session included.

        If the session has completed a turn and no ``runtime`` is named yet, ``runtime`` becomes "hermes".
        """
        members = record.to_json()
        claim = {"runtime": "hermes"} if record.turns > 0 else {}
        document: Any = {name: value for name, value in members.items() if value is not None}
        for name in reversed(leaf_path(key.user_id)):
            document = {name: document}
        values = self._parameters(key) | {"members": _dumped(members), "claim": _dumped(claim)}
        sql = self._sql.save(key.user_id, create=self._create_rows)

        def save_own(connection: sa.Connection) -> None:
            if self._own.ready_to_write(connection):
                self._own.save(connection, key, record.turns, _dumped(members))

        await self._write(sql, values, claim | document, key.conversation_id, leaf_path(key.user_id), then=save_own)
        if self._own.refused is not None and not self._told:
            self._told = True
            log = logger()
            log.warning("own_tables_failed", error=self._own.refused)

    async def set_runtime(self, conversation_id: str, runtime: Literal["hermes", "jarvis"]) -> None:
        """Choose which runtime answers this conversation. Writes ``runtime`` and nothing else."""
        claim = {"runtime": runtime}
        values = {"id": self._row_id(conversation_id), "claim": _dumped(claim)}
        sql = self._sql.set_runtime(create=self._create_rows)
        await self._write(sql, values, claim, conversation_id, ())

    async def records(self, limit: int = 1000) -> list[tuple[SessionKey, SessionRecord]]:
        """Return up to ``limit`` stored sessions, most recently used first. Unreadable ones are left out."""

        def work(connection: sa.Connection) -> list[tuple[SessionKey, SessionRecord]]:
            statement = sa.text(self._sql.records()).columns(
                sa.column("id", self._id.type), sa.column("user_id"), sa.column("value"), sa.column("used")
            )
            found = []
            for conversation_id, user_id, value, _ in connection.execute(statement, {"limit": limit}):
                with contextlib.suppress(InvalidKeyError, ValueError):
                    record = SessionRecord.from_json(_parsed(value))
                    if record.schema <= SCHEMA:
                        found.append((SessionKey(str(conversation_id), user_id), record))
            return found

        return await self._run(work)

    async def close(self) -> None:
        """Wait up to ``timeout_s`` seconds for running operations, and close the store's own connections."""
        self._closed = True
        taken = 0
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._timeout_s):
                    while taken < self._concurrency:
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
        self,
        sql: str,
        values: dict[str, Any],
        document: dict[str, Any],
        conversation_id: str,
        keys: tuple[str, ...],
        *,
        then: Callable[[sa.Connection], None] = lambda _: None,
    ) -> None:
        if self._create_rows:
            values["document"] = _dumped(document)

        def work(connection: sa.Connection) -> None:
            if connection.execute(self._statement(sql), values).rowcount == 0:
                self._raise_refusal(connection, conversation_id, keys)
            then(connection)

        await self._run(work, conversation_id)

    def _raise_refusal(self, connection: sa.Connection, conversation_id: str, keys: tuple[str, ...]) -> NoReturn:
        """Raise the error that explains why the guard of a statement matched no row."""
        statement = self._statement(self._sql.read_raw())
        row = connection.execute(statement, {"id": self._row_id(conversation_id)}).one_or_none()
        if row is None:
            raise StateNotWritableError(
                "it has no row in the database: store the conversation before its first message",
                conversation_id=conversation_id,
            )
        reason = reason_not_writable(row[0], keys)
        if reason is None:
            raise StoreError(
                "its row was changed elsewhere at the same moment: try again", conversation_id=conversation_id
            )
        raise StateNotWritableError(reason, conversation_id=conversation_id)

    async def _run(self, work: Callable[[sa.Connection], T], conversation_id: str | None = None) -> T:
        """Do ``work`` in one transaction, off the event loop's thread and within the time limit.

        Translates every error of the database, its driver or SQLAlchemy into one of ours.
        """
        if self._closed:
            raise StoreError("the store is closed", conversation_id=conversation_id)
        deadline = time.monotonic() + self._timeout_s
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._slots.acquire()
                if self._engine is None or isinstance(self._engine, sa.Engine):
                    return await in_thread(lambda: self._run_in_thread(work, deadline), self._slots.release)
                try:
                    async with self._engine.connect() as connection:
                        return await connection.run_sync(run_in_transaction, work, deadline)
                finally:
                    self._slots.release()
        except TimeoutError as error:
            raise self._timed_out(conversation_id) from error
        except (SQLAlchemyError, OSError) as error:
            raise self._translated(error, conversation_id) from error

    def _run_in_thread(self, work: Callable[[sa.Connection], T], deadline: float) -> T:
        engine = self._engine if isinstance(self._engine, sa.Engine) else self._own_engine(deadline)
        with engine.connect() as connection:
            try:
                return run_in_transaction(connection, work, deadline)
            finally:
                if self._closed and self._own_url is not None:
                    connection.invalidate()  # the connection pool to which it would return may be closed already

    def _own_engine(self, deadline: float) -> sa.Engine:
        if not self._making_engine.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise TimeoutError
        try:
            if self._engine is None and self._own_url is not None:
                table: sa.Table = Conversation.__table__  # type: ignore[attr-defined]
                self._engine = make_engine(self._own_url, table, self._timeout_s)
            return cast(sa.Engine, self._engine)
        finally:
            self._making_engine.release()

    def _statement(self, sql: str) -> Any:
        statement = self._statements.get(sql)
        if statement is None:
            statement = self._statements[sql] = sa.text(sql).bindparams(sa.bindparam("id", type_=self._id.type))
        return statement

    def _parameters(self, key: SessionKey) -> dict[str, Any]:
        leaf = leaf_path(key.user_id)[-1]
        return {"id": self._row_id(key.conversation_id), "leaf": leaf, "schema": SCHEMA}

    def _row_id(self, conversation_id: str) -> Any:
        """Return the id in the column's type: the ids of Jarvis may be numbers or UUIDs."""
        kind: Any = None
        with contextlib.suppress(NotImplementedError):
            kind = self._id.type.python_type
        if kind not in (int, uuid.UUID):
            return conversation_id
        with contextlib.suppress(ValueError):
            if str(converted := kind(conversation_id)) == conversation_id:  # otherwise two ids could mean one row
                return converted
        raise InvalidKeyError(
            f"the id is not a canonical {kind.__name__}, the type of this table's ids: pass the id of a row",
            conversation_id=conversation_id,
        )

    # --- errors ---

    def _timed_out(self, conversation_id: str | None) -> StoreError:
        return StoreError(
            f"the database did not answer within {self._timeout_s:g} s: check that it is up and that no other "
            "transaction holds a lock",
            conversation_id=conversation_id,
        )

    def _translated(self, error: Exception, conversation_id: str | None) -> StoreError:
        """Return our error for one of SQLAlchemy's or the driver's. Hides the password, which theirs may quote."""
        cause = getattr(error, "orig", None) or error
        code = getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None)
        if code in ("22P02", "22P05"):
            return StateNotWritableError(
                r"agent_state is not valid JSON, or contains \u0000 or an unpaired surrogate, which PostgreSQL cannot "
                "process. It was left unchanged: repair it before the next message",
                conversation_id=conversation_id,
            )
        detail = f"{type(cause).__name__}: {(str(cause).strip().splitlines() or [''])[0][:200]}"
        if self._password:
            detail = detail.replace(self._password, "***")
        if isinstance(error, IntegrityError):
            return StateNotWritableError(
                f"it has no row, and none can be created because the table requires more columns ({detail}): store the "
                "conversation before its first message",
                conversation_id=conversation_id,
            )
        if isinstance(error, PoolTimeoutError):
            return StoreError(
                "no database connection became free in time: give the engine a larger connection pool",
                conversation_id=conversation_id,
            )
        no_folder = isinstance(error, OSError) and error.filename is not None
        if self._own_url is not None and (no_folder or "unable to open database file" in str(cause)):
            return StoreError(
                f"the database file {self._own_url.database} cannot be opened ({detail}): it must be a file, in a "
                "folder that this user can write; name another one with database_url",
                conversation_id=conversation_id,
            )
        # 55P03 is lock_timeout, 57014 statement_timeout. SQLite has only a message.
        if code in ("55P03", "57014") or (isinstance(error, DBAPIError) and "locked" in str(cause)):
            return self._timed_out(conversation_id)
        return StoreError(
            f"the database cannot be used ({detail}): check that it is up and has the table",
            conversation_id=conversation_id,
        )


# --- columns and SQL --------------------------------------------------------------------------------------------------


def _column_of(model: type[Any], name: str) -> sa.Column[Any]:
    """Return the column behind an attribute of the model, or the column of that name."""
    try:
        mapper = sa.inspect(model)
    except NoInspectionAvailable:
        raise SettingsError(f"{model!r} is not a mapped class: pass a SQLModel class with table=True") from None
    for columns in (mapper.columns, mapper.local_table.c):
        if isinstance(found := columns.get(name), sa.Column):
            return found
    raise SettingsError(f"{model.__name__} has no column {name!r}; its columns are {', '.join(mapper.columns.keys())}")


def _sql_for(dialect: sa.Dialect, id_column: sa.Column[Any], state_column: sa.Column[Any]) -> JsonSql:
    quote = dialect.identifier_preparer
    names = [quote.format_table(id_column.table), quote.format_column(id_column), quote.format_column(state_column)]
    if quote.quote("%") != '"%"':
        names = [name.replace("%%", "%") for name in names]  # text() doubles them again, for the driver
    return BY_DIALECT[dialect.name](
        *(name.replace(":", r"\:") for name in names)
    )  # a bare colon would begin a parameter


# --- values ---------------------------------------------------------------------------------------------------------


_LOST = "agent_state had lost this session, and it was found again in the pool's own table."
_STALE = "agent_state held an older state of this session; the newer one was found in the pool's own table."
_JSON_TYPES = {list: "an array", str: "a string", bool: "a boolean", int: "a number", float: "a number"}


def reason_not_writable(stored: str | bytes | None, keys: tuple[str, ...]) -> str | None:
    """Return why a column with this content cannot hold an object at ``keys``; ``None`` if it can."""
    try:
        value = _parsed(stored.decode() if isinstance(stored, bytes) else stored) if stored is not None else None
    except (ValueError, RecursionError):
        return "agent_state is not valid JSON and was left unchanged: repair it before the next message"
    name = "agent_state"
    for key in (*keys, None):
        if value is not None and not isinstance(value, dict):
            return (
                f"{name} is {_JSON_TYPES[type(value)]}, not an object, and was left unchanged: repair it before the "
                "next message"
            )
        if key is not None:
            value = (value or {}).get(key)
            name = f"{name}.{key}"
    schema = (value or {}).get("schema")
    if isinstance(schema, int) and schema > SCHEMA:
        return (
            f"{name} was written by a newer hermes-pool (schema {schema}, this one supports {SCHEMA}): upgrade "
            "hermes-pool here"
        )
    return None


def _parsed(value: str) -> Any:
    def refuse(constant: str) -> NoReturn:
        raise ValueError(constant)  # NaN and Infinity: Python writes them, but no database reads them

    # A number with more digits than Python converts does not make a document invalid.
    return json.loads(
        value, parse_constant=refuse, parse_int=lambda digits: int(digits) if len(digits) < 1000 else None
    )


def _without_none(value: Any) -> Any:
    """Return a merge patch as the document that it makes of nothing."""
    if not isinstance(value, Mapping):
        return value
    return {name: _without_none(each) for name, each in value.items() if each is not None}


def _dumped(value: dict[str, Any]) -> str:
    # A value that JSON does not have (bytes, a date) is stored as text: better than losing the record over it.
    return json.dumps(value, allow_nan=False, default=str)
