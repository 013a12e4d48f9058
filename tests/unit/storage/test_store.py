import uuid
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import registry
from sqlmodel import Field, SQLModel

from hermes_pool.errors import InvalidKeyError, SettingsError
from hermes_pool.settings import SessionKey
from hermes_pool.storage.record import SessionRecord
from hermes_pool.storage.store import Conversation, ConversationStore, reason_not_writable


@pytest.mark.parametrize(
    ("stored", "word"),
    [
        ("{", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        ('{"a": NaN}', "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[1]", "agent_state is an array"),
        ('"text"', "agent_state is a string"),
        ("7", "agent_state is a number"),
        ("true", "agent_state is a boolean"),
        ('{"runtime_state": 1.5}', "agent_state.runtime_state is a number"),
        ('{"runtime_state": {"hermes": []}}', "agent_state.runtime_state.hermes is an array"),
        ('{"runtime_state": {"hermes": {"schema": 2}}}', "newer"),
    ],
)
def test_the_reason_of_a_refusal_is_named(stored: str | bytes, word: str) -> None:
    assert word in str(reason_not_writable(stored, ("runtime_state", "hermes")))


@pytest.mark.parametrize("stored", [None, "null", "{}", '{"runtime_state": null}', '{"n": ' + "9" * 5000 + "}"])
def test_nothing_keeps_an_empty_state_from_being_written(stored: str | None) -> None:
    assert reason_not_writable(stored, ("runtime_state", "hermes")) is None


# --- what it is made of ---


@pytest.mark.parametrize(
    ("url", "word"),
    [
        ("mysql://ada:s3cret@host/db", "SQLite or PostgreSQL"),
        ("postgresql+asyncpg://ada:s3cret@host/db", "psycopg"),
        ("postgresql+psycopg2://ada:s3cret@host/db", "pip install"),
        ("sqlite+aiosqlite:///file.db", "leave it out"),
        ("sqlite://", "in-memory"),
        ("sqlite:///:memory:", "in-memory"),
        ("ada:s3cret is no URL", "cannot be parsed"),
        ("postgresql://ada:s3cret@host:port/db", "cannot be parsed"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused_at_once(url: str, word: str) -> None:
    with pytest.raises(SettingsError, match=word) as caught:
        ConversationStore.from_url(url)
    assert "s3cret" not in str(caught.value)


def test_a_missing_driver_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(SettingsError, match=r"pip install 'hermes-pool\[postgresql\]'"):
        ConversationStore.from_url("postgresql://host/db")


def test_a_time_limit_is_over_zero() -> None:
    with pytest.raises(SettingsError, match="timeout_s"):
        ConversationStore.from_url("sqlite:///file.db", timeout_s=0)


def test_another_database_is_refused() -> None:
    dialect = sa.make_url("mssql://").get_dialect()()
    engine: Any = SimpleNamespace(url=sa.make_url("mssql://"), dialect=dialect)
    with pytest.raises(SettingsError, match="mssql is not supported"):
        ConversationStore(engine, create_rows=False)


def test_a_column_that_is_not_there_names_those_that_are() -> None:
    engine = sa.create_engine("sqlite://")
    with pytest.raises(SettingsError, match="no column 'state'; its columns are id, agent_state"):
        ConversationStore(engine, state_column="state", create_rows=False)
    with pytest.raises(SettingsError, match="not a mapped class"):
        ConversationStore(engine, dict, create_rows=False)


def test_jarvis_may_have_a_conversation_of_its_own() -> None:
    assert Conversation.__tablename__ == "conversation"
    assert "conversation" not in SQLModel.metadata.tables


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [(int, "42", "4_2"), (int, "42", "forty-two"), (uuid.UUID, "12345678-1234-5678-1234-567812345678", "1234")],
)
async def test_an_id_that_the_table_cannot_have_is_an_invalid_key(kind: type, good: str, bad: str) -> None:
    class Base(SQLModel, registry=registry()):
        pass

    class Numbered(Base, table=True):
        id: kind = Field(primary_key=True)  # type: ignore[valid-type] # another one in each test
        agent_state: dict[str, Any] | None = Field(default=None, sa_column=sa.Column(sa.JSON))

    engine = sa.create_engine("sqlite://", poolclass=sa.StaticPool, connect_args={"check_same_thread": False})
    Base.metadata.create_all(engine)
    store = ConversationStore(engine, Numbered, create_rows=True)
    await store.save(SessionKey(good), SessionRecord(session_id="s"))
    assert await store.records() == [(SessionKey(good), SessionRecord(session_id="s"))]
    with pytest.raises(InvalidKeyError, match=kind.__name__):
        await store.load(SessionKey(bad))
    await store.close()
    engine.dispose()
