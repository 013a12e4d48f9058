"""The measurements for any fleet. Each returns the named figures of one round."""

import asyncio
import contextlib
import os
import re
import signal
import statistics
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import psutil

from _bench.fleet import DELTAS, WAIT, Fleet, NotSupportedError, Situation, tree
from _bench.stats import percentile

MEBI = 1024 * 1024
PAUSE_S = 0.3
"""Pause before each new session, in which a pool with spares prepares the next one. The same for all subjects."""
SETTLED_S = 23.0
"""Time until idle sessions are at rest. The pool samples its workers every twenty seconds."""
Values = dict[str, float]
Make = Callable[[Situation], Fleet]


def pin() -> None:
    """Bind this process, and everything that it starts from now on, to one CPU."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


async def probe(make: Make) -> Values:
    """Run one turn, to warm caches and find out whether the subject works here."""
    async with make(Situation()) as fleet:
        await fleet.send("probe", "hello")
    return {}


async def warm_turns(make: Make, *, turns: int, seconds: float) -> Values:
    """M1: median time of a turn, by the size of its message, which is also that of its answer."""
    pin()
    values: Values = {}
    async with make(Situation()) as fleet:
        for name, size in (("100 B", 100), ("10 KB", 10_000), ("1 MB", 1_000_000)):
            text = "x" * size
            for _ in range(3):
                assert await fleet.send("one", text) == text
            times: list[float] = []
            end = time.perf_counter() + seconds
            while len(times) < turns and (began := time.perf_counter()) < end:
                await fleet.send("one", text)
                times.append(time.perf_counter() - began)
            values[name] = statistics.median(times) * 1e6
            if size == 100:
                values["p99"] = percentile(times, 0.99) * 1e6
    return values


async def in_flight(make: Make, *, sessions: int, seconds: float) -> Values:
    """M2: all sessions talk at once. Each sends its next message as soon as it has an answer."""
    text = "x" * 100
    counts = [0] * sessions
    async with make(Situation(sessions=sessions, pooled=True)) as fleet:
        await fleet.send("0", text)
        processes = 0
        # Pools grow gradually.
        while processes != (processes := len(tree())):
            await asyncio.gather(*(fleet.send(str(number), text) for number in range(sessions)))
            await _at_rest()
        end = 0.0

        async def talk(number: int) -> None:
            key = str(number)
            while time.perf_counter() < end:
                await fleet.send(key, text)
                counts[number] += 1

        began = time.perf_counter()
        end = began + seconds
        await asyncio.gather(*(talk(number) for number in range(sessions)))
        took = time.perf_counter() - began
    return {"turns/s": sum(counts) / took, "slowest/fastest": min(counts) / max(counts)}


async def _at_rest(limit_s: float = 30.0) -> None:
    """Wait until the process tree uses no CPU any more: pools answer before all their workers are up."""
    end = time.monotonic() + limit_s
    used = -1.0
    while time.monotonic() < end:
        before, used = used, 0.0
        for pid in tree() - {os.getpid()}:
            with contextlib.suppress(psutil.Error):
                times = psutil.Process(pid).cpu_times()
                used += times.user + times.system
        if used <= before + 0.01:
            return
        await asyncio.sleep(0.3)


async def first_answers(make: Make, *, samples: int) -> Values:
    """M3: time from the first message of a new session to its answer. The first session does not count."""
    times = []
    async with make(Situation(sessions=samples + 1)) as fleet:
        for number in range(samples + 1):
            await asyncio.sleep(PAUSE_S)
            began = time.perf_counter()
            await fleet.send(f"new-{number}", "hello")
            times.append(time.perf_counter() - began)
    return {"ms": statistics.median(times[1:]) * 1000}


async def many_at_once(make: Make, *, sessions: int) -> Values:
    """M4: time to start many sessions at once, and the longest stall of the host's event loop meanwhile."""
    async with make(Situation(sessions=sessions + 1, at_once=True)) as fleet:
        if fleet.first_session_warms:
            await fleet.send("first", "hello")
        stop = asyncio.Event()
        ticker = asyncio.create_task(_longest_stall(stop))
        await asyncio.sleep(0.05)
        began = time.perf_counter()
        await asyncio.gather(*(fleet.send(f"new-{number}", "hello") for number in range(sessions)))
        took = time.perf_counter() - began
        stop.set()
        stall = await ticker
    return {"wall ms": took * 1000, "stall ms": stall * 1000}


async def _longest_stall(stop: asyncio.Event) -> float:
    longest, tick = 0.0, 0.001
    while not stop.is_set():
        began = time.perf_counter()
        await asyncio.sleep(tick)
        longest = max(longest, time.perf_counter() - began - tick)
    return longest


async def memory(make: Make, *, sessions: int) -> Values:
    """M5: memory that each further session adds to the process tree, the host included."""
    async with make(Situation(sessions=sessions)) as fleet:
        await fleet.send("0", "hello")
        before = _memory_of(tree())
        for number in range(1, sessions):
            await fleet.send(str(number), "hello")
        await _at_rest()
        after = _memory_of(tree())
        values = {
            "PSS MB": (after["Pss"] - before["Pss"]) / (sessions - 1) / MEBI,
            "USS MB": (after["Uss"] - before["Uss"]) / (sessions - 1) / MEBI,
        }
        if helpers := await fleet.helpers():
            values["zygote USS MB"] = _memory_of(helpers)["Uss"] / MEBI
    return values


def _memory_of(pids: Iterable[int]) -> dict[str, int]:
    """Return the sums of PSS and USS, in bytes."""
    sums = {"Pss": 0, "Uss": 0}
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            found = re.findall(r"^(Pss|Private_Clean|Private_Dirty): +(\d+) kB", smaps(pid), re.MULTILINE)
            for name, kilobytes in found:
                sums["Pss" if name == "Pss" else "Uss"] += int(kilobytes) * 1024
    return sums


def smaps(pid: int) -> str:
    """Return the kernel's summary of a process's memory."""
    return Path(f"/proc/{pid}/smaps_rollup").read_text()


def uss_mb(pid: int) -> float:
    """Return the private memory (USS) of a process."""
    return _memory_of([pid])["Uss"] / MEBI


async def killed(make: Make, *, samples: int) -> Values:
    """M6: time from a kill in a turn until the caller has an error, and until the conversation answers again."""
    seen, answered = [], []
    async with make(Situation(faulty=True)) as fleet:
        await fleet.send("one", "hello")
        for _ in range(samples + 1):
            pid = await fleet.pid("one")
            turn = asyncio.ensure_future(fleet.send("one", WAIT))
            await asyncio.sleep(0.1)
            if turn.done():
                await turn
                raise RuntimeError("the worker answered a message on which it should wait")
            began = time.perf_counter()
            os.kill(pid, signal.SIGKILL)
            try:
                await asyncio.wait_for(turn, 30)
            except TimeoutError:
                raise NotSupportedError("the caller gets no error within 30 s") from None
            except Exception:  # noqa: BLE001 - each subject has an error of its own
                seen.append(time.perf_counter() - began)
            await fleet.revive("one")
            assert await _until_answer(fleet) == "again"
            answered.append(time.perf_counter() - began)
            await asyncio.sleep(PAUSE_S)
    return {"seen ms": statistics.median(seen[1:]) * 1000, "answers again ms": statistics.median(answered[1:]) * 1000}


async def _until_answer(fleet: Fleet) -> str:
    return await asyncio.wait_for(fleet.send("one", "again"), 30)


async def idle(make: Make, *, seconds: float) -> Values:
    """M7: what an idle host with idle sessions costs."""
    values: Values = {}
    for sessions in (50, 200):
        async with make(Situation(sessions=sessions)) as fleet:
            for number in range(0, sessions, 10):
                await asyncio.gather(*(fleet.send(str(each), "hello") for each in range(number, number + 10)))
            # By then metadata is stored, workers are asleep, and all have been sampled once.
            await asyncio.sleep(SETTLED_S)
            # Measuring costs something too, so the host is measured last before the pause and first after it.
            workers_before = _workers_switches()
            switches_before = sum(_switches(os.getpid()))
            cpu_before, began = time.process_time(), time.perf_counter()
            await asyncio.sleep(seconds)
            cpu, took = time.process_time() - cpu_before, time.perf_counter() - began
            switches = _switches(os.getpid())
            values[f"CPU % ({sessions})"] = cpu / took * 100
            values[f"threads ({sessions})"] = len(switches)
            values[f"wake-ups/s ({sessions})"] = (sum(switches) - switches_before) / took
            if sessions == 200:
                values["workers' wake-ups/s (200)"] = (_workers_switches() - workers_before) / took
    more = values["wake-ups/s (200)"] - values["wake-ups/s (50)"]
    values["wake-ups/s per session"] = max(more, 0.0) / 150
    return values


def _workers_switches() -> int:
    return sum(sum(_switches(pid)) for pid in tree() - {os.getpid()})


def _switches(pid: int) -> list[int]:
    """Return how often each thread of a process has gone to sleep (voluntary context switches)."""
    counts = []
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found = re.search(r"^voluntary_ctxt_switches:\s*(\d+)", status.read_text(), re.MULTILINE)
            counts.append(int(found[1]) if found else 0)
    return counts


async def deltas_rate(make: Make, *, count: int) -> Values:
    """M8: pieces of an answer per second, the start and end of the turn included."""
    async with make(Situation(faulty=True)) as fleet:
        await fleet.send("one", "hello")
        await _drain(fleet, 100)
        began = time.perf_counter()
        assert await _drain(fleet, count) == count
        return {"deltas/s": count / (time.perf_counter() - began)}


async def _drain(fleet: Fleet, count: int) -> int:
    pieces = 0
    async for _ in fleet.stream("one", f"{DELTAS} {count} 40"):
        pieces += 1
    return pieces


async def first_delta(make: Make, *, samples: int) -> Values:
    """M8: time to the first piece, with the process tree on one CPU as for all small turns."""
    pin()
    times = []
    async with make(Situation(faulty=True)) as fleet:
        await fleet.send("one", "hello")
        for _ in range(samples + 5):
            began = time.perf_counter()
            came = 0.0
            async for _ in fleet.stream("one", f"{DELTAS} 5 40"):
                came = came or time.perf_counter() - began
            times.append(came)
    return {"first delta us": statistics.median(times[5:]) * 1e6}


async def deltas(make: Make, *, count: int, samples: int) -> Values:
    """M8: both figures. The pinned one is last, because processes that were started stay pinned."""
    values = await deltas_rate(make, count=count)
    return {**values, **await first_delta(make, samples=samples)}


METRICS: dict[str, Callable[..., Awaitable[Values]]] = {
    "probe": probe,
    "M1": warm_turns,
    "M2": in_flight,
    "M3": first_answers,
    "M4": many_at_once,
    "M5": memory,
    "M6": killed,
    "M7": idle,
    "M8": deltas,
}


async def take(metric: str, make: Make, options: dict[str, Any]) -> Values:
    """Take one measurement."""
    return await METRICS[metric](make, **options)
