"""A full pool, and one that is steered from outside, with real workers."""

import asyncio
import json
import os
import sys
from typing import Any

import pytest

from hermes_pool import (
    Drained,
    HermesSessionManager,
    PoolClosedError,
    PoolDrainingError,
    PoolFullError,
    QueueLimits,
    RestartPolicy,
    SessionKey,
    TurnCancelledError,
    WorkerCrashedError,
)
from tests.support import Obedient, OpenPool, until


async def begin(pool: HermesSessionManager, obedient: Obedient, *conversations: str) -> list["asyncio.Task[Any]"]:
    """Have turns run that last until the file of their conversation is there."""
    tasks = [asyncio.create_task(pool.send(name, f"wait {name}")) for name in conversations]
    await until(lambda: {f"wait {name}" for name in conversations} <= set(obedient.marks("begun")), "all to run")
    return tasks


def in_line(pool: HermesSessionManager) -> int:
    return pool.pool().waiting


async def states(pool: HermesSessionManager) -> dict[str, str]:
    return {row.conversation_id: row.state for row in await pool.sessions()}


async def test_the_line_for_a_worker_is_bounded_and_fair_between_users(open_pool: OpenPool, obedient: Obedient) -> None:
    pool = await open_pool(**obedient.settings(), workers_max=1, queues=QueueLimits(admissions_max=3))
    (running,) = await begin(pool, obedient, "first")
    order = [SessionKey("a1", "ada"), SessionKey("a2", "ada"), SessionKey("b1", "bob")]
    sends = []
    for key in order:
        sends.append(asyncio.create_task(pool.send(key, key.conversation_id)))
        await until(lambda: in_line(pool) == len(sends), "it to stand in line")
    with pytest.raises(PoolFullError, match="workers_max") as refused:
        await pool.send(SessionKey("a3", "ada"), "one too many")
    assert (refused.value.position, refused.value.waiting) == (4, 3)
    assert refused.value.conversation_id == "a3"
    assert await states(pool) == {"first": "busy", "a1": "stopped", "a2": "stopped", "b1": "stopped", "a3": "stopped"}
    obedient.allow("first")
    await asyncio.gather(running, *sends)
    assert obedient.marks("begun") == ["wait first", "a1", "b1", "a2"]
    assert pool.pool().workers == 1


async def test_a_turn_whose_worker_dies_is_not_put_behind_those_who_wait(
    open_pool: OpenPool, obedient: Obedient
) -> None:
    pool = await open_pool(**obedient.settings(), workers_max=1)
    (running,) = await begin(pool, obedient, "c")
    waiting = asyncio.create_task(pool.send("other", "other"))
    await until(lambda: in_line(pool) == 1, "the other to stand in line")
    (row,) = [row for row in await pool.sessions() if row.conversation_id == "c"]
    assert row.pid is not None
    os.kill(row.pid, 9)
    await until(lambda: obedient.marks("begun").count("wait c") == 2, "it to run again")
    assert not waiting.done()
    obedient.allow("c")
    assert (await running).restarts == 1
    assert (await waiting).text == "other"
    assert obedient.marks("begun") == ["wait c", "wait c", "other"]


async def test_a_turn_that_ends_with_a_crash_gives_its_slot_back(open_pool: OpenPool, obedient: Obedient) -> None:
    pool = await open_pool(**obedient.settings(), workers_max=1, restarts=RestartPolicy(replacements_per_turn_max=0))
    dying = asyncio.create_task(pool.send("c", "die now"))
    await until(lambda: obedient.marks("begun"), "it to run")
    assert (await pool.send("other", "other")).text == "other"
    with pytest.raises(WorkerCrashedError, match="SIGKILL"):
        await dying
    assert pool.pool().workers == 1


async def test_a_pool_is_resized_while_it_runs(open_pool: OpenPool, obedient: Obedient) -> None:
    pool = await open_pool(**obedient.settings(), workers_max=1)
    running = await begin(pool, obedient, "a")
    waiting = asyncio.create_task(begin(pool, obedient, "b", "c"))
    await until(lambda: in_line(pool) == 2, "two to stand in line")
    pool.resize(3)
    running += await waiting
    pool.resize(1)
    assert set((await states(pool)).values()) == {"busy"}
    for name in "abc":
        obedient.allow(name)
    await asyncio.gather(*running)
    await until(lambda: pool.pool().workers == 1, "all but one to go dormant")
    assert sorted((await states(pool)).values()) == ["idle", "stopped", "stopped"]


async def test_a_drain_finishes_turns_and_their_lines_and_refuses_new_ones(
    open_pool: OpenPool, obedient: Obedient
) -> None:
    pool = await open_pool(**obedient.settings())
    (running,) = await begin(pool, obedient, "a")
    in_line = asyncio.create_task(pool.send("a", "the next one"))
    await asyncio.sleep(0)
    drain = asyncio.create_task(pool.drain(15))
    await until(lambda: pool.pool().state == "draining", "the drain to begin")
    with pytest.raises(PoolDrainingError, match="draining"):
        await pool.send("b", "too late")
    with pytest.raises(PoolClosedError):
        pool.turn("b", "too late")
    obedient.allow("a")
    assert await drain == Drained(finished=2, cut=0)
    assert [reply.text for reply in await asyncio.gather(running, in_line)] == ["wait a", "the next one"]
    assert pool.pool().state == "drained"
    pool.resume()
    assert (await pool.send("a", "again")).text == "again"


async def test_what_is_left_at_the_deadline_of_a_drain_is_ended_and_can_go_on_later(
    open_pool: OpenPool, obedient: Obedient
) -> None:
    pool = await open_pool(**obedient.settings())
    (running,) = await begin(pool, obedient, "a")
    assert await pool.drain(0.05) == Drained(finished=0, cut=1)
    with pytest.raises(TurnCancelledError, match="drained"):
        await running
    pool.resume()
    assert (await pool.send("a", "again")).text == "again"


async def hermes_pool(*arguments: str, pool: HermesSessionManager) -> tuple[int, str, str]:
    """Run the command line in a process of its own, as a person would."""
    environment = {**os.environ, "HERMES_POOL_STATE_DIR": str(pool.settings.state_dir)}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "hermes_pool", *arguments,
        env=environment, cwd="/", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_the_command_line_steers_a_running_pool_and_shows_it(open_pool: OpenPool, obedient: Obedient) -> None:
    pool = await open_pool(**obedient.settings(), workers_max=2)
    (running,) = await begin(pool, obedient, "a")
    who = f"supervisor {os.getpid()}"
    assert await hermes_pool("resize", "5", pool=pool) == (0, f"{who}: 1 of 5 workers\n", "")
    assert await hermes_pool("pause", pool=pool) == (0, f"{who}: paused; 1 turn still running\n", "")
    status, table, told = await hermes_pool("ps", pool=pool)
    assert (status, told) == (0, f"{who} is paused: 1 of 5 workers\n")
    assert table.startswith("CONVERSATION")
    status, text, _ = await hermes_pool("ps", "--json", pool=pool)
    assert json.loads(text)["supervisors"][0]["pool"] == {
        "state": "paused", "workers": 1, "workers_max": 5, "waiting": 0, "held": 0, "expected_wait_s": 0.0,
        "starts": {"state": "closed", "failures": 0, "failures_max": 3, "retry_after_s": None, "last_error": None},
    }  # fmt: skip
    assert await hermes_pool("resume", pool=pool) == (0, f"{who}: resumed\n", "")
    assert await hermes_pool("drain", "--deadline", "0.1", pool=pool) == (
        0,
        f"{who}: drained; 0 turns finished, 1 cut\n",
        "",
    )
    with pytest.raises(TurnCancelledError):
        await running
    status, _, told = await hermes_pool("pause", pool=pool)
    assert status == 1
    assert "the pool is drained" in told
    assert "Traceback" not in told
    await pool.close()
    status, _, told = await hermes_pool("drain", pool=pool)
    assert (status, told) == (
        1,
        f"hermes-pool: no supervisor is running for {pool.settings.state_dir}: start one, or check --state-dir\n",
    )


# --- what needs the gate in Session.begin -----------------------------------------------------------------------------


async def test_a_paused_pool_holds_what_comes_and_what_is_in_line(open_pool: OpenPool, obedient: Obedient) -> None:
    pool = await open_pool(**obedient.settings())
    await pool.send("idle", "hi")
    (running,) = await begin(pool, obedient, "a")
    in_line = asyncio.create_task(pool.send("a", "in line"))
    made_before = pool.turn("idle", "made before")
    assert await pool.pause() == 1
    late = [asyncio.create_task(pool.send("new", "new")), asyncio.create_task(pool.send("idle", "to an idle one"))]
    obedient.allow("a")
    assert (await running).text == "wait a"
    assert await pool.pause(10) == 0
    await until(lambda: pool.pool().held == 3, "all to be held")
    entering = asyncio.create_task(made_before.__aenter__())
    await asyncio.sleep(0)
    entering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await entering
    assert obedient.marks("begun") == ["hi", "wait a"]
    assert "new" not in [row.conversation_id for row in await pool.sessions() if row.pid is not None]
    pool.resume()
    replies = await asyncio.gather(in_line, *late)
    assert [reply.text for reply in replies] == ["in line", "new", "to an idle one"]
    assert pool.pool().held == 0


async def test_a_caller_who_gives_up_leaves_the_line_for_a_worker(open_pool: OpenPool, obedient: Obedient) -> None:
    pool = await open_pool(**obedient.settings(), workers_max=1)
    (running,) = await begin(pool, obedient, "a")
    sends = [asyncio.create_task(pool.send(name, name)) for name in ("b", "c")]
    await until(lambda: in_line(pool) == 2, "two to stand in line")
    sends[0].cancel()
    await until(lambda: in_line(pool) == 1, "one to leave", 2)
    again = asyncio.create_task(pool.send("b", "after all"))
    obedient.allow("a")
    assert [(await task).text for task in (running, sends[1], again)] == ["wait a", "c", "after all"]
    assert obedient.marks("begun") == ["wait a", "c", "after all"]


async def test_a_start_goes_on_for_those_who_still_wait_in_line_for_it(open_pool: OpenPool, obedient: Obedient) -> None:
    pool = await open_pool(**obedient.settings(), workers_max=1)
    (running,) = await begin(pool, obedient, "a")
    sends = [asyncio.create_task(pool.send("b", text)) for text in ("first", "second")]
    await until(lambda: in_line(pool) == 1, "it to stand in line")
    sends[0].cancel()
    obedient.allow("a")
    assert (await sends[1]).text == "second"
    await running


async def test_those_in_line_at_the_deadline_of_a_drain_are_refused(open_pool: OpenPool, obedient: Obedient) -> None:
    pool = await open_pool(**obedient.settings())
    (running,) = await begin(pool, obedient, "a")
    in_line = asyncio.create_task(pool.send("a", "in line"))
    made_before = pool.turn("b", "made before")
    await asyncio.sleep(0)
    assert await pool.drain(0.05) == Drained(finished=0, cut=2)
    ends = await asyncio.gather(running, in_line, return_exceptions=True)
    assert [type(end) for end in ends] == [TurnCancelledError, PoolDrainingError]
    with pytest.raises(PoolDrainingError, match="drained"):
        await made_before.__aenter__()
    assert obedient.marks("begun") == ["wait a"]


async def test_a_start_that_is_stopped_before_its_first_step_stops_no_later_one(open_pool: OpenPool) -> None:
    pool = await open_pool()
    await pool.send("c", "hi")
    for rounds in range(6):  # in one of these the stop meets the start between its making and its first step
        await pool.stop("c")
        stopping = asyncio.create_task(pool.stop("c"))
        for _ in range(rounds):
            await asyncio.sleep(0)
        sending = asyncio.create_task(pool.send("c", "x"))
        await asyncio.gather(stopping, sending, return_exceptions=True)
        assert (await pool.send("c", "y")).text == "y"
