# ruff: noqa: F811 - a fixture that is imported is named again where it is asked for
import asyncio
import contextlib
import json
import math
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import registry
from sqlmodel import Field, SQLModel

from hermes_pool.errors import StateNotWritableError, StoreError
from hermes_pool.settings import SessionKey
from hermes_pool.storage.record import SessionRecord
from hermes_pool.storage.store import ConversationStore
from tests.integration.databases import Database, database, postgres_server, postgres_url  # noqa: F401 - fixtures
from tests.support import known, until

KEY = SessionKey("c1")
RECORD = SessionRecord(
    session_id="20260102_030405_abc",
    last_used_at="2026-01-02T03:04:05Z",
    restart_count=2,
    status="healthy",
    committed="17",
    incarnation=3,
    turns=4,
    pid=4711,
    create_time=1767322445.25,
    host="machine",
    agent="echo",
    last_error="none, really",
)
USERS = [
    "ada",
    'o\'brien "x"',
    "a.b.c",
    "$.runtime",
    "café",
    "😀",
    "back\\slash\\",
    "\\u00e9",
    " ",
    "users",
    "{}",
    ":id %s",
]


@pytest.fixture
async def store(database: Database) -> AsyncIterator[ConversationStore]:
    """Return a store over Jarvis' table, with the column type that is tested."""
    database.sql(f"CREATE TABLE conversation (id TEXT PRIMARY KEY, agent_state {database.json_type})")
    own = ConversationStore.from_url(database.url)
    yield own
    await own.close()


def put(database: Database, state: str | bytes | None, conversation_id: str = KEY.conversation_id) -> None:
    database.sql("INSERT INTO conversation (id, agent_state) VALUES (?, ?)", conversation_id, state)


def read(database: Database, conversation_id: str = KEY.conversation_id) -> Any:
    text = database.text_of_state(conversation_id)
    return None if text is None else json.loads(text)


def stored(record: SessionRecord) -> dict[str, Any]:
    return {name: value for name, value in record.to_json().items() if value is not None}


# --- what is stored, seen by plain SQL on another connection ---


@pytest.mark.parametrize(
    "start", [None, "null", "{}", '{"runtime_state": null}', '{"runtime_state": {"hermes": null}}']
)
async def test_an_empty_state_becomes_ours(store: ConversationStore, database: Database, start: str | None) -> None:
    put(database, start)
    assert await store.load(KEY) is None
    await store.save(KEY, RECORD)
    assert read(database) == {"runtime": "hermes", "runtime_state": {"hermes": stored(RECORD)}}
    assert await store.load(KEY) == RECORD


async def test_each_save_shows_its_nested_values(store: ConversationStore, database: Database) -> None:
    for turn in range(5):
        record = SessionRecord(session_id=f"s{turn}", turns=turn, last_used_at=f"2026-01-0{turn + 1}T00:00:00Z")
        await store.save(KEY, record)
        assert read(database)["runtime_state"]["hermes"] == stored(record)


async def test_a_row_that_somebody_else_wrote_keeps_everything_else(
    store: ConversationStore, database: Database
) -> None:
    theirs = (
        '{"title": "T\\u00e9\\ud83d\\ude00", "big": 1180591620717411303424, "runtime": "jarvis", "deep": {"a": [null, '
        '{"b": null}]}, "float": 1e23, "tiny": 1.50, "runtime_state": {"jarvis": {"x": null, "hermes": 1}, "hermes": '
        '{"ours_later": {"y": null}, "pid": 1, "host": "gone"}, "other": "\\\\u0000"}, "last": true}'
    )
    put(database, theirs)
    before = read(database)
    await store.save(KEY, SessionRecord(session_id="s", turns=1))
    after = read(database)
    assert after["runtime"] == "jarvis"
    hermes = after["runtime_state"].pop("hermes")
    assert hermes == {"ours_later": {"y": None}} | stored(SessionRecord(session_id="s", turns=1))
    del before["runtime_state"]["hermes"]
    assert after == before
    if database.json_type != "jsonb":  # which sorts keys and writes numbers its own way
        text = known(database.text_of_state("c1"))
        assert [key for key in after if key != "runtime_state"] == [key for key in before if key != "runtime_state"]
        assert "1e23" in text
        assert "1.50" in text


async def test_what_no_float_can_hold_survives(store: ConversationStore, database: Database) -> None:
    put(database, '{"huge": 1e400, "digits": 0.1234567890123456789012345678901234567890}')
    await store.save(KEY, RECORD)
    text = known(database.text_of_state("c1"))
    assert "0.1234567890123456789012345678901234567890" in text
    assert "1e400" in text or "1" + "0" * 400 in text


async def test_what_only_one_database_takes_is_stored_equal_on_both(
    store: ConversationStore, database: Database
) -> None:
    odd = SessionRecord(
        session_id="nul \0 half \ud83d whole 😀",
        last_error="\udc97 literal \\u0000 and \\\\u0000",
        restart_count=2**70,
        create_time=math.inf,
        host=b"bytes",  # type: ignore[arg-type] # of no type that it may have
    )
    await store.save(KEY, odd)
    assert read(database)["runtime_state"]["hermes"] == {
        "session_id": "nul \ufffd half \ufffd whole 😀",
        "last_error": "\ufffd literal \\u0000 and \\\\u0000",
        "restart_count": 2**70,
        "status": "dormant",
        "incarnation": 0,
        "turns": 0,
        "host": "b'bytes'",
        "schema": 1,
    }
    loaded = await store.load(KEY)
    assert loaded is not None
    assert loaded.restart_count == 2**70
    assert [record for _, record in await store.records()] == [loaded]


documents = st.dictionaries(
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=8),
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**80), 2**80)
        | st.floats(allow_nan=False, allow_infinity=False).map(lambda number: number or 0.0)
        | st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
        max_leaves=8,
    ),
    max_size=5,
)


@given(theirs=documents, jarvis=documents, user=st.none() | st.sampled_from(USERS), raw=st.booleans())
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_other_key_stays_equal(database: Database, theirs: Any, jarvis: Any, user: str | None, raw: bool) -> None:
    table = "CREATE TABLE IF NOT EXISTS conversation (id TEXT PRIMARY KEY, agent_state "
    database.sql(table + database.json_type + ")")
    theirs = {name: value for name, value in theirs.items() if name not in ("runtime", "runtime_state")}
    jarvis = {name: value for name, value in jarvis.items() if name != "hermes"}
    before = theirs | {"runtime_state": jarvis}
    database.sql("DELETE FROM conversation")
    put(database, json.dumps(before, ensure_ascii=not raw))
    before = read(database)  # as this database has it: jsonb makes an integer of 1e16

    async def go() -> None:
        store = ConversationStore.from_url(database.url)
        key = SessionKey("c1", user)
        await store.save(key, RECORD)
        await store.save(key, SessionRecord(session_id="s", turns=1))
        assert await store.load(key) == SessionRecord(session_id="s", turns=1)
        await store.close()

    asyncio.run(go())
    after = read(database)
    assert after.pop("runtime") == "hermes"
    del after["runtime_state"]["hermes"]
    assert json.dumps(after, sort_keys=True) == json.dumps(before, sort_keys=True)


# --- what is not ours to change ---


@pytest.mark.parametrize(
    ("state", "word"),
    [
        ("[1, 2]", "agent_state is an array"),
        ('"text"', "agent_state is a string"),
        ("17", "agent_state is a number"),
        ('{"runtime_state": "x"}', r"agent_state\.runtime_state is a string"),
        ('{"runtime_state": []}', r"agent_state\.runtime_state is an array"),
        ('{"runtime_state": {"hermes": 1}}', r"runtime_state\.hermes is a number"),
        ('{"runtime_state": {"hermes": {"schema": 2, "session_id": {}}}}', "newer hermes-pool"),
    ],
)
async def test_what_is_no_object_is_left_as_it_is(
    store: ConversationStore, database: Database, state: str, word: str
) -> None:
    put(database, state)
    before = database.text_of_state("c1")
    with pytest.raises(StateNotWritableError, match=word) as caught:
        await store.save(KEY, RECORD)
    assert caught.value.conversation_id == "c1"
    assert not caught.value.retryable
    with pytest.raises(StateNotWritableError, match=word):
        await store.load(KEY)
    assert await store.records() == []
    assert database.text_of_state("c1") == before


@pytest.mark.parametrize("users", ["7", '{"ada": [1]}', '{"ada": {"schema": 9}}'])
async def test_so_it_is_for_one_user(store: ConversationStore, database: Database, users: str) -> None:
    put(database, '{"runtime_state": {"hermes": {"users": ' + users + "}}}")
    before = database.text_of_state("c1")
    with pytest.raises(StateNotWritableError, match=r"runtime_state\.hermes\.users"):
        await store.save(SessionKey("c1", "ada"), RECORD)
    assert database.text_of_state("c1") == before


@pytest.mark.parametrize("state", ["{", "", "{'a': 1}", '{"a": NaN}', '{"runtime_state":', b"\xff\xfe{}", "1e400x"])
async def test_what_is_no_json_is_left_as_it_is(tmp_path: Path, state: str | bytes) -> None:
    database = Database(f"sqlite:///{tmp_path}/jarvis.db", "TEXT")
    store = ConversationStore.from_url(database.url)
    await store.prepare()
    put(database, state, "c1")
    put(database, "{}", "c2")
    before = database.sql("SELECT typeof(agent_state), CAST(agent_state AS BLOB) FROM conversation WHERE id = 'c1'")
    for attempt in (store.save(KEY, RECORD), store.load(KEY), store.set_runtime("c1", "jarvis")):
        with pytest.raises(StateNotWritableError, match="not valid JSON"):
            await attempt
    await store.save(SessionKey("c2"), RECORD)
    assert await store.records() == [(SessionKey("c2"), RECORD)]
    after = database.sql("SELECT typeof(agent_state), CAST(agent_state AS BLOB) FROM conversation WHERE id = 'c1'")
    assert after == before
    await store.close()


@pytest.mark.parametrize("text", ['"\\u0000"', '"\\ud83d"', '"\\udc97"', '"\\\\\\u0000"'])
async def test_postgresql_cannot_change_what_it_cannot_read(postgres_url: str, text: str) -> None:
    database = Database(postgres_url, "json")
    database.sql("CREATE TABLE conversation (id TEXT PRIMARY KEY, agent_state json)")
    store = ConversationStore.from_url(postgres_url)
    put(database, '{"theirs": ' + text + "}", "c1")
    put(database, '{"theirs": "\\\\u0000 \\ud83d\\ude00"}', "c2")
    with pytest.raises(StateNotWritableError, match="unpaired surrogate"):
        await store.save(KEY, RECORD)
    await store.save(SessionKey("c2"), RECORD)
    assert await store.records() == [(SessionKey("c2"), RECORD)]  # the broken row hides no other
    assert database.text_of_state("c1") == '{"theirs": ' + text + "}"
    await store.close()


# --- users, and who answers ---


async def test_sessions_of_users_lie_beside_each_other(store: ConversationStore, database: Database) -> None:
    await store.save(KEY, RECORD)
    for number, user in enumerate(USERS):
        await store.save(SessionKey("c1", user), SessionRecord(session_id=f"s{number}", pid=number))
    # Jarvis reads the document and writes it as its own JSON library spells it.
    for ascii_only in (True, False):
        database.sql("UPDATE conversation SET agent_state = ?", json.dumps(read(database), ensure_ascii=ascii_only))
        for number, user in enumerate(USERS):
            key = SessionKey("c1", user)
            assert known(await store.load(key)).session_id == f"s{number}"
            await store.save(key, SessionRecord(session_id=f"s{number}", turns=number))
    users = read(database)["runtime_state"]["hermes"].pop("users")
    assert users == {user: stored(SessionRecord(session_id=f"s{n}", turns=n)) for n, user in enumerate(USERS)}
    assert len(json.loads(known(database.text_of_state("c1")), object_pairs_hook=list)) == 2
    assert await store.load(KEY) == RECORD
    assert {key.user_id for key, _ in await store.records()} == {None, *USERS}
    assert await store.load(SessionKey("c1", "nobody")) is None


@pytest.mark.parametrize(
    ("start", "turns", "after"),
    [
        ("{}", 1, "hermes"),
        ("{}", 0, None),
        ('{"runtime": null}', 1, "hermes"),
        ('{"runtime": "jarvis"}', 1, "jarvis"),
        ('{"runtime": {"odd": 1}}', 1, {"odd": 1}),
        (None, 1, "hermes"),
    ],
)
async def test_a_first_turn_claims_the_conversation(
    store: ConversationStore, database: Database, start: str | None, turns: int, after: Any
) -> None:
    put(database, start)
    await store.save(KEY, SessionRecord(session_id="s", turns=turns))
    assert read(database).get("runtime") == after
    assert read(database)["runtime_state"]["hermes"]["turns"] == turns


async def test_the_runtime_is_switched_and_nothing_else(store: ConversationStore, database: Database) -> None:
    put(database, '{"a": {"b": null}, "runtime_state": {"hermes": "odd"}}')
    await store.set_runtime("c1", "hermes")
    await store.set_runtime("c1", "jarvis")
    assert read(database) == {"a": {"b": None}, "runtime_state": {"hermes": "odd"}, "runtime": "jarvis"}
    await store.set_runtime("c2", "hermes")
    assert read(database, "c2") == {"runtime": "hermes"}
    put(database, "[]", "c3")
    with pytest.raises(StateNotWritableError, match="agent_state is an array"):
        await store.set_runtime("c3", "hermes")


async def test_records_come_newest_first(store: ConversationStore, database: Database) -> None:
    put(database, '{"runtime_state": {"hermes": {"users": {}}}}', "only users")
    put(database, '{"runtime_state": {"hermes": {"schema": 2, "status": "healthy"}}}', "newer")
    put(database, '{"runtime_state": {"hermes": {"status": "dormant"}}}', "x" * 600)
    for day in (2, 3, 1):
        await store.save(SessionKey(f"c{day}"), SessionRecord(session_id="s", last_used_at=f"2026-01-0{day}T00:00:00Z"))
    await store.save(SessionKey("c0"), SessionRecord(session_id="s"))
    await store.save(SessionKey("c1", "ada"), SessionRecord(session_id="s", last_used_at="2026-01-04T00:00:00Z"))
    found = [(key.conversation_id, key.user_id) for key, _ in await store.records()]
    assert found == [("c1", "ada"), ("c3", None), ("c2", None), ("c1", None), ("c0", None)]
    assert len(await store.records(limit=2)) == 2


# --- others write too ---


async def test_two_writers_of_one_row_lose_nothing(store: ConversationStore, database: Database) -> None:
    put(database, '{"count": 0}')
    theirs = (
        "UPDATE conversation SET agent_state = json_set(agent_state, '$.count', "
        "json_extract(agent_state, '$.count') + 1)"
        if database.is_sqlite
        else "UPDATE conversation SET agent_state = CAST(agent_state AS jsonb) || jsonb_build_object('count', "
        "CAST(agent_state ->> 'count' AS int) + 1)"
    )

    def count() -> None:
        with contextlib.closing(database.connect()) as connection:
            for _ in range(300):
                connection.execute(theirs)

    writer = threading.Thread(target=count)
    writer.start()
    try:
        for turn in range(300):
            await store.save(KEY, SessionRecord(session_id="s", turns=turn))
            assert read(database)["runtime_state"]["hermes"]["turns"] == turn
    finally:
        await asyncio.to_thread(writer.join, 60)
    assert read(database)["count"] == 300
    assert read(database)["runtime_state"]["hermes"]["turns"] == 299


async def test_many_sessions_of_one_row_are_saved_at_once(store: ConversationStore) -> None:
    keys = [SessionKey("c1", f"user {number}") for number in range(40)]
    await asyncio.gather(*(store.save(key, SessionRecord(session_id=str(key.user_id))) for key in keys))
    assert sorted(known(record.session_id) for _, record in await store.records()) == sorted(
        str(key.user_id) for key in keys
    )


async def test_many_stores_make_one_table(database: Database) -> None:
    stores = [ConversationStore.from_url(database.url) for _ in range(8)]
    await asyncio.gather(*(store.prepare() for store in stores))
    await asyncio.gather(*(store.save(SessionKey(f"c{n}"), RECORD) for n, store in enumerate(stores)))
    assert len(await stores[0].records()) == 8
    await asyncio.gather(*(store.close() for store in stores))


@contextlib.contextmanager
def locked(database: Database, *, longest_s: float) -> Iterator[Callable[[], None]]:
    """Hold the row (and on SQLite the file) in a thread, until what is yielded is called, or ``longest_s`` are over."""
    held, let_go = threading.Event(), threading.Event()

    def hold() -> None:
        with contextlib.closing(database.connect()) as connection:
            connection.execute("BEGIN IMMEDIATE" if database.is_sqlite else "BEGIN")
            connection.execute("UPDATE conversation SET id = id")
            held.set()
            let_go.wait(longest_s)
            connection.execute("ROLLBACK")

    holder = threading.Thread(target=hold)
    holder.start()
    try:
        assert held.wait(10)
        yield let_go.set
    finally:
        let_go.set()
        holder.join(10)


class Latency:
    """How late the event loop wakes somebody, measured until ``stop``."""

    def __init__(self) -> None:
        self._done = False
        self._task = asyncio.create_task(self._measure())

    async def _measure(self) -> list[float]:
        late = []
        while not self._done:
            before = time.monotonic()
            await asyncio.sleep(0.005)
            late.append(time.monotonic() - before - 0.005)
        return sorted(late)

    async def stop(self) -> None:
        """Stop, and fail where it was over 100 ms; a rare hiccup of a busy machine is not the loop's."""
        self._done = True
        late = await self._task
        assert late[int(len(late) * 0.99) - 1] < 0.1
        assert late[-1] < 0.5


@pytest.mark.parametrize("mode", ["WAL", "DELETE"])
async def test_a_lock_of_three_seconds_delays_and_blocks_nobody_else(database: Database, mode: str) -> None:
    if not database.is_sqlite and mode == "DELETE":
        return  # a mode of SQLite's
    store = ConversationStore.from_url(database.url)
    keys = [SessionKey(f"c{number}") for number in range(20)]
    for key in keys:
        await store.save(key, SessionRecord(session_id="s"))
    if database.is_sqlite:
        await store.close()
        assert database.sql("PRAGMA journal_mode") == [("wal",)]
        assert database.sql(f"PRAGMA journal_mode={mode}") == [(mode.lower(),)]
        engine = sa.create_engine(database.url, connect_args={"timeout": 0.05})  # Jarvis' own, and impatient
        store = ConversationStore(engine, create_rows=False)
    latency = Latency()
    with locked(database, longest_s=3):
        began = time.monotonic()
        await asyncio.gather(*(store.save(key, RECORD) for key in keys))
        took = time.monotonic() - began
    await latency.stop()
    assert 2.5 < took < 8
    assert [record for _, record in await store.records()] == [RECORD] * 20
    if database.is_sqlite:
        with engine.connect() as connection:
            assert connection.exec_driver_sql("PRAGMA busy_timeout").scalar() == 50  # as it was
    await store.close()
    if database.is_sqlite:
        engine.dispose()


async def test_a_lock_that_outlasts_the_limit_is_an_error_in_time(store: ConversationStore, database: Database) -> None:
    await store.save(KEY, RECORD)
    quick = ConversationStore.from_url(database.url, timeout_s=1)
    await quick.prepare()
    with locked(database, longest_s=30) as let_go:
        began = time.monotonic()
        with pytest.raises(StoreError, match=r"did not answer within 1 s.*lock") as caught:
            await quick.save(KEY, SessionRecord(session_id="late"))
        assert time.monotonic() - began < 2
        assert caught.value.retryable
        assert caught.value.conversation_id == "c1"
        assert await quick.load(KEY) == RECORD  # readers do not wait
        let_go()
    await quick.save(KEY, SessionRecord(session_id="again"))
    assert known(await quick.load(KEY)).session_id == "again"
    await quick.close()


# --- a database that hangs, or is not there ---


def our_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "hermes-pool"]


@pytest.fixture
def hanging(tmp_path: Path) -> Iterator[tuple[sa.Engine, threading.Event]]:
    """Yield an engine whose statements wait for an event, for 30 s at most."""
    engine = sa.create_engine(f"sqlite:///{tmp_path}/hangs.db")
    go_on = threading.Event()
    sa.event.listen(engine, "before_cursor_execute", lambda *_: go_on.wait(30))
    yield engine, go_on
    go_on.set()
    engine.dispose()


async def test_a_thread_that_hangs_holds_up_neither_its_caller_nor_close(
    hanging: tuple[sa.Engine, threading.Event],
) -> None:
    engine, go_on = hanging
    store = ConversationStore(engine, create_rows=True, timeout_s=0.2)
    await until(lambda: not our_threads(), "the threads of earlier tests have ended")
    began = time.monotonic()
    results = await asyncio.gather(*(store.load(SessionKey(f"c{n}")) for n in range(9)), return_exceptions=True)
    assert all(isinstance(result, StoreError) for result in results)
    ours = our_threads()
    assert 0 < len(ours) <= 4
    await store.close()
    assert time.monotonic() - began < 2
    with pytest.raises(StoreError, match="closed"):
        await store.load(KEY)
    go_on.set()
    for thread in ours:
        await asyncio.to_thread(thread.join, 10)
        assert not thread.is_alive()


async def test_a_write_whose_caller_gave_up_does_not_happen_later(store: ConversationStore, database: Database) -> None:
    await store.save(KEY, RECORD)
    engine = sa.create_engine(database.url.replace("postgresql:", "postgresql+psycopg:"))
    go_on = threading.Event()
    sa.event.listen(engine, "engine_connect", lambda *_: go_on.wait(30))
    slow = ConversationStore(engine, create_rows=False, timeout_s=0.2)
    with pytest.raises(StoreError):
        await slow.save(KEY, SessionRecord(session_id="stale"))
    threads = our_threads()
    go_on.set()
    for thread in threads:
        await asyncio.to_thread(thread.join, 10)
    assert await store.load(KEY) == RECORD
    await slow.close()
    engine.dispose()


def test_a_thread_that_hangs_does_not_keep_the_interpreter(tmp_path: Path) -> None:
    program = """
        import asyncio, sys, threading
        import sqlalchemy as sa
        from hermes_pool.errors import StoreError
        from hermes_pool.settings import SessionKey
        from hermes_pool.storage.store import ConversationStore

        engine = sa.create_engine("sqlite:///" + sys.argv[1])
        sa.event.listen(engine, "before_cursor_execute", lambda *_: threading.Event().wait(60))

        async def main():
            store = ConversationStore(engine, create_rows=True, timeout_s=0.1)
            try:
                await store.load(SessionKey("c1"))
            except StoreError:
                print("in time")
            await store.close()

        asyncio.run(main())
    """
    arguments = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path / "hangs.db")]
    result = subprocess.run(arguments, capture_output=True, text=True, timeout=30, check=False)
    assert (result.returncode, result.stdout) == (0, "in time\n"), result.stderr


async def test_a_cancelled_save_leaves_the_store_usable(hanging: tuple[sa.Engine, threading.Event]) -> None:
    engine, go_on = hanging
    store = ConversationStore(engine, create_rows=True, timeout_s=5)
    tasks = [asyncio.create_task(store.load(KEY)) for _ in range(6)]
    for _ in range(3):
        await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    assert all(
        isinstance(each, asyncio.CancelledError) for each in await asyncio.gather(*tasks, return_exceptions=True)
    )
    go_on.set()
    with pytest.raises(StoreError, match="no such table"):
        await store.load(KEY)
    await store.close()


@pytest.mark.parametrize(
    "url",
    ["postgresql://ada:s3cret@127.0.0.1:1/db", "sqlite:////proc/no/such/folder/s3cret.db", "sqlite:////proc/s3cret"],
)
async def test_a_database_that_is_not_there_is_an_error_of_ours_without_secrets(url: str) -> None:
    store = ConversationStore.from_url(url, timeout_s=5)
    with pytest.raises(StoreError) as caught:
        await store.save(KEY, RECORD)
    assert "ada:s3cret" not in str(caught.value)
    assert "'c1'" in str(caught.value)
    assert caught.value.__cause__ is not None
    await store.close()


async def test_the_password_is_in_no_message(postgres_url: str) -> None:
    store = ConversationStore.from_url(sa.make_url(postgres_url).set(password="no_such_table", username="postgres"))
    store._engine = sa.create_engine(sa.make_url(postgres_url).set(drivername="postgresql+psycopg"))
    store._sql = type(store._sql)("no_such_table", "id", "agent_state")
    with pytest.raises(StoreError, match=r"UndefinedTable.*\*\*\*") as caught:
        await store.save(KEY, RECORD)
    assert "no_such_table" not in str(caught.value)
    await store.close()


# --- Jarvis' own engine, model and columns ---


def own_model(json_type: str) -> Any:
    class Base(SQLModel, registry=registry()):
        pass

    class Talk(Base, table=True):
        __tablename__ = 'odd "table": %s'
        key: str = Field(sa_column=sa.Column("talk:id %", sa.String(100), primary_key=True))
        title: str
        revision: int
        state: dict[str, Any] | None = Field(
            sa_column=sa.Column("the state", JSONB if json_type == "jsonb" else sa.JSON)
        )

    return Talk


async def exercise(store: ConversationStore) -> None:
    await store.save(KEY, RECORD)
    assert await store.load(KEY) == RECORD
    await store.save(SessionKey("c1", "ada"), SessionRecord(session_id="a"))
    await store.set_runtime("c1", "jarvis")
    assert await store.records() == [(KEY, RECORD), (SessionKey("c1", "ada"), SessionRecord(session_id="a"))]
    assert await store.load(SessionKey("c2")) is None
    with pytest.raises(StateNotWritableError, match="it has no row"):
        await store.save(SessionKey("c2"), RECORD)


EXPECTED = {
    "theirs": {"x": None},
    "runtime": "jarvis",
    "runtime_state": {"hermes": stored(RECORD) | {"users": {"ada": stored(SessionRecord(session_id="a"))}}},
}


@pytest.mark.parametrize("names", [("key", "state"), ("talk:id %", "the state")])
async def test_a_table_of_jarvis_with_its_own_names(database: Database, names: tuple[str, str]) -> None:
    Talk = own_model(database.json_type)  # noqa: N806 - it is a class
    engine = sa.create_engine(database.url.replace("postgresql:", "postgresql+psycopg:"))
    Talk.metadata.create_all(engine)
    with engine.begin() as connection:
        row = {"talk:id %": "c1", "title": "T", "revision": 7, "the state": {"theirs": {"x": None}}}
        connection.execute(sa.insert(Talk.__table__).values(row))
    store = ConversationStore(engine, Talk, id_column=names[0], state_column=names[1], create_rows=False)
    await exercise(store)
    strict = ConversationStore(engine, Talk, id_column=names[0], state_column=names[1], create_rows=True)
    with pytest.raises(StateNotWritableError, match="the table requires more"):
        await strict.save(SessionKey("c2"), RECORD)
    await store.close()
    with engine.connect() as connection:  # still Jarvis', and open
        assert [tuple(row) for row in connection.execute(sa.select(Talk.__table__))] == [("c1", "T", 7, EXPECTED)]
    engine.dispose()


async def test_an_async_engine_of_jarvis(database: Database) -> None:
    from sqlalchemy.ext.asyncio import create_async_engine

    database.sql(f"CREATE TABLE conversation (id TEXT PRIMARY KEY, agent_state {database.json_type})")
    put(database, '{"theirs": {"x": null}}')
    url = database.url.replace("sqlite:", "sqlite+aiosqlite:").replace("postgresql:", "postgresql+psycopg:")
    engine = create_async_engine(url)
    store = ConversationStore(engine, create_rows=False)
    await store.prepare()
    await exercise(store)
    assert read(database) == EXPECTED
    keys = [SessionKey("c1", f"user {number}") for number in range(20)]
    await asyncio.gather(*(store.save(key, SessionRecord(session_id=str(key.user_id))) for key in keys))
    assert len(await store.records()) == 22

    quick = ConversationStore(engine, create_rows=False, timeout_s=1)
    latency = Latency()
    with locked(database, longest_s=30) as let_go:
        began = time.monotonic()
        with pytest.raises(StoreError, match="did not answer within 1 s"):
            await quick.save(KEY, SessionRecord(session_id="late"))
        assert time.monotonic() - began < 2
        let_go()
    await latency.stop()
    await quick.save(KEY, RECORD)
    await quick.close()
    await store.close()
    async with engine.connect() as connection:  # still Jarvis', and open
        assert (await connection.exec_driver_sql("SELECT count(*) FROM conversation")).scalar() == 1
    await engine.dispose()


async def test_the_loop_goes_on_during_the_first_use(tmp_path: Path, postgres_url: str) -> None:
    for url in (f"sqlite:///{tmp_path}/new/folder/pool.db", postgres_url):
        latency = Latency()
        store = ConversationStore.from_url(url)
        await store.prepare()
        await latency.stop()
        await store.close()
    assert (tmp_path / "new/folder").stat().st_mode & 0o777 == 0o700


def test_operations_run_on_other_threads_than_the_loops(tmp_path: Path) -> None:
    engine = sa.create_engine(f"sqlite:///{tmp_path}/pool.db")
    seen: set[str] = set()
    sa.event.listen(engine, "before_cursor_execute", lambda *_: seen.add(threading.current_thread().name))

    async def go() -> None:
        store = ConversationStore(engine, create_rows=True)
        with pytest.raises(StoreError, match="no such table"):
            await store.save(KEY, RECORD)
        await store.close()

    # Jarvis' default executor is full, and that is none of our business.
    with ThreadPoolExecutor(1) as pool:
        pool.submit(asyncio.run, go()).result(30)
    assert seen == {"hermes-pool"}
    engine.dispose()


def test_sqlite_itself_is_new_enough_for_these_tests() -> None:
    assert sqlite3.sqlite_version_info >= (3, 35)


def test_it_is_imported_without_greenlet_and_without_a_driver() -> None:
    program = """if True:
        import sys
        sys.modules["greenlet"] = None  # as if it were not installed
        import hermes_pool.storage.store
        sys.exit(len({"psycopg", "aiosqlite"} & set(sys.modules)))
    """
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
