"""Faults of Hermes' history, and other programs that write to it, judged by the next request to the model."""

import contextlib
import resource
import sqlite3
from pathlib import Path

import pytest

from hermes_pool.testing.scripted_model import ScriptedModel
from hermes_pool_worker import wire
from tests.integration.hermes_program import END, NEEDS_HERMES, Start, Worker, assert_well_paired, done_of, said
from tests.support import known

pytestmark = NEEDS_HERMES

REFUSE = "CREATE TRIGGER no BEFORE INSERT ON messages BEGIN SELECT RAISE(FAIL, 'no row today'); END"
ALLOW = "DROP TRIGGER no"


def change(home: Path, *statements: str) -> None:
    """Change Hermes' database, as any other program can."""
    with contextlib.closing(sqlite3.connect(home / "state.db", timeout=10)) as database:
        for statement in statements:
            database.execute(statement)
        database.commit()


def flush(worker: Worker) -> None:
    worker.send(wire.Flush())
    assert worker.first(wire.Flushed).error is None


def cancel(worker: Worker, text: str) -> wire.TurnDone:
    turn = worker.begin(text)
    worker.until(wire.TextDelta)
    worker.send(wire.Cancel(turn.turn_id, 1, True, "it took too long"))
    return done_of(worker.until(*END))


@pytest.mark.parametrize("safe", [True, False])
def test_what_another_program_writes_in_the_middle_of_a_failed_turn_stays(
    start: Start, model: ScriptedModel, tmp_path: Path, safe: bool
) -> None:
    worker, other = start(), start()
    opened = worker.open(safe_tools=["terminal"] if safe else [])
    worker.ask("one")
    other.open(session_id=opened.session_id)
    gate = tmp_path / "gate"
    poison = f"[tool until test -e {gate}; do sleep 0.05; done] [error 400] poison"
    worker.begin(poison)
    worker.until(wire.ToolStarted)
    other.ask("from elsewhere")
    gate.touch()
    end = worker.until(*END)[-1]
    assert isinstance(end, wire.TurnFailed)
    assert end.kept == (not safe)
    worker.ask("two")
    request = model.requests[-1]
    assert [any(text in each for each in said(request)) for text in ("from elsewhere", poison)] == [True, not safe]
    assert_well_paired(request)
    if safe:
        assert said(request) == ["one", "from elsewhere", "two"]


def test_what_another_program_writes_in_the_middle_of_a_completed_turn_is_seen(
    start: Start, model: ScriptedModel, tmp_path: Path
) -> None:
    worker, other = start(), start()
    opened = worker.open()
    worker.ask("one")
    other.open(session_id=opened.session_id)
    gate = tmp_path / "gate"
    worker.begin(f"ours [tool until test -e {gate}; do sleep 0.05; done]")
    worker.until(wire.ToolStarted)
    other.ask("from elsewhere")
    gate.touch()
    assert done_of(worker.until(*END)).kept
    worker.ask("two")
    request = model.requests[-1]
    assert [any(text in each for each in said(request)) for text in ("from elsewhere", "ours", "two")] == [True] * 3
    assert_well_paired(request)


def test_turns_of_each_kind_are_remembered_while_the_history_refuses_them(
    start: Start, home: Path, model: ScriptedModel
) -> None:
    worker = start()
    opened = worker.open()
    worker.ask("one")
    change(home, REFUSE)
    half = cancel(worker, "half [stall]")
    assert (half.outcome, half.kept) == ("interrupted", False)
    assert "no row today" in known(half.notice)
    assert not worker.ask("two").kept
    for poison in ("[error 400] poison", "[tool echo a] [error 400] acted"):
        end = worker.turn(poison)[-1]
        assert isinstance(end, wire.TurnFailed)
        assert not end.kept
    expected = ["one", "half [stall]", "two", "[tool echo a] [error 400] acted"]
    worker.ask("three")
    assert said(model.requests[-1]) == [*expected, "three"]
    assert "it took too long" in str(model.requests[-1]["messages"])
    assert_well_paired(model.requests[-1])
    change(home, ALLOW)
    flush(worker)
    worker.close()
    worker = start()
    worker.open(session_id=opened.session_id)
    worker.ask("four")
    assert said(model.requests[-1]) == [*expected, "three", "four"]
    assert_well_paired(model.requests[-1])


def test_a_failed_turn_that_cannot_be_removed_is_removed_later(start: Start, home: Path, model: ScriptedModel) -> None:
    worker = start()
    opened = worker.open()
    worker.ask("one")
    change(home, "CREATE TRIGGER no BEFORE UPDATE OF active ON messages BEGIN SELECT RAISE(FAIL, 'no'); END")
    assert isinstance(worker.turn("[error 400] poison")[-1], wire.TurnFailed)
    worker.turn("two")
    assert said(model.requests[-1]) == ["one", "two"]
    change(home, ALLOW)
    flush(worker)
    worker.close()
    worker = start()
    worker.open(session_id=opened.session_id)
    worker.ask("three")
    assert said(model.requests[-1]) == ["one", "two", "three"]


def test_a_history_that_cannot_be_read_loses_no_reply(start: Start, home: Path, model: ScriptedModel) -> None:
    worker = start()
    opened = worker.open()
    worker.ask("one")
    worker.begin("two [slow 10]")
    worker.until(wire.TextDelta)
    change(home, "ALTER TABLE messages RENAME TO gone")
    done = done_of(worker.until(*END))
    assert "piece-10" in done.text
    assert not done.kept
    assert "no such table" in known(done.notice)
    assert not worker.ask("three").kept
    change(home, "ALTER TABLE gone RENAME TO messages")
    flush(worker)
    worker.close()
    worker = start()
    worker.open(session_id=opened.session_id)
    worker.ask("four")
    assert said(model.requests[-1]) == ["one", "two [slow 10]", "three", "four"]


def test_a_full_disk(start: Start, model: ScriptedModel) -> None:
    worker = start()
    opened = worker.open()
    worker.ask("one")
    limits = resource.prlimit(worker.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(worker.process.pid, resource.RLIMIT_FSIZE, (1000, limits[1]))
    assert not worker.ask("two").kept
    assert not worker.ask("three").kept
    assert said(model.requests[-1]) == ["one", "two", "three"]
    resource.prlimit(worker.process.pid, resource.RLIMIT_FSIZE, limits)
    flush(worker)
    worker.close()
    worker = start()
    worker.open(session_id=opened.session_id)
    worker.ask("four")
    assert said(model.requests[-1]) == ["one", "two", "three", "four"]


def test_a_worker_that_dies_after_it_has_sealed_a_turn(start: Start, home: Path, model: ScriptedModel) -> None:
    worker = start()
    opened = worker.open()
    before = worker.ask("one").committed
    turn = wire.Turn("turn-2", 1, "half [stall]")
    assert cancel(worker, turn.text).turn_id == turn.turn_id
    worker.kill()
    # It did not come to note that the turn has ended.
    change(home, "UPDATE state_meta SET value = json_remove(value, '$.ended') WHERE key LIKE 'hermes-pool:turn:%'")
    worker = start()
    again = worker.open(
        session_id=opened.session_id, committed=before, unfinished=turn, given_up=True,
        keep=True, said="(scripted) This", why="it was stopped",
    )  # fmt: skip
    assert again.kept
    worker.ask("two")
    assert said(model.requests[-1]) == ["one", "half [stall]", "two"]
    assert str(model.requests[-1]["messages"]).count("This reply") == 1
