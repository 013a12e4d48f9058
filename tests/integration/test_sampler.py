"""Looks at real processes: what they use, whose they are, and what that costs."""

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from hermes_pool.policy.liveness import (
    QUIET_S,
    STILL_S,
    Evidence,
    ProcessIdentity,
    ProcessState,
    Sample,
    Verdict,
    diagnose,
)
from hermes_pool.system import processes
from hermes_pool.system.linux_source import LinuxSource
from hermes_pool.system.psutil_source import PsutilSource
from hermes_pool.system.sampler import FULL_PASS_EVERY, SAMPLES_KEPT, Sampler
from hermes_pool.system.samples import Attention, Source
from tests.support import known

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
SOURCES = [pytest.param(LinuxSource, marks=linux_only), PsutilSource]

OBEDIENT = """
import os, subprocess, sys, time
BURNS = "import time\\nwhile time.process_time() < 0.1: pass\\ntime.sleep(600)"
print("up", flush=True)
for order in sys.stdin:
    what, _, rest = order.strip().partition(" ")
    if what == "burn":
        end = time.process_time() + float(rest)
        while time.process_time() < end: pass
    elif what == "write":
        with open(os.devnull, "wb") as file: file.write(bytes(int(rest)))
    elif what == "hold":
        held = bytearray(os.urandom(1)) * int(rest)
    elif what == "hang":
        import ctypes, threading
        threading.Thread(target=threading.Event().wait, args=(0.01,), daemon=True).start()  # waits for the lock, then
        ctypes.PyDLL(None).sleep(int(rest))  # which is held all the time
    elif what == "start":
        child = subprocess.Popen([sys.executable, "-c", BURNS], start_new_session=True, env={})
        print(child.pid, flush=True); continue
    print("done", flush=True)
"""


class Worker:
    """A process that does what it is told, and says when it is done."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", OBEDIENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert known(self.process.stdout).readline() == "up\n"
        self.pid = self.process.pid
        self.identity: ProcessIdentity = (self.pid, psutil.Process(self.pid).create_time())
        self.rest()

    def rest(self) -> None:
        until(lambda: psutil.Process(self.pid).status() == psutil.STATUS_SLEEPING)

    def begin(self, order: str) -> None:
        print(order, file=self.process.stdin, flush=True)

    def order(self, order: str) -> str:
        self.begin(order)
        answer = known(self.process.stdout).readline().strip()
        self.rest()
        return answer


@pytest.fixture
def start(nothing_left: None) -> Iterator[Callable[[], Worker]]:
    workers: list[Worker] = []

    def begin() -> Worker:
        workers.append(Worker())
        return workers[-1]

    yield begin
    for worker in workers:
        processes.kill(processes.descendants(*worker.identity))
        worker.process.kill()
        worker.process.wait(10)
        known(worker.process.stdin).close()
        known(worker.process.stdout).close()


def look(sampler: Sampler, *workers: Worker, attention: Attention = Attention.CLOSE, **options: Any) -> Sample:
    samples = sampler.sample({worker.identity: attention for worker in workers}, **options)
    return samples[workers[0].identity]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("source", SOURCES)
def test_cpu_memory_and_condition_are_those_of_the_process(start: Callable[[], Worker], source: type[Source]) -> None:
    worker, sampler = start(), Sampler(source=source())
    before = look(sampler, worker)
    assert before.state is ProcessState.SLEEPING
    assert before.threads == 1
    worker.order("burn 0.3")
    worker.order("hold 50000000")
    after = look(sampler, worker)
    assert 0.25 < known(after.own_cpu_s) - known(before.own_cpu_s) < 1
    assert after.cpu_s == after.own_cpu_s
    assert 40e6 < known(after.rss_bytes) - known(before.rss_bytes) < 80e6
    assert after.at >= before.at
    assert sampler.samples(worker.identity) == (before, after)


@linux_only
def test_io_is_read_where_it_is_looked_at_closely(start: Callable[[], Worker]) -> None:
    worker, sampler = start(), Sampler()
    before = look(sampler, worker)
    worker.order("write 3000000")
    assert 3_000_000 <= known(look(sampler, worker).io_bytes) - known(before.io_bytes) < 3_100_000
    worker.order("write 1")
    assert look(sampler, worker, attention=Attention.PASSING).io_bytes is None


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("attention", Attention)
def test_work_between_two_looks_is_seen_by_any_of_them(
    start: Callable[[], Worker], source: type[Source], attention: Attention
) -> None:
    worker, idle, sampler = start(), start(), Sampler(source=source())
    before = sampler.sample({worker.identity: attention, idle.identity: attention})
    worker.order("burn 0.1")
    after = sampler.sample({worker.identity: attention, idle.identity: attention})
    assert known(after[worker.identity].cpu_s) - known(before[worker.identity].cpu_s) >= 0.08
    assert after[idle.identity].cpu_s == before[idle.identity].cpu_s


@pytest.mark.parametrize("source", SOURCES)
def test_a_stopped_worker_is_seen_at_once_when_it_is_looked_at_closely(
    start: Callable[[], Worker], source: type[Source]
) -> None:
    worker, sampler = start(), Sampler(source=source())
    look(sampler, worker)
    os.kill(worker.pid, signal.SIGSTOP)
    until(lambda: psutil.Process(worker.pid).status() == psutil.STATUS_STOPPED)
    assert look(sampler, worker).state is ProcessState.STOPPED


@pytest.mark.parametrize("source", SOURCES)
def test_a_zombie_a_vanished_one_and_a_pid_of_another_are_dead(
    start: Callable[[], Worker], source: type[Source]
) -> None:
    worker, other, sampler = start(), start(), Sampler(source=source())
    look(sampler, worker, other)
    os.kill(worker.pid, signal.SIGKILL)
    os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
    assert look(sampler, worker).state is ProcessState.DEAD
    worker.process.wait(10)
    assert look(sampler, worker).state is ProcessState.DEAD
    replaced = (other.pid, other.identity[1] - 100)
    assert sampler.sample({replaced: Attention.CLOSE})[replaced].state is ProcessState.DEAD
    assert sampler.samples(replaced) == ()


@pytest.mark.parametrize("source", SOURCES)
def test_descendants_are_counted_in_and_named_as_psutil_names_them(
    start: Callable[[], Worker], source: type[Source]
) -> None:
    worker, sampler = start(), Sampler(source=source())
    alone = look(sampler, worker)
    pid = int(worker.order("start"))
    both = look(sampler, worker)
    assert both.descendants == ((pid, psutil.Process(pid).create_time()),)
    # Both grow while it starts.
    until(lambda: known(look(sampler, worker).rss_bytes) > known(alone.rss_bytes) + 2_000_000)
    until(lambda: known((now := look(sampler, worker)).cpu_s) > known(now.own_cpu_s))
    assert look(sampler, worker).descendants == both.descendants
    os.kill(pid, signal.SIGKILL)
    until(lambda: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    assert look(sampler, worker).descendants == ()


@pytest.mark.parametrize("source", SOURCES)
def test_children_of_before_its_first_look_are_its_own_and_nobody_elses(
    start: Callable[[], Worker], source: type[Source]
) -> None:
    worker, other, sampler = start(), start(), Sampler(source=source())
    look(sampler, other)
    pid = int(worker.order("start"))
    look(sampler, other)  # sees the child, and knows nothing of its parent yet
    seen = sampler.sample({worker.identity: Attention.PASSING, other.identity: Attention.PASSING})
    assert [each for each, _ in seen[worker.identity].descendants] == [pid]
    assert seen[other.identity].descendants == ()


@pytest.mark.parametrize("source", SOURCES)
def test_what_it_started_can_be_ended_after_its_death_whatever_it_cleared(
    start: Callable[[], Worker], source: type[Source]
) -> None:
    worker, other, sampler = start(), start(), Sampler(source=source())
    pid = int(worker.order("start"))  # in a session of its own, with an empty environment
    spared = int(other.order("start"))
    look(sampler, worker, other)
    worker.process.kill()
    worker.process.wait(10)
    assert psutil.Process(pid).ppid() != worker.pid
    assert look(sampler, other).descendants[0][0] == spared
    assert [each.pid for each in sampler.process_tree(worker.identity)] == [pid]
    assert processes.kill(sampler.process_tree(worker.identity)) == [pid]
    assert sampler.process_tree(worker.identity) == []
    assert psutil.pid_exists(spared)


@linux_only
def test_a_daemon_stays_its_own_though_its_parent_is_gone(start: Callable[[], Worker]) -> None:
    worker, sampler = start(), Sampler()
    assert worker.order("start")
    look(sampler, worker)
    (child,) = sampler.process_tree(worker.identity)
    # Its parent is this process's by now: the worker is dead, and it was handed on.
    worker.process.kill()
    worker.process.wait(10)
    for _ in range(FULL_PASS_EVERY + 2):  # across a look that reads everything anew
        assert sampler.sample({}) == {}
    assert [each.pid for each in sampler.process_tree(worker.identity)] == [child.pid]
    processes.kill([child])


def test_a_pid_that_has_changed_hands_is_not_kin_any_more(start: Callable[[], Worker]) -> None:
    worker, sampler = start(), Sampler()
    pid = int(worker.order("start"))
    look(sampler, worker)
    sampler._workers[worker.identity].tree[pid].started += 1  # as if another process had begun there later
    assert sampler.process_tree(worker.identity) == []


def test_what_was_there_at_rest_is_told_from_what_a_turn_began(start: Callable[[], Worker]) -> None:
    worker, sampler = start(), Sampler()
    server = int(worker.order("start"))
    look(sampler, worker, attention=Attention.PASSING)
    child = int(worker.order("start"))
    sample = look(sampler, worker)
    assert {pid for pid, _ in sample.descendants} == {server, child}
    assert {pid for pid, _ in sampler.descendants_when_idle(worker.identity)} == {server}


@pytest.mark.parametrize("source", SOURCES)
def test_unique_memory_is_measured_above_the_mark_and_is_less_than_what_is_resident(
    start: Callable[[], Worker], source: type[Source]
) -> None:
    worker, sampler = start(), Sampler(source=source())
    worker.order("hold 50000000")
    assert look(sampler, worker).unique_bytes is None
    assert look(sampler, worker, unique_above_bytes=2**40).unique_bytes is None
    sample = look(sampler, worker, unique_above_bytes=0)
    assert 50_000_000 < known(sample.unique_bytes) < known(sample.rss_bytes)


def test_unique_memory_is_measured_again_only_after_something_has_happened(start: Callable[[], Worker]) -> None:
    measured = []

    class Counting(LinuxSource):
        def unique_bytes(self, pid: int) -> int | None:
            measured.append(pid)
            return super().unique_bytes(pid)

    worker, sampler = start(), Sampler(source=Counting())
    for order, times in [("write 10", 1), ("write 10", 1), ("hold 9000000", 2), ("write 10", 2), ("burn 0.6", 3)]:
        worker.order(order)
        sample = look(sampler, worker, unique_above_bytes=0)
        assert len(measured) == times, order
        assert sample.unique_bytes is not None


def test_samples_span_some_time_however_often_it_is_looked(start: Callable[[], Worker]) -> None:
    ticks = itertools.count()
    worker, sampler = start(), Sampler(lambda: next(ticks) / 20)
    for _ in range(8 * SAMPLES_KEPT):
        last = look(sampler, worker)
    samples = sampler.samples(worker.identity)
    assert samples[-1] == last
    assert samples[-1].at - samples[0].at > STILL_S


def test_memory_of_it_is_bounded_and_ends_with_forgetting(start: Callable[[], Worker]) -> None:
    seconds = itertools.count()
    worker, sampler = start(), Sampler(lambda: float(next(seconds)))
    for _ in range(SAMPLES_KEPT + 5):
        last = look(sampler, worker)
    idle = [look(sampler, worker, attention=Attention.PASSING) for _ in range(5)]
    assert idle == [last] * 5  # nothing has happened since
    assert len(sampler.samples(worker.identity)) == SAMPLES_KEPT
    assert sampler.samples(worker.identity)[-1] == last
    sampler.forget(worker.identity)
    sampler.sample({})
    assert sampler.samples(worker.identity) == ()
    assert sampler.descendants_when_idle(worker.identity) == frozenset()
    assert sampler.process_tree(worker.identity) == []


def verdicts(worker: Worker, sampler: Sampler) -> Iterator[Verdict]:
    """Look at a worker that is deaf and silent from now on, ten times a second, and diagnose it each time."""
    silent_since = time.monotonic()
    while True:
        look(sampler, worker)
        evidence = Evidence(
            now=time.monotonic(),
            heard_at=silent_since - QUIET_S,
            pinged_at=silent_since,
            samples=sampler.samples(worker.identity),
            descendants_when_idle=sampler.descendants_when_idle(worker.identity),
        )
        yield diagnose(evidence, wedged_after_s=0.5).verdict
        time.sleep(0.1)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hermes_pool.policy.liveness.STILL_S", 0.3)


@linux_only
def test_a_real_worker_that_hangs_with_the_lock_is_wedged_and_not_before_its_time(
    start: Callable[[], Worker], short: None
) -> None:
    worker, sampler = start(), Sampler()
    worker.begin("hang 60")
    seen = []
    for verdict, _ in zip(verdicts(worker, sampler), range(100), strict=False):
        seen.append(verdict)
        if verdict is Verdict.WEDGED:
            break
    assert seen[-1] is Verdict.WEDGED
    assert set(seen[:3]) <= {Verdict.SLOW, Verdict.BUSY}
    os.kill(worker.pid, signal.SIGSTOP)
    until(lambda: psutil.Process(worker.pid).status() == psutil.STATUS_STOPPED)
    assert next(verdicts(worker, sampler)) is Verdict.FROZEN


@linux_only
@pytest.mark.parametrize(("order", "expected"), [("burn 60", Verdict.BUSY), ("start", Verdict.BLOCKED_ON_CHILD)])
def test_a_real_worker_that_works_or_waits_for_a_child_is_never_wedged(
    start: Callable[[], Worker], short: None, order: str, expected: Verdict
) -> None:
    worker, sampler = start(), Sampler()
    look(sampler, worker, attention=Attention.PASSING)
    worker.begin(order)
    if order == "start":
        assert known(worker.process.stdout).readline()
    seen = [verdict for verdict, _ in zip(verdicts(worker, sampler), range(12), strict=False)]
    assert Verdict.WEDGED not in seen
    assert seen.count(expected) >= 6


@linux_only
def test_a_look_at_an_idle_worker_takes_microseconds(start: Callable[[], Worker]) -> None:
    workers = [start() for _ in range(10)]
    sampler = Sampler()
    asked = {worker.identity: Attention.PASSING for worker in workers}
    sampler.sample(asked)
    spent = []
    for _ in range(12):
        began = time.process_time()
        sampler.sample(asked)
        spent.append(time.process_time() - began)
    assert sorted(spent)[6] < 0.005  # ten times what it takes here, whoever else works on this machine
