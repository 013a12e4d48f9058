"""Workers are killed at random under load: what do their callers get, and does anybody else notice?

All conversations talk all the time. The workers of some are struck (killed), those of the others, the calm ones, are
not. The agent streams, uses tools, leaves processes behind, and keeps each session's history in a file. So what really
happened can be compared with what the callers were told. ``scripts/storm`` runs this, and so does
``tests/crash/test_random_kills.py``.
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

from _turns import TurnStorm
from hermes_pool import HermesPoolError, HermesSessionManager, PoolSettings, RestartPolicy, StartPolicy

Launcher = Literal["zygote", "spawn", "portable"]

AGENT = '''
import os
import subprocess
import time

from hermes_pool_worker.echo import EchoAgent


class Agent(EchoAgent):
    """Echoes in pieces. ``tool`` makes it use a tool, ``stray`` makes it leave a process in its own session."""

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
    "restarts": RestartPolicy(quarantine_after=0, deaths_in_window_max=1_000_000),
    "starts": StartPolicy(failures_max=1_000_000),
}
"""No breaker may stand between a kill and its outcome."""

SIGNALS = ("SIGKILL", "SIGSEGV", "SIGQUIT", "SIGSTOP, then SIGKILL")
WORK = ("talk", "talk", "talk", "tool", "stray")
FREEZE_S_MAX = 0.05
OUTCOME_S_MAX = 10.0
"""How long a caller may wait. Beyond that, the turn counts as hanging."""
CALM_S_MAX = 1.0
"""How long a calm turn may take. It needs about 15 ms, but the machine is busy starting workers."""
SURVIVE_S_MAX = 5.0
"""How long the processes of a dead worker may survive it."""


@dataclass
class Tally:
    """The counts of one storm."""

    seed: int
    launcher: Launcher
    kills: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    struck_s: list[float] = field(default_factory=list)
    """Seconds from each kill in a turn to the outcome of that turn."""
    calm_s: list[float] = field(default_factory=list)
    """Duration of each calm turn, in seconds."""
    faults: list[str] = field(default_factory=list)
    """Violations: what must never happen."""
    failed_but_kept: int = 0
    """Messages that the agent remembers although their callers got an error."""
    seconds: float = 0.0

    def lines(self) -> Iterator[str]:
        """Return the counts as text."""
        yield f"seed {self.seed}, launcher {self.launcher}, {self.seconds:.1f} s"
        yield f"kills: {sum(self.kills.values())} ({_counted(self.kills)})"
        yield f"outcomes of turns in struck conversations: {_counted(self.outcomes)}"
        yield f"time from a kill in a turn to the outcome: {_spread(self.struck_s)}"
        yield f"turns in calm conversations: {_spread(self.calm_s)}"
        yield f"failed messages that the agent remembers: {self.failed_but_kept}"
        yield f"violations: {len(self.faults)}"
        yield from (f"    {fault}" for fault in self.faults)


def _counted(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in counter.most_common()) or "none"


def _spread(seconds: Sequence[float]) -> str:
    if not seconds:
        return "none"
    ordered = sorted(1000 * each for each in seconds)
    at_99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return f"{len(ordered)}, median {statistics.median(ordered):.0f} ms, p99 {at_99:.0f} ms, max {ordered[-1]:.0f} ms"


class Storm:
    """One pool, the callers that talk to it, and the one that kills its workers."""

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
        """Run the storm and return its counts."""
        began = time.monotonic()
        before = _descendants()
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
                self.tally.faults.append("the worker of a calm conversation was replaced")
            await self._check_recovery(pool)
        await self._check_survivors(before)
        self._check_histories()
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
                    self.tally.faults.append(f"{name} was not struck but got: {outcome}")
                if ended - began > CALM_S_MAX:
                    self.tally.faults.append(f"{name} was not struck but waited {ended - began:.2f} s")
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
            wait_s = error.retry_after_s
            if wait_s is not None:
                await asyncio.sleep(min(wait_s, 1.0))
            return type(error).__name__
        except TimeoutError:
            self.tally.faults.append(f"{name}: {text!r} had no outcome within {OUTCOME_S_MAX:g} s")
            return "no outcome"
        if reply.text != text:
            self.tally.faults.append(f"{name}: {text!r} was answered with {reply.text!r}")
        self._answered[name].append(text)
        self._session_ids[name].add(reply.session_id)
        return "reply" if reply.restarts == 0 else f"reply after {reply.restarts} restart"

    # --- striking ---

    async def _strike(self, pool: HermesSessionManager) -> None:
        while sum(self.tally.kills.values()) < self._kills:
            await asyncio.sleep(2 * self._pause_s * self._random.random())
            name, signals = self._random.choice(self._struck), self._random.choice(SIGNALS)
            worker = (await self._workers(pool, [name]))[name]
            if worker is None:
                continue  # the worker is being replaced
            try:
                first, _, then = signals.partition(", then ")
                worker.send_signal(signal.Signals[first])
                if then:
                    await asyncio.sleep(FREEZE_S_MAX * self._random.random())
                    worker.send_signal(signal.Signals[then])
            except psutil.NoSuchProcess:
                continue
            self.tally.kills[signals] += 1
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

    async def _check_recovery(self, pool: HermesSessionManager) -> None:
        """Check that each conversation works, at the latest after its back-off, and that dead workers left no stray."""
        for name in self._answered:
            end, tries = time.monotonic() + OUTCOME_S_MAX, 0
            while "reply" not in await self._outcome(pool, name, f"last-{tries} talk"):
                tries += 1
                if time.monotonic() > end:
                    self.tally.faults.append(f"{name} no longer works")
                    break
        workers = {row.pid for row in await pool.sessions()}
        await self._wait_until_gone(lambda: {stray for stray, worker in self._strays() if worker not in workers})

    async def _check_survivors(self, before: set[int]) -> None:
        await self._wait_until_gone(lambda: (_descendants() - before) | {stray for stray, _ in self._strays()})

    async def _wait_until_gone(self, left: Callable[[], set[int]]) -> None:
        end = time.monotonic() + SURVIVE_S_MAX
        while pids := left():
            if time.monotonic() > end:
                self.tally.faults += [f"survived: {_described(pid)}" for pid in pids]
                return
            await asyncio.sleep(0.05)

    def _strays(self) -> list[tuple[int, int]]:
        """Return the pids of living processes that tools left behind, each with the pid of its worker."""
        pairs = [tuple(map(int, line.split())) for line in self._lines("strays")]
        return [(stray, worker) for stray, worker in pairs if _is_alive(stray, self._folder)]

    def _check_histories(self) -> None:
        """Compare the agent's memory with what callers were told, and check that no turn used its tool twice."""
        twice = [turn_id for turn_id, times in Counter(self._lines("effects")).items() if times > 1]
        self.tally.faults += [f"turn {turn_id} used its tool more than once" for turn_id in twice]
        for name, answered in self._answered.items():
            if len(self._session_ids[name]) != 1:
                self.tally.faults.append(f"{name} had {len(self._session_ids[name])} sessions instead of one")
                continue
            (file,) = (self._folder / "state" / "agents").rglob(f"{min(map(str, self._session_ids[name]))}.jsonl")
            history = [json.loads(line) for line in file.read_text().splitlines()]
            unanswered = [text for text in history if text not in answered]
            self.tally.failed_but_kept += len(unanswered)
            if [text for text in history if text in answered] != answered:
                self.tally.faults.append(f"{name}: its history differs from what its callers were told")
            if len(set(unanswered)) != len(unanswered):
                self.tally.faults.append(f"{name}: a failed message is in its history twice")

    def _lines(self, name: str) -> list[str]:
        file = self._folder / name
        return file.read_text().splitlines() if file.exists() else []


def _descendants() -> set[int]:
    return {each.pid for each in psutil.Process().children(recursive=True)}


def _is_alive(pid: int, folder: Path) -> bool:
    """Return whether a pid is still one of our strays. Their working directory tells them from other processes."""
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
    """Start and end ``number`` workers, ten at a time, alternately by kill and by stop. Return what was leaked."""

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
    print(f"{launcher}: {number} workers started and ended; before {before}, after {after}")
    return [f"{what}: {before[what]} before, {after[what]} after" for what in after if after[what] > before[what]]


REST_S = 3.0
"""Pause before counting, in which everything that is kept for a while is released."""


# --- the command ------------------------------------------------------------------------------------------------------


def main() -> int:
    """Run the storms and return the exit status: 0 only if there was no violation."""
    parser = argparse.ArgumentParser(
        prog="scripts/storm", description="Kill workers at random under load, and check what must never happen."
    )
    parser.add_argument("--kills", type=int, default=500, help="kills for each launcher (default: 500)")
    parser.add_argument("--seed", type=int, default=None, help="seed of all random choices (default: a new one)")
    parser.add_argument(
        "--launcher",
        choices=("zygote", "spawn", "portable"),
        action="append",
        help="launcher to test; may be repeated (default: zygote and spawn)",
    )
    parser.add_argument(
        "--defaults",
        action="store_true",
        help="keep the default breakers and quarantine, instead of switching them off",
    )
    parser.add_argument(
        "--cycles", type=int, default=0, help="instead, start and end this many workers and look for leaks"
    )
    parser.add_argument(
        "--turns", type=int, default=0, help="instead, put this many faults of all kinds into turns, and compare"
    )
    parser.add_argument("--hermes", action="store_true", help="with --turns: into turns of the real Hermes")
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(2**32)
    faults: list[str] = []
    for launcher in options.launcher or ("zygote", "spawn"):
        with tempfile.TemporaryDirectory(prefix="hermes-pool-storm-") as folder:
            if options.turns:
                turns = TurnStorm(
                    Path(folder), faults=options.turns, seed=seed, hermes=options.hermes, launcher=launcher
                )
                turn_tally = asyncio.run(turns.run())
                print("\n".join(turn_tally.lines()), flush=True)
                faults += turn_tally.violations
                continue
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
        print(f"leaked: {fault}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
