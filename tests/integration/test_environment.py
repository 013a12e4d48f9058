"""What a worker can see of its host, and where its secrets can be seen: in processes, files, logs, errors."""

import logging
from pathlib import Path
from typing import Any

import psutil
import pytest

from hermes_pool import RestartPolicy
from hermes_pool.errors import WorkerCrashedError
from tests.support import OpenPool, children

LAUNCHERS = pytest.mark.parametrize("launcher", ["zygote", "spawn", "portable"])
SECRET = "sk-jarvis-0123456789"
KEY = "sk-provider-9876543210"
AGENT = """
import json, os, sys
from hermes_pool_worker.agent import Outcome
from hermes_pool_worker.echo import EchoAgent

class Agent(EchoAgent):
    def turn(self, text, turn):
        if text == "die":
            print("last words", file=sys.stderr)
            os.abort()
        if text == "import":
            import colorsys  # a module of the standard library that nothing has imported so far
            return Outcome(colorsys.__file__)
        return Outcome(json.dumps([dict(os.environ), sys.path, os.getcwd()]))
"""


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """A host full of secrets, with a folder on its path and a working folder that would break any interpreter."""
    trap = tmp_path / "trap"
    for folder in (trap, tmp_path / "cwd", tmp_path / "agents"):
        folder.mkdir()
    for name in ("msgspec", "colorsys", "json"):
        (trap / f"{name}.py").write_text("raise SystemError('imported from where it must not be')\n")
        (tmp_path / "cwd" / f"{name}.py").write_text("raise SystemError('imported from where it must not be')\n")
    (tmp_path / "agents" / "curious.py").write_text(AGENT)
    for name in ("JARVIS_SECRET", "DATABASE_URL", "OPENAI_API_KEY", "HERMES_SESSION_KEY", "HERMES_POOL_WORKER"):
        monkeypatch.setenv(name, SECRET)
    for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONSTARTUP"):
        monkeypatch.setenv(name, str(trap))
    return {
        "agent": "curious:Agent",
        "agent_paths": (str(tmp_path / "agents"),),
        "worker_cwd": tmp_path / "cwd",
        "worker_env": {"PROVIDER_KEY": KEY},
        "restarts": RestartPolicy(replacements_per_turn_max=0),
    }


@LAUNCHERS
async def test_a_worker_sees_nothing_of_its_host_but_what_is_listed(
    open_pool: OpenPool, host: dict[str, Any], tmp_path: Path, launcher: str
) -> None:
    pool = await open_pool(**host, launcher=launcher)
    reply = (await pool.send("c", "look")).text
    assert SECRET not in reply
    assert KEY in reply
    assert str(tmp_path / "trap") not in reply
    assert f'"{tmp_path / "cwd"}"' in reply  # it works there, and imports nothing from there
    assert str(tmp_path / "cwd") not in (await pool.send("c", "import")).text
    for pid in children():
        process = psutil.Process(pid)
        assert SECRET not in str(process.environ()), process
        assert SECRET not in str(process.cmdline()) + process.cwd(), process
        assert KEY not in str(process.cmdline()), process


@LAUNCHERS
async def test_no_secret_gets_into_a_log_an_error_or_a_file(
    open_pool: OpenPool,
    host: dict[str, Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    launcher: str,
) -> None:
    caplog.set_level(logging.DEBUG, logger="hermes_pool")
    pool = await open_pool(**host, launcher=launcher)
    await pool.send("c", "hello")
    with pytest.raises(WorkerCrashedError) as caught:
        await pool.send("c", "die")
    await pool.send("c", "hello")
    rows = repr(await pool.sessions())
    await pool.close()
    assert "last words" in str(caught.value)  # the error is not empty
    told = [str(caught.value), repr(caught.value.report), rows, caplog.text, repr(pool.settings)]
    files = [file for file in (tmp_path / "state").rglob("*") if file.is_file()]
    assert any(file.suffix == ".db" for file in files)
    for secret in (SECRET, KEY):
        assert not any(secret in each for each in told)
        assert not [file for file in files if secret.encode() in file.read_bytes()]
