from pathlib import Path

from hermes_pool import (
    PoolSettings,
)
from hermes_pool.process.environment import worker_environment


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
