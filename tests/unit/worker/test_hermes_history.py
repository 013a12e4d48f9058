"""Whose rows are whose, on a database in memory that has the methods of Hermes' own."""

from typing import Any

import pytest

from hermes_pool_worker.hermes_history import (
    NOTHING_YET,
    UNFINISHED_TOOL,
    History,
    Row,
    TurnNote,
    is_finished,
    last_words,
    mark_of,
    may_have_acted,
    open_calls,
    past_turns,
    sealed,
    text_digest,
    unsaid,
)


class Database:
    """A session, as ``SessionDB`` keeps it."""

    def __init__(self) -> None:
        self.table: list[Row] = []
        self.meta: dict[str, str] = {}

    def append_message(self, session_id: str, role: str, content: Any = None, **more: Any) -> int:
        row_id = len(self.table) + 1
        self.table.append(
            {"id": row_id, "session_id": session_id, "role": role, "content": content, "active": 1, **more}
        )
        return row_id

    def get_messages(self, session_id: str) -> list[Row]:
        return [dict(row) for row in self.table if row["session_id"] == session_id and row["active"]]

    def rewind_to_message(self, session_id: str, message_id: int) -> None:
        for row in self.table:
            if row["session_id"] == session_id and row["id"] >= message_id:
                row["active"] = 0

    def _execute_write(self, write: Any) -> Any:
        return write(self)

    def executemany(self, statement: str, parameters: list[tuple[int]]) -> Any:
        assert statement.startswith("UPDATE messages SET active = 0")
        for (row_id,) in parameters:
            self.table[row_id - 1]["active"] = 0
        return self

    rowcount = 0


class Elsewhere:
    """Another program: it writes to the same session, and not through our object."""

    def __init__(self, database: Database) -> None:
        self.database = database

    def say(self, text: str) -> None:
        for role, content in (("user", text), ("assistant", f"re: {text}")):
            Database.append_message(self.database, "s", role, content)


@pytest.fixture
def database() -> Database:
    return Database()


@pytest.fixture
def history(database: Database) -> History:
    history = History(database, "s")
    history.watch()
    return history


def call(call_id: str, name: str = "terminal") -> dict[str, Any]:
    return {"id": call_id, "function": {"name": name, "arguments": "{}"}}


def note(history: History, text: str) -> TurnNote:
    history.forget_written()
    return TurnNote("t", history.mark(), text_digest(text))


def texts(history: History) -> list[Any]:
    return [row["content"] for row in history.rows()]


def test_the_rows_of_a_turn_are_those_that_this_process_wrote(database: Database, history: History) -> None:
    elsewhere = Elsewhere(database)
    elsewhere.say("before")
    turn = note(history, "ours")
    elsewhere.say("just before")
    database.append_message("s", "user", "ours")
    elsewhere.say("meanwhile")
    database.append_message("s", "assistant", "answer")
    own = history.own(turn)
    assert [row["content"] for row in own] == ["ours", "answer"]
    assert history.shared
    history.take_back(own)
    assert texts(history) == [
        "before", "re: before", "just before", "re: just before", "meanwhile", "re: meanwhile",
    ]  # fmt: skip


def test_nothing_is_ours_if_we_wrote_nothing(database: Database, history: History) -> None:
    turn = note(history, "ours")
    Elsewhere(database).say("ours")
    assert history.own(turn) == []


def test_a_compaction_that_writes_a_turn_anew_leaves_it_ours(database: Database, history: History) -> None:
    turn = note(history, "ours")
    database.append_message("s", "user", "ours")
    database.rewind_to_message("s", 1)
    Database.append_message(database, "s", "user", "ours")
    database.append_message("s", "assistant", "answer")
    assert [row["content"] for row in history.own(turn)] == ["ours", "answer"]
    assert not history.shared


def test_what_was_half_written_is_taken_back_and_nothing_else(database: Database, history: History) -> None:
    Elsewhere(database).say("one")
    mark = history.mark()
    database.append_message("s", "user", "half")
    Elsewhere(database).say("two")
    history.take_back_own(mark)
    assert texts(history) == ["one", "re: one", "two", "re: two"]


def test_a_sealed_turn_is_well_paired_on_disk_and_in_memory(database: Database, history: History) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "act"},
        {"role": "assistant", "content": "", "tool_calls": [call("a"), call("b")]},
        {"role": "tool", "content": "done", "tool_call_id": "a", "tool_name": "terminal"},
    ]
    history.write(messages)
    history.seal(history.rows(), "[ended]")
    in_memory = sealed(messages, "[ended]")
    for rows in (history.rows(), in_memory):
        assert [row["content"] for row in rows] == ["act", "", "done", UNFINISHED_TOOL, "[ended]"]
        assert open_calls(rows) == []
        assert is_finished(rows)
    assert may_have_acted(in_memory, ["terminal"]) == []


def test_what_the_history_does_not_hold_of_what_was_said() -> None:
    rows: list[dict[str, Any]] = [
        {"role": "user", "content": "act"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": [call("a")]},
    ]
    assert unsaid(rows, "Let me see. It is") == "It is"
    assert unsaid(rows, "It is") == "It is"
    assert last_words(rows) == []
    assert last_words([*rows, {"role": "tool"}, {"role": "assistant", "content": "It is"}]) == [
        {"role": "assistant", "content": "It is"}
    ]
    assert unsaid(rows[:1], " It is\n") == "It is"


def test_turns_are_told_by_place(database: Database, history: History) -> None:
    for text in ("[System: not so]", "two"):
        Elsewhere(database).say(text)
    first, second = past_turns(history.rows(), None, 10)
    assert (first.text, second.text) == ("[System: not so]", "two")
    assert second.committed == mark_of(history.rows()) == history.mark()
    assert past_turns(history.rows(), first.committed, 10) == [second]
    assert past_turns(history.rows(), NOTHING_YET, 1) == [first]
    with pytest.raises(ValueError, match="no mark"):
        past_turns(history.rows(), "99.x", 1)
