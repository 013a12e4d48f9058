"""Looks after the workers: finds those that hang, and lets those go that have grown too big or too old.

Every ``SAMPLE_S`` it looks at all of them, in one pass in a thread; while turns run, at their workers every
``CLOSE_EVERY_S``. ``policy.liveness`` and ``policy.memory``, which are pure, decide what that means; the worker slots
act on it. Nothing here is on the path of a turn.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import Any, Protocol

from hermes_pool.lifecycle import WorkerState
from hermes_pool.policy.liveness import Diagnosis, Evidence, ProcessIdentity, Pulse, Sample, Verdict, diagnose
from hermes_pool.policy.memory import Action, Activity, MemoryPolicy, Usage
from hermes_pool.settings import PoolSettings
from hermes_pool.system.sampler import Sampler, since_boot
from hermes_pool.system.samples import Attention
from hermes_pool.system.threads import in_thread_or_here

SAMPLE_S = 20.0
"""How often all workers are looked at, in seconds: memory, CPU time, what they have started."""
CLOSE_EVERY_S = 2.0
"""How often the workers with a turn are looked at, unless ``SAMPLE_S`` is less: a verdict takes some looks."""


class Watched(Protocol):
    """A worker slot, as far as the monitor knows it."""

    @property
    def state(self) -> WorkerState:
        """What its worker is doing."""

    @property
    def worker(self) -> ProcessIdentity | None:
        """Its worker, while it is ready."""

    @property
    def worker_age_s(self) -> float:
        """How long the worker has been running, in seconds."""

    @property
    def has_work(self) -> bool:
        """Whether the worker has a turn, or work in the background: then it is not to be disturbed."""

    diagnosis: Diagnosis | None
    """What the worker was doing at the last look, in a turn."""

    def ask(self) -> None:
        """Ask the worker for a sign of life, unless it owes one already."""

    def evidence(
        self, samples: tuple[Sample, ...], at_rest: frozenset[ProcessIdentity], trusted_from: float
    ) -> Evidence:
        """Return all that is known of a worker in a turn."""

    async def kill(self, reason: str, *, wanted: bool, diagnosis: Diagnosis | None = None) -> None:
        """Kill the worker for a ``reason`` that follows "the worker"; with a ``diagnosis``, since it hangs."""

    def retire(self, reason: str) -> None:
        """Let the worker go: now if it is idle, else after its turn and its work in the background."""


class Monitor:
    """The monitor of a pool. ``slots`` returns its worker slots, ``worth`` how much an idle worker is worth keeping."""

    def __init__(
        self,
        settings: PoolSettings,
        sampler: Sampler,
        *,
        slots: Callable[[], Iterable[Watched]],
        worth: Callable[[Any], float],
        in_background: Callable[[Coroutine[Any, Any, Any]], Any],
        log: Any,
    ) -> None:
        self._settings = settings
        self._sampler = sampler
        self._slots = slots
        self._worth = worth
        self._in_background = in_background
        self._log = log
        self._policy: MemoryPolicy[ProcessIdentity] = MemoryPolicy(settings.memory, settings.worker_age_max_s)
        self._pulse = Pulse()

    async def run(self) -> None:
        """Look, again and again, until cancelled."""
        loop = asyncio.get_running_loop()
        look_at_all = due = loop.time() + SAMPLE_S
        while True:
            await asyncio.sleep(due - loop.time())
            now = loop.time()
            self._pulse.beat(due=due, now=now, since_boot=since_boot())
            slots = {worker: slot for slot in self._slots() if (worker := slot.worker) is not None}
            in_turn = {worker: slot for worker, slot in slots.items() if slot.state is WorkerState.BUSY}
            try:
                await self._look(slots, in_turn, at_all=now >= look_at_all)
            except OSError as error:  # no descriptor is to be had, say: at the next look there may be one again
                self._log.warning("look_failed", error=str(error))
            if now >= look_at_all:
                look_at_all = loop.time() + SAMPLE_S
            due = min(look_at_all, loop.time() + CLOSE_EVERY_S) if in_turn else look_at_all

    async def _look(
        self, slots: dict[ProcessIdentity, Watched], in_turn: dict[ProcessIdentity, Watched], *, at_all: bool
    ) -> None:
        looked_at = slots if at_all else in_turn
        if not looked_at:
            return
        for slot in in_turn.values():
            slot.ask()
        wanted = {worker: Attention.CLOSE if worker in in_turn else Attention.PASSING for worker in looked_at}
        above = self._policy.unique_above_bytes
        await in_thread_or_here(partial(self._sampler.sample, wanted, unique_above_bytes=above))
        here = {worker: slot for worker, slot in slots.items() if slot.worker == worker}
        self._diagnose({worker: slot for worker, slot in here.items() if worker in looked_at})
        self._keep_small(here)  # all of them: a total of some would mean nothing

    def _diagnose(self, slots: dict[ProcessIdentity, Watched]) -> None:
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
        """Return whether to give up a stopped worker. One that was stopped before it began has done nothing yet."""
        if diagnosis.verdict is not Verdict.FROZEN:
            return False
        silent_s = evidence.now - max(evidence.heard_at, evidence.trusted_from)
        return not evidence.begun or silent_s >= self._settings.timeouts.wedged_s

    def _keep_small(self, slots: dict[ProcessIdentity, Watched]) -> None:
        seen = [(worker, slot, self._sampler.samples(worker)) for worker, slot in slots.items()]
        usages = [
            Usage(
                worker=worker,
                activity=Activity.IN_TURN if slot.has_work else Activity.IDLE,
                age_s=slot.worker_age_s,
                unique_bytes=samples[-1].unique_bytes,
                rss_bytes=samples[-1].rss_bytes,
            )
            for worker, slot, samples in seen
            if samples
        ]
        plan = self._policy.decide(usages, lambda worker: self._worth(slots[worker]))
        for worker, decided in plan.workers.items():
            match decided.action:
                case Action.WARN:
                    self._log.warning("worker_is_big", pid=worker[0], reason=decided.reason)
                case Action.RECYCLE_NOW | Action.RECYCLE_AFTER_TURN:
                    slots[worker].retire(decided.reason)
                case Action.KILL:
                    self._in_background(slots[worker].kill(decided.reason, wanted=False))
        for worker in plan.shed:
            slots[worker].retire("has to make room (memory.total_bytes)")
