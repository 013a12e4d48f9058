import socket
from pathlib import Path

from hermes_pool.control import client
from hermes_pool.control.messages import Ps


async def test_nobody_runs_and_nothing_is_made(tmp_path: Path) -> None:
    assert client.query(tmp_path / "none", Ps()) == []
    assert list(tmp_path.iterdir()) == []


def test_a_stale_pointer_deletes_no_file_that_is_no_socket(tmp_path: Path) -> None:
    folder = tmp_path / "control"
    folder.mkdir(mode=0o700)
    precious = tmp_path / "precious"
    precious.write_text("dear")
    (folder / "1-ab.lock").write_text(f"{socket.gethostname()}\n{precious}")
    assert client.query(tmp_path, Ps()) == []
    assert precious.read_text() == "dear"
    assert list(folder.iterdir()) == []
