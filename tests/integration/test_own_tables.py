"""The pool's own tables beside Jarvis' table: what is found when ``agent_state`` has lost it, and ids of turns."""

# ruff: noqa: F811 - a fixture that is imported is named again where it is asked for
import asyncio
import json
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import registry
from sqlmodel import Field, Session, SQLModel

from hermes_pool import (
    ConversationStore,
    InvalidMessageError,
    SessionKey,
    StateNotWritableError,
    TurnIdConflictError,
    TurnInterruptedError,
)
from hermes_pool.conversation.outcomes import digest_of
from hermes_pool.storage import own_tables
from tests.integration.databases import Database, database, postgres_server, postgres_url  # noqa: F401 - fixtures
from tests.support import AGENTS, Obedient, OpenPool, until

KEY = SessionKey("c")


class _Tables(SQLModel, registry=registry()):
    pass


class Conversation(_Tables, table=True):
    id: str = Field(primary_key=True)
    title: str = ""
    agent_state: dict[str, Any] = Field(default_factory=dict, sa_column=sa.Column(sa.JSON))


@pytest.fixture(params=["sync", pytest.param("async", marks=pytest.mark.slow)])
async def engine(request: pytest.FixtureRequest, database: Database, nothing_left: None) -> AsyncIterator[Any]:
    """Jarvis' engine, its table in it, and its conversation."""
    url = sa.make_url(database.url)
    sync = url.set(drivername="sqlite" if database.is_sqlite else "postgresql+psycopg")
    made = sa.create_engine(sync)
    _Tables.metadata.create_all(made)
    with Session(made) as jarvis:
        jarvis.add(Conversation(id="c", agent_state={"runtime_state": {"jarvis": {"x": 1}}}))
        jarvis.commit()
    if request.param == "sync":
        yield made
        made.dispose()
        return
    made.dispose()
    asynchronous = create_async_engine(url.set(drivername="sqlite+aiosqlite") if database.is_sqlite else sync)
    yield asynchronous
    await asynchronous.dispose()


def store(engine: Any) -> ConversationStore:
    return ConversationStore(engine, Conversation, create_rows=False)


def overwrite(database: Database, document: dict[str, Any]) -> None:
    """Write the whole column, as an ORM does."""
    database.sql("UPDATE conversation SET agent_state = ? WHERE id = 'c'", json.dumps(document))


async def stored_session(database: Database) -> str:
    def look() -> str | None:
        state = json.loads(database.text_of_state("c") or "{}")
        session_id: str | None = state.get("runtime_state", {}).get("hermes", {}).get("session_id")
        return session_id

    return await until(look, "the session to be stored")


async def test_a_session_that_jarvis_has_overwritten_is_found_and_told(
    database: Database, engine: Any, open_pool: OpenPool
) -> None:
    pool = await open_pool(store=store(engine))
    first = await pool.send("c", "I am Ada")
    await stored_session(database)
    await pool.close()
    overwrite(database, {"runtime_state": {"jarvis": {"x": 2}}})

    pool = await open_pool(store=store(engine))
    reply = await pool.send("c", "/first")
    assert (reply.text, reply.session_id) == ("I am Ada", first.session_id)
    assert reply.notice is not None
    assert "had lost this session" in reply.notice
    assert (await pool.send("c", "/count")).notice is None
    assert await stored_session(database) == first.session_id
    state = json.loads(database.text_of_state("c") or "")
    assert state["runtime_state"]["jarvis"] == {"x": 2}


@pytest.mark.parametrize("rounds", [2, pytest.param(20, marks=pytest.mark.slow)])
async def test_a_handler_that_writes_the_column_back_after_each_message_loses_no_session(
    database: Database, engine: Any, open_pool: OpenPool, rounds: int
) -> None:
    """The commonest handler: it loads the row, sends, changes ``agent_state`` and commits all of it."""
    found = []
    for number in range(rounds):
        pool = await open_pool(store=store(engine))
        loaded = json.loads(database.text_of_state("c") or "{}")
        reply = await pool.send("c", f"message {number}")
        await pool.close()
        loaded["runtime_state"]["jarvis"] = {"x": number}
        overwrite(database, loaded)
        found.append((reply.session_id, (await count_of(database, engine, open_pool))))
    assert found == [(found[0][0], str(number)) for number in range(2, 2 * rounds + 2, 2)]
    state = json.loads(database.text_of_state("c") or "")
    assert state["runtime_state"]["jarvis"] == {"x": rounds - 1}


async def count_of(database: Database, engine: Any, open_pool: OpenPool) -> str:
    """How many messages the next host finds in the session, its own question included."""
    pool = await open_pool(store=store(engine))
    reply = await pool.send("c", "/count")
    await stored_session(database)
    await pool.close()
    return reply.text


async def test_an_older_state_that_jarvis_has_brought_back_does_not_win(
    database: Database, engine: Any, open_pool: OpenPool
) -> None:
    pool = await open_pool(store=store(engine))
    await pool.send("c", "one")
    await stored_session(database)
    await pool.send("c", "two")
    old = json.loads(database.text_of_state("c") or "")
    await pool.close()
    old["runtime_state"]["hermes"] |= {"session_id": "echo-of-long-ago", "turns": 1}
    overwrite(database, old)

    pool = await open_pool(store=store(engine))
    reply = await pool.send("c", "/count")
    assert reply.text == "3"
    assert "older state" in (reply.notice or "")


async def test_without_the_right_to_make_tables_all_else_works(
    database: Database, engine: Any, open_pool: OpenPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = sa.Table("no", sa.MetaData(), sa.Column("x", sa.Text, server_default=sa.text("no such function()")))
    monkeypatch.setattr(own_tables, "TABLES", (broken,))
    pool = await open_pool(store=store(engine))
    turn = await pool.start("c", "one", turn_id="m1")
    assert (await turn.reply()).text == "one"
    await stored_session(database)
    await pool.close()
    pool = await open_pool(store=store(engine))
    assert (await pool.send("c", "/first")).text == "one"


def test_the_documented_statements_are_those_that_make_the_tables() -> None:
    printed = [sys.executable, "-m", "hermes_pool.storage.own_tables"]
    made = subprocess.run(printed, capture_output=True, text=True, check=True).stdout
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "your-own-table.md").read_text()
    assert made in page


async def test_the_tables_are_as_documented(database: Database, engine: Any, open_pool: OpenPool) -> None:
    pool = await open_pool(store=store(engine))
    await pool.send("c", "one")
    await stored_session(database)
    await until(lambda: database.sql("SELECT id FROM hermes_pool_session") == [("c",)], "the record in our table")
    assert database.sql("SELECT count(*) FROM hermes_pool_turn") == [(0,)]


# --- ids of turns -----------------------------------------------------------------------------------------------------


async def test_a_message_that_is_sent_again_after_a_restart_is_answered_and_not_run(
    database: Database, engine: Any, open_pool: OpenPool
) -> None:
    pool = await open_pool(store=store(engine))
    turn = await pool.start("c", "buy milk", turn_id="m1")
    first = await turn.reply()
    again = await pool.start("c", "buy milk", turn_id="m1")
    assert again == turn
    with pytest.raises(TurnIdConflictError):
        await pool.start("c", "buy bread", turn_id="m1")
    await pool.close()

    pool = await open_pool(store=store(engine))
    again = await pool.start("c", "buy milk", turn_id="m1")
    assert (await again.reply()) == first
    assert (await pool.send("c", "/count")).text == "2"
    await pool.close()
    pool = await open_pool(store=store(engine))
    other = await pool.start("c", "buy bread", turn_id="m1")
    with pytest.raises(TurnIdConflictError):
        await other.reply()


async def test_any_message_can_have_an_id(database: Database, engine: Any, open_pool: OpenPool) -> None:
    pool = await open_pool(store=store(engine))
    for number, text in enumerate(("x" * 2**20 + "\N{GRINNING FACE}", "half \ud83d", "nul \0", "")):
        turn = await pool.start("c", text, turn_id=f"m{number}\N{GRINNING FACE}")
        assert (await turn.reply()).outcome == "completed"
        assert await pool.start("c", text, turn_id=f"m{number}\N{GRINNING FACE}") == turn
    for wrong in ("\ud83d", "nul \0"):
        with pytest.raises(InvalidMessageError, match="database can store"):
            await pool.start("c", "text", turn_id=wrong)
    await pool.close()
    pool = await open_pool(store=store(engine))
    turn = await pool.start("c", "half \ud83d", turn_id="m1\N{GRINNING FACE}")
    assert (await turn.reply()).text == "half \ufffd"
    assert (await pool.send("c", "/count")).text == "5"


async def test_the_latest_ids_are_kept(database: Database, engine: Any, open_pool: OpenPool) -> None:
    pool = await open_pool(store=store(engine))
    count = own_tables.TURNS_KEPT + 5
    for number in range(count):
        await (await pool.start("c", f"text {number}", turn_id=f"m{number}")).reply()
    await pool.close()
    kept = [row[0] for row in database.sql("SELECT turn_id FROM hermes_pool_turn ORDER BY begun_at")]
    assert kept == [f"m{number}" for number in range(5, count)]


async def test_a_refused_message_may_come_again(open_pool: OpenPool, obedient: Obedient) -> None:
    pool = await open_pool(**obedient.settings(), busy="reject")
    running = await pool.start("c", "wait go", turn_id="m1")
    await until(lambda: obedient.marks("begun"), "the turn to run")
    with pytest.raises(Exception, match="reject"):
        await pool.start("c", "second", turn_id="m2")
    obedient.allow("go")
    await running.reply()
    assert (await (await pool.start("c", "second", turn_id="m2")).reply()).text == "second"


# --- merge ------------------------------------------------------------------------------------------------------------


async def test_merge_changes_what_it_names_and_nothing_else(database: Database, engine: Any) -> None:
    ours = store(engine)
    overwrite(
        database,
        {"a": 1, "runtime_state": {"hermes": {"session_id": "s"}, "jarvis": {"x": 1, "deep": {"y": [1], "z": 2}}}},
    )
    await ours.merge("c", {"jarvis": {"x": None, "deep": {"y": {"new": True}}, "b": "é'\"\\"}, "other": 5})
    assert json.loads(database.text_of_state("c") or "") == {
        "a": 1,
        "runtime_state": {
            "hermes": {"session_id": "s"},
            "jarvis": {"deep": {"y": {"new": True}, "z": 2}, "b": "é'\"\\"},
            "other": 5,
        },
    }
    with pytest.raises(InvalidMessageError, match="pool's"):
        await ours.merge("c", {"hermes": {}})
    with pytest.raises(StateNotWritableError):
        await ours.merge("unknown", {"jarvis": {}})
    overwrite(database, {"runtime_state": []})
    with pytest.raises(StateNotWritableError):
        await ours.merge("c", {"jarvis": {}})


async def test_concurrent_merges_and_saves_lose_nothing(database: Database, engine: Any, open_pool: OpenPool) -> None:
    ours = store(engine)
    pool = await open_pool(store=ours)
    await asyncio.gather(
        *(ours.merge("c", {"jarvis": {f"k{number}": number}}) for number in range(30)),
        *(pool.send("c", f"message {number}") for number in range(5)),
    )
    session = await stored_session(database)
    state = json.loads(database.text_of_state("c") or "")["runtime_state"]
    assert state["jarvis"] == {"x": 1, **{f"k{number}": number for number in range(30)}}
    assert state["hermes"]["session_id"] == session


# --- a host that ended in a turn --------------------------------------------------------------------------------------


def begun(database: Database, turn_id: str, text: str) -> None:
    """Record a turn as begun and nothing more, as a host leaves it that was killed in it."""
    database.sql(
        "INSERT INTO hermes_pool_turn (id, user_id, turn_id, begun_at, digest, text) VALUES ('c', '', ?, 1.0, ?, ?)",
        turn_id, digest_of(text), text,
    )  # fmt: skip


async def test_what_was_complete_when_the_host_ended_is_delivered_and_not_run(
    database: Database, engine: Any, open_pool: OpenPool, tmp_path: Path
) -> None:
    pool = await open_pool(store=store(engine))
    session_id = (await (await pool.start("c", "one", turn_id="m1")).reply()).session_id
    await pool.close()
    (history,) = (tmp_path / "state").rglob(f"{session_id}.jsonl")
    with history.open("a") as file:
        file.write('"two"\n')  # the worker had finished; nobody heard of it
    begun(database, "m2", "two")

    pool = await open_pool(store=store(engine))
    reply = await (await pool.start("c", "two", turn_id="m2")).reply()
    assert (reply.text, reply.turn_id) == ("two", "m2")
    assert "The host ended" in (reply.notice or "")
    assert (await pool.send("c", "/count")).text == "3"
    await pool.close()
    pool = await open_pool(store=store(engine))
    assert (await (await pool.start("c", "two", turn_id="m2")).reply()).text == "two"
    assert (await pool.send("c", "/count")).text == "4"


async def test_what_had_done_nothing_when_the_host_ended_runs(
    database: Database, engine: Any, open_pool: OpenPool
) -> None:
    pool = await open_pool(store=store(engine))
    await (await pool.start("c", "one", turn_id="m1")).reply()
    await pool.close()
    begun(database, "m2", "two")
    begun(database, "m3", "three")
    pool = await open_pool(store=store(engine))
    assert (await pool.send("c", "/count")).text == "2"  # another message comes first
    assert (await (await pool.start("c", "two", turn_id="m2")).reply()).text == "two"
    assert (await (await pool.start("c", "three", turn_id="m3")).reply()).text == "three"
    assert (await pool.send("c", "/count")).text == "5"


HOST = """
    import asyncio
    from hermes_pool import ConversationStore, HermesSessionManager, PoolSettings

    async def main():
        settings = PoolSettings(
            agent="obedient:Agent", agent_paths=({agents!r},), agent_options={{"folder": {folder!r}}},
            state_dir={state!r},
        )
        async with HermesSessionManager(settings) as pool:
            await (await pool.start("c", {text!r}, turn_id="m1")).reply()

    asyncio.run(main())
"""


@pytest.mark.parametrize(("text", "acts"), [("wait go", False), ("tool_then_wait go", True)])
async def test_a_host_that_is_killed_in_a_turn_with_an_id(
    open_pool: OpenPool, obedient: Obedient, tmp_path: Path, text: str, acts: bool
) -> None:
    """The next host decides as after the death of a worker: by what the agent's history shows."""
    program = HOST.format(agents=str(AGENTS), folder=str(obedient.folder), state=str(tmp_path / "state"), text=text)
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)]) as host:  # noqa: ASYNC220 - it is short
        await until(lambda: text in obedient.marks("begun"), "the turn to run")
        host.kill()
    pool = await open_pool(**obedient.settings(kept=acts))
    turn = await pool.start("c", text, turn_id="m1")
    obedient.allow("go")
    if acts:
        with pytest.raises(TurnInterruptedError) as ended:
            await turn.reply()
        assert ([tool.name for tool in ended.value.tools], ended.value.kept) == (["hammer"], True)
    else:
        assert (await turn.reply()).text == text
    assert obedient.marks("begun") == [text] * (1 if acts else 2)
    assert " True" in obedient.marks("opened")[-1], "the new worker is told of the unfinished turn"
