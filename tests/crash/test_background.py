"""The turn is over, the work is not: it keeps its worker, up to a cap, and its end is of no turn."""

import asyncio
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from hermes_pool import Drained, HermesSessionManager, SessionKey
from hermes_pool.errors import PoolFullError
from hermes_pool.testing.scripted_model import ScriptedModel, write_hermes_home
from hermes_pool_worker import wire
from tests.crash.outside import gone, hermes_of, never, process_of, row_of, row_when_stopped
from tests.support import Faulty, OpenPool, quick, until

LAUNCHERS = pytest.mark.parametrize("launcher", ["zygote", "spawn", "portable"])
QUICK = {"timeouts": quick(idle_s=0.2), "sweep_s": 0.05}


async def the_sweep_has_passed(pool: HermesSessionManager) -> None:
    """Wait until another session, that was used after all others, has been let go as an idle one."""
    await pool.send("other", "hello")
    worker = await process_of(pool, "other")
    await until(lambda: gone(worker), "the idle one to go")


@LAUNCHERS
async def test_a_worker_is_kept_until_its_job_has_ended_and_the_end_is_told_to_the_owner_alone(
    open_pool: OpenPool, faulty: Faulty, tmp_path: Path, launcher: str
) -> None:
    told: list[Any] = []
    pool = await open_pool(
        **faulty("works_after_its_turn"), **QUICK, worker_cwd=tmp_path, launcher=launcher,
        on_background=lambda *what: told.append(what),
    )  # fmt: skip
    await pool.send("c", "job made")
    worker = await process_of(pool, "c")
    for _ in range(2):
        await the_sweep_has_passed(pool)
    row = await row_of(pool, "c")
    assert (row.state, row.jobs, row.last_error) == ("idle", ("job made",), None)
    assert row.idle_s is not None
    (tmp_path / "made").touch()
    await until(lambda: told, "the end to be told")
    assert told == [(SessionKey("c"), wire.BackgroundFinished("id-made", "made is there"))]
    async with pool.turn("c", "/count") as turn:
        assert [type(event) async for event in turn] == [wire.TextDelta]
        assert (await turn.reply()).text == "2"
    assert await process_of(pool, "c") == worker
    await until(lambda: gone(worker), "the worker to go, now that it is idle")
    row = await row_when_stopped(pool, "c")
    assert (row.jobs, row.last_error, len(told)) == ((), None, 1)


async def test_a_job_that_ends_in_a_later_turn_is_no_part_of_it(
    open_pool: OpenPool, faulty: Faulty, tmp_path: Path
) -> None:
    told: list[Any] = []
    pool = await open_pool(
        **faulty("works_after_its_turn"), worker_cwd=tmp_path, on_background=lambda *what: told.append(what)
    )
    await pool.send("c", "job made")
    async with pool.turn("c", "end made") as turn:
        assert [type(event) async for event in turn] == [wire.TextDelta]
        assert (await turn.reply()).text == "end made"
    assert [message.job_id for _, message in told] == ["id-made"]


async def test_a_job_that_never_ends_is_abandoned_at_the_cap_and_named(
    open_pool: OpenPool, faulty: Faulty, tmp_path: Path
) -> None:
    pool = await open_pool(
        **faulty("works_after_its_turn"), worker_cwd=tmp_path, sweep_s=0.05, timeouts=quick(idle_s=0.2, background_s=1)
    )
    began = time.monotonic()
    await pool.send("c", "job never")
    worker = await process_of(pool, "c")
    await until(lambda: gone(worker), "the worker to go at the cap")
    assert 1 <= time.monotonic() - began < 3
    row = await row_when_stopped(pool, "c")
    assert row.jobs == ()
    assert row.last_error == "background work was abandoned (timeouts.background_s): job never"
    assert hermes_of(tmp_path / "state", "c")["last_error"] == row.last_error
    assert (await pool.send("c", "/count")).text == "2"
    assert (await row_of(pool, "c")).last_error is None


async def test_a_drain_waits_for_messages_and_not_for_work_in_the_background(
    open_pool: OpenPool, faulty: Faulty, tmp_path: Path
) -> None:
    pool = await open_pool(**faulty("works_after_its_turn"), worker_cwd=tmp_path)
    await pool.send("c", "job never")
    worker = await process_of(pool, "c")
    assert await pool.drain(10) == Drained(0, 0)
    assert not gone(worker)  # idle workers stay
    assert (await row_of(pool, "c")).jobs == ("job never",)
    pool.resume()
    assert (await pool.send("c", "/count")).text == "2"


@LAUNCHERS
async def test_a_worker_is_kept_by_what_its_tools_left_running_and_not_by_its_servers(
    open_pool: OpenPool, faulty: Faulty, tmp_path: Path, launcher: str
) -> None:
    pool = await open_pool(
        **faulty("works_after_its_turn", server=True), **QUICK, worker_cwd=tmp_path, launcher=launcher
    )
    shell = psutil.Process(int((await pool.send("c", "shell made")).text))
    worker = await process_of(pool, "c")
    for _ in range(2):
        await the_sweep_has_passed(pool)  # which has a server as well
    assert not gone(shell)
    assert await process_of(pool, "c") == worker
    (tmp_path / "made").touch()
    await until(lambda: gone(worker), "the worker to go, now that it is idle")
    assert (await row_when_stopped(pool, "c")).last_error is None


@LAUNCHERS
async def test_what_a_tool_left_running_is_ended_at_the_cap_and_named(
    open_pool: OpenPool, faulty: Faulty, tmp_path: Path, launcher: str
) -> None:
    pool = await open_pool(
        **faulty("works_after_its_turn"),
        worker_cwd=tmp_path,
        sweep_s=0.05,
        timeouts=quick(idle_s=0.2, background_s=1),
        launcher=launcher,
    )
    began = time.monotonic()
    shell = psutil.Process(int((await pool.send("c", "shell never")).text))
    name, worker = shell.name(), await process_of(pool, "c")
    await until(lambda: gone(worker) and gone(shell), "both to go at the cap")
    assert time.monotonic() - began >= 1
    error = (await row_when_stopped(pool, "c")).last_error or ""
    assert "abandoned" in error
    assert name in error


async def test_who_needs_room_gets_it_when_the_job_has_ended(
    open_pool: OpenPool, faulty: Faulty, tmp_path: Path
) -> None:
    pool = await open_pool(**faulty("works_after_its_turn"), worker_cwd=tmp_path, workers_max=1, sweep_s=600)
    await pool.send("c", "job made")
    sending = asyncio.create_task(pool.send("other", "hello"))
    await until(lambda: pool.pool().waiting == 1, "the other one to stand in line")
    await never(sending.done, 0.2)
    (tmp_path / "made").touch()
    await asyncio.wait_for(sending, 5)


async def test_who_needs_room_gets_it_at_the_cap(open_pool: OpenPool, faulty: Faulty, tmp_path: Path) -> None:
    pool = await open_pool(
        **faulty("works_after_its_turn"),
        worker_cwd=tmp_path,
        workers_max=1,
        sweep_s=0.05,
        timeouts=quick(background_s=1),
    )
    await pool.send("c", "job never")
    began = time.monotonic()
    assert (await pool.send("other", "hello")).text == "hello"
    assert 0.9 < time.monotonic() - began < 3
    assert "abandoned" in ((await row_of(pool, "c")).last_error or "")


async def test_who_cannot_wait_so_long_is_told(open_pool: OpenPool, faulty: Faulty, tmp_path: Path) -> None:
    pool = await open_pool(
        **faulty("works_after_its_turn"), worker_cwd=tmp_path, workers_max=1, timeouts=quick(wait_s=0.2), sweep_s=0.05
    )
    await pool.send("c", "job never")
    worker = await process_of(pool, "c")
    with pytest.raises(PoolFullError):
        await pool.send("other", "hello")
    assert not gone(worker)
    stopped = await pool.stop("c")  # which waits for no job
    assert stopped is not None
    assert (await row_of(pool, "c")).jobs == ()


async def test_a_worker_that_is_to_be_recycled_ends_its_job_first(
    open_pool: OpenPool, faulty: Faulty, tmp_path: Path
) -> None:
    pool = await open_pool(
        **faulty("works_after_its_turn"), worker_cwd=tmp_path, worker_age_max_s=0.2, sample_s=0.05
    )  # fmt: skip
    await pool.send("c", "job made")
    worker = await process_of(pool, "c")
    await pool.send("other", "hello")
    other = await process_of(pool, "other")
    await until(lambda: gone(other), "the one without a job to be recycled")
    assert not gone(worker)
    assert (await pool.send("c", "/count")).text == "2"
    assert await process_of(pool, "c") == worker
    (tmp_path / "made").touch()
    await until(lambda: gone(worker), "the worker to be recycled")


async def test_a_fault_of_the_owner_s_is_none_of_the_worker_s(
    open_pool: OpenPool, faulty: Faulty, tmp_path: Path
) -> None:
    def fails(*_: Any) -> None:
        raise ValueError("the owner's own")

    pool = await open_pool(**faulty("works_after_its_turn"), worker_cwd=tmp_path, on_background=fails)
    await pool.send("c", "job made")
    worker = await process_of(pool, "c")
    assert (await pool.send("c", "end made")).text == "end made"
    assert (await pool.send("c", "/count")).text == "3"
    assert await process_of(pool, "c") == worker
    assert (await row_of(pool, "c")).jobs == ()


async def test_jobs_without_end_are_not_all_kept_and_die_with_their_worker(open_pool: OpenPool, faulty: Faulty) -> None:
    pool = await open_pool(**faulty("works_after_its_turn"))
    await pool.send("c", "jobs 150")
    assert len((await row_of(pool, "c")).jobs) == 100
    worker = await process_of(pool, "c")
    worker.kill()
    await until(lambda: gone(worker), "its end")

    async def forgotten() -> bool:
        return (await row_of(pool, "c")).jobs == ()

    await until(forgotten, "the jobs to be forgotten")
    assert (await pool.send("c", "/count")).text == "2"


@pytest.mark.skipif(find_spec("run_agent") is None, reason="Hermes is not installed in this environment")
async def test_a_command_that_hermes_runs_in_the_background_keeps_its_worker(
    open_pool: OpenPool, tmp_path: Path
) -> None:
    told: list[Any] = []
    command = f"until [ -e {tmp_path}/made ]; do sleep 0.05; done; echo it is made"
    call = f'[call terminal {{"command": "{command}", "background": true}}]'
    with ScriptedModel() as model:
        pool = await open_pool(
            agent="hermes", hermes_home=write_hermes_home(tmp_path / "hermes", model.url), sweep_s=0.05,
            timeouts=quick(idle_s=0.2, start_s=60), on_background=lambda *what: told.append(what),
        )  # fmt: skip
        await pool.send("c", call)
        worker = await process_of(pool, "c")
        assert (await row_of(pool, "c")).jobs == (command,)
        await never(lambda: gone(worker), 0.6)
        assert (await pool.send("c", "how many messages")).text == "(scripted) You have sent 2 messages."
        assert (await row_of(pool, "c")).jobs == (command,)
        (tmp_path / "made").touch()
        await until(lambda: told, "the end to be told")
        ((key, message),) = told
        assert key == SessionKey("c")
        assert message.result.startswith("exit code 0: ")
        assert message.result.endswith("it is made")
        await until(lambda: gone(worker), "the worker to go, now that it is idle")
        assert (await row_when_stopped(pool, "c")).last_error is None
