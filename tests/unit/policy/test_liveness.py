"""Busy, blocked, slow, frozen or wedged: tables over all that can be known of a silent worker."""

import itertools
from dataclasses import replace
from typing import Any

import pytest

from hermes_pool.policy.liveness import (
    STACK_LINES_MAX,
    Evidence,
    ProcessState,
    Pulse,
    Sample,
    Verdict,
    diagnose,
    stacks_of,
)

LIMIT_S = 60.0
CHILD = (77, 1000.0)
SERVER = (66, 900.0)


def samples(*, own: float = 0.0, below: float = 0.0, io: int | None = 0, **fields: Any) -> list[Sample]:
    """Five looks, every 10 s until 1000; ``own``, ``below`` (shares of a core) and ``io`` (bytes) go on in each."""
    values = {"state": ProcessState.SLEEPING, "threads": 2, **fields}
    return [
        Sample(
            at=960.0 + 10 * number,
            own_cpu_s=5 + own * 10 * number,
            cpu_s=7 + (own + below) * 10 * number,
            io_bytes=None if io is None else 100 + io * number,
            **values,
        )
        for number in range(5)
    ]


WEDGED = Evidence(now=1000.0, heard_at=930.0, pinged_at=935.0, samples=samples())


def verdict(evidence: Evidence) -> Verdict:
    found = diagnose(evidence, wedged_after_s=LIMIT_S)
    assert found.reason
    assert "\n" not in found.reason
    return found.verdict


def test_wedged_is_who_shows_no_sign_at_all() -> None:
    found = diagnose(WEDGED, wedged_after_s=LIMIT_S)
    assert found.verdict is Verdict.WEDGED
    assert found.reason == "silent for 70 s, no answer to a ping for 65 s, no CPU, I/O or running child for 40 s"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"heard_at": 998.0}, Verdict.BUSY),
        ({"heard_at": 945.0}, Verdict.SLOW),
        ({"pinged_at": None}, Verdict.SLOW),
        ({"pinged_at": 945.0}, Verdict.SLOW),
        ({"excuse": "waits for an answer to its question"}, Verdict.SLOW),
        ({"samples": []}, Verdict.SLOW),
        ({"samples": samples()[-1:]}, Verdict.SLOW),
        ({"samples": samples()[-2:]}, Verdict.SLOW),
        ({"samples": samples()[-3:]}, Verdict.WEDGED),
        ({"samples": samples()[:4]}, Verdict.SLOW),  # the last look is too long ago
        ({"samples": [replace(each, at=1000 - (4 - n) / 10) for n, each in enumerate(samples())]}, Verdict.SLOW),
        ({"samples": samples(own=1.0)}, Verdict.BUSY),
        ({"samples": samples(own=0.05)}, Verdict.BUSY),
        ({"samples": samples(own=0.01)}, Verdict.WEDGED),  # threads that wait for the interpreter's lock
        ({"samples": samples(own=0.07, threads=31)}, Verdict.WEDGED),
        ({"samples": samples(io=5000)}, Verdict.BUSY),
        ({"samples": samples(io=None)}, Verdict.WEDGED),
        (
            {"samples": samples(below=0.5, descendants=(SERVER,)), "descendants_when_idle": frozenset({SERVER})},
            Verdict.BUSY,
        ),
        ({"samples": samples(descendants=(SERVER,)), "descendants_when_idle": frozenset({SERVER})}, Verdict.WEDGED),
        (
            {"samples": samples(descendants=(SERVER, CHILD)), "descendants_when_idle": frozenset({SERVER})},
            Verdict.BLOCKED_ON_CHILD,
        ),
        ({"samples": samples(descendants=(CHILD,))}, Verdict.BLOCKED_ON_CHILD),
        ({"samples": samples(own=1.0, descendants=(CHILD,))}, Verdict.BUSY),
        ({"samples": samples(below=1.0, descendants=(CHILD,))}, Verdict.BLOCKED_ON_CHILD),
        ({"samples": samples(state=ProcessState.STOPPED)}, Verdict.FROZEN),
        ({"samples": samples(state=ProcessState.STOPPED), "heard_at": 999.0}, Verdict.FROZEN),
        ({"samples": samples(state=ProcessState.UNINTERRUPTIBLE)}, Verdict.SLOW),
        ({"samples": samples(state=ProcessState.DEAD)}, Verdict.SLOW),
        ({"samples": samples(state=ProcessState.UNKNOWN)}, Verdict.WEDGED),
        ({"samples": [replace(each, own_cpu_s=None, cpu_s=None) for each in samples()]}, Verdict.SLOW),
        ({"tools_open": ["terminal"]}, Verdict.WEDGED),
    ],
)
def test_each_sign_of_life_saves_it(change: dict[str, Any], expected: Verdict) -> None:
    assert verdict(replace(WEDGED, **change)) is expected


def test_of_all_combinations_only_the_one_without_any_sign_is_wedged() -> None:
    conditions = (ProcessState.SLEEPING, ProcessState.RUNNING, ProcessState.UNINTERRUPTIBLE, ProcessState.STOPPED)
    heard, asked, excuses = (999.0, 970.0, 930.0), (None, 990.0, 935.0), (None, "waits for an answer")
    works: tuple[dict[str, Any], ...] = ({}, {"own": 1.0}, {"below": 1.0}, {"io": 5000})
    children = ((), (CHILD,), (SERVER,))
    wedged = set()
    for row in itertools.product(heard, asked, excuses, works, children, conditions):
        heard_at, pinged_at, excuse, work, descendants, condition = row
        evidence = Evidence(
            now=1000.0,
            heard_at=heard_at,
            pinged_at=pinged_at,
            excuse=excuse,
            samples=samples(**work, descendants=descendants, state=condition),
            descendants_when_idle=frozenset({SERVER}),
        )
        found = verdict(evidence)
        assert (found is Verdict.FROZEN) == (condition is ProcessState.STOPPED)
        if found is Verdict.WEDGED:
            wedged.add((heard_at, pinged_at, excuse, str(work), descendants, condition))
    assert wedged == {
        (930.0, 935.0, None, "{}", descendants, condition)
        for descendants in ((), (SERVER,))
        for condition in (ProcessState.SLEEPING, ProcessState.RUNNING)
    }


def test_work_in_the_middle_of_the_silence_starts_the_watch_anew() -> None:
    looks = samples()
    worked = [replace(each, own_cpu_s=9.0, cpu_s=11.0) for each in looks[3:]]
    assert verdict(replace(WEDGED, samples=[*looks[:3], *worked])) is Verdict.SLOW
    later = [replace(each, at=each.at + 10) for each in worked]
    assert verdict(replace(WEDGED, samples=[*worked[:1], *later], now=1010.0)) is Verdict.WEDGED


def test_a_child_that_came_or_went_is_progress() -> None:
    looks = samples()
    ended = [replace(looks[0], descendants=(CHILD,)), *looks[1:3]]
    assert verdict(replace(WEDGED, samples=[replace(each, at=each.at + 20) for each in ended])) is Verdict.SLOW


def test_twelve_seconds_of_the_interpreters_lock_are_no_reason_whether_it_computes_or_sleeps() -> None:
    for own, expected in ((1.0, Verdict.BUSY), (0.0, Verdict.SLOW)):
        evidence = Evidence(now=1000.0, heard_at=988.0, pinged_at=988.0, samples=samples(own=own))
        assert verdict(evidence) is expected


def test_after_lost_time_nothing_is_judged_until_it_was_looked_at_again() -> None:
    asleep = replace(WEDGED, now=5000.0, trusted_from=5000.0)
    assert verdict(asleep) is Verdict.SLOW
    woken = [replace(each, at=each.at + 4050) for each in samples()]  # from 5010 on
    for now in (5010.0, 5030.0, 5050.0):
        seen = [each for each in woken if each.at <= now]
        assert verdict(replace(asleep, now=now, samples=[*samples(), *seen])) is Verdict.SLOW
    assert verdict(replace(asleep, now=5061.0, samples=[replace(each, at=each.at + 10) for each in woken])) is (
        Verdict.WEDGED
    )


@pytest.mark.parametrize(
    ("due", "now", "since_boot", "well"),
    [
        (110.0, 110.1, 1110.1, True),
        (110.0, 114.0, 1114.0, True),
        (110.0, 116.0, 1116.0, False),  # the host was blocked, or stopped
        (110.0, 110.1, 4710.1, False),  # an hour of sleep that the monotonic clock knows nothing of
        (110.0, 3710.0, 4710.0, False),  # or knows all of
        (110.0, 110.1, 1000.0, False),  # a clock that was set back, where there is no better one
    ],
)
def test_lost_time_is_noticed(due: float, now: float, since_boot: float, well: bool) -> None:
    pulse = Pulse()
    assert pulse.beat(due=100.0, now=100.0, since_boot=1100.0)
    assert pulse.beat(due=due, now=now, since_boot=since_boot) is well
    assert (pulse.trusted_from == now) is not well
    assert pulse.beat(due=now + 10, now=now + 10, since_boot=since_boot + 10)


DUMP = [
    "Thread 0x00007f0000000002 (most recent call first):",
    '  File "/lib/threading.py", line 331 in wait',
    "  <no Python frame>",
    "",
    "Current thread 0x00007f0000000001 [main] (most recent call first):",
    '  File "/app/agent.py", line 12 in turn',
    "  ...",
]


def test_stacks_are_found_between_other_lines_and_the_last_dump_counts() -> None:
    whole = [line for line in DUMP if line]
    noisy = [
        "starting",
        *DUMP[:2],
        "WARNING: something",
        "  indented",
        *DUMP[2:],
        "Traceback:",
        '  File "a.py", line 3, in b',
    ]
    assert stacks_of(noisy) == tuple(whole)
    older = [line.replace("agent.py", "old.py") for line in DUMP]
    assert stacks_of([*older, *DUMP]) == tuple(whole)
    assert stacks_of(["50 % done " + DUMP[0], *DUMP[1:]]) == tuple(whole)


@pytest.mark.parametrize("lines", [[], ["a line"], ['  File "x", line 1 in y'], ["Thread 7 has begun"]])
def test_where_there_are_no_stacks_there_are_none(lines: list[str]) -> None:
    assert stacks_of(lines) == ()


def test_endless_stacks_are_cut() -> None:
    assert len(stacks_of([DUMP[0], *DUMP[1:2] * 5000])) == STACK_LINES_MAX
