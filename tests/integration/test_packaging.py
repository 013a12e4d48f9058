"""The wheel, in environments as they are out there: the supervisor in one, the workers in another that has little."""

import json
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Callable
from configparser import ConfigParser
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import pytest

ROOT = Path(__file__).resolve().parents[2]
BIN = "Scripts" if sys.platform == "win32" else "bin"
EXIT_UNUSABLE = 78

REPORTER = """
import json, os, sys
import hermes_pool_worker, msgspec
from hermes_pool_worker.agent import Opened, Outcome


class Reporter:
    def open(self, request):
        return Opened(session_id=request.session_id or "reporter-1")

    def turn(self, text, turn):
        found = {
            "path": sys.path,
            "prefix": sys.prefix,
            "executable": sys.executable,
            "pid": os.getpid(),
            "worker_package": hermes_pool_worker.__file__,
            "msgspec": msgspec.__file__,
            "supervisor_package": "hermes_pool" in sys.modules,
        }
        return Outcome(json.dumps(found))

    def interrupt(self): ...
    def close(self): ...
"""

SUPERVISOR = """
import asyncio, json, sys, time
import psutil
import hermes_pool
from hermes_pool import HermesPoolError, HermesSessionManager, PoolSettings


async def main(settings, messages):
    found = {"package": hermes_pool.__file__, "replies": [], "error": None, "command": None}
    async with HermesSessionManager(PoolSettings(**settings)) as sessions:
        began = time.monotonic()
        try:
            for message in messages:
                found["replies"].append((await sessions.send("c", message)).text)
        except HermesPoolError as error:
            found.update(error=type(error).__name__, text=str(error), retryable=error.retryable)
        found["seconds"] = time.monotonic() - began
        (session,) = await sessions.sessions()
        found.update(pid=session.pid, incarnation=session.incarnation)
        if session.pid is not None:
            found["command"] = psutil.Process(session.pid).cmdline()
    print(json.dumps(found))


asyncio.run(main(json.loads(sys.argv[1]), sys.argv[2:]))
"""


class Environment:
    """A virtual environment."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, symlinks=sys.platform != "win32")
        self.folder = folder
        self.python = folder / BIN / ("python.exe" if sys.platform == "win32" else "python")
        self.packages = Path(sysconfig.get_path("purelib", "venv", vars={"base": str(folder), "platbase": str(folder)}))

    def run(self, *arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        # -I: neither the checkout, by way of the working folder, nor anybody's PYTHONPATH gets in.
        return subprocess.run(
            [self.python, "-I", *arguments], capture_output=True, text=True, timeout=60, check=False, cwd=cwd
        )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # Where the build backend is installed already it is used as it is, and no network is needed.
    isolation = ["--no-isolation", "--skip-dependency-check"] if find_spec("hatchling") else []
    done = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", *isolation, "--outdir", folder, ROOT],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = folder.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def jarvis(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Environment A: the host's, with the wheel."""
    environment = Environment(tmp_path_factory.mktemp("a"))
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--python", environment.python, "install", "--quiet", "--no-index", "--no-deps",
         "--disable-pip-version-check", wheel],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    # The dependencies come from the environment that runs the tests. What a .pth in *that* folder says, such as where
    # the checkout is, is not followed from here.
    (environment.packages / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return environment


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Environment B: for workers, with msgspec and nothing else."""
    environment = Environment(tmp_path_factory.mktemp("b"))
    shutil.copytree(
        Path(msgspec.__file__).parent, environment.packages / "msgspec", ignore=shutil.ignore_patterns("__pycache__")
    )
    return environment


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Environment C: a Python and nothing else."""
    return Environment(tmp_path_factory.mktemp("c"))


@pytest.fixture
def converse(jarvis: Environment, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Have the supervisor of the wheel send messages, and return what it found."""
    program = tmp_path / "supervisor.py"
    program.write_text(SUPERVISOR)
    (tmp_path / "agents").mkdir()
    (tmp_path / "agents" / "reporter.py").write_text(REPORTER)

    def run(*messages: str, **settings: object) -> dict[str, Any]:
        given = json.dumps({"state_dir": str(tmp_path / "state"), **settings}, default=str)
        done = jarvis.run(program, given, *messages, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        found: dict[str, Any] = json.loads(done.stdout)
        assert Path(found["package"]).is_relative_to(jarvis.packages), "the checkout must have no part in this"
        return found

    return run


def test_the_wheel_holds_two_packages_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        dist_info = next(name for name in names if name.endswith(".dist-info/METADATA")).partition("/")[0]
        points = ConfigParser()
        points.read_string(archive.read(f"{dist_info}/entry_points.txt").decode())
        metadata = archive.read(f"{dist_info}/METADATA").decode()
    assert {name.partition("/")[0] for name in names} == {"hermes_pool", "hermes_pool_worker", dist_info}
    assert {"hermes_pool/py.typed", "hermes_pool_worker/py.typed"} <= names
    assert dict(points["console_scripts"]) == {"hermes-pool": "hermes_pool.cli.app:app"}
    assert "Requires-Python: >=3.11" in metadata
    assert f"{dist_info}/licenses/LICENSE" in names

    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "hermes_pool").rglob("*.py")}
    sources |= {path.relative_to(ROOT / "worker").as_posix() for path in (ROOT / "worker").rglob("*.py")}
    assert {name for name in names if not name.startswith(dist_info)} - {
        "hermes_pool/py.typed",
        "hermes_pool_worker/py.typed",
    } == sources


def test_the_command_is_installed(jarvis: Environment, tmp_path: Path) -> None:
    command = jarvis.folder / BIN / ("hermes-pool.exe" if sys.platform == "win32" else "hermes-pool")
    done = subprocess.run(
        [command, "ps", "--state-dir", tmp_path / "none"], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0
    assert "no supervisor is running" in done.stderr


def test_a_conversation_with_workers_in_an_environment_that_has_only_msgspec(
    converse: Callable[..., dict[str, Any]], workers: Environment
) -> None:
    found = converse("one", "/count", agent="echo", worker_python=workers.python)
    assert found["replies"][0] == "one"
    assert "2" in found["replies"][1]
    assert found["incarnation"] == 1
    if sys.platform != "win32":  # where the interpreter of an environment is a program that starts another one
        assert found["command"][0] == str(workers.python)


def test_nothing_of_the_hosts_environment_gets_into_the_workers(
    converse: Callable[..., dict[str, Any]], workers: Environment, jarvis: Environment, tmp_path: Path
) -> None:
    folder = tmp_path / "agents"
    found = converse("look", agent="reporter:Reporter", agent_paths=[folder], worker_python=workers.python)
    seen = json.loads(found["replies"][0])
    assert Path(seen["prefix"]) == workers.folder
    if sys.platform != "win32":
        assert seen["pid"] == found["pid"]
        assert seen["executable"] == str(workers.python)
    assert not seen["supervisor_package"]
    # Both sides run the same definition of the wire; the rest is the worker's own.
    assert Path(seen["worker_package"]).is_relative_to(jarvis.packages)
    assert Path(seen["msgspec"]).is_relative_to(workers.packages)
    for entry in map(Path, seen["path"]):
        assert not entry.is_relative_to(jarvis.folder)
        assert not entry.is_relative_to(ROOT)
    assert str(folder) in seen["path"]
    assert "" not in seen["path"]


def test_without_msgspec_the_remedy_is_told_and_no_second_start_is_tried(
    converse: Callable[..., dict[str, Any]], bare: Environment
) -> None:
    found = converse("one", agent="echo", worker_python=bare.python)
    assert found["error"] == "WorkerUnusableError"
    assert not found["retryable"]
    assert f"{bare.python} -m pip install msgspec" in found["text"]
    assert found["incarnation"] == 1
    assert found["seconds"] < 5
    assert found["pid"] is None


def test_without_msgspec_the_worker_leaves_with_a_status_of_its_own(jarvis: Environment, bare: Environment) -> None:
    program = jarvis.packages / "hermes_pool_worker" / "__main__.py"
    done = subprocess.run(
        [bare.python, "-P", program, "echo", "65536"],
        input="",
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == EXIT_UNUSABLE
    assert done.stdout == ""
    assert "pip install msgspec" in done.stderr


def test_without_hermes_the_remedy_names_it_and_no_second_start_is_tried(
    converse: Callable[..., dict[str, Any]], workers: Environment
) -> None:
    found = converse("one", agent="hermes", worker_python=workers.python)
    assert found["error"] == "WorkerUnusableError"
    assert not found["retryable"]
    assert f"{workers.python} -m pip install hermes-agent" in found["text"]
    assert found["incarnation"] == 1
    assert found["pid"] is None
