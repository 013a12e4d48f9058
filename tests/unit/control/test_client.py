from pathlib import Path

from hermes_pool.control import client
from hermes_pool.control.messages import Ps


async def test_nobody_runs_and_nothing_is_made(tmp_path: Path) -> None:
    assert client.query(tmp_path / "none", Ps()) == []
    assert list(tmp_path.iterdir()) == []
