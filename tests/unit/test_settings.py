import sys
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest

from hermes_pool import InvalidKeyError, PoolSettings, SessionKey, SettingsError
from hermes_pool.process.environment import worker_environment


@pytest.mark.parametrize(
    "wrong",
    [
        {"agent": "nonsense"},
        {"agent": "module:"},
        {"agent": ":factory"},
        {"busy": "perhaps"},
        {"replay": "sometimes"},
        {"launcher": "catapult"},
        {"worker_python": ""},
        {"workers_max": 0},
        {"spares": -1},
        {"frame_bytes_max": 100},
        {"frame_bytes_max": 2**32},
        {"agent_paths": "/a/folder"},
        {"worker_env": {"A=B": "x"}},
        {"worker_env": {"A": "x\0"}},
        {"state_dir": "/what?"},
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused_and_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=next(iter(wrong))):
        PoolSettings(**wrong)


def test_settings_are_frozen_and_their_paths_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = PoolSettings(state_dir=Path("here"), agent_paths=("lib",), hermes_home=Path("home"))
    assert settings.state_dir == tmp_path / "here"
    assert settings.agent_paths == (str(tmp_path / "lib"),)
    assert settings.hermes_home == tmp_path / "home"
    assert settings.store_url == f"sqlite:///{tmp_path}/here/hermes-pool.db"
    with pytest.raises(FrozenInstanceError):
        settings.agent = "echo"  # type: ignore[misc]


def test_secrets_in_the_environment_are_not_in_the_repr() -> None:
    assert "sesame" not in repr(PoolSettings(worker_env={"API_KEY": "sesame"}))


@pytest.mark.parametrize("bad", ["", "x" * 513, "a\0b", "\ud83d", 7, None])
def test_ids_that_cannot_be_one(bad: Any) -> None:
    with pytest.raises(InvalidKeyError, match="conversation id"):
        SessionKey(bad)
    if bad is not None:
        with pytest.raises(InvalidKeyError, match="user id"):
            SessionKey("c", bad)


@pytest.mark.parametrize("fine", ["x", "x" * 512, "../../etc/passwd", "\N{GRINNING FACE}", "a b\n'\"%", "-rf"])
def test_ids_that_are_fine(fine: str) -> None:
    assert SessionKey(fine, fine) == SessionKey(fine, fine)


def test_the_environment_is_an_allow_list_and_what_the_settings_add(tmp_path: Path) -> None:
    host = {
        "PATH": "/bin",
        "HOME": "/root",
        "LANG": "C",
        "DATABASE_URL": "secret",
        "PYTHONPATH": "/jarvis",
        "VIRTUAL_ENV": "/jarvis",
        "HERMES_SESSION_ID": "another",
        "HERMES_HOME": "/hosts",
        "HTTPS_PROXY": "http://proxy",
    }
    plain = worker_environment(PoolSettings(), host)
    assert set(plain) == {"PATH", "HOME", "LANG", "HTTPS_PROXY", "HERMES_HOME", "PYTHONUNBUFFERED", "PYTHONUTF8"}
    own = worker_environment(PoolSettings(hermes_home=tmp_path, worker_env={"LANG": "de", "API_KEY": "k"}), host)
    assert (own["HERMES_HOME"], own["LANG"], own["API_KEY"]) == (str(tmp_path), "de", "k")


@pytest.mark.skipif(sys.platform == "win32", reason="there, the home folder comes from elsewhere")
def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import pwd

    def unknown(uid: int) -> Any:
        raise KeyError(f"getpwuid(): uid not found: {uid}")  # as in a container whose user has no entry

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for variable in ("HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(SettingsError, match="set HOME, or state_dir"):
        PoolSettings()
    assert PoolSettings(state_dir=tmp_path).state_dir == tmp_path
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert PoolSettings().state_dir == tmp_path / "hermes-pool"


@pytest.mark.parametrize("name", ["state_dir", "worker_cwd", "hermes_home"])
def test_a_home_that_is_nobodys_is_refused_and_named(name: str) -> None:
    with pytest.raises(SettingsError, match=f"{name}='~nobody-of-that-name/here'"):
        PoolSettings(**{name: "~nobody-of-that-name/here"})  # type: ignore[arg-type]


@pytest.mark.skipif(sys.platform == "win32", reason="there, a folder that is in use cannot be removed")
def test_a_path_below_a_current_folder_that_is_gone_is_refused_and_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(SettingsError, match="state_dir='here'"):
        PoolSettings(state_dir=Path("here"))
    with pytest.raises(SettingsError, match="agent_paths='lib'"):
        PoolSettings(state_dir=tmp_path, agent_paths=("lib",))
