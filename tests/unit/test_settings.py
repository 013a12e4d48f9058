from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest

from hermes_pool import (
    InvalidKeyError,
    PoolSettings,
    SessionKey,
    SettingsError,
)


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
        {"idle_timeout_s": 0},
        {"turn_timeout_s": -1},
        {"progress_timeout_s": float("nan")},
        {"workers_max": 0},
        {"spares": -1},
        {"restarts_max": -1},
        {"close_grace_s": -0.1},
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
        settings.agent = "echo"  # type: ignore[misc] # the fault


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


@pytest.mark.parametrize(
    "wrong",
    [{"RLIMIT_NONSENSE": 1}, {"NOFILE": 1}, {"RLIMIT_NOFILE": "7"}, {"RLIMIT_NOFILE": -2}, {"RLIMIT_NOFILE": True}],
    ids=str,
)
def test_settings_know_the_names_and_want_numbers(wrong: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match="worker_rlimits"):
        PoolSettings(worker_rlimits=wrong)
    assert PoolSettings(worker_rlimits={"RLIMIT_CORE": 0, "RLIMIT_AS": -1})


@pytest.mark.parametrize(
    "wrong",
    [
        {"memory_warn_bytes": 0},
        {"memory_warn_bytes": 2, "memory_recycle_bytes": 1},
        {"memory_recycle_bytes": 2, "memory_kill_bytes": 1},
        {"memory_warn_bytes": 2, "memory_kill_bytes": 1},
        {"memory_total_bytes": -1},
        {"memory_total_low": 0},
        {"memory_total_low": 1.1},
        {"worker_age_max_s": 0},
        {"sample_s": 0},
        {"wedged_after_s": float("nan")},
    ],
    ids=str,
)
def test_settings_of_memory_that_make_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=next(iter(wrong))):
        PoolSettings(**wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"restarts_in_window_max": 0},
        {"restarts_window_s": 0},
        {"restart_backoff_s": 0},
        {"restart_backoff_s": 61},
        {"restart_backoff_max_s": float("nan")},
        {"quarantine_after": -1},
        {"start_failures_max": 0},
        {"start_probe_s": -1},
        {"start_probe_s": 121},
        {"start_probe_max_s": 0},
    ],
    ids=str,
)
def test_settings_of_breakers_that_make_no_sense_are_refused_and_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=next(iter(wrong))):
        PoolSettings(**wrong)
