import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from hermes_pool.process import orphans
from hermes_pool.process.orphans import Orphans, Owner, end_session
from hermes_pool.system.processes import IdentityCheck
from tests.support import alive, wait_for

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes show their environment on Linux")


class Log:
    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def warning(self, event: str, **values: Any) -> None:
        self.events.append((event, values))


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def tool() -> Iterator[Callable[..., int]]:
    """Start a process that carries a marker and has lost its parent, as when a supervisor has died."""
    started: list[psutil.Process] = []

    def start(marker: str, program: str = "exec sleep 300", **more: Any) -> int:
        environment = {"HERMES_POOL_WORKER": marker, "PATH": os.environ["PATH"]}
        orphaning = ["sh", "-c", 'sh -c "$0" >/dev/null 2>&1 & echo $!', program]
        pid = int(subprocess.run(orphaning, env=environment, stdout=subprocess.PIPE, check=True, **more).stdout)
        started.append(psutil.Process(pid))
        return pid

    yield start
    for each in started:
        for process in (*_below(each), each):
            if process.is_running():
                process.kill()


def _below(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def dead_owner(**changes: Any) -> dict[str, Any]:
    """The record of a supervisor that has ended, and been waited for."""
    process = subprocess.Popen(["sleep", "300"])
    owner = {
        **json.loads(json.dumps(_values(Owner.here()))),
        "pid": process.pid,
        "create_time": psutil.Process(process.pid).create_time(),
        "began": orphans._began(process.pid),
    }
    process.kill()
    process.wait()
    return {**owner, **changes}


def _values(owner: Owner) -> dict[str, Any]:
    return {name: getattr(owner, name) for name in Owner.__slots__}


def put(folder: Path, pool: str, record: Any) -> Path:
    file = folder / "owners" / f"{pool}.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(record if isinstance(record, str) else json.dumps(record))
    return file


def test_what_a_dead_supervisor_left_is_ended_and_told(tmp_path: Path, log: Log, tool: Callable[..., int]) -> None:
    above = tool("dead-1", "env -i sleep 300 & wait")
    left = {tool("dead-1"), tool("dead-zygote"), above}
    hidden = _child_of(above)
    others = {tool("living-1"), tool("dead"), tool("deadly-1")}
    file = put(tmp_path, "dead", dead_owner())
    ended = Orphans(tmp_path, "mine", log).sweep()
    assert set(ended["dead"]) == left | {hidden.pid}
    assert not [pid for pid in (*left, hidden.pid) if alive(pid)]
    assert all(alive(pid) for pid in others)
    assert not file.exists()
    ((event, values),) = log.events
    assert (event, values["pool"], set(values["pids"])) == ("orphans_ended", "dead", left | {hidden.pid})


def _child_of(pid: int) -> psutil.Process:
    return wait_for(lambda: [each for each in psutil.Process(pid).children() if each.name() == "sleep"])[0]


def test_what_a_living_supervisor_owns_is_not_touched(tmp_path: Path, log: Log, tool: Callable[..., int]) -> None:
    pid = tool("living-1")
    living = Orphans(tmp_path, "living", log)
    living.record()
    mine = Orphans(tmp_path, "mine", log)
    mine.record()
    assert mine.sweep() == living.sweep() == {}
    assert alive(pid)
    assert {file.stem for file in (tmp_path / "owners").iterdir()} == {"living", "mine"}
    mine.forget()
    assert {file.stem for file in (tmp_path / "owners").iterdir()} == {"living"}


@pytest.mark.parametrize(
    ("changes", "identity"),
    [
        ({}, IdentityCheck.GONE),
        ({"pid": 1}, IdentityCheck.REPLACED),
        ({"system": "another-boot pid:[1]", "host": "another-machine"}, IdentityCheck.UNKNOWN),
        ({"system": "another-boot pid:[1]"}, IdentityCheck.GONE),
        ({"system": orphans._system().split()[0] + " pid:[1]"}, IdentityCheck.UNKNOWN),
    ],
    ids=["gone", "its pid is another's", "another machine", "rebooted since", "another container"],
)
def test_only_one_that_is_surely_gone_is_swept_up_after(
    tmp_path: Path, log: Log, tool: Callable[..., int], changes: dict[str, Any], identity: IdentityCheck
) -> None:
    file = put(tmp_path, "other", dead_owner(**changes))
    owner = Owner.read(file)
    assert owner is not None
    assert owner.identify() is identity
    pid = tool("other-1")
    swept = identity in (IdentityCheck.GONE, IdentityCheck.REPLACED)
    assert bool(Orphans(tmp_path, "mine", log).sweep()) is swept
    assert alive(pid) is not swept
    assert file.exists() is not swept


@pytest.mark.parametrize(
    "record", ["", "null", "[]", "{}", '{"pid": 1}', {**dead_owner(), "pid": "1"}, {**dead_owner(), "more": 1}]
)
def test_a_record_that_cannot_be_read_is_left_alone(
    tmp_path: Path, log: Log, tool: Callable[..., int], record: Any
) -> None:
    file = put(tmp_path, "other", record)
    pid = tool("other-1")
    assert Orphans(tmp_path, "mine", log).sweep() == {}
    assert alive(pid)
    assert file.exists()


def test_a_host_that_an_agent_of_the_dead_one_has_started_spares_itself_and_its_family(
    tmp_path: Path, tool: Callable[..., int]
) -> None:
    put(tmp_path, "dead", dead_owner())
    program = """
import subprocess, sys
from pathlib import Path
from hermes_pool.process.orphans import Orphans
from hermes_pool.system.log import logger
own = subprocess.Popen(["sleep", "300"])
print(Orphans(Path(sys.argv[1]), "mine", logger()).sweep()["dead"], own.poll())
own.kill()
own.wait()
"""
    other = tool("dead-1")
    shell = subprocess.run(
        ["sh", "-c", f'{sys.executable} -c "$0" "$1"; echo the shell lives', program, str(tmp_path)],
        check=False,
        env={**os.environ, "HERMES_POOL_WORKER": "dead-1"},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert shell.stdout.splitlines() == [f"[{other}] None", "the shell lives"]


def test_a_sweep_has_a_limit(
    tmp_path: Path, log: Log, tool: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orphans, "SWEEP_S", 0.0)
    file = put(tmp_path, "dead", dead_owner())
    pid = tool("dead-1")
    assert Orphans(tmp_path, "mine", log).sweep() == {}
    assert alive(pid)
    assert file.exists()


def test_the_session_of_a_dead_worker_is_ended_and_no_other(tool: Callable[..., int]) -> None:
    leader = tool("pool-1", "exec setsid sh -c 'sleep 300 & sleep 300'")
    _child_of(leader)
    created = psutil.Process(leader).create_time()
    assert end_session(leader, created, "pool") == [], "its leader lives"
    family = [each.pid for each in psutil.Process(leader).children()]
    elsewhere = tool("pool-1", "exec setsid sleep 300")
    foreign = tool("other-1")
    psutil.Process(leader).kill()
    wait_for(lambda: not alive(leader))
    assert set(end_session(leader, created, "pool")) == set(family)
    assert alive(elsewhere)
    assert alive(foreign)
