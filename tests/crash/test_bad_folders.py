"""Something lies where the pool's files go: what cannot work without them is refused, with an error of ours.

Files and folders are in the way, and no modes: the tests may run as root, whom no mode stops.
"""

from pathlib import Path

import pytest

from hermes_pool import HermesSessionManager, PoolSettings
from hermes_pool.errors import HermesPoolError, SettingsError, StateDirError, StoreError, WorkerStartError
from tests.support import OpenPool, children


async def test_a_pool_whose_folder_cannot_be_made_is_not_opened_and_can_be_later(tmp_path: Path) -> None:
    state_dir = tmp_path / "file" / "state"
    (tmp_path / "file").touch()
    before = children()
    pool = HermesSessionManager(PoolSettings(agent="echo", state_dir=state_dir))
    with pytest.raises(StateDirError, match=str(state_dir)):
        await pool.__aenter__()
    assert children() == before
    (tmp_path / "file").unlink()
    async with pool:
        assert (await pool.send("c", "hello")).text == "hello"


async def test_a_pool_whose_workers_would_start_in_a_file_is_not_opened(open_pool: OpenPool, tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "workspace").touch()
    before = children()
    with pytest.raises(StateDirError, match="workspace"):
        await open_pool()
    assert children() == before


async def test_a_pool_whose_database_nobody_knows_is_not_opened(open_pool: OpenPool) -> None:
    before = children()
    with pytest.raises(SettingsError, match="mysql"):
        await open_pool(database_url="mysql://host/db")
    assert children() == before


@pytest.mark.parametrize("name", ["owners", "control", "preload"])
async def test_a_file_where_a_folder_goes_that_is_not_indispensable(
    open_pool: OpenPool, tmp_path: Path, name: str
) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / name).touch()
    pool = await open_pool()
    assert (await pool.send("c", "hello")).text == "hello"
    await pool.stop("c")
    assert (await pool.send("c", "/count")).text == "2"


async def test_a_file_where_an_agent_keeps_its_own_is_named(open_pool: OpenPool, tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    in_the_way = tmp_path / "state" / "agents"
    in_the_way.touch()
    pool = await open_pool()
    with pytest.raises(WorkerStartError, match=f"Not a directory: '{in_the_way}"):
        await pool.send("c", "hello")
    in_the_way.unlink()
    assert (await pool.send("c", "hello")).text == "hello"


@pytest.mark.parametrize(
    ("in_the_way", "database"), [("hermes-pool.db", None), ("folder", "folder/pool.db")], ids=["its own", "another one"]
)
async def test_a_database_file_that_cannot_be_made_is_named(
    open_pool: OpenPool, tmp_path: Path, in_the_way: str, database: str | None
) -> None:
    state_dir = tmp_path / "state"
    state_dir.mkdir()
    thing = state_dir / in_the_way
    if database is None:
        thing.mkdir()
    else:
        thing.touch()
    url = None if database is None else f"sqlite:///{state_dir / database}"
    pool = await open_pool(database_url=url)
    with pytest.raises(StoreError, match="cannot be opened") as caught:
        await pool.send("c", "hello")
    assert str(state_dir / (database or in_the_way)) in str(caught.value)
    assert not caught.value.sent
    with pytest.raises(HermesPoolError):
        await pool.set_runtime("c", "jarvis")
    thing.rmdir() if database is None else thing.unlink()
    assert (await pool.send("c", "hello")).text == "hello"
