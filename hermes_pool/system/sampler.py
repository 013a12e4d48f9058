"""Samples all workers in one pass, again and again, and remembers what it saw.

For each worker it keeps the latest samples (its memory curve, and the evidence for a diagnosis) and its process tree. A
process that was once seen below a worker stays in that worker's tree, whatever its parent, session or environment is
later, so that it can be ended with the worker.

A pass is cheap enough to repeat for ever. On Linux an idle worker costs one system call: if its CPU clock, which counts
nanoseconds, has not moved, it has done nothing. (If it was stopped meanwhile, that shows at most ``FULL_PASS_EVERY``
passes later.) Of all other processes, only new ones are read. Other platforms use psutil. A pass reads files of other
processes and may block on them, so run it in a thread, one pass at a time; all other methods may be called from any
thread.
"""

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final

import psutil

from hermes_pool.policy.liveness import STILL_S, ProcessIdentity, ProcessState, Sample
from hermes_pool.system.linux_source import LinuxSource
from hermes_pool.system.processes import CREATE_TIME_TOLERANCE_S
from hermes_pool.system.psutil_source import PsutilSource
from hermes_pool.system.samples import Attention, Source, Stat

SAMPLES_KEPT: Final = 32
"""Number of samples kept for each worker."""
KEPT_EVERY_S: Final = 2 * STILL_S / SAMPLES_KEPT
"""Of samples closer together than this, only the latest is kept."""
FULL_PASS_EVERY: Final = 30
"""Every so many passes, everything is read, even if it does not seem to have changed, since pids are reused."""
REMEASURE_CPU_S: Final = 0.5
"""After this much CPU time, the unique memory of a worker is measured again: it has written to shared pages."""
REMEASURE_SHARE: Final = 0.05
"""It is measured again as well after its resident memory has changed by this share."""
REMEASURE_MAX: Final = 16
"""Most workers that are measured *again* in one pass: each takes a millisecond or more."""

PAUSE_EVERY_S: Final = 0.0003
"""How often a pass pauses for ``PAUSE_S``. A busy thread would hold the GIL for five milliseconds at a time."""
PAUSE_S: Final = 50e-6


@dataclass(slots=True)
class _TreeProcess:
    """What is remembered of one process in a tree."""

    identity: ProcessIdentity
    started: float
    clock_ns: int | None = None


@dataclass(slots=True)
class _Worker:
    """What is remembered of one worker. ``tree`` has its processes by pid, the worker itself first."""

    tree: dict[int, _TreeProcess]
    samples: deque[Sample] = field(default_factory=lambda: deque(maxlen=SAMPLES_KEPT))
    descendants_when_idle: frozenset[ProcessIdentity] = frozenset()
    unique_bytes: int | None = None
    unique_at: tuple[float, int] = (0.0, 0)  # CPU time (seconds) and resident memory (bytes) at that measurement


class Sampler:
    """Samples the workers of one pool. ``clock`` is the monotonic clock, in seconds, that diagnoses use."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, source: Source | None = None) -> None:
        self._clock = clock
        self._source = source or (LinuxSource() if sys.platform == "linux" else PsutilSource())
        self._boot_time_s = 0.0
        self._workers: dict[ProcessIdentity, _Worker] = {}
        self._table: dict[int, Stat] = {}  # every process of the system, as it was when it was first seen
        self._forgotten: deque[ProcessIdentity] = deque()
        self._passes = 0
        self._measured_again = 0
        self._pause_at = 0.0

    def sample(
        self, workers: Mapping[ProcessIdentity, Attention], *, unique_above_bytes: float | None = None
    ) -> dict[ProcessIdentity, Sample]:
        """Sample workers in one pass; return a ``Sample`` of each. Blocks for a few milliseconds.

        A worker that has done nothing since the last pass gets its last sample again, unless the attention is close.

        The unique memory is included for workers whose resident memory is above ``unique_above_bytes``. It is never
        more than the resident memory, so below a limit the cheap measure is enough. It is measured again once the
        worker has done much.
        """
        while self._forgotten:
            self._workers.pop(self._forgotten.popleft(), None)
        full = self._passes % FULL_PASS_EVERY == 0
        self._passes += 1
        new_workers = [worker for worker in workers if worker not in self._workers]
        if new_workers or full:
            self._boot_time_s = psutil.boot_time()
        new = self._read_table(full=full)
        for worker in new_workers:
            self._track(worker)
        self._extend_trees(self._table if new_workers or full else new)
        self._measured_again = 0
        fresh = new if full else {}
        samples = {}
        for number, (worker, attention) in enumerate(workers.items()):
            if number % 16 == 0:
                self._pause()
            known = self._workers.get(worker)
            if known is None:
                samples[worker] = Sample(at=self._clock(), state=ProcessState.DEAD)
                continue
            if attention is Attention.CLOSE or full or not known.samples or self._may_have_run(known):
                _append(known.samples, self._sample(known, attention, fresh))
            sample = known.samples[-1]
            if unique_above_bytes is not None and (sample.rss_bytes or 0) > unique_above_bytes:
                sample = known.samples[-1] = self._with_unique(known, sample)
            if attention is Attention.PASSING:
                known.descendants_when_idle = frozenset(sample.descendants)
            samples[worker] = sample
        return samples

    def samples(self, worker: ProcessIdentity) -> tuple[Sample, ...]:
        """Return the latest samples of a worker, oldest first; at most ``SAMPLES_KEPT``."""
        known = self._workers.get(worker)
        return () if known is None else tuple(known.samples)

    def descendants_when_idle(self, worker: ProcessIdentity) -> frozenset[ProcessIdentity]:
        """Return the descendants that a worker had in the last sample without a turn."""
        known = self._workers.get(worker)
        return frozenset() if known is None else known.descendants_when_idle

    def process_tree(self, worker: ProcessIdentity) -> list[psutil.Process]:
        """Return the living descendants of a worker, which may be dead itself; ``processes.kill`` ends them. Blocks.

        Includes only processes that a pass has seen below the worker, and that are still the same ones.
        """
        known = self._workers.get(worker)
        if known is None:
            return []
        found = []
        for pid, process in list(known.tree.items())[1:]:
            with suppress(psutil.Error):
                handle = psutil.Process(pid)  # made first, so that the checks below are about this very process
                stat = self._source.stat(pid)
                if stat is not None and stat.started == process.started and stat.state is not ProcessState.DEAD:
                    found.append(handle)
        return found

    def forget(self, worker: ProcessIdentity) -> None:
        """Forget a worker at the next pass. Call it once the worker is dead; otherwise its samples stay in memory."""
        self._forgotten.append(worker)

    # --- process trees ---

    def _track(self, worker: ProcessIdentity) -> None:
        """Start to track a worker, unless its pid was reused."""
        pid, create_time = worker
        stat = self._source.stat(pid)
        if stat is None:
            return
        if abs(self._source.create_time(stat, self._boot_time_s) - create_time) <= CREATE_TIME_TOLERANCE_S:
            self._table[pid] = stat
            self._workers[worker] = _Worker({pid: _TreeProcess(worker, stat.started)})

    def _read_table(self, *, full: bool) -> dict[int, Stat]:
        """Update the process table; return what is new in it."""
        pids = set(self._source.pids())
        self._pause()
        if full:
            self._table.clear()
        for pid in self._table.keys() - pids:
            del self._table[pid]
        new = {}
        for pid in pids - self._table.keys():
            if (stat := self._read(pid)) is not None:
                new[pid] = stat
        self._table.update(new)
        return new

    def _extend_trees(self, pids: Mapping[int, Stat]) -> None:
        """Add each of these processes that is below a worker to that worker's tree."""
        if not pids:
            return
        trees = {
            pid: known.tree
            for known in self._workers.values()
            for pid, process in known.tree.items()
            if pid in self._table and self._table[pid].started == process.started
        }
        for each in pids:
            pid, path = each, []
            # Go up to an ancestor whose tree is known. A child is never older than its parent; if it seems to be, one
            # of the two pids was reused since it was read.
            while pid not in trees and (stat := self._table.get(pid)) is not None and pid not in path:
                path.append(pid)
                parent = self._table.get(stat.parent)
                if parent is None or parent.started > stat.started:
                    break
                pid = stat.parent
            if (tree := trees.get(pid)) is not None:
                for below in reversed(path):
                    stat = self._table[below]
                    identity = below, self._source.create_time(stat, self._boot_time_s)
                    tree[below] = _TreeProcess(identity, stat.started)
                    trees[below] = tree

    # --- one worker ---

    def _read(self, pid: int) -> Stat | None:
        self._pause()
        return self._source.stat(pid)

    def _pause(self) -> None:
        """Let the event loop of this process run, if this thread has worked for a while."""
        if time.perf_counter() >= self._pause_at:
            time.sleep(PAUSE_S)
            self._pause_at = time.perf_counter() + PAUSE_EVERY_S

    def _may_have_run(self, known: _Worker) -> bool:
        """Return whether a process of a tree has, or may have, run since it was last read."""
        clock_ns = self._source.clock_ns
        for pid, process in known.tree.items():
            last_ns = process.clock_ns
            if last_ns is None or last_ns != clock_ns(pid):
                return True
        return False

    def _with_unique(self, known: _Worker, sample: Sample) -> Sample:
        """Add the unique memory to a sample, measured now or recently enough."""
        again = known.unique_bytes is not None
        if not again or (self._measured_again < REMEASURE_MAX and _is_outdated(known, sample)):
            self._measured_again += again
            known.unique_bytes = _sum(self._source.unique_bytes, known.tree)
            known.unique_at = sample.cpu_s or 0.0, sample.rss_bytes or 0
        return sample if sample.unique_bytes == known.unique_bytes else replace(sample, unique_bytes=known.unique_bytes)

    def _sample(self, known: _Worker, attention: Attention, fresh: Mapping[int, Stat]) -> Sample:
        """Sample one tree, and remove the processes that are gone."""
        at = self._clock()
        own, *below = known.tree.items()
        own_stat = self._stat(*own, fresh)
        own_cpu_s = cpu_s = _cpu_s(own[1], own_stat)
        rss_bytes = 0 if own_stat is None else own_stat.rss_bytes
        descendants = []
        for pid, process in below:
            stat = self._stat(pid, process, fresh)
            if stat is None:
                del known.tree[pid]
                continue
            cpu_s += _cpu_s(process, stat)
            rss_bytes += stat.rss_bytes
            descendants.append(process.identity)
        if own_stat is None:
            return Sample(at=at, state=ProcessState.DEAD, descendants=tuple(descendants))
        return Sample(
            at=at,
            state=own_stat.state,
            threads=own_stat.threads,
            own_cpu_s=own_cpu_s,
            cpu_s=cpu_s,
            io_bytes=_sum(self._source.io_bytes, known.tree) if attention is Attention.CLOSE else None,
            rss_bytes=rss_bytes,
            descendants=tuple(descendants),
        )

    def _stat(self, pid: int, process: _TreeProcess, fresh: Mapping[int, Stat]) -> Stat | None:
        """Return the present ``Stat`` of a process in a tree, or ``None`` if it has ended."""
        process.clock_ns = self._source.clock_ns(pid)  # first, so that no later work is missed
        stat = fresh.get(pid) or self._read(pid)
        if stat is None or stat.started != process.started or stat.state is ProcessState.DEAD:
            return None
        return stat


def since_boot() -> float:
    """Return the time in seconds of a clock that runs on while the machine is suspended; see ``liveness.Pulse``."""
    if sys.platform == "linux":
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.time()


def _append(samples: deque[Sample], sample: Sample) -> None:
    """Add a sample. Those that are kept always span enough time for a diagnosis, which takes ``STILL_S``."""
    if len(samples) > 1 and samples[-1].at - samples[-2].at < KEPT_EVERY_S:
        samples[-1] = sample
    else:
        samples.append(sample)


def _cpu_s(process: _TreeProcess, stat: Stat | None) -> float:
    if process.clock_ns is not None:
        return process.clock_ns / 1e9
    return 0.0 if stat is None else stat.cpu_s  # counted in hundredths of a second


def _is_outdated(known: _Worker, sample: Sample) -> bool:
    cpu_s, rss_bytes = known.unique_at
    used_s = (sample.cpu_s or 0.0) - cpu_s  # negative if a descendant has ended, which changes the memory as well
    changed_bytes = abs((sample.rss_bytes or 0) - rss_bytes)
    return used_s < 0 or used_s > REMEASURE_CPU_S or changed_bytes > REMEASURE_SHARE * rss_bytes


def _sum(read: Callable[[int], int | None], pids: Iterable[int]) -> int | None:
    total = 0
    for pid in pids:
        if (value := read(pid)) is None:
            return None
        total += value
    return total
