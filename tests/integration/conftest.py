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
from tests.integration.warm_worker import Warm


@pytest.fixture
def model() -> Iterator[ScriptedModel]:
    with ScriptedModel() as server:
        yield server


@pytest.fixture
def home(tmp_path: Path, model: ScriptedModel) -> Path:
    return write_hermes_home(tmp_path / "hermes", model.url)


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    warm = Warm(tmp_path_factory.mktemp("warm"))
    yield warm
    warm.close()


@pytest.fixture
def start(home: Path, tmp_path: Path, warm: Warm) -> Iterator[Start]:
    """Return a function that starts a worker; whatever is left of the workers and their tools ends with the test."""
    warm.lead_to(home)
    marker = uuid.uuid4().hex
    workers: list[Worker] = []

    def start_worker(**environ: str) -> Worker:
        workers.append(Worker(warm, tmp_path, HERMES_POOL_TEST=marker, **environ))
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
        worker.process.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            worker.process.stdin.close()
    for pid in left():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
