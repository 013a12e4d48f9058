import asyncio
import os
import socket
import stat
from pathlib import Path

import pytest

from hermes_pool.control import client, messages, socket_folder
from hermes_pool.control.client import QueryResult
from hermes_pool.control.messages import Done, Ps
from hermes_pool.control.server import ControlServer
from hermes_pool.control.socket_folder import ControlError
from tests.support import known


async def answer(_request: messages.Request) -> messages.Response:
    return Done("here")


async def ask(state_dir: Path, request: messages.Request, timeout_s: float = 5.0) -> list[QueryResult]:
    return await asyncio.to_thread(client.query, state_dir, request, timeout_s)


def test_a_stale_pointer_deletes_no_file_that_is_no_socket(tmp_path: Path) -> None:
    folder = tmp_path / "control"
    folder.mkdir(mode=0o700)
    precious = tmp_path / "precious"
    precious.write_text("dear")
    (folder / "1-ab.lock").write_text(f"{socket.gethostname()}\n{precious}")
    assert client.query(tmp_path, Ps()) == []
    assert precious.read_text() == "dear"
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("name", ["d" * 90, "d" * 107, "d" * 108, "d" * 200, "dé" * 60, "深い" * 30, "a b\tc\nd"])
async def test_any_state_dir_will_do(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    state_dir = tmp_path / name
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    server = ControlServer(state_dir, answer)
    where = known(await server.start())
    try:
        assert len(os.fsencode(where)) <= socket_folder.ADDRESS_BYTES_MAX
        assert stat.S_IMODE(where.stat().st_mode) == 0o600
        # Another terminal has other variables.
        monkeypatch.delenv("XDG_RUNTIME_DIR")
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        monkeypatch.chdir("/")
        assert [a.problem for a in await ask(state_dir, Ps())] == [None]
    finally:
        await server.close()
    assert not where.exists()


async def test_a_folder_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "control").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ControlError, match="link"):
        await ControlServer(tmp_path, answer).start()
    with pytest.raises(ControlError, match="not a folder of yours"):
        client.query(tmp_path, Ps())


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a folder away")
async def test_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "control").mkdir(mode=0o700)
    os.chown(tmp_path / "control", 12345, -1)
    with pytest.raises(ControlError, match="another user"):
        await ControlServer(tmp_path, answer).start()


async def test_a_folder_of_ours_that_is_open_to_others_is_closed(tmp_path: Path) -> None:
    (tmp_path / "control").mkdir()
    (tmp_path / "control").chmod(0o777)
    server = ControlServer(tmp_path, answer)
    await server.start()
    assert stat.S_IMODE((tmp_path / "control").stat().st_mode) == 0o700
    await server.close()


async def test_a_state_dir_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ControlError, match="cannot create"):
        await ControlServer(tmp_path / "file" / "below", answer).start()
    assert client.query(tmp_path / "file" / "below", Ps()) == []


def test_another_user_is_not_listened_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    peer, ours = socket.socketpair(socket.AF_UNIX)
    with peer, ours:
        assert socket_folder.is_peer_allowed(ours, {os.getuid()})
        assert not socket_folder.is_peer_allowed(ours, {12345})
