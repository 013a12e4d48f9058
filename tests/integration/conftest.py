"""Fixtures for tests of the real Hermes: a scripted model, a home that uses it, and workers."""

import contextlib
import os
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from hermes_pool.testing.scripted_model import ScriptedModel, write_hermes_home
from tests.integration.hermes_program import Start, Worker
from tests.support import known


@pytest.fixture
def model() -> Iterator[ScriptedModel]:
    with ScriptedModel() as server:
        yield server


@pytest.fixture
def home(tmp_path: Path, model: ScriptedModel) -> Path:
    return write_hermes_home(tmp_path / "hermes", model.url)


@pytest.fixture
def start(home: Path, tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts a worker; whatever is left of the workers and their tools ends with the test."""
    marker = uuid.uuid4().hex
    workers: list[Worker] = []

    def start_worker(**environ: str) -> Worker:
        workers.append(Worker(home, tmp_path, HERMES_POOL_TEST=marker, **environ))
        return workers[-1]

    def left() -> list[int]:
        """Return the pids of all processes that descend from these workers."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if marker.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
        return found

    yield Start(start_worker, left)
    for worker in workers:
        worker.kill()
        known(worker.process.stdout).close()
        with contextlib.suppress(BrokenPipeError):
            known(worker.process.stdin).close()
    for pid in left():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
