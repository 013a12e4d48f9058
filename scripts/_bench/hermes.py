"""The measurements with the real Hermes Agent, on a scripted model in a process of its own."""

import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import psutil

from _bench.fleet import NotSupportedError
from _bench.measure import Values, uss_mb
from _bench.ours import SPARES, settings_of
from hermes_pool import HermesSessionManager
from hermes_pool.testing.scripted_model import MODEL_ID, write_hermes_home

PLAIN = Path(__file__).with_name("plain_hermes.py")
SPARE_READY_S = 3.0
"""Pause in which spares become ready; the same for every subject."""


@dataclass(frozen=True)
class Stage:
    """A folder with a Hermes home whose model is the scripted one."""

    folder: Path
    url: str

    @property
    def environment(self) -> dict[str, str]:
        """Extra variables for the workers and the plain script.

        Hermes imports the MCP SDK if it is there. hermes-agent does not install it, and here it is only a peer, so it
        is hidden from all subjects alike.
        """
        return {"HOME": str(self.folder), "PYTHONPATH": str(self.folder / "hidden"), "PYTHONNOUSERSITE": "1"}


@contextlib.contextmanager
def stage() -> Iterator[Stage]:
    """Start the scripted model, and yield the stage."""
    if find_spec("run_agent") is None:
        raise ImportError("hermes-agent")
    with (
        tempfile.TemporaryDirectory(prefix="hpb-", ignore_cleanup_errors=True) as name,
        subprocess.Popen(
            [sys.executable, "-m", "hermes_pool.testing.scripted_model"], stdout=subprocess.PIPE, text=True
        ) as model,
    ):
        folder = Path(name)
        try:
            assert model.stdout is not None
            url = model.stdout.readline().strip()
            write_hermes_home(folder / "hermes", url)
            (folder / "hidden").mkdir()
            (folder / "hidden" / "mcp.py").write_text("raise ImportError('hidden by the benchmark')\n")
            yield Stage(folder, url)
        finally:
            model.terminate()


@contextlib.asynccontextmanager
async def pool(where: Stage, launcher: str, spares: int = 0) -> AsyncIterator[HermesSessionManager]:
    """Open a pool of real Hermes workers that is not the first on this stage, and complete a turn in it.

    So caches are warm, and an earlier pool has learnt what a first turn imports: the state of a host on every day but
    its first.
    """
    settings = settings_of(
        launcher,
        spares,
        agent="hermes",
        hermes_home=where.folder / "hermes",
        state_dir=where.folder / "state",
        worker_env=where.environment,
    )
    async with HermesSessionManager(settings) as sessions:
        await _send(sessions, "learn", 1)
    async with HermesSessionManager(settings) as sessions:
        await _send(sessions, "warm", 1)
        yield sessions


async def _send(sessions: HermesSessionManager, key: str, number: int) -> None:
    reply = await sessions.send(key, f"Message number {number}.")
    if f"(message {number} of this conversation)" not in reply.text:
        raise RuntimeError(f"wrong reply to message {number}: {reply.text}")


async def _pid(sessions: HermesSessionManager, key: str) -> int:
    (pid,) = [row.pid for row in await sessions.sessions() if row.conversation_id == key]
    assert pid is not None
    return pid


# --- ours -------------------------------------------------------------------------------------------------------------


async def first_replies(sessions: HermesSessionManager, *, samples: int, **_unused: Any) -> Values:
    """H1: time from a new conversation to its first reply."""
    times = []
    for number in range(samples):
        await asyncio.sleep(SPARE_READY_S)
        began = time.perf_counter()
        await _send(sessions, f"new-{number}", 1)
        times.append(time.perf_counter() - began)
    return {"s": statistics.median(times)}


async def dormant(sessions: HermesSessionManager, *, samples: int, **_unused: Any) -> Values:
    """H2: time from a message to a dormant conversation to its reply in context."""
    times = []
    await sessions.send("ada", "Hi, I am Ada.")
    for _ in range(samples):
        await sessions.stop("ada")
        await asyncio.sleep(SPARE_READY_S)
        began = time.perf_counter()
        reply = await sessions.send("ada", "What is my name?")
        times.append(time.perf_counter() - began)
        if "Ada" not in reply.text:
            raise RuntimeError(f"the context is lost: {reply.text}")
    return {"s": statistics.median(times)}


async def eight(sessions: HermesSessionManager, **_unused: Any) -> Values:
    """H3: time until the last of eight new conversations, begun at once, has its first reply."""
    await asyncio.sleep(SPARE_READY_S)
    began = time.perf_counter()
    await asyncio.gather(*(_send(sessions, f"new-{number}", 1) for number in range(8)))
    return {"s": time.perf_counter() - began}


async def memory(sessions: HermesSessionManager, *, turns: int, workers: int, **_unused: Any) -> Values:
    """H4: private memory (USS) of a worker."""
    values = {}
    keys = [f"new-{number}" for number in range(workers)]
    done = 0
    for mark in (1, turns):
        while done < mark:
            done += 1
            for key in keys:
                await _send(sessions, key, done)
        # By then an idle worker has released what it can.
        await asyncio.sleep(2.0)
        values[_after(mark)] = statistics.median([uss_mb(await _pid(sessions, key)) for key in keys])
    return values


def _after(turns: int) -> str:
    return "USS MB, 1 turn" if turns == 1 else "USS MB, many turns"


async def cpu(sessions: HermesSessionManager, *, turns: int, **_unused: Any) -> Values:
    """H5: CPU time of a warm turn in the worker process."""
    await _send(sessions, "new", 1)
    await _send(sessions, "new", 2)
    process = psutil.Process(await _pid(sessions, "new"))
    before = process.cpu_times()
    for number in range(3, turns + 3):
        await _send(sessions, "new", number)
    after = process.cpu_times()
    return {"CPU ms per turn": (after.user + after.system - before.user - before.system) / turns * 1000}


METRICS: Mapping[str, Callable[..., Awaitable[Values]]] = {
    "H1": first_replies,
    "H2": dormant,
    "H3": eight,
    "H4": memory,
    "H5": cpu,
}
LAUNCHERS = {"hermes spawn": ("spawn", 0), "hermes zygote": ("zygote", 0), "hermes spare": ("zygote", SPARES)}


# --- Hermes alone -----------------------------------------------------------------------------------------------------


class Plain:
    """The plain script, in the same interpreter and on the same model."""

    def __init__(self, where: Stage, *marks: int) -> None:
        environment = {**_environment(), **where.environment, "HERMES_HOME": str(where.folder / "hermes")}
        command = [sys.executable, "-P", str(PLAIN), where.url, MODEL_ID, *map(str, marks)]
        self.began = time.perf_counter()
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, cwd=where.folder, text=True
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.communicate()

    def mark(self) -> dict[str, float]:
        """Wait until the script reports, and return what it has used."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("Hermes ended before it answered")
        used: dict[str, float] = json.loads(line)
        return used

    def go_on(self) -> None:
        """Let the script continue."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()


def _environment() -> dict[str, str]:
    """Return those variables of this process that workers get as well."""
    return {name: value for name, value in os.environ.items() if name in ("PATH", "LANG", "TMPDIR", "TZ")}


def plain(metric: str, where: Stage, *, samples: int = 1, turns: int = 1, **_unused: Any) -> Values:
    """Measure the plain script."""
    with Plain(where, 1) as script:  # creates the files of a new home
        script.mark()
    if metric == "H1":
        times = []
        for _ in range(samples):
            with Plain(where, 1) as script:
                script.mark()
                times.append(time.perf_counter() - script.began)
        return {"s": statistics.median(times)}
    if metric == "H3":
        began = time.perf_counter()
        scripts = [Plain(where, 1) for _ in range(8)]
        for script in scripts:
            script.mark()
        took = time.perf_counter() - began
        for script in scripts:
            script.process.communicate()
        return {"s": took}
    if metric == "H4":
        values = {}
        with Plain(where, 1, turns) as script:
            for mark in (1, turns):
                script.mark()
                time.sleep(2.0)
                values[_after(mark)] = uss_mb(script.process.pid)
                script.go_on()
        return values
    if metric == "H5":
        with Plain(where, 2, turns + 2) as script:
            before = script.mark()
            script.go_on()
            after = script.mark()
        return {"CPU ms per turn": (after["cpu_s"] - before["cpu_s"]) / turns * 1000}
    raise NotSupportedError("has no sessions that can be dormant")


async def take(metric: str, subject: str, options: dict[str, Any]) -> Values:
    """Take one measurement."""
    with stage() as where:
        if subject == "hermes alone":
            return plain(metric, where, **options)
        launcher, spares = LAUNCHERS[subject]
        async with pool(where, launcher, spares) as sessions:
            return await METRICS[metric](sessions, **options)
