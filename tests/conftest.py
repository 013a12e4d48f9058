"""What tests share: pools that are closed and then looked for in the operating system, and ways to await facts."""

import asyncio
import os
import stat
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from hermes_pool import HermesSessionManager, PoolSettings, Timeouts
from hermes_pool import manager as manager_module
from hermes_pool.scheduling import monitor

FAULTY = Path(__file__).parent / "crash" / "faulty_workers"
DEADLINE_S = 20.0


def quick(**timeouts: Any) -> Timeouts:
    """Timeouts for tests: what ends a worker takes no longer than it must."""
    return Timeouts(**{"close_grace_s": 1.0, "term_grace_s": 0.5, "start_s": 15.0, **timeouts})


async def until(fact: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> Any:
    """Wait until ``fact()`` (or what it awaits) is true and return it. The pace is the loop's; the deadline is hard."""
    end = time.monotonic() + deadline_s
    while True:
        value = fact()
        if isinstance(value, Awaitable):
            value = await value
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"not within {deadline_s} s: {what}")
        await asyncio.sleep(0.01)


def descriptors() -> set[str]:
    """The descriptors of this process, with what they refer to."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        # The loop's own, and a file that some library keeps open on purpose, are not ours to count.
        if target.startswith(("pipe:", "socket:", "anon_inode:[pidfd]")) or ".db" in target:
            found.add(f"{name} {target}")
    return found


def children() -> set[int]:
    """All descendants of this process, zombies included."""
    return {process.pid for process in psutil.Process().children(recursive=True)}


def alive(pid: int) -> bool:
    """Whether a process has that pid and has not ended; a zombie, which waits to be reaped, has."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


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


Pool = HermesSessionManager
OpenPool = Callable[..., Awaitable[HermesSessionManager]]


@pytest.fixture
async def open_pool(tmp_path: Path, nothing_left: None, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[OpenPool]:
    """Open pools with quick settings; each is closed at the end, and its tasks must be gone.

    ``sweep_s`` is how often idle workers are looked for, and ``sample_s`` how often all workers are looked at.
    """
    pools: list[HermesSessionManager] = []
    monkeypatch.setattr(manager_module, "sweep_every_s", lambda _: 0.1)

    async def open_one(
        *,
        store: Any = None,
        on_background: Any = None,
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
        pool = HermesSessionManager(PoolSettings(**values), store=store, on_background=on_background)
        pools.append(await pool.__aenter__())
        return pool

    yield open_one
    for pool in pools:
        await asyncio.wait_for(pool.close(), 20)
    await until(lambda: len(asyncio.all_tasks()) <= 1, f"no task left, but {asyncio.all_tasks()}", 2)


@pytest.fixture
def faulty() -> Callable[[str], dict[str, Any]]:
    """Settings for an agent of ``faulty_workers``, run in the real shim."""

    def settings(name: str, **options: Any) -> dict[str, Any]:
        assert (FAULTY / f"{name}.py").exists()
        return {"agent": f"{name}:Agent", "agent_paths": (str(FAULTY),), "agent_options": options}

    return settings


@pytest.fixture
def instead_of_python(tmp_path: Path) -> Callable[[str], dict[str, Any]]:
    """Settings for a program of ``faulty_workers`` that takes the place of the whole worker, shim and all."""

    def settings(name: str) -> dict[str, Any]:
        program = tmp_path / name
        source = (FAULTY / f"{name}.py").read_text()
        program.write_text(f"#!{sys.executable}\n{source}")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        return {"worker_python": str(program)}

    return settings


class Obedient:
    """The folder through which a test commands ``agents/obedient.py``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def settings(self, **options: Any) -> dict[str, Any]:
        return {
            "agent": "obedient:Agent",
            "agent_paths": (str(Path(__file__).parent / "integration" / "agents"),),
            "agent_options": {"folder": str(self.folder), **options},
        }

    def allow(self, name: str) -> None:
        (self.folder / name).touch()

    def marks(self, kind: str | None = None) -> list[str]:
        """What the workers did, in order: ``kind text`` each, or only the texts of one kind."""
        try:
            lines = (self.folder / "marks").read_text().splitlines()
        except FileNotFoundError:
            return []
        found = [line.split(" ", 2)[1:] for line in lines]
        return [" ".join(parts) if kind is None else parts[1] for parts in found if kind in (None, parts[0])]


@pytest.fixture
def obedient(tmp_path: Path) -> Obedient:
    return Obedient(tmp_path / "orders")
