import os
import re
import sys
from collections.abc import Mapping
from dataclasses import Field, FrozenInstanceError, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest

import hermes_pool
import hermes_pool_worker
from hermes_pool import (
    InvalidKeyError,
    MemoryLimits,
    PoolSettings,
    QueueLimits,
    RestartPolicy,
    SessionKey,
    SettingsError,
    StartPolicy,
    Timeouts,
)
from hermes_pool.settings import NOT_SETTINGS

GROUPS = {each.name: each.type for each in fields(PoolSettings) if is_dataclass(each.type)}
FIELDS = {each.name: each for each in fields(PoolSettings)} | {
    f"{name}.{each.name}": each for name, group in GROUPS.items() for each in fields(group)
}
"""Every setting, and every group, by the path that messages name."""
SETTINGS = {path: each for path, each in FIELDS.items() if path not in GROUPS}


def variable(path: str) -> str:
    return "HERMES_POOL_" + path.upper().replace(".", "__")


def at(settings: PoolSettings, path: str) -> Any:
    found: Any = settings
    for name in path.split("."):
        found = getattr(found, name)
    return found


def made(path: str, value: Any) -> PoolSettings:
    """Make settings in which one has a value, the others their defaults."""
    group, _, name = path.rpartition(".")
    if not group:
        return PoolSettings(**{path: value})
    make: Any = GROUPS[group]  # a dataclass, whichever
    return PoolSettings(**{group: make(**{name: value})})


def kind(each: Field[Any]) -> Any:
    """What a field holds, without ``None`` and what is said of it."""
    hints = get_args(each.type) if type(None) in get_args(each.type) else (each.type,)
    return get_args(hints[0])[0]


def is_optional(each: Field[Any]) -> bool:
    return type(None) in get_args(each.type)


def as_text(path: str) -> tuple[str, Any]:
    """Some value of a setting that is not its default, as a variable says it and as it is."""
    held = kind(SETTINGS[path])
    if get_origin(held) is Literal:
        return get_args(held)[-1], get_args(held)[-1]
    if get_origin(held) is tuple:
        return os.pathsep.join(["/a", "/b c"]), ("/a", "/b c")
    match path:
        case "agent":
            return "package.module:factory", "package.module:factory"
        case "worker_rlimits":
            return '{"RLIMIT_NOFILE": 1024}', {"RLIMIT_NOFILE": 1024}
        case "agent_options":
            return '{"model": "m", "toolsets": ["x"]}', {"model": "m", "toolsets": ["x"]}
        case "worker_env":
            return '{"API_KEY": "1"}', {"API_KEY": "1"}
    return {int: ("5000", 5000), float: ("7.5", 7.5), str: ("text", "text"), Path: ("/a/b", Path("/a/b"))}[held]


def bad_texts(path: str) -> list[str]:
    held = kind(SETTINGS[path])
    if held is int or held is float:
        return ["many", "-1", "nan", "512M", "1,5", "1_000", " 5", "true", "{}", "\udcff"]
    if get_origin(held) is Literal:
        return ["maybe", "None", get_args(held)[0].upper(), "\udcff"]
    if get_origin(held) is Mapping:
        return [
            "{",
            "[1]",
            "5",
            "a=b",
            "none",
            "\udcff",
            *(['{"a": 1}', '{"A=B": "x"}'] if path == "worker_env" else []),
        ]
    return ["nobody", ":x", "x:"] if path == "agent" else []


# --- settings of Python -----------------------------------------------------------------------------------------------


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
    ("group", "wrong"),
    [
        (Timeouts, {"idle_s": 0}),
        (Timeouts, {"turn_s": -1}),
        (Timeouts, {"progress_s": float("nan")}),
        (Timeouts, {"wedged_s": float("nan")}),
        (Timeouts, {"question_s": 0}),
        (Timeouts, {"close_grace_s": -0.1}),
        (QueueLimits, {"turns_max": -1}),
        (QueueLimits, {"admissions_max": 0}),
        (RestartPolicy, {"replacements_per_turn_max": -1}),
        (RestartPolicy, {"deaths_in_window_max": 0}),
        (RestartPolicy, {"window_s": 0}),
        (RestartPolicy, {"backoff_s": 0}),
        (RestartPolicy, {"backoff_s": 61}),
        (RestartPolicy, {"quarantine_after": -1}),
        (StartPolicy, {"failures_max": 0}),
        (StartPolicy, {"probe_s": -1}),
        (StartPolicy, {"probe_s": 121}),
        (MemoryLimits, {"warn_bytes": 0}),
        (MemoryLimits, {"total_bytes": -1}),
        (MemoryLimits, {"warn_bytes": 2, "recycle_bytes": 1}),
        (MemoryLimits, {"recycle_bytes": 2, "kill_bytes": 1}),
        (MemoryLimits, {"warn_bytes": 2, "kill_bytes": 1}),
    ],
)
def test_what_makes_no_sense_in_a_group_is_refused_and_named_by_its_path(group: Any, wrong: dict[str, Any]) -> None:
    (path,) = (name for name, each in GROUPS.items() if each is group)
    with pytest.raises(SettingsError, match=rf"^{path}\.{next(iter(wrong))}\b"):
        group(**wrong)


def test_an_error_says_what_the_value_may_be() -> None:
    with pytest.raises(SettingsError) as caught:
        Timeouts(turn_s=-1)
    assert str(caught.value) == "timeouts.turn_s must be a number over 0, not -1"


def refusal(path: str, value: object) -> str | None:
    """Return why a value is refused; ``None`` where it is not."""
    try:
        made(path, value)
    except SettingsError as error:
        return str(error)
    return None


WRONG = (
    b"bytes",
    {5: 5},
    {"turn_s": 5},
    [object()],
    "\0",
    "\ud83d",
    float("nan"),
    1.5,
    True,
    10**400,
    -7,
    (),
    Timeouts,
)


@pytest.mark.parametrize("path", FIELDS)
def test_a_value_of_a_wrong_type_is_refused_and_named_whatever_it_is(path: str) -> None:
    told = [refusal(path, wrong) for wrong in WRONG]
    assert all(why is None or why.startswith(path) for why in told)
    assert sum(why is None for why in told) <= 4
    assert (refusal(path, object()) or "").startswith(f"{path} must be ")
    if path not in GROUPS and is_optional(FIELDS[path]):
        assert at(made(path, None), path) is None
    else:
        assert (refusal(path, None) or "").startswith(f"{path} must be ")


def test_a_whole_number_is_one_by_its_type() -> None:
    for wrong in (4.0, True, "4"):
        with pytest.raises(SettingsError, match="workers_max must be a whole number over 0"):
            PoolSettings(workers_max=wrong)  # type: ignore[arg-type] # the fault


def test_settings_are_frozen_and_their_paths_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = PoolSettings(state_dir=Path("here"), agent_paths=("lib",), hermes_home=Path("home"))
    assert settings.state_dir == tmp_path / "here"
    assert settings.agent_paths == (str(tmp_path / "lib"),)
    assert settings.hermes_home == tmp_path / "home"
    assert settings.store_url == f"sqlite:///{tmp_path}/here/hermes-pool.db"
    with pytest.raises(FrozenInstanceError):
        settings.agent = "echo"  # type: ignore[misc] # the fault


def test_folders_may_be_text_or_paths_and_the_home_folder_is_filled_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setenv("USERPROFILE", "/home/ada")
    settings = PoolSettings(
        state_dir="~/state",  # type: ignore[arg-type] # a text will do at run time
        worker_cwd=Path("~/work"),
        agent_paths=[Path("/a"), "~/b"],  # type: ignore[arg-type] # so will a list
    )
    assert settings.state_dir == Path("/home/ada/state").absolute()
    assert settings.worker_cwd == Path("/home/ada/work").absolute()
    assert settings.agent_paths == (str(Path("/a").absolute()), str(Path("/home/ada/b").absolute()))


def test_what_is_given_can_be_changed_without_changing_the_settings() -> None:
    options = {"model": "m"}
    settings = PoolSettings(agent_options=options)
    options["model"] = "another"
    assert settings.agent_options == {"model": "m"}


def test_secrets_are_not_in_the_repr() -> None:
    settings = PoolSettings(
        worker_env={"API_KEY": "sesame"},
        agent_options={"api_key": "sesame"},
        database_url="postgresql+asyncpg://ada:sesame@db/hermes",
    )
    assert "sesame" not in repr(settings)


@pytest.mark.parametrize(
    "wrong",
    [
        {"worker_env": {"API_KEY": b"sesame"}},
        {"worker_env": {"API_KEY": "sesame\0"}},
        {"worker_env": {"API_KEY=sesame": ""}},
        {"worker_env": "API_KEY=sesame"},
        {"agent_options": ["sesame"]},
        {"database_url": b"sesame"},
    ],
    ids=str,
)
def test_secrets_are_not_in_an_error(wrong: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=next(iter(wrong))) as caught:
        PoolSettings(**wrong)
    assert "sesame" not in str(caught.value)


# --- settings of the environment --------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", SETTINGS)
def test_every_setting_can_be_read_from_the_environment(path: str) -> None:
    text, value = as_text(path)
    settings = PoolSettings.from_env({variable(path): text, "PATH": "/bin"})
    assert settings == made(path, value) != PoolSettings()
    assert type(at(settings, path)) is type(at(made(path, value), path))


@pytest.mark.parametrize("path", SETTINGS)
def test_an_empty_variable_is_unset_and_none_is_none_where_a_setting_may_be(path: str) -> None:
    assert PoolSettings.from_env({variable(path): ""}) == PoolSettings()
    if is_optional(SETTINGS[path]):
        for none in ("none", "None", "NONE"):
            assert at(PoolSettings.from_env({variable(path): none}), path) is None


@pytest.mark.parametrize(("path", "text"), [(path, text) for path in SETTINGS for text in bad_texts(path)])
def test_a_variable_that_makes_no_sense_is_named(path: str, text: str) -> None:
    with pytest.raises(SettingsError, match=rf"^{variable(path)}\b"):
        PoolSettings.from_env({variable(path): text})


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("SPARES", "two", "HERMES_POOL_SPARES must be a whole number, 0 or more, not 'two'"),
        ("MEMORY__KILL_BYTES", "5M", "HERMES_POOL_MEMORY__KILL_BYTES must be a whole number over 0, or None, not '5M'"),
        ("TIMEOUTS__IDLE_S", "nan", "HERMES_POOL_TIMEOUTS__IDLE_S must be a number over 0, not 'nan'"),
        ("BUSY", "no", "HERMES_POOL_BUSY must be one of wait and reject, not 'no'"),
        ("WORKER_RLIMITS", "5", "HERMES_POOL_WORKER_RLIMITS must be a JSON object"),
        ("WORKERS_MAXX", "3", "HERMES_POOL_WORKERS_MAXX is not a setting; did you mean HERMES_POOL_WORKERS_MAX?"),
    ],
)  # fmt: skip
def test_an_error_of_the_environment_says_what_to_write(name: str, text: str, message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        PoolSettings.from_env({f"HERMES_POOL_{name}": text})
    assert str(caught.value) == message


def test_a_group_is_made_of_its_variables() -> None:
    settings = PoolSettings.from_env(
        {
            "HERMES_POOL_TIMEOUTS__IDLE_S": "60",
            "HERMES_POOL_TIMEOUTS__TURN_S": "5",
            "HERMES_POOL_QUEUES__TURNS_MAX": "0",
        }
    )
    assert settings.timeouts == Timeouts(idle_s=60, turn_s=5)
    assert settings.queues == QueueLimits(turns_max=0)


def test_variables_that_exclude_each_other_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"memory\.warn_bytes=2 is over memory\.kill_bytes=1"):
        PoolSettings.from_env({"HERMES_POOL_MEMORY__WARN_BYTES": "2", "HERMES_POOL_MEMORY__KILL_BYTES": "1"})
    with pytest.raises(SettingsError, match="state_dir"):
        PoolSettings.from_env({"HERMES_POOL_STATE_DIR": "/what?"})
    both = {"HERMES_POOL_STATE_DIR": "/what?", "HERMES_POOL_DATABASE_URL": "sqlite:////elsewhere.db"}
    assert PoolSettings.from_env(both).database_url == "sqlite:////elsewhere.db"


def test_what_is_given_goes_first_and_needs_no_sound_variable() -> None:
    environment = {"HERMES_POOL_AGENT": "nobody", "HERMES_POOL_TIMEOUTS__IDLE_S": "never", "HERMES_POOL_SPARES": "2"}
    settings = PoolSettings.from_env(environment, agent="echo", timeouts=Timeouts(turn_s=5))
    assert settings == PoolSettings(agent="echo", timeouts=Timeouts(turn_s=5), spares=2)


def test_the_environment_is_that_of_the_process_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERMES_POOL_WORKERS_MAX", "3")
    assert PoolSettings.from_env().workers_max == 3


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("MEMROY__WARN_BYTES", "MEMORY__WARN_BYTES"),
        ("MEMORY_WARN_BYTES", "MEMORY__WARN_BYTES"),
        ("WORKERSMAX", "WORKERS_MAX"),
        ("STATEDIR", "STATE_DIR"),
        ("IDLE_S", "TIMEOUTS__IDLE_S"),
        ("IDLE_TIMEOUT_S", "TIMEOUTS__IDLE_S"),
        ("QUESTION_TIMEOUT_S", "TIMEOUTS__QUESTION_S"),
        ("TURNS_WAITING_MAX", "QUEUES__TURNS_MAX"),
        ("RESTARTS_IN_WINDOW_MAX", "RESTARTS__DEATHS_IN_WINDOW_MAX"),
        ("START_PROBE_S", "STARTS__PROBE_S"),
        ("timeouts__idle_s", "TIMEOUTS__IDLE_S"),
    ],
)
def test_a_misspelt_variable_is_an_error_that_suggests_the_right_one(wrong: str, meant: str) -> None:
    with pytest.raises(SettingsError) as caught:
        PoolSettings.from_env({f"HERMES_POOL_{wrong}": "sesame"})
    assert str(caught.value) == f"HERMES_POOL_{wrong} is not a setting; did you mean HERMES_POOL_{meant}?"


@pytest.mark.parametrize("wrong", ["XYZZY", "MEMORY", "", "_", "__"])
def test_a_variable_that_is_like_no_setting_is_an_error_too(wrong: str) -> None:
    with pytest.raises(SettingsError, match=f"^HERMES_POOL_{wrong} is not a setting"):
        PoolSettings.from_env({f"HERMES_POOL_{wrong}": "1"})


def test_variables_that_the_pool_itself_sets_are_no_settings_and_no_errors() -> None:
    folders = [Path(package.__path__[0]) for package in (hermes_pool, hermes_pool_worker)]
    sources = [file.read_text(encoding="utf-8") for folder in folders for file in folder.rglob("*.py")]
    named = {name for source in sources for name in re.findall(r'"(HERMES_POOL_[A-Z]\w*)"', source)}
    assert named == NOT_SETTINGS
    assert PoolSettings.from_env(dict.fromkeys(named, "x")) == PoolSettings()


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("worker_env", '{"API_KEY": "sesame"'),
        ("worker_env", '["sesame"]'),
        ("worker_env", '{"API_KEY": ["sesame"]}'),
        ("worker_env", '{"API_KEY=sesame": ""}'),
        ("agent_options", "sesame"),
        ("agent_options", '"sesame"'),
    ],
)
def test_secrets_of_the_environment_are_not_in_an_error(path: str, text: str) -> None:
    with pytest.raises(SettingsError, match=variable(path)) as caught:
        PoolSettings.from_env({variable(path): text})
    error: BaseException | None = caught.value
    while error is not None:
        assert "sesame" not in str(error)
        error = error.__context__


# --- keys -------------------------------------------------------------------------------------------------------------


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
        PoolSettings(**{name: "~nobody-of-that-name/here"})  # type: ignore[arg-type] # of any field


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


@pytest.mark.parametrize(
    "wrong",
    [
        {"deaths_in_window_max": 0},
        {"window_s": 0},
        {"backoff_s": 0},
        {"backoff_s": 61},
        {"backoff_s": float("nan")},
        {"quarantine_after": -1},
    ],
    ids=str,
)
def test_a_policy_of_restarts_that_makes_no_sense_is_refused_and_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=f"restarts.{next(iter(wrong))}"):
        RestartPolicy(**wrong)


@pytest.mark.parametrize("wrong", [{"failures_max": 0}, {"probe_s": -1}, {"probe_s": 121}], ids=str)
def test_a_policy_of_starts_that_makes_no_sense_is_refused_and_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=f"starts.{next(iter(wrong))}"):
        StartPolicy(**wrong)
