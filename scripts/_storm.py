"""Workers killed at random while they talk: what their callers get, and that nobody else notices.

Some conversations are struck, others are not; all talk all the time. An agent that streams, uses tools and leaves
processes behind keeps a history in a file per session, so that what really happened can be compared with what the
callers were told. ``scripts/storm`` starts this; ``tests/crash/test_random_kills.py`` uses it too.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

from hermes_pool import HermesPoolError, HermesSessionManager, PoolSettings

Launcher = Literal["zygote", "spawn", "portable"]

AGENT = '''
import os
import subprocess
import time

from hermes_pool_worker.echo import EchoAgent


class Agent(EchoAgent):
    """Streams what it is told; ``tool`` makes it act once, ``stray`` leave a process in a session of its own."""

    stray = None

    def turn(self, text, turn):
        work = text.split()[1]
        for piece in range(4):
            turn.text(f"{piece} ")
            time.sleep(0.003)
        if work == "tool":
            turn.tool_started("call-1", "hammer")
            with open("effects", "a") as effects:
                print(turn.turn_id, file=effects)
            time.sleep(0.003)
            turn.tool_finished("call-1", "hammer")
        if work == "stray":
            if self.stray is not None:
                self.stray.kill()
                self.stray.wait()
            self.stray = subprocess.Popen(["sleep", "1000"], start_new_session=True)
            with open("strays", "a") as strays:
                print(self.stray.pid, os.getpid(), file=strays)
        return super().turn(text, turn)
'''

UNBOUNDED: dict[str, Any] = {
    "quarantine_after": 0,
    "restarts_in_window_max": 1_000_000,
    "start_failures_max": 1_000_000,
}
"""No breaker shall stand between a kill and its outcome."""

WAYS = ("SIGKILL", "SIGSEGV", "SIGTERM", "SIGSTOP, then SIGKILL")
WORK = ("talk", "talk", "talk", "tool", "stray")
FREEZE_S_MAX = 0.05
OUTCOME_S_MAX = 10.0
"""Longest that a caller may wait; then it hangs, as far as anybody can tell."""
CALM_S_MAX = 1.0
"""Longest that a turn of about 15 ms may take whose worker was not struck: the machine is busy with starts."""
SURVIVE_S_MAX = 5.0
"""How long what a dead worker leaves may live on."""


@dataclass
class Tally:
    """What was counted."""

    seed: int
    launcher: Launcher
    kills: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    struck_s: list[float] = field(default_factory=list)
    """Seconds from a kill in a turn to what the turn's caller got."""
    calm_s: list[float] = field(default_factory=list)
    """Seconds of the turns of those who were not struck."""
    faults: list[str] = field(default_factory=list)
    """What must never happen."""
    kept_all_the_same: int = 0
    """Messages whose callers got an error and which the agent remembers."""
    seconds: float = 0.0

    def lines(self) -> Iterator[str]:
        """Say it for people."""
        yield f"seed {self.seed}, launcher {self.launcher}, {self.seconds:.1f} s"
        yield f"kills: {sum(self.kills.values())} ({_counted(self.kills)})"
        yield f"outcomes of the struck conversations' turns: {_counted(self.outcomes)}"
        yield f"from a kill in a turn to its outcome: {_spread(self.struck_s)}"
        yield f"turns of those not struck: {_spread(self.calm_s)}"
        yield f"failed messages that the agent remembers all the same: {self.kept_all_the_same}"
        yield f"what must never happen: {len(self.faults)}"
        yield from (f"    {fault}" for fault in self.faults)


def _counted(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in counter.most_common()) or "none"


def _spread(seconds: Sequence[float]) -> str:
    if not seconds:
        return "none"
    ordered = sorted(1000 * each for each in seconds)
    at_99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return f"{len(ordered)}, median {statistics.median(ordered):.0f} ms, 99% {at_99:.0f} ms, most {ordered[-1]:.0f} ms"


class Storm:
    """One pool, its talkers, and the one who strikes."""

    def __init__(
        self,
        folder: Path,
        *,
        kills: int,
        seed: int,
        launcher: Launcher,
        struck: int = 8,
        calm: int = 4,
        pause_s: float = 0.05,
        settings: dict[str, Any] | None = None,
    ) -> None:
        self.tally = Tally(seed, launcher)
        self._folder = folder
        self._kills = kills
        self._pause_s = pause_s
        self._random = random.Random(seed)
        self._struck = [f"struck-{number}" for number in range(struck)]
        self._calm = [f"calm-{number}" for number in range(calm)]
        self._over = False
        self._struck_at: dict[str, float] = {}
        self._answered: dict[str, list[str]] = {}
        self._failed: dict[str, list[str]] = {}
        self._session_ids: dict[str, set[str | None]] = {}
        (folder / "storm_agent.py").write_text(AGENT)
        self._settings = PoolSettings(
            agent="storm_agent:Agent",
            agent_paths=(str(folder),),
            state_dir=folder / "state",
            worker_cwd=folder,
            launcher=launcher,
            **(UNBOUNDED if settings is None else settings),
        )

    async def run(self) -> Tally:
        """Let it rage; return what was counted."""
        began = time.monotonic()
        before = _below()
        async with HermesSessionManager(self._settings) as pool:
            await asyncio.gather(*(pool.send(name, "0 talk") for name in (*self._struck, *self._calm)))
            self._answered = {name: ["0 talk"] for name in (*self._struck, *self._calm)}
            self._failed = {name: [] for name in self._answered}
            self._session_ids = {name: set() for name in self._answered}
            calm_workers = await self._workers(pool, self._calm)
            talking = [asyncio.create_task(self._talk(pool, name)) for name in self._answered]
            await self._strike(pool)
            self._over = True
            await asyncio.gather(*talking)
            if await self._workers(pool, self._calm) != calm_workers:
                self.tally.faults.append("a conversation that was not struck has another worker than before")
            await self._settle(pool)
        await self._survivors(before)
        self._histories()
        self.tally.seconds = time.monotonic() - began
        return self.tally

    # --- talking ---

    async def _talk(self, pool: HermesSessionManager, name: str) -> None:
        number, chooser, is_calm = 0, random.Random(f"{self.tally.seed} {name}"), name in self._calm
        while not self._over:
            number += 1
            text = f"{number} {chooser.choice(WORK)}"
            began = time.monotonic()
            outcome = await self._outcome(pool, name, text)
            ended = time.monotonic()
            if is_calm:
                self.tally.calm_s.append(ended - began)
                if outcome != "reply":
                    self.tally.faults.append(f"{name}, which was not struck, got: {outcome}")
                if ended - began > CALM_S_MAX:
                    self.tally.faults.append(f"{name}, which was not struck, waited for {ended - began:.2f} s")
            else:
                self.tally.outcomes[outcome] += 1
                if (struck_at := self._struck_at.pop(name, 0.0)) >= began:
                    self.tally.struck_s.append(ended - struck_at)
            await asyncio.sleep(0.02 * chooser.random())

    async def _outcome(self, pool: HermesSessionManager, name: str, text: str) -> str:
        try:
            async with asyncio.timeout(OUTCOME_S_MAX):
                async with pool.turn(name, text) as turn:
                    async for _ in turn:
                        pass
                    reply = await turn.reply()
        except HermesPoolError as error:
            self._failed[name].append(text)
            wait_s = getattr(error, "retry_after_s", None)
            if wait_s is not None:
                await asyncio.sleep(min(wait_s, 1.0))
            return type(error).__name__
        except TimeoutError:
            self.tally.faults.append(f"{name}: {text!r} had no outcome in {OUTCOME_S_MAX:g} s")
            return "nothing"
        if reply.text != text:
            self.tally.faults.append(f"{name}: {text!r} was answered with {reply.text!r}")
        self._answered[name].append(text)
        self._session_ids[name].add(reply.session_id)
        return "reply" if reply.restarts == 0 else f"reply after {reply.restarts} restart"

    # --- striking ---

    async def _strike(self, pool: HermesSessionManager) -> None:
        while sum(self.tally.kills.values()) < self._kills:
            await asyncio.sleep(2 * self._pause_s * self._random.random())
            name, way = self._random.choice(self._struck), self._random.choice(WAYS)
            worker = (await self._workers(pool, [name]))[name]
            if worker is None:
                continue  # it is being replaced
            try:
                first, _, then = way.partition(", then ")
                worker.send_signal(signal.Signals[first])
                if then:
                    await asyncio.sleep(FREEZE_S_MAX * self._random.random())
                    worker.send_signal(signal.Signals[then])
            except psutil.NoSuchProcess:
                continue
            self.tally.kills[way] += 1
            self._struck_at[name] = time.monotonic()

    async def _workers(self, pool: HermesSessionManager, names: Sequence[str]) -> dict[str, psutil.Process | None]:
        found: dict[str, psutil.Process | None] = dict.fromkeys(names)
        for row in await pool.sessions():
            if row.conversation_id in found and row.pid is not None:
                try:
                    found[row.conversation_id] = psutil.Process(row.pid)
                except psutil.NoSuchProcess:
                    found[row.conversation_id] = None
        return found

    # --- afterwards ---

    async def _settle(self, pool: HermesSessionManager) -> None:
        """Each conversation works, at the latest after its back-off; and what dead workers have left is gone."""
        for name in self._answered:
            end, tries = time.monotonic() + OUTCOME_S_MAX, 0
            while "reply" not in await self._outcome(pool, name, f"last-{tries} talk"):
                tries += 1
                if time.monotonic() > end:
                    self.tally.faults.append(f"{name} does not work any more")
                    break
        workers = {row.pid for row in await pool.sessions()}
        await self._gone(lambda: {stray for stray, worker in self._strays() if worker not in workers})

    async def _survivors(self, before: set[int]) -> None:
        await self._gone(lambda: (_below() - before) | {stray for stray, _ in self._strays()})

    async def _gone(self, left: Callable[[], set[int]]) -> None:
        end = time.monotonic() + SURVIVE_S_MAX
        while pids := left():
            if time.monotonic() > end:
                self.tally.faults += [f"survived: {_described(pid)}" for pid in pids]
                return
            await asyncio.sleep(0.05)

    def _strays(self) -> list[tuple[int, int]]:
        """Return what tools have left and still lives, each with its worker: both by their pids."""
        pairs = [tuple(map(int, line.split())) for line in self._lines("strays")]
        return [(stray, worker) for stray, worker in pairs if _lives(stray, self._folder)]

    def _histories(self) -> None:
        """Compare what the agent remembers with what callers were told; and no turn's tool has acted twice."""
        twice = [turn_id for turn_id, times in Counter(self._lines("effects")).items() if times > 1]
        self.tally.faults += [f"the tool of turn {turn_id} acted more than once" for turn_id in twice]
        for name, answered in self._answered.items():
            if len(self._session_ids[name]) != 1:
                self.tally.faults.append(f"{name} went through {len(self._session_ids[name])} sessions")
                continue
            (file,) = (self._folder / "state" / "agents").rglob(f"{min(map(str, self._session_ids[name]))}.jsonl")
            history = [json.loads(line) for line in file.read_text().splitlines()]
            unanswered = [text for text in history if text not in answered]
            self.tally.kept_all_the_same += len(unanswered)
            if [text for text in history if text in answered] != answered:
                self.tally.faults.append(f"{name}: its history is not what its callers were told")
            if len(set(unanswered)) != len(unanswered):
                self.tally.faults.append(f"{name}: a message that failed is twice in its history")

    def _lines(self, name: str) -> list[str]:
        file = self._folder / name
        return file.read_text().splitlines() if file.exists() else []


def _below() -> set[int]:
    return {each.pid for each in psutil.Process().children(recursive=True)}


def _lives(pid: int, folder: Path) -> bool:
    """Whether a pid still is one of our strays: they are known by the folder that they were started in."""
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and process.cwd() == str(folder)
    except psutil.Error:
        return False


def _is_zombie(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _described(pid: int) -> str:
    try:
        return " ".join(psutil.Process(pid).cmdline()) or str(psutil.Process(pid))
    except psutil.Error as error:
        return repr(error)


# --- starts and ends --------------------------------------------------------------------------------------------------


async def cycles(folder: Path, launcher: Launcher, number: int) -> list[str]:
    """Start and end that many workers, ten at once, a third each by stop, kill and close; return what is left over."""

    def counted() -> dict[str, int]:
        below = psutil.Process().children(recursive=True)
        return {
            "processes": len(below),
            "zombies": sum(_is_zombie(each) for each in below),
            "descriptors": psutil.Process().num_fds(),
            "threads": threading.active_count(),
            "tasks": len(asyncio.all_tasks()),
        }

    async def cycle(pool: HermesSessionManager, name: str, how: int) -> None:
        await pool.send(name, "hi")
        if how:
            await pool.stop(name)
            return
        (pid,) = [row.pid for row in await pool.sessions() if row.conversation_id == name]
        if pid is not None:
            os.kill(pid, signal.SIGKILL)

    async def rounds(pool: HermesSessionManager, first: int, end: int) -> dict[str, int]:
        for begin in range(first, end, 10):
            await asyncio.gather(*(cycle(pool, f"c{each}", each % 2) for each in range(begin, begin + 10)))
        await asyncio.sleep(REST_S)
        return counted()

    settings = PoolSettings(
        agent="echo",
        agent_options={"durable": False},
        state_dir=folder / "state",
        launcher=launcher,
        **UNBOUNDED,
    )
    async with HermesSessionManager(settings) as pool:
        before = await rounds(pool, 0, 10)
        after = await rounds(pool, 10, 10 + number)
    print(f"{launcher}: {number} starts and ends; before {before}, after {after}")
    return [f"{what}: {before[what]} before, {after[what]} after" for what in after if after[what] > before[what]]


REST_S = 3.0
"""After this long nothing of what was needed for a while is kept any more."""


# --- the command ------------------------------------------------------------------------------------------------------


def main() -> int:
    """Run it and return the exit status: 0 only if nothing happened that must never happen."""
    parser = argparse.ArgumentParser(prog="scripts/storm", description="Kill workers at random under load.")
    parser.add_argument("--kills", type=int, default=500, help="how many, for each launcher (default: 500)")
    parser.add_argument("--seed", type=int, default=None, help="of all that is chosen at random (default: a new one)")
    parser.add_argument("--launcher", choices=("zygote", "spawn", "portable"), action="append", help="default: both")
    parser.add_argument("--defaults", action="store_true", help="with the breakers as they are by default")
    parser.add_argument("--cycles", type=int, default=0, help="start and end so many workers instead")
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(2**32)
    faults: list[str] = []
    for launcher in options.launcher or ("zygote", "spawn"):
        with tempfile.TemporaryDirectory(prefix="hermes-pool-storm-") as folder:
            if options.cycles:
                faults += asyncio.run(cycles(Path(folder), launcher, options.cycles))
                continue
            storm = Storm(
                Path(folder), kills=options.kills, seed=seed, launcher=launcher,
                settings={} if options.defaults else None,
            )  # fmt: skip
            tally = asyncio.run(storm.run())
            print("\n".join(tally.lines()), flush=True)
            faults += tally.faults
    for fault in faults if options.cycles else ():
        print(f"left over: {fault}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
