"""Looks at all workers in one pass, over and over, and remembers what it saw.

It keeps, for each worker, the latest samples (the curve of its memory, and what its verdict is made of) and the
processes it has started: once seen below a worker they stay known as its own, whatever parent, session or environment
they have later, so that they can be ended with it.

Meant to be cheap enough for always. On Linux an idle worker costs one system call: its CPU clock, in nanoseconds,
stands exactly where it stood, so it has done nothing. (That it was stopped meanwhile is seen up to ``READ_ALL_EVERY``
looks later.) Of the other processes only new ones are read. Elsewhere psutil is asked. A look reads files that belong
to other processes and may block on them, and so is made in a worker thread, never two at once; the rest may be called
from any thread.
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
"""How many samples of each worker are kept."""
KEPT_EVERY_S: Final = 2 * STILL_S / SAMPLES_KEPT
"""Samples that follow each other more closely are not kept, but for the latest one."""
READ_ALL_EVERY: Final = 30
"""Every so many looks, everything is read, whether or not it seems to have changed: pids change hands."""
UNIQUE_AGAIN_CPU_S: Final = 0.5
"""After so much CPU time of its own, a worker's unique memory is measured again: what was shared becomes its own."""
UNIQUE_AGAIN_SHARE: Final = 0.05
"""Or after such a change of its resident memory."""
UNIQUE_AGAIN_MAX: Final = 16
"""Most workers measured *again* in one look: one takes a millisecond or more."""

BREATHE_EVERY_S: Final = 0.0003
"""So often a look pauses for ``BREATHE_S``: a thread that works keeps the interpreter's lock for five milliseconds."""
BREATHE_S: Final = 50e-6


@dataclass(slots=True)
class _Known:
    """What is remembered of one process of a tree."""

    identity: ProcessIdentity
    started: float
    clock_ns: int | None = None


@dataclass(slots=True)
class _Worker:
    """What is remembered of one worker. ``family`` are its processes by pid, itself first."""

    family: dict[int, _Known]
    samples: deque[Sample] = field(default_factory=lambda: deque(maxlen=SAMPLES_KEPT))
    at_rest: frozenset[ProcessIdentity] = frozenset()
    unique_bytes: int | None = None
    unique_at: tuple[float, int] = (0.0, 0)  # CPU time and resident memory when it was measured


class Sampler:
    """Looks at the workers of one pool. ``clock`` is the monotonic one that verdicts are made by."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, source: Source | None = None) -> None:
        self._clock = clock
        self._source = source or (LinuxSource() if sys.platform == "linux" else PsutilSource())
        self._boot_time_s = 0.0
        self._workers: dict[ProcessIdentity, _Worker] = {}
        self._table: dict[int, Stat] = {}  # every process of the system, as it was when it was new
        self._forgotten: deque[ProcessIdentity] = deque()
        self._looks = 0
        self._measured = 0
        self._breathe_at = 0.0

    def look(
        self, workers: Mapping[ProcessIdentity, Attention], *, unique_above_bytes: float | None = None
    ) -> dict[ProcessIdentity, Sample]:
        """Look at workers, all in one pass; return a ``Sample`` of each. Blocks for a millisecond, or some.

        Of one that has done nothing since it is the last sample again, unless it is looked at closely.

        ``unique_above_bytes`` asks for the unique memory of those whose resident memory is above it: it can only be
        less, so below a limit the cheap measure is enough. It is measured again when much has happened since.
        """
        while self._forgotten:
            self._workers.pop(self._forgotten.popleft(), None)
        read_all = self._looks % READ_ALL_EVERY == 0
        self._looks += 1
        new_workers = [worker for worker in workers if worker not in self._workers]
        if new_workers or read_all:
            self._boot_time_s = psutil.boot_time()
        new = self._read_table(read_all=read_all)
        for worker in new_workers:
            self._begin(worker)
        self._find_families(self._table if new_workers or read_all else new)
        self._measured = 0
        read_just_now = new if read_all else {}
        seen = {}
        for number, (worker, attention) in enumerate(workers.items()):
            if number % 16 == 0:
                self._breathe()
            known = self._workers.get(worker)
            if known is None:
                seen[worker] = Sample(at=self._clock(), state=ProcessState.DEAD)
                continue
            if attention is Attention.CLOSE or read_all or not known.samples or self._has_run(known):
                _keep(known.samples, self._sample(known, attention, read_just_now))
            sample = known.samples[-1]
            if unique_above_bytes is not None and (sample.rss_bytes or 0) > unique_above_bytes:
                sample = known.samples[-1] = self._with_unique(known, sample)
            if attention is Attention.PASSING:
                known.at_rest = frozenset(sample.descendants)
            seen[worker] = sample
        return seen

    def samples(self, worker: ProcessIdentity) -> tuple[Sample, ...]:
        """Return the latest samples of a worker, oldest first; at most ``SAMPLES_KEPT``."""
        known = self._workers.get(worker)
        return () if known is None else tuple(known.samples)

    def at_rest(self, worker: ProcessIdentity) -> frozenset[ProcessIdentity]:
        """Return the descendants that a worker had when it was last seen without a turn."""
        known = self._workers.get(worker)
        return frozenset() if known is None else known.at_rest

    def process_tree(self, worker: ProcessIdentity) -> list[psutil.Process]:
        """Return what a worker has started and still lives, the worker dead or not: for ``health.kill``. Blocks.

        Only what was seen by a look while it could be told whose it is, and is the very same process still.
        """
        known = self._workers.get(worker)
        if known is None:
            return []
        found = []
        for pid, process in list(known.family.items())[1:]:
            with suppress(psutil.Error):
                handle = psutil.Process(pid)  # made first: what is checked afterwards is what it stands for
                stat = self._source.stat(pid)
                if stat is not None and stat.started == process.started and stat.state is not ProcessState.DEAD:
                    found.append(handle)
        return found

    def forget(self, worker: ProcessIdentity) -> None:
        """Forget a worker, at the next look. To be called after its death, or what is known of it stays."""
        self._forgotten.append(worker)

    # --- whose is what ---

    def _begin(self, worker: ProcessIdentity) -> None:
        """Take up a worker, unless its pid is another's by now."""
        pid, create_time = worker
        stat = self._source.stat(pid)
        if stat is None:
            return
        if abs(self._source.create_time(stat, self._boot_time_s) - create_time) <= CREATE_TIME_TOLERANCE_S:
            self._table[pid] = stat
            self._workers[worker] = _Worker({pid: _Known(worker, stat.started)})

    def _read_table(self, *, read_all: bool) -> dict[int, Stat]:
        """Bring the table of processes up to date; return what is new in it."""
        pids = set(self._source.pids())
        self._breathe()
        if read_all:
            self._table.clear()
        for pid in self._table.keys() - pids:
            del self._table[pid]
        new = {}
        for pid in pids - self._table.keys():
            if (stat := self._read(pid)) is not None:
                new[pid] = stat
        self._table.update(new)
        return new

    def _find_families(self, pids: Mapping[int, Stat]) -> None:
        """Add each of these processes that is below a worker to its family."""
        if not pids:
            return
        families = {
            pid: known.family
            for known in self._workers.values()
            for pid, process in known.family.items()
            if pid in self._table and self._table[pid].started == process.started
        }
        for each in pids:
            pid, way = each, []
            # Up to somebody whose family is known. A child is never older than its parent: if it is, the pid of one
            # of them has changed hands since it was read.
            while pid not in families and (stat := self._table.get(pid)) is not None and pid not in way:
                way.append(pid)
                parent = self._table.get(stat.parent)
                if parent is None or parent.started > stat.started:
                    break
                pid = stat.parent
            if (family := families.get(pid)) is not None:
                for below in reversed(way):
                    stat = self._table[below]
                    identity = below, self._source.create_time(stat, self._boot_time_s)
                    family[below] = _Known(identity, stat.started)
                    families[below] = family

    # --- one worker ---

    def _read(self, pid: int) -> Stat | None:
        self._breathe()
        return self._source.stat(pid)

    def _breathe(self) -> None:
        """Let the event loop of this process get on, if it has waited for a while."""
        if time.perf_counter() >= self._breathe_at:
            time.sleep(BREATHE_S)
            self._breathe_at = time.perf_counter() + BREATHE_EVERY_S

    def _has_run(self, known: _Worker) -> bool:
        """Say whether a process of a family has run, as far as that can be told, since it was read."""
        clock_ns = self._source.clock_ns
        for pid, process in known.family.items():
            if process.clock_ns is None or process.clock_ns != clock_ns(pid):
                return True
        return False

    def _with_unique(self, known: _Worker, sample: Sample) -> Sample:
        """Add the unique memory, measured now or not so long ago."""
        again = known.unique_bytes is not None
        if not again or (self._measured < UNIQUE_AGAIN_MAX and _is_outdated(known, sample)):
            self._measured += again
            known.unique_bytes = _sum(self._source.unique_bytes, known.family)
            known.unique_at = sample.cpu_s or 0.0, sample.rss_bytes or 0
        return sample if sample.unique_bytes == known.unique_bytes else replace(sample, unique_bytes=known.unique_bytes)

    def _sample(self, known: _Worker, attention: Attention, read_just_now: Mapping[int, Stat]) -> Sample:
        """Look at one family, and let go of those of it that are gone."""
        at = self._clock()
        own, *below = known.family.items()
        own_stat = self._stat(*own, read_just_now)
        own_cpu_s = cpu_s = _cpu_s(own[1], own_stat)
        rss_bytes = 0 if own_stat is None else own_stat.rss_bytes
        descendants = []
        for pid, process in below:
            stat = self._stat(pid, process, read_just_now)
            if stat is None:
                del known.family[pid]
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
            io_bytes=_sum(self._source.io_bytes, known.family) if attention is Attention.CLOSE else None,
            rss_bytes=rss_bytes,
            descendants=tuple(descendants),
        )

    def _stat(self, pid: int, process: _Known, read_just_now: Mapping[int, Stat]) -> Stat | None:
        """Return the state of a known process, ``None`` when it has ended."""
        process.clock_ns = self._source.clock_ns(pid)  # first: what it does from now on will be seen
        stat = read_just_now.get(pid) or self._read(pid)
        if stat is None or stat.started != process.started or stat.state is ProcessState.DEAD:
            return None
        return stat


def since_boot() -> float:
    """Return seconds of a clock that goes on while the machine sleeps, for ``verdict.Pulse.beat``."""
    if sys.platform == "linux":
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.time()


def _keep(samples: deque[Sample], sample: Sample) -> None:
    """Add a sample. Those that are kept span some time, however often it is looked: a verdict takes ``STILL_S``."""
    if len(samples) > 1 and samples[-1].at - samples[-2].at < KEPT_EVERY_S:
        samples[-1] = sample
    else:
        samples.append(sample)


def _cpu_s(process: _Known, stat: Stat | None) -> float:
    if process.clock_ns is not None:
        return process.clock_ns / 1e9
    return 0.0 if stat is None else stat.cpu_s  # in hundredths of a second


def _is_outdated(known: _Worker, sample: Sample) -> bool:
    cpu_s, rss_bytes = known.unique_at
    used_s = (sample.cpu_s or 0.0) - cpu_s  # below 0 when a descendant has ended, and that changes the memory as well
    changed_bytes = abs((sample.rss_bytes or 0) - rss_bytes)
    return used_s < 0 or used_s > UNIQUE_AGAIN_CPU_S or changed_bytes > UNIQUE_AGAIN_SHARE * rss_bytes


def _sum(read: Callable[[int], int | None], pids: Iterable[int]) -> int | None:
    total = 0
    for pid in pids:
        if (value := read(pid)) is None:
            return None
        total += value
    return total
