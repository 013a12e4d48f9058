import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from hermes_pool import HermesSessionManager, RestartPolicy, WorkerCrashedError
from hermes_pool.system import processes
from tests.support import OpenPool, alive, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only")

AGENTS = str(Path(__file__).parent / "agents")


def observer(**options: Any) -> dict[str, Any]:
    return {"agent": "observer:Agent", "agent_paths": (AGENTS,), "agent_options": options, "launcher": "zygote"}


async def ask(pool: HermesSessionManager, conversation_id: str, what: str) -> Any:
    return json.loads((await pool.send(conversation_id, what)).text)


def the_zygote() -> psutil.Process:
    (zygote,) = [each for each in psutil.Process().children() if "--zygote" in each.cmdline()]
    return zygote


async def test_a_forked_worker_is_like_any_other(open_pool: OpenPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_PASSWORD", "secret")
    forking = await open_pool(**observer(), worker_env={"ADDED": "yes"})
    spawning = await open_pool(**{**observer(), "launcher": "spawn"}, worker_env={"ADDED": "yes"})
    forked, spawned = await ask(forking, "c", "process"), await ask(spawning, "c", "process")
    assert forked["ppid"] == the_zygote().pid
    assert spawned["ppid"] == os.getpid()
    assert forked["preloaded_by"] == the_zygote().pid
    assert forked["sid"] == forked["pid"]
    for what in ("cwd", "path", "threads"):
        assert forked[what] == spawned[what]
    its_own = {"HERMES_POOL_WORKER", "SET_BY_PRELOAD"}
    environments = [await ask(pool, "c", "env") for pool in (forking, spawning)]
    assert "DATABASE_PASSWORD" not in environments[0]
    assert environments[0]["ADDED"] == "yes"
    assert environments[0]["HERMES_POOL_WORKER"]
    assert environments[0]["SET_BY_PRELOAD"] == "yes"  # as an import would have, in a worker that was spawned
    without = [{name: value for name, value in each.items() if name not in its_own} for each in environments]
    assert without[0] == without[1]


async def test_a_forked_worker_holds_nothing_of_others_but_the_end_of_the_lifeline(open_pool: OpenPool) -> None:
    pool = await open_pool(**observer())
    await ask(pool, "a", "x")
    fds = await ask(pool, "b", "fds")
    alone = await ask(await open_pool(**{**observer(), "launcher": "spawn"}), "b", "fds")
    kinds = [sorted(target.partition(":")[0] for target in each.values()) for each in (fds, alone)]
    assert kinds[0] == kinds[1]
    assert not [target for target in fds.values() if target.startswith("socket:")]
    pipes = [target for target in fds.values() if target.startswith("pipe:")]
    others = await ask(pool, "a", "fds")
    (shared,) = set(pipes) & set(others.values())
    (worker,) = [each for each in await pool.sessions() if each.conversation_id == "b"]
    assert [mode for fd, mode in _modes(worker.pid or 0).items() if fds.get(fd) == shared] == [os.O_RDONLY]


def _modes(pid: int) -> dict[str, int]:
    """Whether a process may read or write, by its descriptors."""
    found = {}
    for file in Path(f"/proc/{pid}/fdinfo").iterdir():
        flags = next(line for line in file.read_text().splitlines() if line.startswith("flags:"))
        found[file.name] = int(flags.split()[1], 8) & os.O_ACCMODE
    return found


async def test_forks_do_not_share_their_random_numbers_nor_what_was_said(open_pool: OpenPool) -> None:
    pool = await open_pool(**observer())
    numbers = {(await ask(pool, name, "process"))["random"] for name in "abcdef"}
    assert len(numbers) == 6
    assert await ask(pool, "g", "remembered") == ["remembered"]


async def test_the_exit_status_of_a_forked_worker_is_known(open_pool: OpenPool) -> None:
    pool = await open_pool(**observer(), restarts=RestartPolicy(replacements_per_turn_max=0))
    with pytest.raises(WorkerCrashedError, match="SIGKILL") as caught:
        await pool.send("c", "die")
    assert caught.value.returncode == -9
    stopped = (await ask(pool, "c", "x"), await pool.stop("c"))[1]
    assert stopped is not None
    assert (stopped.how, stopped.exit.returncode) == ("closed", 0)


async def test_the_death_of_the_zygote_harms_nobody_and_is_healed(open_pool: OpenPool) -> None:
    pool = await open_pool(**observer(), restarts=RestartPolicy(replacements_per_turn_max=0))
    before = await ask(pool, "a", "process")
    zygote = the_zygote()
    zygote.kill()
    await until(lambda: not zygote.is_running(), "the zygote to go")
    assert (await ask(pool, "a", "process"))["pid"] == before["pid"]
    after = await ask(pool, "b", "process")
    assert after["preloaded_by"] == the_zygote().pid != zygote.pid
    # Nobody is left who could know how this one ended; that it ended is seen all the same.
    with pytest.raises(WorkerCrashedError, match="unknown") as caught:
        await pool.send("a", "die")
    assert caught.value.returncode is None
    assert await ask(pool, "a", "x") == "x"


async def test_fifty_at_once_while_the_zygote_is_killed(open_pool: OpenPool) -> None:
    pool = await open_pool(**observer())
    await ask(pool, "warm", "x")
    sends = [asyncio.create_task(ask(pool, f"c{number}", "x")) for number in range(50)]
    await asyncio.sleep(0)
    the_zygote().kill()
    assert await asyncio.gather(*sends) == ["x"] * 50


async def test_a_changed_file_brings_a_new_zygote(open_pool: OpenPool, tmp_path: Path) -> None:
    watched = tmp_path / "config"
    watched.write_text("1")
    pool = await open_pool(**observer(watched=str(watched)))
    first = await ask(pool, "a", "process")
    assert (await ask(pool, "b", "process"))["preloaded_by"] == first["preloaded_by"]
    watched.write_text("other")

    async def renewed() -> bool:
        await pool.stop("c")
        return bool((await ask(pool, "c", "process"))["preloaded_by"] != first["preloaded_by"])

    await until(renewed, "a new zygote")
    assert (await ask(pool, "a", "process"))["pid"] == first["pid"]
    assert alive(first["preloaded_by"])  # it still has children whose end it must report
    for name in "ab":
        await pool.stop(name)
    await until(lambda: not alive(first["preloaded_by"]), "the old zygote to leave with its last child")


async def test_what_workers_had_to_import_the_next_zygote_has(open_pool: OpenPool, tmp_path: Path) -> None:
    pool = await open_pool(**observer())
    await ask(pool, "a", "import")
    learnt = await until(lambda: list((tmp_path / "state" / "preload").glob("*.json")), "the file")
    await until(lambda: "wsgiref.simple_server" in json.loads(learnt[0].read_text()), "what was learnt")
    await pool.close()
    again = await open_pool(**observer())
    process = psutil.Process((await ask(again, "a", "process"))["pid"])
    mapped = "wsgiref.simple_server" in json.loads(learnt[0].read_text())
    assert mapped
    assert process.is_running()


@pytest.mark.parametrize("how", ["thread", "raise", "exit"])
async def test_where_no_zygote_can_fork_workers_are_spawned(
    open_pool: OpenPool, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    pool = await open_pool(**observer(preload=how))
    process = await ask(pool, "a", "process")
    assert process["ppid"] == os.getpid()
    assert "spawned_instead" in caplog.text
    assert await ask(pool, "b", "x") == "x"


async def test_a_spare_makes_a_new_conversation_immediate_and_is_used_once(open_pool: OpenPool) -> None:
    pool = await open_pool(**observer(), spares=2)

    async def spare_pids() -> set[int]:
        return {row.pid for row in await pool.sessions() if row.state == "spare" and row.pid}

    async def full() -> set[int] | None:
        pids = await spare_pids()
        return pids if len(pids) == 2 else None

    ready = await until(full, "two spares")
    process = await ask(pool, "a", "process")
    assert process["pid"] in ready
    assert process["prepared"]
    ready = await until(full, "another spare in its place")
    assert process["pid"] not in ready
    await ask(pool, "a", "a secret of a")
    await pool.stop("a")
    other = await ask(pool, "b", "process")
    assert other["pid"] in ready
    assert await ask(pool, "b", "remembered") == ["process", "remembered"]
    again = await ask(pool, "a", "process")  # a known session gets a spare as well
    assert again["prepared"]
    assert (await pool.send("a", "x")).session_id == "observer-a"


async def test_a_spare_that_dies_is_replaced_and_a_stale_one_is_not_used(open_pool: OpenPool, tmp_path: Path) -> None:
    watched = tmp_path / "config"
    watched.write_text("1")
    pool = await open_pool(**observer(watched=str(watched)), spares=1)

    async def the_spare() -> int | None:
        return next((row.pid for row in await pool.sessions() if row.state == "spare"), None)

    first = await until(the_spare, "a spare")
    os.kill(first, signal.SIGKILL)

    async def another() -> int | None:
        pid = await the_spare()
        return pid if pid not in (None, first) else None

    second = await until(another, "another spare")
    watched.write_text("changed")
    assert (await ask(pool, "a", "process"))["pid"] not in (first, second)
    await until(lambda: not alive(second), "the stale spare to go")


async def test_no_spares_while_memory_is_short(open_pool: OpenPool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def short() -> float:
        asked.append(True)
        return 0.05

    monkeypatch.setattr(processes, "memory_available", short)
    pool = await open_pool(**observer(), spares=2)
    await until(lambda: asked, "the question")
    assert await ask(pool, "a", "x") == "x"
    assert [row.state for row in await pool.sessions()] == ["idle"]
