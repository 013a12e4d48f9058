import json
import sys
from pathlib import Path
from typing import Any

import pytest

from hermes_pool.process.orphans import Orphans, Owner
from hermes_pool.system import processes
from hermes_pool.system.processes import IdentityCheck

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes show their environment on Linux")


class Log:
    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def warning(self, event: str, **values: Any) -> None:
        self.events.append((event, values))


@pytest.fixture
def log() -> Log:
    return Log()


def _values(owner: Owner) -> dict[str, Any]:
    return {name: getattr(owner, name) for name in Owner.__slots__}


def put(folder: Path, pool: str, record: Any) -> Path:
    file = folder / "owners" / f"{pool}.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(record if isinstance(record, str) else json.dumps(record))
    return file


def test_a_clock_that_was_set_makes_no_living_supervisor_a_replaced_one(tmp_path: Path) -> None:
    moved = {**_values(Owner.here()), "create_time": Owner.here().create_time - 3600}
    owner = Owner.read(put(tmp_path, "living", moved))
    assert owner is not None
    assert processes.identify(owner.pid, owner.create_time) is IdentityCheck.REPLACED
    assert owner.identify() is IdentityCheck.CURRENT


def test_a_folder_that_cannot_be_used_fails_no_start(tmp_path: Path, log: Log) -> None:
    (tmp_path / "owners").write_text("a file")
    mine = Orphans(tmp_path, "mine", log)
    mine.record()
    assert mine.sweep() == {}
    mine.forget()
    assert [event for event, _ in log.events] == ["owner_not_recorded", "owner_record_not_removed"]
