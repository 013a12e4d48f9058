"""What the monitor makes of its looks: of all workers, of some, and of none that could be made."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
import structlog

from hermes_pool import PoolSettings
from hermes_pool.lifecycle import State
from hermes_pool.policy.liveness import Diagnosis, Evidence, ProcessIdentity, ProcessState, Sample
from hermes_pool.scheduling import monitor
from hermes_pool.scheduling.monitor import Monitor
from hermes_pool.system.samples import Attention
from tests.support import until

MB = 1024 * 1024


class Session:
    """A session whose worker holds so much memory; it goes when it is told to."""

    def __init__(self, pid: int, state: State, mb: int, *, works_on: bool = False) -> None:
        self.worker: ProcessIdentity | None = (pid, 1.0)
        self.state = state
        self.mb = mb
        self.works_on = works_on
        self.worker_age_s = 1.0
        self.verdicts: list[Diagnosis | None] = []

    def ask(self) -> None:
        """It has nobody to ask."""

    def evidence(self, samples: tuple[Sample, ...], at_rest: Any, trusted_from: float) -> Evidence:
        now = asyncio.get_running_loop().time()
        return Evidence(now=now, heard_at=now, asked_at=None, samples=samples)

    def diagnosed(self, diagnosis: Diagnosis | None) -> None:
        self.verdicts.append(diagnosis)

    async def replace_stuck(self, diagnosis: Diagnosis) -> None:
        raise AssertionError

    async def kill_for(self, reason: str) -> None:
        raise AssertionError

    def recycle(self, reason: str) -> None:
        self.worker = None


class Looks:
    """A sampler that sees what the sessions hold, and counts its looks by how many were looked at."""

    def __init__(self, sessions: list[Session]) -> None:
        self._sessions = sessions
        self._samples: dict[ProcessIdentity, tuple[Sample, ...]] = {}
        self.failures_left = 0
        self.looks: list[int] = []

    def look(self, workers: Mapping[ProcessIdentity, Attention], *, unique_above_bytes: float | None = None) -> None:
        if self.failures_left:
            self.failures_left -= 1
            raise OSError("too many open files")
        self.looks.append(len(workers))
        for session in self._sessions:
            if session.worker is not None and session.worker in workers:
                sample = Sample(at=0.0, state=ProcessState.SLEEPING, rss_bytes=session.mb * MB)
                self._samples[session.worker] = (sample,)

    def samples(self, worker: ProcessIdentity) -> tuple[Sample, ...]:
        return self._samples.get(worker, ())

    def at_rest(self, worker: ProcessIdentity) -> frozenset[ProcessIdentity]:
        return frozenset()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "CLOSE_EVERY_S", 0.02)


def at_work(sessions: list[Session], looks: Any, **settings: Any) -> "asyncio.Task[None]":
    care = Monitor(
        PoolSettings(agent="echo", sample_s=0.2, **settings),
        looks,
        wards=lambda: list(sessions),
        worth=lambda _: 0.0,
        in_background=asyncio.ensure_future,
        log=structlog.get_logger(),
    )
    return asyncio.ensure_future(care.run())


async def test_a_look_at_some_workers_is_not_taken_for_the_total(quick: None) -> None:
    busy, works = Session(1, State.BUSY, 100), Session(2, State.IDLE, 200, works_on=True)
    idle = Session(3, State.IDLE, 250)
    sessions = [busy, works, idle]
    looks = Looks(sessions)
    task = at_work(sessions, looks, memory_total_bytes=500 * MB, memory_total_low=0.5)
    try:
        await until(lambda: idle.worker is None, "the idle one to go: 550 MB are over the total")
        await until(lambda: 1 in looks.looks[1:], "a look at the busy one alone")
        works.works_on = False
        await until(lambda: works.worker is None, "the next one to go: 300 MB are still over the lower mark", 5)
        assert busy.worker is not None
    finally:
        task.cancel()


async def test_a_look_that_could_not_be_made_is_not_the_last_one(quick: None) -> None:
    busy = Session(1, State.BUSY, 100)
    looks = Looks([busy])
    looks.failures_left = 2
    task = at_work([busy], looks)
    try:
        await until(lambda: busy.verdicts, "a verdict after all", 5)
        assert looks.failures_left == 0
    finally:
        task.cancel()
