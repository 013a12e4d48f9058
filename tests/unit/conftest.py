"""Unit tests start no process: whatever would, fails."""

import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager

import pytest

STARTS = {
    "subprocess.Popen", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.startfile", "os.system",
    "pty.spawn",
}  # fmt: skip

_started: list[str] | None = None
"""What was tried since it is forbidden; ``None`` while it is not. A flag, since no audit hook can be removed again."""


def _audit(event: str, arguments: tuple[object, ...]) -> None:
    if _started is not None and event in STARTS:
        _started.append(f"{event} {arguments[:1]}")
        raise AssertionError(f"a unit test starts no process, so this one belongs elsewhere: {_started[-1]}")


sys.addaudithook(_audit)


@contextmanager
def _forbidden() -> Iterator[list[str]]:
    global _started
    started: list[str] = []
    _started = started
    try:
        yield started
    finally:
        _started = None


@pytest.fixture(autouse=True)
def _no_process() -> Iterator[None]:
    with _forbidden() as started:
        yield
    assert not started, "it tried to, and went on"


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Forbid it also to the test modules, while they are imported."""
    with _forbidden():
        return (yield)
