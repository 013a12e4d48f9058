import os
import sys

import psutil
import pytest

from hermes_pool.system.linux_source import LinuxSource
from hermes_pool.system.sampler import FULL_PASS_EVERY, Sampler
from hermes_pool.system.samples import Attention, Stat

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@linux_only
def test_idle_workers_are_not_read_again() -> None:
    read = []

    class Counting(LinuxSource):
        def pids(self) -> list[int]:
            return [os.getppid()]

        def clock_ns(self, pid: int) -> int:
            return 5

        def stat(self, pid: int) -> Stat | None:
            read.append(pid)
            return super().stat(pid)

    parent = os.getppid()
    workers = {(parent, psutil.Process(parent).create_time()): Attention.PASSING}
    sampler = Sampler(source=Counting())
    sampler.sample(workers)
    read.clear()
    for _ in range(FULL_PASS_EVERY - 1):
        assert sampler.sample(workers) == {worker: sampler.samples(worker)[0] for worker in workers}
    assert read == []
    sampler.sample(workers)
    assert parent in read
