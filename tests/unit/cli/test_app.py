import os
from pathlib import Path

import pytest

from hermes_pool.cli import app
from hermes_pool.errors import SettingsError
from hermes_pool.settings import PoolSettings


def test_settings_come_from_variables_by_the_type_of_the_field(tmp_path: Path) -> None:
    settings = app.settings_from(
        {
            "HERMES_POOL_STATE_DIR": str(tmp_path),
            "HERMES_POOL_WORKERS_MAX": "3",
            "HERMES_POOL_IDLE_TIMEOUT_S": "1.5",
            "HERMES_POOL_AGENT_PATHS": os.pathsep.join(["/a", "/b"]),
            "HERMES_POOL_AGENT_OPTIONS": '{"model": "m", "toolsets": ["x"]}',
            "HERMES_POOL_HERMES_HOME": "/h",
            "HERMES_POOL_DATABASE_URL": "",
            "HERMES_POOL_WORKER": "the marker of a worker, no setting",
            "HERMES_POOL_BUSY": "reject",
        },
        agent="echo",
        hermes_home=None,
    )
    assert settings == PoolSettings(
        agent="echo", state_dir=tmp_path, workers_max=3, idle_timeout_s=1.5, agent_paths=("/a", "/b"), busy="reject",
        agent_options={"model": "m", "toolsets": ["x"]}, hermes_home=Path("/h"),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text"),
    [("WORKERS_MAX", "many"), ("WORKERS_MAX", "0"), ("IDLE_TIMEOUT_S", "nan"), ("AGENT_OPTIONS", "[1]"),
     ("AGENT_OPTIONS", "{"), ("BUSY", "maybe"), ("AGENT", "nobody"), ("WORKER_ENV", '{"a=b": "c"}')],
)  # fmt: skip
def test_a_variable_that_makes_no_sense_is_named(name: str, text: str) -> None:
    with pytest.raises(SettingsError, match=f"HERMES_POOL_{name}"):
        app.settings_from({f"HERMES_POOL_{name}": text})


def test_what_is_given_needs_no_sound_variable(tmp_path: Path) -> None:
    assert app.settings_from({"HERMES_POOL_AGENT": "nobody"}, agent="echo").agent == "echo"
