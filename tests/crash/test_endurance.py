import asyncio
import json
import logging
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest

from tests.support import OpenPool, alive, children, descriptors, known, quick, until

AGENTS = str(Path(__file__).parent.parent / "integration" / "agents")
LAUNCHERS = pytest.mark.parametrize("launcher", ["zygote", "spawn"])
SPAWN_IS_SLOW = pytest.mark.parametrize("launcher", ["zygote", pytest.param("spawn", marks=pytest.mark.slow)])


CYCLES_AT_ONCE = 10


@pytest.mark.parametrize(
    ("launcher", "cycles"),
    [
        ("zygote", 100),
        ("spawn", 20),
        pytest.param("zygote", 300, marks=pytest.mark.slow),
        pytest.param("spawn", 60, marks=pytest.mark.slow),
    ],
)  # scripts/storm --cycles: any number
async def test_starts_and_ends_of_all_kinds_leave_nothing(
    open_pool: OpenPool, launcher: str, cycles: int, tmp_path: Path
) -> None:
    pool = await open_pool(
        launcher=launcher, agent_options={"durable": False}, timeouts=quick(idle_s=1000), workers_max=32
    )

    async def cycle(number: int) -> None:
        name = f"c{number}"
        assert (await pool.send(name, "hi")).text == "hi"
        session = pool._sessions[next(key for key in pool._sessions if key.conversation_id == name)]
        match number % 3:
            case 0:
                await pool.stop(name)
            case 1:
                assert await session.hibernate(0.0)
            case 2:
                os.kill(known(session.snapshot().pid), signal.SIGKILL)
                await until(lambda: session.is_inactive, "the death to be seen")

    async def cycles_from(first: int) -> None:
        await asyncio.gather(*(cycle(number) for number in range(first, first + CYCLES_AT_ONCE)))

    async def at_rest() -> tuple[set[int], set[str], int, int]:
        """What there is when nothing goes on: no worker, no zombie, no thread of ours, all saved."""
        await until(lambda: not any(session.metadata.unsaved for session in pool._sessions.values()), "all to be saved")
        await until(lambda: not _workers_and_zombies(launcher), "all workers to be buried")
        await until(lambda: not any(each.name == "hermes-pool" for each in threading.enumerate()), "threads to end")
        return children(), descriptors(), threading.active_count(), len(asyncio.all_tasks())

    await cycles_from(0)  # what is opened once: a zygote, the store's connections
    before, files = await at_rest(), _files(pool.settings.state_dir)
    for first in range(CYCLES_AT_ONCE, cycles + CYCLES_AT_ONCE, CYCLES_AT_ONCE):
        await cycles_from(first)
    after = await at_rest()
    assert after[0] == before[0]
    assert len(after[1]) <= len(before[1]), after[1] - before[1]
    assert after[2:] == before[2:]
    assert _files(pool.settings.state_dir) == files


def _workers_and_zombies(launcher: str) -> list[psutil.Process]:
    """All below this process but what a pool keeps: the guardian and, where there is one, the zygote."""
    below = psutil.Process().children(recursive=True)
    kept = {"zygote": 2, "spawn": 1}[launcher]
    busy = [each for each in below if not alive(each.pid)]
    return busy if len(below) - len(busy) == kept else below


def _files(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


HOST = """
    import asyncio, sys
    from hermes_pool import HermesSessionManager, PoolSettings

    async def main():
        state, orders, agents, launcher = sys.argv[1:]
        settings = PoolSettings(
            agent="obedient:Agent", agent_paths=(agents,), agent_options={"folder": orders}, state_dir=state,
            launcher=launcher,
        )
        async with HermesSessionManager(settings) as pool:
            for name in "abc":
                await pool.send(name, "hi")
            print((await pool.send("d", "daemon")).text, flush=True)
            turns = [asyncio.create_task(pool.send("a", "wait never")), asyncio.create_task(pool.send("e", "hi"))]
            await asyncio.gather(*turns)

    asyncio.run(main())
"""


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a program as a host of its own; whatever is below it is ended at last."""
    started: list[subprocess.Popen[str]] = []

    def start(source: str, *arguments: str, **more: Any) -> subprocess.Popen[str]:
        file = tmp_path / f"host{len(started)}.py"
        file.write_text(textwrap.dedent(source))
        process = subprocess.Popen(
            [sys.executable, str(file), *arguments], stdout=subprocess.PIPE, text=True, start_new_session=True, **more
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@LAUNCHERS
async def test_when_the_host_is_killed_nothing_is_left(
    host: Callable[..., subprocess.Popen[str]], tmp_path: Path, launcher: str
) -> None:
    orders = tmp_path / "orders"
    orders.mkdir()
    process = host(HOST, str(tmp_path / "state"), str(orders), AGENTS, launcher)
    assert process.stdout is not None
    tool = psutil.Process(int(await asyncio.to_thread(process.stdout.readline)))
    marks = orders / "marks"
    await until(lambda: "begun wait never" in marks.read_text(), "a turn to run")
    family = psutil.Process(process.pid).children(recursive=True)
    assert tool in family or tool.is_running()
    assert len(family) >= 5
    process.kill()
    gone_by = time.monotonic() + 5
    await until(
        lambda: not [p for p in (*family, tool) if p.is_running() and p.status() != psutil.STATUS_ZOMBIE],
        "every worker and every tool to go",
        5,
    )
    assert time.monotonic() < gone_by


@LAUNCHERS
async def test_a_worker_does_not_belong_to_the_thread_that_started_it(
    tmp_path: Path, launcher: Literal["zygote", "spawn"]
) -> None:
    """A loop in a thread of its own starts a worker from a task; the worker lives as long as the pool."""
    from hermes_pool import HermesSessionManager, PoolSettings

    def life() -> list[str]:
        async def main() -> list[str]:
            settings = PoolSettings(agent="echo", state_dir=tmp_path / "state", launcher=launcher)
            async with HermesSessionManager(settings) as pool:
                factory = threading.Thread(
                    target=asyncio.run_coroutine_threadsafe, args=(pool.send("c", "one"), asyncio.get_running_loop())
                )
                factory.start()
                await asyncio.to_thread(factory.join)
                return [(await pool.send("c", "/count")).text, (await pool.send("c", "/first")).text]

        return asyncio.run(main())

    assert await asyncio.to_thread(life) == ["2", "one"]


@pytest.mark.slow
@LAUNCHERS
async def test_two_hundred_starts_beside_threads_that_log(open_pool: OpenPool, launcher: str) -> None:
    over = threading.Event()
    log = logging.getLogger("busy")
    log.addHandler(logging.NullHandler())

    def busy() -> None:
        while not over.is_set():
            log.warning("a line that takes and gives back the lock of logging")
            over.wait(0.0005)

    threads = [threading.Thread(target=busy) for _ in range(8)]
    for thread in threads:
        thread.start()
    try:
        pool = await open_pool(launcher=launcher, workers_max=25, timeouts=quick(start_s=15))
        for first in range(0, 200, 25):
            names = [f"c{number}" for number in range(first, first + 25)]
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                replies = await asyncio.gather(*(pool.send(name, name) for name in names))
            assert [reply.text for reply in replies] == names
    finally:
        over.set()
        for thread in threads:
            thread.join()


@LAUNCHERS
async def test_a_forked_sibling_that_holds_the_pipes_does_not_keep_a_worker(open_pool: OpenPool, launcher: str) -> None:
    pool = await open_pool(launcher=launcher, timeouts=quick(close_grace_s=1.0))
    await pool.send("c", "hi")
    (row,) = await pool.sessions()
    fork = multiprocessing.get_context("fork")
    over = fork.Event()
    helper = fork.Process(target=over.wait, args=(60,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        helper.start()
    try:
        began = time.monotonic()
        assert await pool.stop("c") is not None
        assert time.monotonic() - began < 2
        assert not alive(row.pid or 0)
        assert helper.is_alive()
        assert (await pool.send("c", "/count")).text == "2"
    finally:
        over.set()
        helper.join()
        helper.close()


CONTAINER = """
    import asyncio, ctypes, json, os, psutil, signal, sys, time
    from hermes_pool import HermesPoolError, HermesSessionManager, PoolSettings, RestartPolicy

    async def main():
        state, agents, launcher = sys.argv[1:]
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # orphans come to this process, as they do to process 1
        settings = PoolSettings(
            agent="forker:Agent", agent_paths=(agents,), state_dir=state, launcher=launcher,
            restarts=RestartPolicy(replacements_per_turn_max=0, deaths_in_window_max=1000, quarantine_after=0),
        )
        async with HermesSessionManager(settings) as pool:
            await pool.send("c", "double-fork 200")
            codes = []
            for number in range(20):
                try:
                    await pool.send("c", f"exit {number}" if number % 2 else "die")
                except HermesPoolError as error:
                    codes.append(error.returncode)
            deadline = time.monotonic() + 5
            def zombies():
                found = psutil.process_iter(["ppid", "status"])
                return [p for p in found if p.info["status"] == "zombie" and p.info["ppid"] in family]
            family = {p.pid for p in psutil.Process().children(recursive=True)} | {os.getpid()}
            while zombies() and time.monotonic() < deadline:
                await asyncio.sleep(0.05)
            print(json.dumps({"zombies": len(zombies()), "codes": codes}), flush=True)

    asyncio.run(main())
"""


async def test_in_a_container_the_zygote_reaps_what_tools_have_orphaned(
    host: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = host(CONTAINER, str(tmp_path / "state"), AGENTS, "zygote")
    out, _ = await asyncio.to_thread(process.communicate, timeout=60)
    assert json.loads(out) == {"zombies": 0, "codes": [number if number % 2 else -9 for number in range(20)]}


MANY_DESCRIPTORS = """
    import asyncio, json, sys, time
    from hermes_pool import HermesSessionManager, PoolSettings

    async def main():
        settings = PoolSettings(agent="echo", state_dir=sys.argv[1], launcher=sys.argv[2])
        async with HermesSessionManager(settings) as pool:
            await pool.send("warm", "up")
            took = []
            for number in range(20):
                began = time.monotonic()
                await pool.send(f"c{number}", "hi")
                took.append(time.monotonic() - began)
            print(json.dumps(sorted(took)), flush=True)

    asyncio.run(main())
"""


@SPAWN_IS_SLOW
async def test_a_million_descriptors_do_not_slow_a_start(
    host: Callable[..., subprocess.Popen[str]], tmp_path: Path, launcher: str
) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    many = min(hard, 1048576)
    times = {}
    for limit in (1024, many):
        process = host(
            MANY_DESCRIPTORS,
            str(tmp_path / str(limit)),
            launcher,
            preexec_fn=lambda limit=limit: resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard)),
        )
        out, _ = await asyncio.to_thread(process.communicate, timeout=60)
        times[limit] = json.loads(out)
    # The median: a walk over all descriptors would slow every start, a busy machine slows some.
    assert sorted(times[many])[len(times[many]) // 2] <= sorted(times[1024])[len(times[1024]) // 2] + 0.1
