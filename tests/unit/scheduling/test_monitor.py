"""What the monitor makes of its looks: of all workers, of some, and of none that could be made."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
import structlog

from hermes_pool import MemoryLimits, PoolSettings
from hermes_pool.lifecycle import WorkerState
from hermes_pool.policy import memory
from hermes_pool.policy.liveness import Diagnosis, Evidence, ProcessIdentity, ProcessState, Sample
from hermes_pool.scheduling import monitor
from hermes_pool.scheduling.monitor import Monitor
from hermes_pool.system.samples import Attention
from tests.support import until

MB = 1024 * 1024


class Slot:
    """A slot whose worker holds so much memory, and goes when it is told to."""

    def __init__(self, pid: int, state: WorkerState, mb: int, *, has_work: bool = False) -> None:
        self.worker: ProcessIdentity | None = (pid, 1.0)
        self.state = state
        self.mb = mb
        self.has_work = has_work or state is WorkerState.BUSY
        self.worker_age_s = 1.0
        self.diagnosis: Diagnosis | None = None

    def ping(self) -> None:
        """It has nobody to ask."""

    def evidence(self, samples: tuple[Sample, ...], descendants_when_idle: Any, trusted_from: float) -> Evidence:
        now = asyncio.get_running_loop().time()
        return Evidence(now=now, heard_at=now, pinged_at=None, samples=samples)

    async def kill(self, reason: str, *, wanted: bool, diagnosis: Diagnosis | None = None) -> None:
        raise AssertionError

    def retire(self, reason: str) -> None:
        self.worker = None


class Looks:
    """A sampler that sees what the slots hold, and counts its looks by how many were looked at."""

    def __init__(self, slots: list[Slot]) -> None:
        self._slots = slots
        self._samples: dict[ProcessIdentity, tuple[Sample, ...]] = {}
        self.failures_left = 0
        self.looks: list[int] = []

    def sample(self, workers: Mapping[ProcessIdentity, Attention], *, unique_above_bytes: float | None = None) -> None:
        if self.failures_left:
            self.failures_left -= 1
            raise OSError("too many open files")
        self.looks.append(len(workers))
        for slot in self._slots:
            if slot.worker is not None and slot.worker in workers:
                sample = Sample(at=0.0, state=ProcessState.SLEEPING, rss_bytes=slot.mb * MB)
                self._samples[slot.worker] = (sample,)

    def samples(self, worker: ProcessIdentity) -> tuple[Sample, ...]:
        return self._samples.get(worker, ())

    def descendants_when_idle(self, worker: ProcessIdentity) -> frozenset[ProcessIdentity]:
        return frozenset()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "SAMPLE_S", 0.2)
    monkeypatch.setattr(monitor, "SAMPLE_TURNS_S", 0.02)


def at_work(slots: list[Slot], looks: Any, **settings: Any) -> "asyncio.Task[None]":
    care = Monitor(
        PoolSettings(agent="echo", **settings),
        looks,
        slots=lambda: list(slots),
        worth=lambda _: 0.0,
        in_background=asyncio.ensure_future,
        log=structlog.get_logger(),
    )
    return asyncio.ensure_future(care.run())


async def test_a_look_at_some_workers_is_not_taken_for_the_total(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "TOTAL_LOW", 0.5)
    busy, works = Slot(1, WorkerState.BUSY, 100), Slot(2, WorkerState.IDLE, 200, has_work=True)
    idle = Slot(3, WorkerState.IDLE, 250)
    slots = [busy, works, idle]
    looks = Looks(slots)
    task = at_work(slots, looks, memory=MemoryLimits(total_bytes=500 * MB))
    try:
        await until(lambda: idle.worker is None, "the idle one to go: 550 MB are over the total")
        await until(lambda: 1 in looks.looks[1:], "a look at the busy one alone")
        works.has_work = False
        await until(lambda: works.worker is None, "the next one to go: 300 MB are still over the lower mark", 5)
        assert busy.worker is not None
    finally:
        task.cancel()


async def test_a_look_that_could_not_be_made_is_not_the_last_one(quick: None) -> None:
    busy = Slot(1, WorkerState.BUSY, 100)
    looks = Looks([busy])
    looks.failures_left = 2
    task = at_work([busy], looks)
    try:
        await until(lambda: busy.diagnosis, "a verdict after all", 5)
        assert looks.failures_left == 0
    finally:
        task.cancel()
