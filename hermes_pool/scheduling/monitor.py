"""Watches the workers: finds those that hang, and recycles those that are too big or too old.

It samples all workers every ``SAMPLE_S``, in one pass in a thread, and those with a turn every ``SAMPLE_TURNS_S``. The
pure ``policy.liveness`` and ``policy.memory`` decide what the samples mean, and the worker slots act on it. Nothing
here is on the path of a turn.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from hermes_pool.lifecycle import WorkerState
from hermes_pool.policy.liveness import Diagnosis, Evidence, ProcessIdentity, Pulse, Sample, Verdict, diagnose
from hermes_pool.policy.memory import Action, Activity, MemoryPolicy, Usage
from hermes_pool.settings import PoolSettings
from hermes_pool.system.sampler import Sampler, since_boot
from hermes_pool.system.samples import Attention
from hermes_pool.system.threads import in_thread_or_here

SAMPLE_S = 20.0
"""How often all workers are sampled, in seconds: memory, CPU time, child processes."""
SAMPLE_TURNS_S = 2.0
"""How often workers with a turn are sampled, unless ``SAMPLE_S`` is less: a verdict takes several samples."""


class Watched(Protocol):
    """A worker slot as the monitor sees it."""

    @property
    def state(self) -> WorkerState:
        """What its worker is doing."""

    @property
    def worker(self) -> ProcessIdentity | None:
        """The identity of its worker; ``None`` while no worker is ready."""

    @property
    def worker_age_s(self) -> float:
        """How long the worker has been running, in seconds."""

    @property
    def has_work(self) -> bool:
        """Whether the worker has a turn or background work, and must not be disturbed."""

    diagnosis: Diagnosis | None
    """What the worker was doing in its turn, by the last sample."""

    def ping(self) -> None:
        """Ping the worker, unless an earlier ping is still unanswered."""

    def evidence(
        self, samples: tuple[Sample, ...], descendants_when_idle: frozenset[ProcessIdentity], trusted_from: float
    ) -> Evidence:
        """Return all that is known about the worker and its turn."""

    async def kill(self, reason: str, *, wanted: bool, diagnosis: Diagnosis | None = None) -> None:
        """Kill the worker; ``reason`` continues "the worker ...". A ``diagnosis`` means that it hangs."""

    def retire(self, reason: str) -> None:
        """Stop the worker: now if it is idle, otherwise after its turn and its background work."""


W = TypeVar("W", bound=Watched)


class Monitor(Generic[W]):
    """The monitor of a pool. ``slots`` returns its worker slots; ``worth`` says how much an idle worker is worth."""

    def __init__(
        self,
        settings: PoolSettings,
        sampler: Sampler,
        *,
        slots: Callable[[], Iterable[W]],
        worth: Callable[[W], float],
        in_background: Callable[[Coroutine[Any, Any, Any]], Any],
        log: Any,
    ) -> None:
        self._settings = settings
        self._sampler = sampler
        self._slots = slots
        self._worth = worth
        self._in_background = in_background
        self._log = log
        self._memory_policy: MemoryPolicy[ProcessIdentity] = MemoryPolicy(settings.memory, settings.worker_age_max_s)
        self._pulse = Pulse()

    async def run(self) -> None:
        """Sample the workers periodically, until cancelled."""
        loop = asyncio.get_running_loop()
        sample_all_at = due = loop.time() + SAMPLE_S
        while True:
            await asyncio.sleep(due - loop.time())
            now = loop.time()
            self._pulse.beat(due=due, now=now, since_boot=since_boot())
            slots = {worker: slot for slot in self._slots() if (worker := slot.worker) is not None}
            in_turn = {worker: slot for worker, slot in slots.items() if slot.state is WorkerState.BUSY}
            try:
                await self._sample(slots, in_turn, sample_all=now >= sample_all_at)
            except OSError as error:  # out of file descriptors, say: the next pass may find some
                self._log.warning("sampling_failed", error=str(error))
            if now >= sample_all_at:
                sample_all_at = loop.time() + SAMPLE_S
            due = min(sample_all_at, loop.time() + SAMPLE_TURNS_S) if in_turn else sample_all_at

    async def _sample(
        self, slots: dict[ProcessIdentity, W], in_turn: dict[ProcessIdentity, W], *, sample_all: bool
    ) -> None:
        sampled = slots if sample_all else in_turn
        if not sampled:
            return
        for slot in in_turn.values():
            slot.ping()
        wanted = {worker: Attention.CLOSE if worker in in_turn else Attention.PASSING for worker in sampled}
        above = self._memory_policy.unique_above_bytes
        await in_thread_or_here(partial(self._sampler.sample, wanted, unique_above_bytes=above))
        current = {worker: slot for worker, slot in slots.items() if slot.worker == worker}
        self._diagnose({worker: slot for worker, slot in current.items() if worker in sampled})
        self._limit_memory(current)  # all of them: the limit on the total needs them

    def _diagnose(self, slots: dict[ProcessIdentity, W]) -> None:
        for worker, slot in slots.items():
            if slot.state is not WorkerState.BUSY:
                slot.diagnosis = None
                continue
            sampler = self._sampler
            evidence = slot.evidence(
                sampler.samples(worker), sampler.descendants_when_idle(worker), self._pulse.trusted_from
            )
            diagnosis = diagnose(evidence, wedged_after_s=self._settings.timeouts.wedged_s)
            slot.diagnosis = diagnosis
            if diagnosis.verdict is Verdict.WEDGED or self._stays_frozen(evidence, diagnosis):
                reason = f"was {diagnosis.verdict} ({diagnosis.reason})"
                self._in_background(slot.kill(reason, wanted=False, diagnosis=diagnosis))

    def _stays_frozen(self, evidence: Evidence, diagnosis: Diagnosis) -> bool:
        """Return whether to give up on a stopped worker: at once if it has not begun, and so done nothing."""
        if diagnosis.verdict is not Verdict.FROZEN:
            return False
        silent_s = evidence.now - max(evidence.heard_at, evidence.trusted_from)
        return not evidence.begun or silent_s >= self._settings.timeouts.wedged_s

    def _limit_memory(self, slots: dict[ProcessIdentity, W]) -> None:
        sampled = [(worker, slot, self._sampler.samples(worker)) for worker, slot in slots.items()]
        usages = [
            Usage(
                worker=worker,
                activity=Activity.IN_TURN if slot.has_work else Activity.IDLE,
                age_s=slot.worker_age_s,
                unique_bytes=samples[-1].unique_bytes,
                rss_bytes=samples[-1].rss_bytes,
            )
            for worker, slot, samples in sampled
            if samples
        ]
        plan = self._memory_policy.decide(usages, lambda worker: self._worth(slots[worker]))
        for worker, decided in plan.workers.items():
            match decided.action:
                case Action.WARN:
                    self._log.warning("worker_memory_high", pid=worker[0], reason=decided.reason)
                case Action.RECYCLE_NOW | Action.RECYCLE_AFTER_TURN:
                    slots[worker].retire(decided.reason)
                case Action.KILL:
                    self._in_background(slots[worker].kill(decided.reason, wanted=False))
        for worker in plan.shed:
            slots[worker].retire("has to make room (memory.total_bytes)")
