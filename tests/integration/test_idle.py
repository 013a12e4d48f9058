import asyncio
import os
import signal
import sqlite3
from pathlib import Path

from hermes_pool import RestartPolicy
from tests.integration.test_conversations import stored, the_pid
from tests.support import Obedient, OpenPool, alive, quick, until


async def test_an_idle_worker_goes_after_its_metadata_is_saved_and_comes_back_in_context(open_pool: OpenPool) -> None:
    pool = await open_pool(timeouts=quick(idle_s=0.3))
    first = await pool.send("c", "remember me")
    pid = await the_pid(pool, "c")
    await until(lambda: not alive(pid), "the idle worker to go")
    row = stored(pool, "c")
    assert row["session_id"] == first.session_id
    assert row["status"] == "dormant"
    assert row["restart_count"] == 0
    assert row["last_used_at"] == (await pool.sessions())[0].last_used_at
    assert "pid" not in row
    again = await pool.send("c", "/first")
    assert (again.text, again.session_id) == ("remember me", first.session_id)
    assert await the_pid(pool, "c") != pid


async def test_a_silent_turn_is_not_idle(open_pool: OpenPool, obedient: Obedient) -> None:
    pool = await open_pool(**obedient.settings(), timeouts=quick(idle_s=0.3))
    await pool.send("other", "hi")
    sending = asyncio.create_task(pool.send("c", "wait go"))
    await until(lambda: "wait go" in obedient.marks("begun"), "the turn to run")
    pid = await the_pid(pool, "c")
    # Twice, the idle one goes: so the sweep has looked at the busy one after its limit, twice.
    for _ in range(2):
        await until(lambda: stored(pool, "other").get("status") == "dormant", "the idle one to go")
        await pool.send("other", "hi")
    assert alive(pid)
    obedient.allow("go")
    assert (await sending).text == "wait go"
    assert await the_pid(pool, "c") == pid


async def test_looking_does_not_keep_a_worker_awake(open_pool: OpenPool) -> None:
    pool = await open_pool(timeouts=quick(idle_s=0.3))
    await pool.send("c", "hi")

    async def gone() -> bool:
        return [row.pid for row in await pool.sessions()] == [None]

    await until(gone, "the idle worker to go while it is looked at")


async def test_a_worker_is_not_killed_before_it_is_saved(open_pool: OpenPool) -> None:
    pool = await open_pool(timeouts=quick(idle_s=0.3, database_s=0.3))
    first = await pool.send("c", "remember me")
    await until(lambda: stored(pool, "c"), "the first save")
    pid = await the_pid(pool, "c")
    lock = sqlite3.connect(pool.settings.state_dir / "hermes-pool.db", isolation_level=None)
    try:
        lock.execute("BEGIN IMMEDIATE")

        async def save_failed() -> bool:
            (row,) = await pool.sessions()
            return row.last_error is not None

        await until(save_failed, "a save to fail")
        assert alive(pid)
        assert (await pool.send("c", "/first")).text == "remember me"
        lock.execute("ROLLBACK")
    finally:
        lock.close()
    await until(lambda: not alive(pid), "the idle worker to go, now that it can be saved")
    assert stored(pool, "c")["session_id"] == first.session_id


async def test_a_message_that_meets_a_leaving_worker_waits_and_is_answered(open_pool: OpenPool) -> None:
    pool = await open_pool(timeouts=quick(idle_s=0.05), sweep_s=0.01)
    for number in range(60):
        reply = await pool.send("c", f"m{number}")
        assert reply.text == f"m{number}"
        if number % 3 == 0:  # meet it at changing moments of its end
            await until(lambda: pool._sessions and next(iter(pool._sessions.values())).state.value != "idle", "the end")
    assert (await pool.send("c", "/count")).text == "61"
    assert (await pool.sessions())[0].restart_count == 0


async def test_an_idle_worker_killed_from_outside_costs_the_next_message_nothing(open_pool: OpenPool) -> None:
    pool = await open_pool(restarts=RestartPolicy(replacements_per_turn_max=0))
    for name in "abc":
        await pool.send(name, "hi")
    os.kill(await the_pid(pool, "b"), signal.SIGKILL)

    async def seen() -> bool:
        rows = {row.conversation_id: row for row in await pool.sessions()}
        return rows["b"].state == "stopped" and rows["b"].pid is None

    await until(seen, "the death to be seen")
    reply = await pool.send("b", "/count")
    assert (reply.text, reply.restarts) == ("2", 0)
    assert {row.conversation_id: row.restart_count for row in await pool.sessions()} == {"a": 0, "b": 1, "c": 0}


async def test_the_default_store_is_the_shape_that_was_asked_for(open_pool: OpenPool, tmp_path: Path) -> None:
    pool = await open_pool()
    await pool.send("c", "hi")
    await until(lambda: stored(pool, "c").get("last_used_at"), "the first turn to be saved")
    with sqlite3.connect(tmp_path / "state" / "hermes-pool.db") as db:
        kinds = db.execute(
            "select json_type(agent_state,'$.runtime_state.hermes.'||column1) from conversation, "
            "(values ('session_id'),('last_used_at'),('restart_count'),('status'))"
        ).fetchall()
        (runtime,) = db.execute("select json_extract(agent_state,'$.runtime') from conversation").fetchone()
    db.close()
    assert kinds == [("text",), ("text",), ("integer",), ("text",)]
    assert runtime == "hermes"
