"""A folder that cannot hold the pool's files is told by an error of ours, which names it and what to do."""

import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hermes_pool.errors import SettingsError, StateDirError
from hermes_pool.system.state_dir import WORKSPACE, prepare_state_dir


def a_file_in_the_way(folder: Path) -> Path:
    (folder / "state").touch()
    return folder / "state"


def below_a_file(folder: Path) -> Path:
    (folder / "file").touch()
    return folder / "file" / "deep" / "state"


def a_link_to_nowhere(folder: Path) -> Path:
    (folder / "state").symlink_to(folder / "nowhere" / "at all")
    return folder / "state"


def a_link_to_itself(folder: Path) -> Path:
    (folder / "state").symlink_to(folder / "state")
    return folder / "state"


def a_name_that_is_too_long(folder: Path) -> Path:
    return folder / ("long" * 100)


def a_nul_in_its_name(folder: Path) -> Path:
    return folder / "sta\0te"


def a_file_where_its_workspace_goes(folder: Path) -> Path:
    (folder / "state").mkdir()
    (folder / "state" / WORKSPACE).touch()
    return folder / "state"


WAYS = [
    a_file_in_the_way,
    below_a_file,
    a_link_to_nowhere,
    a_link_to_itself,
    a_name_that_is_too_long,
    a_nul_in_its_name,
    a_file_where_its_workspace_goes,
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_folder_that_cannot_be_made(way: Callable[[Path], Path], tmp_path: Path) -> None:
    state_dir = way(tmp_path)
    with pytest.raises(StateDirError) as caught:
        prepare_state_dir(state_dir, workspace=True)
    error = caught.value
    assert isinstance(error, SettingsError)
    assert repr(str(state_dir)) in str(error)
    assert "HERMES_POOL_STATE_DIR" in str(error)
    assert (error.retryable, error.sent, error.http_status) == (False, False, 500)
    assert error.__cause__ is not None


@pytest.mark.parametrize(
    "state_dir",
    [
        pytest.param("/proc/hermes-pool", id="none can be made there"),
        pytest.param("/proc/self/task", id="it is there, and no file can be made in it"),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="these folders refuse root, too")
def test_a_folder_that_nobody_can_write(state_dir: str) -> None:
    with pytest.raises(StateDirError, match=state_dir):
        prepare_state_dir(Path(state_dir), workspace=False)


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_this_user_cannot_write(tmp_path: Path) -> None:
    state_dir = tmp_path / "state"
    state_dir.mkdir(mode=0o500)
    with pytest.raises(StateDirError, match="Permission denied"):
        prepare_state_dir(state_dir, workspace=False)


def test_it_is_made_for_this_user_only_and_nothing_is_left_of_the_trial(tmp_path: Path) -> None:
    state_dir = tmp_path / "some" / "where"
    for _ in range(2):  # also where it is there already
        prepare_state_dir(state_dir, workspace=True)
        assert [each.name for each in state_dir.iterdir()] == [WORKSPACE]
    if sys.platform != "win32":
        assert stat.S_IMODE(state_dir.stat().st_mode) == 0o700


def test_no_workspace_is_made_where_workers_start_elsewhere(tmp_path: Path) -> None:
    prepare_state_dir(tmp_path / "state", workspace=False)
    assert list((tmp_path / "state").iterdir()) == []
