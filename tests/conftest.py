"""Fixtures that tests share: pools, closed and then looked for in the operating system, and agents for them."""

import asyncio
import stat
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import psutil
import pytest

from hermes_pool import BackgroundFinished, ConversationStore, HermesSessionManager, PoolSettings, SessionKey
from hermes_pool import manager as manager_module
from hermes_pool.scheduling import monitor
from tests.support import FAULTY, Faulty, FaultyProgram, Obedient, OpenPool, children, descriptors, quick, until

# Each test has a deadline; an example has none of its own, which on a busy machine would measure its neighbours.
hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")

collect_ignore: list[str] = []
if sys.platform != "linux":
    collect_ignore += ["crash"]  # faults are put in, and looked for, by way of zygotes, signals and /proc
if sys.platform == "win32":
    collect_ignore += [
        "integration/test_cli.py",  # has terminals as Unix has them
        "integration/test_control.py",  # has sockets in files
        "integration/test_limits_and_stacks.py",  # has rlimits and signals
        "unit/control",  # has sockets in files
    ]


@pytest.fixture(scope="session", autouse=True)
def home_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A home folder of the run's own. What a tool's shell reads at its start must not decide about a test.

    Nor must a test that kills such a shell leave anything half done in the home of whoever runs it.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Fail if the test leaves a process or a descriptor behind. Asked of the operating system, not of the pool."""
    before = children(), descriptors()
    yield
    end = time.monotonic() + 5
    while (left := children() - before[0]) and time.monotonic() < end:
        psutil.wait_procs([p for p in psutil.Process().children(recursive=True) if p.pid in left], timeout=0.05)
    assert not left, f"processes left: {[_described(pid) for pid in left]}"
    if sys.platform == "linux":
        assert not descriptors() - before[1], f"descriptors left: {descriptors() - before[1]}"


def _described(pid: int) -> str:
    try:
        return str(psutil.Process(pid))
    except psutil.Error as error:
        return repr(error)


@pytest.fixture
async def open_pool(tmp_path: Path, nothing_left: None, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[OpenPool]:
    """Open pools with quick settings; each is closed at the end, and its tasks must be gone.

    ``sweep_s`` is how often idle workers are looked for, and ``sample_s`` how often all workers are looked at.
    """
    pools: list[HermesSessionManager] = []
    monkeypatch.setattr(manager_module, "sweep_every_s", lambda _: 0.1)

    async def open_one(
        *,
        store: ConversationStore | None = None,
        on_background: Callable[[SessionKey, BackgroundFinished], None] | None = None,
        on_question: Any = None,
        on_turn: Any = None,
        history: Any = None,
        sweep_s: float | None = None,
        sample_s: float | None = None,
        **settings: Any,
    ) -> HermesSessionManager:
        if sweep_s is not None:
            monkeypatch.setattr(manager_module, "sweep_every_s", lambda _: sweep_s)
        if sample_s is not None:
            monkeypatch.setattr(monitor, "SAMPLE_S", sample_s)
        # A program of a test's own in the interpreter's place is no zygote.
        launcher = {"launcher": "spawn"} if "worker_python" in settings else {}
        values = {"agent": "echo", "state_dir": tmp_path / "state", "timeouts": quick(), **launcher, **settings}
        pool = HermesSessionManager(
            PoolSettings(**values),
            store=store,
            on_background=on_background,
            on_question=on_question,
            on_turn=on_turn,
            history=history,
        )
        pools.append(await pool.__aenter__())
        return pool

    yield open_one
    for pool in pools:
        await asyncio.wait_for(pool.close(), 20)
    await until(lambda: len(asyncio.all_tasks()) <= 1, f"no task left, but {asyncio.all_tasks()}", 2)


@pytest.fixture
def faulty() -> Faulty:
    """Settings for an agent of ``faulty_workers``, run in the real shim."""

    def settings(name: str, **options: Any) -> dict[str, Any]:
        assert (FAULTY / f"{name}.py").exists()
        return {"agent": f"{name}:Agent", "agent_paths": (str(FAULTY),), "agent_options": options}

    return settings


@pytest.fixture
def instead_of_python(tmp_path: Path) -> FaultyProgram:
    """Settings for a program of ``faulty_workers`` that takes the place of the whole worker, shim and all."""

    def settings(name: str) -> dict[str, Any]:
        program = tmp_path / name
        source = (FAULTY / f"{name}.py").read_text()
        program.write_text(f"#!{sys.executable}\n{source}")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        return {"worker_python": str(program)}

    return settings


@pytest.fixture
def obedient(tmp_path: Path) -> Obedient:
    return Obedient(tmp_path / "orders")
