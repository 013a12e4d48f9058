"""Judges from evidence whether a worker is stuck, and finds the stacks that show where it hangs.

Pure: samples, times and facts go in, a verdict with its reason comes out. The rule behind all others: neither silence
nor unanswered pings alone are proof. A worker that holds the interpreter's lock in C code answers no ping and may be
hard at work; one that waits for a slow model uses no CPU. ``wedged`` needs all the evidence at once, over time, from
samples that can be trusted. In doubt the verdict is ``slow``, and the limits of the turn decide.
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
"""A worker that has sent something within this time is busy, whatever else the evidence says."""
STILL_SAMPLES_MIN: Final = 3
"""How many consecutive samples without progress it takes to count a worker as inactive."""
STILL_S: Final = 5.0
"""The least time those samples must span: samples taken within a moment prove nothing."""
STILL_SHARE: Final = 0.02
"""A process that uses no more than this share of a core counts as inactive."""
STILL_SHARE_PER_THREAD: Final = 0.005
"""The allowance grows by this for each thread: in CPython, a thread that waits for the interpreter's lock wakes up 200
times a second to request it. Measured while a sleep in C held the lock: 0.9 % of a core with one waiting thread, 2.5 %
with ten, 7 % with thirty."""
PING_BYTES_MAX: Final = 512
"""A generous bound on the I/O of a ping and its answer: answering a ping does not count as work."""
TIME_LOST_S: Final = 5.0
"""A sample this late means that time was lost: the machine was suspended, or the host was blocked."""
STACK_LINES_MAX: Final = 400
"""How many lines of stacks are kept at most."""


class ProcessState(StrEnum):
    """The state of a process, according to the kernel."""

    RUNNING = "running"
    SLEEPING = "sleeping"
    UNINTERRUPTIBLE = "uninterruptible"
    """It waits in the kernel, for a disk or a network file system, and cannot be killed until that ends."""
    STOPPED = "stopped"
    """Stopped by a signal or a debugger."""
    DEAD = "dead"
    """Gone, a zombie, or its pid now belongs to another process."""
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One worker and its descendants at one moment; ``None`` means "not measured" or "cannot be known"."""

    at: float
    """Monotonic time in seconds."""
    state: ProcessState
    threads: int = 1
    own_cpu_s: float | None = None
    """CPU time, user and system, of the worker alone."""
    cpu_s: float | None = None
    """CPU time of the worker and its living descendants; it can decrease when one of them ends."""
    io_bytes: int | None = None
    """How many bytes they have read and written so far."""
    rss_bytes: int | None = None
    """Resident memory of all of them; a shared page counts once for each process that maps it."""
    unique_bytes: int | None = None
    """Their memory with each shared page counted proportionally (PSS plus its swapped-out part)."""
    descendants: tuple[ProcessIdentity, ...] = ()
    """The living ones, including those that have left their parent, session or environment."""


class Verdict(StrEnum):
    """What a silent worker is doing."""

    BUSY = "busy"
    """It sends, computes, reads or writes."""
    BLOCKED_ON_CHILD = "blocked_on_child"
    """A process that it started in this turn is running."""
    SLOW = "slow"
    """It does nothing visible, but may still go on: it waits for its model, say."""
    FROZEN = "frozen"
    """It was stopped from outside, by SIGSTOP or a debugger, and can be continued."""
    WEDGED = "wedged"
    """It answers no pings, sends nothing, uses no CPU, does no I/O, and waits for no child."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A verdict, and the reason for it in one line for people."""

    verdict: Verdict
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """All that is known about one worker. Times are in seconds, on one monotonic clock."""

    now: float
    heard_at: float
    """When its last frame of the turn arrived; before the first one, when the turn was handed over."""
    begun: bool = True
    """Whether any frame of the turn has arrived."""
    pinged_at: float | None
    """When the oldest unanswered ping was sent; ``None`` if all are answered."""
    samples: Sequence[Sample]
    """The latest ones, oldest first."""
    descendants_when_idle: frozenset[ProcessIdentity] = frozenset()
    """Descendants that it had before the turn, such as tool servers: it does not wait for those."""
    tools_open: Sequence[str] = ()
    """Names of the tools that have started and not finished."""
    excuse: str | None = None
    """Why it may be silent, worded to follow "it": "waits for an answer". ``None`` if nothing excuses it. A worker
    whose events are not read *must* be excused: it may block in a write, and then cannot answer a ping."""
    trusted_from: float = float("-inf")
    """What happened before this moment does not count as evidence (see ``Pulse``)."""


class Pulse:
    """Notices lost time: the machine was suspended, or this process was stopped or blocked.

    Answers to pings then lie unread in pipes, and clocks have jumped. That is our fault and not the workers'.
    """

    def __init__(self) -> None:
        self.trusted_from = float("-inf")
        """Evidence from before this moment does not count."""
        self._ahead_s: float | None = None

    def beat(self, *, due: float, now: float, since_boot: float) -> bool:
        """Record a sample, ``due`` at one monotonic time and taken ``now``; return ``False`` if time was lost.

        ``since_boot`` is a clock, in seconds, that also runs while the machine sleeps.
        """
        ahead_s = since_boot - now
        jumped_s = 0.0 if self._ahead_s is None else abs(ahead_s - self._ahead_s)
        self._ahead_s = ahead_s
        if jumped_s < TIME_LOST_S and now - due < TIME_LOST_S:
            return True
        self.trusted_from = now
        return False


def diagnose(evidence: Evidence, *, wedged_after_s: float) -> Diagnosis:
    """Judge what a worker is doing. It is ``wedged`` at the earliest after ``wedged_after_s`` without frame or pong.

    Call it right after sampling: without a fresh sample no worker is ``wedged``.
    """
    samples = [sample for sample in evidence.samples if sample.at >= evidence.trusted_from]
    silent_s = evidence.now - max(evidence.heard_at, evidence.trusted_from)
    if not samples:
        return Diagnosis(Verdict.SLOW, "not sampled yet, or not since time was lost")
    last = samples[-1]
    if last.state is ProcessState.STOPPED:
        return Diagnosis(Verdict.FROZEN, "stopped by a signal or a debugger; SIGCONT continues it")
    if silent_s < QUIET_S and evidence.heard_at >= evidence.trusted_from:
        return Diagnosis(Verdict.BUSY, f"sent something {silent_s:.0f} s ago")
    silence = f"silent for {silent_s:.0f} s"
    if last.state is ProcessState.DEAD:
        return Diagnosis(Verdict.SLOW, f"{silence}; its process is ending or gone")
    if len(samples) > 1 and (work := _own_work(*samples[-2:])):
        return Diagnosis(Verdict.BUSY, f"{silence}, but {work}")
    if children := [pid for pid, began in last.descendants if (pid, began) not in evidence.descendants_when_idle]:
        return Diagnosis(Verdict.BLOCKED_ON_CHILD, f"{silence}; {_waiting(evidence, children)}")
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
    """Judge a worker that shows no work: it is wedged if it has also answered no ping, all of that for long enough."""
    if evidence.pinged_at is None:
        tool = f"; the tool {evidence.tools_open[-1]!r} is open" if evidence.tools_open else ""
        return Diagnosis(Verdict.SLOW, f"{silence}, but it answers pings{tool}")
    unanswered_since = max(evidence.pinged_at, evidence.trusted_from)
    unanswered_s = evidence.now - unanswered_since
    symptoms = f"{silence}, no answer to a ping for {unanswered_s:.0f} s"
    if min(unanswered_s, silent_s) < wedged_after_s:
        return Diagnosis(Verdict.SLOW, f"{symptoms}; it may still be working")
    since = max(unanswered_since, evidence.heard_at)
    still = _still_at_the_end([sample for sample in samples if sample.at >= since])
    sampled_enough = len(still) >= STILL_SAMPLES_MIN and still[-1].at - still[0].at >= STILL_S
    if not sampled_enough or evidence.now - still[-1].at > STILL_S:
        return Diagnosis(Verdict.SLOW, f"{symptoms}; not sampled for long enough to know whether it works")
    span_s = still[-1].at - still[0].at
    tool = f" in the tool {evidence.tools_open[-1]!r}" if evidence.tools_open else ""
    return Diagnosis(Verdict.WEDGED, f"{symptoms}{tool}, no CPU, I/O or running child for {span_s:.0f} s")


def _waiting(evidence: Evidence, children: list[int]) -> str:
    tool = f" of the tool {evidence.tools_open[-1]!r}" if evidence.tools_open else ""
    if len(children) == 1:
        return f"waits for a child process{tool} (pid {children[0]})"
    return f"waits for {len(children)} child processes{tool} (pid {children[0]} and others)"


def _still_at_the_end(samples: list[Sample]) -> list[Sample]:
    """Return the samples since the last sign of work. An unknown CPU time counts as work."""
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
    """Return in words what the worker did between two samples: its own CPU, or the I/O of its whole tree."""
    share = _share(before.own_cpu_s, after.own_cpu_s, after.at - before.at)
    if share is not None and share > STILL_SHARE + STILL_SHARE_PER_THREAD * after.threads:
        return f"it uses {share:.0%} of a core"
    if before.io_bytes is not None and after.io_bytes is not None and before.descendants == after.descendants:
        moved = after.io_bytes - before.io_bytes
        if moved > PING_BYTES_MAX:
            return f"it does I/O ({moved:,} bytes in {after.at - before.at:.0f} s)"
    return None


def _work_below(before: Sample, after: Sample) -> str | None:
    """Return in words what its descendants did between two samples; ``None`` if nothing."""
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
    """Return the Python stacks in lines of a worker's stderr: the last ``faulthandler`` dump, or nothing.

    Lines that other threads wrote in between are left out; at most ``STACK_LINES_MAX`` lines are returned. The dump may
    be incomplete without a sign of it; the main thread's stack comes last.
    """
    found: list[str] = []
    threads: set[str] = set()
    for line in lines:
        if (head := _HEAD.search(line)) is not None:
            if head[1] in threads:  # a new dump begins
                found, threads = [], set()
            threads.add(head[1])
            found.append(head[0])  # it may follow an unfinished line
        elif found and _FRAME.match(line):
            found.append(line)
    return tuple(found[:STACK_LINES_MAX])
