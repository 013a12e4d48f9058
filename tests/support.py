"""What tests share: ways to await facts, to ask the operating system, and to tell agents what to do."""

import asyncio
import os
import stat
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, Protocol, TypeVar, overload

import psutil

from hermes_pool import HermesPoolError, HermesSessionManager, Timeouts

T = TypeVar("T")

FAULTY = Path(__file__).parent / "crash" / "faulty_workers"
AGENTS = Path(__file__).parent / "integration" / "agents"
DEADLINE_S = 20.0

Pool = HermesSessionManager


class OpenPool(Protocol):
    """Open a pool with quick settings; the fixture ``open_pool`` closes it."""

    def __call__(self, **settings: Any) -> Coroutine[Any, Any, Pool]: ...


class Faulty(Protocol):
    """Settings for an agent of ``faulty_workers``, with these options."""

    def __call__(self, name: str, **options: Any) -> dict[str, Any]: ...


class FaultyProgram(Protocol):
    """Settings for a program of ``faulty_workers`` in the place of the whole worker."""

    def __call__(self, name: str) -> dict[str, Any]: ...


def quick(**timeouts: Any) -> Timeouts:
    """Timeouts for tests: what ends a worker takes no longer than it must."""
    return Timeouts(**{"close_grace_s": 1.0, "term_grace_s": 0.5, "start_s": 15.0, **timeouts})


def known(value: T | None) -> T:
    """The value, which has to be there."""
    assert value is not None
    return value


def refused(check: Callable[..., None], *arguments: Any) -> Any:
    """Return the error with which something is refused, or ``None`` where it is let in."""
    try:
        check(*arguments)
    except HermesPoolError as error:
        return error
    return None


@overload
async def until(fact: Callable[[], Awaitable[T | None]], what: str, deadline_s: float = DEADLINE_S) -> T: ...
@overload
async def until(fact: Callable[[], T | None], what: str, deadline_s: float = DEADLINE_S) -> T: ...
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


def wait_for(fact: Callable[[], T | None], deadline_s: float = 10.0) -> T:
    """Wait until ``fact()`` is true and return it, in a test that has no loop."""
    end = time.monotonic() + deadline_s
    while not (value := fact()):
        assert time.monotonic() < end
        time.sleep(0.005)
    return value


def descriptors() -> set[str]:
    """The open pipes and sockets of this process, and on Linux its pidfds and databases; none where nothing lists them.

    The loop's own, and a file that some library keeps open on purpose, are not ours to count.
    """
    if sys.platform == "linux":
        kinds = ("pipe:", "socket:", "anon_inode:[pidfd]")
        return {each for each in _links("/proc/self/fd") if each.split()[1].startswith(kinds) or ".db" in each}
    if sys.platform == "win32":
        return set()
    return set(_open_files("/dev/fd"))


def _links(folder: str) -> list[str]:
    found = []
    for name in os.listdir(folder):
        try:
            found.append(f"{name} {os.readlink(f'{folder}/{name}')}")
        except OSError:  # the one through which the folder was read
            continue
    return found


def _open_files(folder: str) -> list[str]:
    found = []
    for name in os.listdir(folder):
        try:
            is_now = os.fstat(int(name))
        except OSError:
            continue
        if stat.S_ISFIFO(is_now.st_mode) or stat.S_ISSOCK(is_now.st_mode):
            found.append(f"{name} {is_now.st_dev}:{is_now.st_ino}")
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


class Obedient:
    """The folder through which a test commands ``agents/obedient.py``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def settings(self, **options: Any) -> dict[str, Any]:
        return {
            "agent": "obedient:Agent",
            "agent_paths": (str(AGENTS),),
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
