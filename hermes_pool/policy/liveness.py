"""Whether a worker is stuck, judged from what is known of it, and where it hangs.

Pure: samples, times and facts go in, a verdict with its reason comes out. The rule behind all others: silence alone
condemns nobody, nor does deafness. A worker that holds the interpreter's lock in C code answers no ping and may be hard
at work; one that waits for a slow model uses no CPU. ``wedged`` needs all evidence at once, over time, from looks that
can be trusted. In doubt it is ``slow``, and the limits of the turn decide.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Final

ProcessIdentity = tuple[int, float]
"""A process: its pid and its create time in seconds since the epoch."""

QUIET_S: Final = 5.0
"""A worker that has sent something within this time is at work, and nothing else is looked at."""
STILL_LOOKS: Final = 3
"""From how many samples in a row without progress a worker counts as doing nothing."""
STILL_S: Final = 5.0
"""How much time those samples must span at least: two glances within a moment tell nothing."""
STILL_SHARE: Final = 0.02
"""Up to this share of a core, a process counts as doing nothing."""
STILL_SHARE_PER_THREAD: Final = 0.005
"""And this for each of its threads: in CPython, each that waits for the lock wakes 200 times a second to ask
for it. Measured while a sleep in C held the lock: 0.9 % of a core with one thread waiting, 2.5 % with ten, 7 % with
thirty."""
PING_BYTES_MAX: Final = 512
"""What a ping and its answer take of input and output, generously: to be looked at is no work."""
TIME_LOST_S: Final = 5.0
"""A look that comes this much too late tells that time was lost: a suspended machine, a host that was blocked."""
STACK_LINES_MAX: Final = 400
"""Most lines of stacks that are kept."""


class ProcessState(StrEnum):
    """What the kernel says that a process is doing."""

    RUNNING = "running"
    SLEEPING = "sleeping"
    UNINTERRUPTIBLE = "uninterruptible"
    """It waits in the kernel, for a disk or a network file system, and cannot even be killed."""
    STOPPED = "stopped"
    """By a signal or a debugger."""
    DEAD = "dead"
    """Gone, a zombie, or its pid is another's by now."""
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One worker and what is below it at one moment; ``None`` is "was not asked" or "cannot be known"."""

    at: float
    """Monotonic time in seconds."""
    state: ProcessState
    threads: int = 1
    own_cpu_s: float | None = None
    """CPU time, user and system, of the worker alone."""
    cpu_s: float | None = None
    """CPU time of the worker and its living descendants; it may fall when one of them ends."""
    io_bytes: int | None = None
    """Bytes that they have read and written so far."""
    rss_bytes: int | None = None
    """Resident memory of them all; pages that they share with others, or with each other, count for each."""
    unique_bytes: int | None = None
    """Their memory with each shared page counted by its share (PSS, and what of it is swapped out)."""
    descendants: tuple[ProcessIdentity, ...] = ()
    """The living ones, those included that have left their parent, session or environment since they were seen."""


class Verdict(StrEnum):
    """What a silent worker is up to."""

    BUSY = "busy"
    """It sends, computes, reads or writes."""
    BLOCKED_ON_CHILD = "blocked_on_child"
    """A process that it has started in this turn is running."""
    SLOW = "slow"
    """It does nothing that can be seen, and nothing says that it never will: it waits for its model, say."""
    FROZEN = "frozen"
    """It was stopped from outside, by SIGSTOP or a debugger, and may be continued."""
    WEDGED = "wedged"
    """It answers no ping, sends nothing, uses no CPU, reads and writes nothing, and waits for no child."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A verdict, and one line for people that says why."""

    verdict: Verdict
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """All that is known of one worker. Moments are monotonic times in seconds, of one clock."""

    now: float
    heard_at: float
    """When its last frame of the turn came, or the turn was handed over."""
    begun: bool = True
    """Whether a frame of the turn has come at all."""
    asked_at: float | None
    """When the oldest ping was sent that it has not answered; ``None`` when all are answered."""
    samples: Sequence[Sample]
    """The latest ones, oldest first."""
    at_rest: frozenset[ProcessIdentity] = frozenset()
    """Descendants that it had before the turn, such as servers of tools: it does not wait for those."""
    tools_open: Sequence[str] = ()
    """Names of the tools that it has begun and not finished."""
    excuse: str | None = None
    """Why we expect nothing of it, in words that go on from "it": "waits for an answer". ``None`` if nothing excuses
    it. A worker whose events nobody reads *must* be excused: it may hang in a write, and cannot answer a ping."""
    trusted_from: float = float("-inf")
    """What was seen or missed before this moment does not count (see ``Pulse``)."""


class Pulse:
    """Notices that time was lost: the machine was suspended, or this process was stopped or did not get to look.

    Then pings lie unread in pipes and clocks have jumped, on our side and not on the workers'.
    """

    def __init__(self) -> None:
        self.trusted_from = float("-inf")
        """The moment up to which nothing counts."""
        self._ahead_s: float | None = None

    def beat(self, *, due: float, now: float, since_boot: float) -> bool:
        """Say whether all is well with a look that was ``due`` then and comes ``now`` (both monotonic).

        ``since_boot`` is a clock that goes on while the machine sleeps, in seconds.
        """
        ahead_s = since_boot - now
        jumped_s = 0.0 if self._ahead_s is None else abs(ahead_s - self._ahead_s)
        self._ahead_s = ahead_s
        if jumped_s < TIME_LOST_S and now - due < TIME_LOST_S:
            return True
        self.trusted_from = now
        return False


def diagnose(evidence: Evidence, *, wedged_after_s: float) -> Diagnosis:
    """Say what a worker is up to. ``wedged_after_s`` is how long it may be deaf and silent before that may be it.

    To be asked right after a look: without a fresh sample nobody is ``wedged``.
    """
    samples = [sample for sample in evidence.samples if sample.at >= evidence.trusted_from]
    silent_s = evidence.now - max(evidence.heard_at, evidence.trusted_from)
    if not samples:
        return Diagnosis(Verdict.SLOW, "nothing is known of it yet, or since time was lost")
    last = samples[-1]
    if last.state is ProcessState.STOPPED:
        return Diagnosis(Verdict.FROZEN, "stopped by a signal or a debugger; SIGCONT lets it go on")
    if silent_s < QUIET_S and evidence.heard_at >= evidence.trusted_from:
        return Diagnosis(Verdict.BUSY, f"sent something {silent_s:.0f} s ago")
    silence = f"silent for {silent_s:.0f} s"
    if last.state is ProcessState.DEAD:
        return Diagnosis(Verdict.SLOW, f"{silence}; its process is ending or gone")
    if len(samples) > 1 and (work := _own_work(*samples[-2:])):
        return Diagnosis(Verdict.BUSY, f"{silence}, but {work}")
    if children := [pid for pid, began in last.descendants if (pid, began) not in evidence.at_rest]:
        return Diagnosis(Verdict.BLOCKED_ON_CHILD, f"{silence}; {_waits(evidence, children)}")
    if len(samples) > 1 and (work := _work_below(*samples[-2:])):
        return Diagnosis(Verdict.BUSY, f"{silence}, but {work}")
    if last.state is ProcessState.UNINTERRUPTIBLE:
        return Diagnosis(Verdict.SLOW, f"{silence}; it waits in the kernel (a disk or a network file system)")
    if evidence.excuse is not None:
        return Diagnosis(Verdict.SLOW, f"{silence}; it {evidence.excuse}")
    return _silent_and_idle(evidence, samples, silence, silent_s, wedged_after_s)


def _silent_and_idle(
    evidence: Evidence, samples: list[Sample], silence: str, silent_s: float, wedged_after_s: float
) -> Diagnosis:
    """Judge one that shows no work at all: it is wedged if it is also deaf, and all of that for long enough."""
    if evidence.asked_at is None:
        tool = f"; the tool {evidence.tools_open[-1]!r} is open" if evidence.tools_open else ""
        return Diagnosis(Verdict.SLOW, f"{silence}, but it answers{tool}")
    deaf_since = max(evidence.asked_at, evidence.trusted_from)
    deaf_s = evidence.now - deaf_since
    told = f"{silence}, deaf for {deaf_s:.0f} s"
    if min(deaf_s, silent_s) < wedged_after_s:
        return Diagnosis(Verdict.SLOW, f"{told}; that may still be work")
    since = max(deaf_since, evidence.heard_at)
    still = _still_at_the_end([sample for sample in samples if sample.at >= since])
    looked_enough = len(still) >= STILL_LOOKS and still[-1].at - still[0].at >= STILL_S
    if not looked_enough or evidence.now - still[-1].at > STILL_S:
        return Diagnosis(Verdict.SLOW, f"{told}; not looked at long enough to know whether it works")
    span_s = still[-1].at - still[0].at
    tool = f" in the tool {evidence.tools_open[-1]!r}" if evidence.tools_open else ""
    return Diagnosis(Verdict.WEDGED, f"{told}{tool}, without CPU, input, output or a running child for {span_s:.0f} s")


def _waits(evidence: Evidence, children: list[int]) -> str:
    tool = f" of the tool {evidence.tools_open[-1]!r}" if evidence.tools_open else ""
    if len(children) == 1:
        return f"waits for a child process{tool} (pid {children[0]})"
    return f"waits for {len(children)} child processes{tool} (pid {children[0]} and others)"


def _still_at_the_end(samples: list[Sample]) -> list[Sample]:
    """Return the samples from the last sign of work on. Where the CPU time is unknown, there is no stillness."""
    still = samples[-1:]
    for before, after in reversed(list(pairwise(samples))):
        if (
            before.own_cpu_s is None
            or after.own_cpu_s is None
            or before.cpu_s is None
            or after.cpu_s is None
            or before.descendants != after.descendants
            or _own_work(before, after)
            or _work_below(before, after)
        ):
            break
        still.insert(0, before)
    return still


def _own_work(before: Sample, after: Sample) -> str | None:
    """Say what the worker has done between two looks, if anything: CPU of its own, or I/O of its whole tree."""
    share = _share(before.own_cpu_s, after.own_cpu_s, after.at - before.at)
    if share is not None and share > STILL_SHARE + STILL_SHARE_PER_THREAD * after.threads:
        return f"it uses {share:.0%} of a core"
    if before.io_bytes is not None and after.io_bytes is not None and before.descendants == after.descendants:
        moved = after.io_bytes - before.io_bytes
        if moved > PING_BYTES_MAX:
            return f"it reads and writes ({moved:,} bytes in {after.at - before.at:.0f} s)"
    return None


def _work_below(before: Sample, after: Sample) -> str | None:
    """Say what its descendants have done between two looks, if anything."""
    if before.cpu_s is None or before.own_cpu_s is None or after.cpu_s is None or after.own_cpu_s is None:
        return None
    share = _share(before.cpu_s - before.own_cpu_s, after.cpu_s - after.own_cpu_s, after.at - before.at)
    return None if share is None or share <= STILL_SHARE else f"its child processes use {share:.0%} of a core"


def _share(before_s: float | None, after_s: float | None, span_s: float) -> float | None:
    if before_s is None or after_s is None or span_s <= 0:
        return None
    return (after_s - before_s) / span_s


# --- where it hangs ---------------------------------------------------------------------------------------------------

_HEAD = re.compile(r"(?:Current thread|Thread) (0x[0-9a-f]+).*\(most recent call first\):")
_FRAME = re.compile(r"  (?:File .*, line [0-9?]+ in |<|\.\.\.)")  # a traceback has a comma before its "in"


def stacks_of(lines: Iterable[str]) -> tuple[str, ...]:
    """Return the Python stacks that lines of a worker's stderr hold: the last dump of ``faulthandler``, or nothing.

    What other threads wrote in between is left out; at most ``STACK_LINES_MAX`` lines are returned. Whether the dump
    is complete cannot be told: the main thread's stack is the last one.
    """
    found: list[str] = []
    threads: set[str] = set()
    for line in lines:
        if (head := _HEAD.search(line)) is not None:
            if head[1] in threads:  # another dump begins
                found, threads = [], set()
            threads.add(head[1])
            found.append(head[0])  # it may stand behind a line that was not finished
        elif found and _FRAME.match(line):
            found.append(line)
    return tuple(found[:STACK_LINES_MAX])
