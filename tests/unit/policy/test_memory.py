"""From numbers to actions, without a process in sight."""

import pytest

from hermes_pool import MemoryLimits
from hermes_pool.policy import memory
from hermes_pool.policy.memory import Action, Activity, MemoryPolicy, Mode, Plan, Usage
from tests.support import known

MIB = 2**20
LIMITS = MemoryLimits(warn_bytes=100 * MIB, recycle_bytes=200 * MIB, kill_bytes=300 * MIB)


@pytest.fixture(autouse=True)
def _half_is_low(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "TOTAL_LOW", 0.5)


def usage(
    worker: str = "w", mib: int | None = 10, *, rss: int | None = None, age_s: float = 1.0, idle: bool = True
) -> Usage[str]:
    return Usage(
        worker=worker,
        activity=Activity.IDLE if idle else Activity.IN_TURN,
        age_s=age_s,
        unique_bytes=None if mib is None else mib * MIB,
        rss_bytes=None if rss is None else rss * MIB,
    )


def decide(policy: MemoryPolicy[str], *workers: Usage[str]) -> Plan[str]:
    return policy.decide(workers, value=lambda name: ord(name[0]))


def action(policy: MemoryPolicy[str], one: Usage[str]) -> Action:
    decided = decide(policy, one).workers.get(one.worker)
    return Action.NONE if decided is None else decided.action


@pytest.mark.parametrize(
    ("mib", "idle", "in_turn"),
    [
        (None, Action.NONE, Action.NONE),
        (100, Action.NONE, Action.NONE),
        (101, Action.WARN, Action.WARN),
        (200, Action.WARN, Action.WARN),
        (201, Action.RECYCLE_NOW, Action.RECYCLE_AFTER_TURN),
        (300, Action.RECYCLE_NOW, Action.RECYCLE_AFTER_TURN),
        (301, Action.KILL, Action.KILL),
    ],
)
def test_each_mark_has_its_action(mib: int | None, idle: Action, in_turn: Action) -> None:
    assert action(MemoryPolicy(LIMITS), usage(mib=mib)) is idle
    assert action(MemoryPolicy(LIMITS), usage(mib=mib, idle=False)) is in_turn


def test_without_limits_nothing_is_done() -> None:
    policy: MemoryPolicy[str] = MemoryPolicy(MemoryLimits())
    plan = decide(policy, usage(mib=10**6, age_s=1e9))
    assert (plan.workers, plan.shed, plan.mode) == ({}, (), Mode.CALM)
    assert policy.unique_above_bytes is None


def test_the_unique_memory_counts_where_it_is_known_and_else_the_resident() -> None:
    assert action(MemoryPolicy(LIMITS), usage(mib=50, rss=400)) is Action.NONE
    assert action(MemoryPolicy(LIMITS), usage(mib=None, rss=400)) is Action.KILL


@pytest.mark.parametrize(
    ("limits", "above"),
    [
        (LIMITS, 100 * MIB),
        (MemoryLimits(kill_bytes=7), 7),
        (MemoryLimits(kill_bytes=7, total_bytes=100), 0),
        (MemoryLimits(), None),
    ],
)
def test_the_dear_measure_is_asked_for_only_where_it_can_matter(limits: MemoryLimits, above: int | None) -> None:
    assert MemoryPolicy(limits).unique_above_bytes == above


def test_a_warning_comes_once_and_again_only_after_it_was_well_below() -> None:
    policy: MemoryPolicy[str] = MemoryPolicy(LIMITS)
    seen = [action(policy, usage(mib=mib)) for mib in (101, 110, 95, 105, 89, 101)]
    assert seen == [Action.WARN, *[Action.NONE] * 4, Action.WARN]
    decide(policy)  # it is gone
    assert action(policy, usage(mib=101)) is Action.WARN


def test_reasons_name_the_setting_and_the_numbers() -> None:
    plan = decide(MemoryPolicy(LIMITS), usage(mib=301))
    assert plan.workers["w"].reason == "uses 301 MiB, over memory.kill_bytes (300 MiB)"


def test_age_is_limited_a_tenth_around_the_setting_and_always_the_same_for_one_worker() -> None:
    policy: MemoryPolicy[str] = MemoryPolicy(MemoryLimits(), worker_age_max_s=1000.0)
    limits = [known(policy.age_max_s(f"worker-{number}")) for number in range(500)]
    assert limits == [policy.age_max_s(f"worker-{number}") for number in range(500)]
    assert 900 <= min(limits) < 910
    assert 1090 < max(limits) <= 1100
    own = known(policy.age_max_s("w"))
    assert action(policy, usage(age_s=own)) is Action.NONE
    assert action(policy, usage(age_s=own + 0.1)) is Action.RECYCLE_NOW
    assert action(policy, usage(age_s=own + 0.1, idle=False)) is Action.RECYCLE_AFTER_TURN


TOTAL = MemoryLimits(total_bytes=100 * MIB, kill_bytes=80 * MIB)


def test_above_the_total_the_least_valuable_idle_ones_go_until_below_the_lower_mark() -> None:
    policy: MemoryPolicy[str] = MemoryPolicy(TOTAL)
    workers = [usage("d", 30), usage("b", 30, idle=False), usage("a", 20), usage("c", 21)]
    plan = decide(policy, *workers)
    assert plan.total_bytes == 101 * MIB
    assert plan.mode is Mode.SHEDDING
    assert plan.shed == ("a", "c", "d")
    assert decide(MemoryPolicy(TOTAL), usage("a", 40), usage("b", 40), usage("c", 25)).shed == ("a", "b")


def test_shedding_begins_above_the_total_and_goes_on_to_the_lower_mark() -> None:
    policy: MemoryPolicy[str] = MemoryPolicy(TOTAL)
    busy = usage("z", 60, idle=False)
    assert decide(policy, busy, usage("a", 40)).shed == ()
    assert decide(policy, busy, usage("a", 41)).shed == ("a",)
    assert decide(policy, busy, usage("a", 10)).shed == ("a",)  # it is between the marks, and was above
    assert decide(policy, usage("z", 40), usage("a", 10)).mode is Mode.CALM
    assert decide(policy, busy, usage("a", 30)).shed == ()  # between the marks again, and was below


def test_who_is_killed_or_recycled_anyway_counts_as_gone() -> None:
    plan = decide(MemoryPolicy(TOTAL), usage("y", 90, idle=False), usage("a", 15), usage("b", 15))
    assert plan.workers["y"].action is Action.KILL
    assert plan.shed == ()


def test_busy_ones_and_those_that_free_nothing_are_not_shed() -> None:
    plan = decide(MemoryPolicy(TOTAL), usage("y", 70, idle=False), usage("x", 70, idle=False), usage("a", None))
    assert (plan.shed, plan.mode) == ((), Mode.SHEDDING)
