import dataclasses
import json
from pathlib import Path

from hermes_pool.cli import view
from hermes_pool.settings import PoolSettings
from hermes_pool.snapshot import SessionSnapshot

HOSTILE = "a\x1b[31mred\x07\r\n\u202egnp.exe\ud800\0"


def test_the_object_of_ps_has_every_field_and_is_plain_ascii() -> None:
    row = SessionSnapshot(conversation_id=HOSTILE, state="idle")
    text = json.dumps(view.View("stored", [view.Supervisor(1, problem="x")], [row]).as_object())
    assert text.isascii()
    assert set(json.loads(text)["sessions"][0]) == {field.name for field in dataclasses.fields(SessionSnapshot)}


def test_a_database_that_is_not_there_is_nothing_stored(tmp_path: Path) -> None:
    assert view.stored_sessions(PoolSettings(state_dir=tmp_path / "none")) == []
    assert list(tmp_path.iterdir()) == []
