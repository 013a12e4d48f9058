"""Looks after the workers that live: finds those that hang, and lets those go that have grown too big or too old.

Every ``sample_s`` it looks at all of them, in one pass in a thread; while turns run, at their workers every
``CLOSE_EVERY_S``. What it sees is judged by ``verdict`` and ``memory``, which are pure; what is to be done, the
sessions do. Nothing here is on the path of a turn.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import fields
from functools import partial
from typing import Any, Protocol

from hermes_pool.lifecycle import State
from hermes_pool.policy.liveness import Diagnosis, Evidence, ProcessIdentity, Pulse, Sample, Verdict, diagnose
from hermes_pool.policy.memory import Action, Activity, MemoryLimits, MemoryPolicy, Usage
from hermes_pool.settings import PoolSettings
from hermes_pool.system.sampler import Sampler, since_boot
from hermes_pool.system.samples import Attention
from hermes_pool.system.threads import in_thread_or_here

CLOSE_EVERY_S = 2.0
"""How often the workers with a turn are looked at, unless ``sample_s`` is less: a verdict takes some looks."""


class Ward(Protocol):
    """A session, as its monitor sees it."""

    @property
    def state(self) -> State:
        """What its worker is doing."""

    @property
    def worker(self) -> ProcessIdentity | None:
        """Its worker, if it is ready."""

    @property
    def worker_age_s(self) -> float:
        """For how long it runs, in seconds."""

    @property
    def works_on(self) -> bool:
        """Whether it has, and may have, work in the background: then it is no more to be disturbed than in a turn."""

    def ask(self) -> None:
        """Ask the worker for a sign of life, unless it owes one already."""

    def evidence(
        self, samples: tuple[Sample, ...], at_rest: frozenset[ProcessIdentity], trusted_from: float
    ) -> Evidence:
        """Return all that is known of a worker in a turn."""

    def diagnosed(self, diagnosis: Diagnosis | None) -> None:
        """Take note of what was found; ``None``: nothing to judge."""

    async def replace_stuck(self, diagnosis: Diagnosis) -> None:
        """End a worker that hangs; its turn goes on as after any other death."""

    async def kill_for(self, reason: str) -> None:
        """End a worker at once, for a ``reason`` that follows "the worker"."""

    def recycle(self, reason: str) -> None:
        """Let the worker go: now if it is idle, else after its turn and its work in the background."""


class Monitor:
    """One for a pool. ``wards`` are its sessions; ``worth`` tells how much an idle one is worth keeping."""

    def __init__(
        self,
        settings: PoolSettings,
        sampler: Sampler,
        *,
        wards: Callable[[], Iterable[Ward]],
        worth: Callable[[Any], float],
        in_background: Callable[[Coroutine[Any, Any, Any]], Any],
        log: Any,
    ) -> None:
        self._settings = settings
        self._sampler = sampler
        self._wards = wards
        self._worth = worth
        self._in_background = in_background
        self._log = log
        limits = MemoryLimits(**{each.name: getattr(settings, each.name) for each in fields(MemoryLimits)})
        self._policy: MemoryPolicy[ProcessIdentity] = MemoryPolicy(limits)
        self._pulse = Pulse()

    async def run(self) -> None:
        """Look, again and again, until cancelled."""
        loop = asyncio.get_running_loop()
        look_at_all = due = loop.time() + self._settings.sample_s
        while True:
            await asyncio.sleep(due - loop.time())
            now = loop.time()
            self._pulse.beat(due=due, now=now, since_boot=since_boot())
            wards = {worker: ward for ward in self._wards() if (worker := ward.worker) is not None}
            in_turn = {worker: ward for worker, ward in wards.items() if ward.state is State.BUSY}
            try:
                await self._look(wards, in_turn, at_all=now >= look_at_all)
            except OSError as error:  # no descriptor is to be had, say: at the next look there may be one again
                self._log.warning("look_failed", error=str(error))
            if now >= look_at_all:
                look_at_all = loop.time() + self._settings.sample_s
            due = min(look_at_all, loop.time() + CLOSE_EVERY_S) if in_turn else look_at_all

    async def _look(
        self, wards: dict[ProcessIdentity, Ward], in_turn: dict[ProcessIdentity, Ward], *, at_all: bool
    ) -> None:
        looked_at = wards if at_all else in_turn
        if not looked_at:
            return
        for ward in in_turn.values():
            ward.ask()
        wanted = {worker: Attention.CLOSE if worker in in_turn else Attention.PASSING for worker in looked_at}
        above = self._policy.unique_above_bytes
        await in_thread_or_here(partial(self._sampler.sample, wanted, unique_above_bytes=above))
        here = {worker: ward for worker, ward in wards.items() if ward.worker == worker}
        self._diagnose({worker: ward for worker, ward in here.items() if worker in looked_at})
        self._keep_small(here)  # all of them: a total of some would mean nothing

    def _diagnose(self, wards: dict[ProcessIdentity, Ward]) -> None:
        for worker, ward in wards.items():
            if ward.state is not State.BUSY:
                ward.diagnosed(None)
                continue
            sampler = self._sampler
            evidence = ward.evidence(
                sampler.samples(worker), sampler.descendants_when_idle(worker), self._pulse.trusted_from
            )
            diagnosis = diagnose(evidence, wedged_after_s=self._settings.wedged_after_s)
            ward.diagnosed(diagnosis)
            if diagnosis.verdict is Verdict.WEDGED or self._stays_frozen(evidence, diagnosis):
                self._in_background(ward.replace_stuck(diagnosis))

    def _stays_frozen(self, evidence: Evidence, diagnosis: Diagnosis) -> bool:
        """Say whether a stopped worker is given up. One that was stopped before it began has done nothing yet."""
        if diagnosis.verdict is not Verdict.FROZEN:
            return False
        silent_s = evidence.now - max(evidence.heard_at, evidence.trusted_from)
        return not evidence.begun or silent_s >= self._settings.wedged_after_s

    def _keep_small(self, wards: dict[ProcessIdentity, Ward]) -> None:
        seen = [(worker, ward, self._sampler.samples(worker)) for worker, ward in wards.items()]
        usages = [
            Usage(
                worker=worker,
                activity=Activity.IDLE if ward.state is State.IDLE and not ward.works_on else Activity.IN_TURN,
                age_s=ward.worker_age_s,
                unique_bytes=samples[-1].unique_bytes,
                rss_bytes=samples[-1].rss_bytes,
            )
            for worker, ward, samples in seen
            if samples
        ]
        plan = self._policy.decide(usages, lambda worker: self._worth(wards[worker]))
        for worker, decided in plan.workers.items():
            match decided.action:
                case Action.WARN:
                    self._log.warning("worker_is_big", pid=worker[0], reason=decided.reason)
                case Action.RECYCLE_NOW | Action.RECYCLE_AFTER_TURN:
                    wards[worker].recycle(decided.reason)
                case Action.KILL:
                    self._in_background(wards[worker].kill_for(decided.reason))
        for worker in plan.shed:
            wards[worker].recycle("has to make room (memory_total_bytes)")
