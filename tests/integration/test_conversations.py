import asyncio
import json
import os
import signal
import sqlite3
from functools import partial
from typing import Any

import psutil
import pytest

from hermes_pool import (
    AgentFailedError,
    ConversationBusyError,
    HermesPoolError,
    HermesSessionManager,
    PoolClosedError,
    PoolFullError,
    PoolSettings,
    QueueLimits,
    SessionKey,
    TurnCancelledError,
    TurnTimeoutError,
    WorkerCrashedError,
)
from hermes_pool.conversation import active_turn
from hermes_pool_worker import wire
from tests.support import Obedient, OpenPool, alive, quick, until


async def the_pid(pool: HermesSessionManager, conversation_id: str) -> int:
    (row,) = [row for row in await pool.sessions() if row.conversation_id == conversation_id]
    assert row.pid is not None
    return row.pid


def stored(pool: HermesSessionManager, conversation_id: str) -> dict[str, Any]:
    with sqlite3.connect(f"file:{pool.settings.state_dir}/hermes-pool.db?mode=ro", uri=True) as db:
        rows = db.execute(
            "select json_extract(agent_state, '$.runtime_state.hermes') from conversation where id = ?",
            (conversation_id,),
        ).fetchall()
    db.close()
    return json.loads(rows[0][0]) if rows and rows[0][0] else {}


async def test_ten_turns_keep_one_process_and_the_context(open_pool: OpenPool) -> None:
    pool = await open_pool()
    replies = [await pool.send("ada", f"message {number}") for number in range(10)]
    pids = {await the_pid(pool, "ada")}
    assert [reply.text for reply in replies] == [f"message {number}" for number in range(10)]
    assert (await pool.send("ada", "/first")).text == "message 0"
    assert (await pool.send("ada", "/count")).text == "12"
    pids.add(await the_pid(pool, "ada"))
    assert len(pids) == 1
    assert os.getpid() in [parent.pid for parent in psutil.Process(pids.pop()).parents()]


async def test_conversations_and_users_have_sessions_of_their_own(open_pool: OpenPool) -> None:
    pool = await open_pool()
    keys = [SessionKey("c"), SessionKey("c", "ada"), SessionKey("c", "bob"), SessionKey("d")]
    await asyncio.gather(*(pool.send(key, f"I am {key}") for key in keys))
    firsts = await asyncio.gather(*(pool.send(key, "/first") for key in keys))
    assert [reply.text for reply in firsts] == [f"I am {key}" for key in keys]
    assert len({row.pid for row in await pool.sessions()}) == 4
    await pool.close()
    again = await open_pool()
    firsts = await asyncio.gather(*(again.send(key, "/first") for key in keys))
    assert [reply.text for reply in firsts] == [f"I am {key}" for key in keys]


async def test_fifty_first_messages_start_one_worker_and_run_in_order(open_pool: OpenPool, obedient: Obedient) -> None:
    pool = await open_pool(**obedient.settings(slow_start=True))
    sends = [asyncio.create_task(pool.send("c", f"m{number}")) for number in range(50)]
    await until(lambda: obedient.marks("opened"), "the one start")
    (row,) = await pool.sessions()
    assert row.state == "starting"
    sends[7].cancel()
    await until(sends[7].done, "a waiter gives up on its own")
    obedient.allow("may_start")
    replies = await asyncio.gather(*sends, return_exceptions=True)
    assert len(obedient.marks("opened")) == 1
    wanted = [f"m{number}" for number in range(50) if number != 7]
    assert obedient.marks("begun") == wanted
    assert [reply.text for reply in replies if not isinstance(reply, BaseException)] == wanted
    # Never two at once: begin and end alternate.
    kinds = [mark.split()[0] for mark in obedient.marks() if mark.split()[0] in ("begun", "ended")]
    assert kinds == ["begun", "ended"] * 49


async def test_the_first_caller_may_give_up_during_the_start(open_pool: OpenPool, obedient: Obedient) -> None:
    pool = await open_pool(**obedient.settings(slow_start=True))
    first = asyncio.create_task(pool.send("c", "first"))
    await until(lambda: obedient.marks("opened"), "the start")
    second = asyncio.create_task(pool.send("c", "second"))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    obedient.allow("may_start")
    assert (await second).text == "second"
    assert obedient.marks("begun") == ["second"]
    assert len(obedient.marks("opened")) == 1


async def test_a_busy_conversation_rejects_or_bounds_its_line(open_pool: OpenPool, obedient: Obedient) -> None:
    pool = await open_pool(**obedient.settings(), busy="reject")
    running = asyncio.create_task(pool.send("c", "wait go"))
    await until(lambda: obedient.marks("begun"), "the turn to run")
    with pytest.raises(ConversationBusyError, match="'c'"):
        await pool.send("c", "rejected")
    assert (await pool.send("other", "hi")).text == "hi"
    obedient.allow("go")
    await running
    await pool.close()

    bounded = await open_pool(**obedient.settings(), queues=QueueLimits(turns_max=1), timeouts=quick(wait_s=0.2))
    (obedient.folder / "go").unlink()
    running = asyncio.create_task(bounded.send("d", "wait go"))
    await until(lambda: "wait go" in obedient.marks("begun")[2:], "the turn to run")
    waiting = asyncio.create_task(bounded.send("d", "waits too long"))
    await asyncio.sleep(0)
    with pytest.raises(ConversationBusyError, match=r"queues\.turns_max"):
        await bounded.send("d", "one too many")
    with pytest.raises(ConversationBusyError, match=r"timeouts\.wait_s"):
        await waiting
    obedient.allow("go")
    await running
    assert obedient.marks("begun")[-1] == "wait go"


async def test_events_come_as_they_happen_and_the_reply_at_the_end(open_pool: OpenPool, obedient: Obedient) -> None:
    pool = await open_pool(**obedient.settings())
    async with pool.turn("c", "stream_and_wait go") as turn:
        first = await anext(turn)
        assert isinstance(first, wire.TextDelta)
        assert first.text == "begun "
        assert turn.outcome is None
        obedient.allow("go")
        assert [event async for event in turn] == []
        reply = await turn.reply()
    assert reply.text == "stream_and_wait go"
    assert reply.usage == {"input_tokens": len("stream_and_wait go")}
    assert reply.outcome == "completed"
    assert (await pool.send("c", "partial")).notice == "the budget is spent"


async def test_a_tool_and_a_question_reach_the_caller(open_pool: OpenPool, obedient: Obedient) -> None:
    pool = await open_pool(**obedient.settings())
    async with pool.turn("c", "tool_then_wait go") as turn:
        started = await anext(turn)
        assert isinstance(started, wire.ToolStarted)
        obedient.allow("go")
        assert [type(event).__name__ async for event in turn] == ["ToolFinished"]
    async with pool.turn("c", "ask Really?") as turn:
        question = await anext(turn)
        assert isinstance(question, wire.Question)
        assert question.choices == ["yes", "no"]
        await turn.answer("q99", "to nobody")
        await turn.answer(question.question_id, "yes")
        assert (await turn.reply()).text == "answer: yes"


async def test_a_slow_consumer_slows_its_worker_down_and_loses_nothing(
    open_pool: OpenPool, obedient: Obedient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(active_turn, "EVENTS_WAITING_MAX", 10)
    pool = await open_pool(**obedient.settings())
    await pool.send("c", "hi")
    pid = await the_pid(pool, "c")
    total = 200_000
    async with pool.turn("c", f"stream {total}") as turn:
        await anext(turn)
        # The pipe is full now and its writer waits in the kernel.
        await until(lambda: _waits_in_write(pid), "the worker to wait for its reader", 30)
        assert (await pool.send("other", "hi")).text == "hi"
        rest = [event async for event in turn]
        assert "".join(event.text for event in rest if isinstance(event, wire.TextDelta)) == "".join(
            f"{number} " for number in range(1, total)
        )
        assert (await turn.reply()).outcome == "completed"


def _waits_in_write(pid: int) -> bool:
    with open(f"/proc/{pid}/wchan") as file:
        return "pipe_w" in file.read()


async def test_leaving_a_turn_early_cancels_it_and_the_next_sees_none_of_it(
    open_pool: OpenPool, obedient: Obedient
) -> None:
    pool = await open_pool(**obedient.settings())
    for number in range(20):
        async with pool.turn("c", f"stream_and_wait never{number}") as turn:
            await anext(turn)
        async with pool.turn("c", f"stream {number}") as turn:
            texts = [event.text async for event in turn if isinstance(event, wire.TextDelta)]
        assert "".join(texts) == "".join(f"{piece} " for piece in range(number))
    assert len(obedient.marks("opened")) == 1


async def test_cancelling_the_caller_cancels_the_turn(open_pool: OpenPool, obedient: Obedient) -> None:
    pool = await open_pool(**obedient.settings())
    sending = asyncio.create_task(pool.send("c", "wait never"))
    await until(lambda: obedient.marks("begun"), "the turn to run")
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    assert (await pool.send("c", "next")).text == "next"
    assert obedient.marks("ended") == ["wait never", "next"]
    assert len(obedient.marks("opened")) == 1


async def test_cancel_gives_what_there_was(open_pool: OpenPool, obedient: Obedient) -> None:
    pool = await open_pool(**obedient.settings())
    async with pool.turn("c", "stream_and_wait never") as turn:
        await anext(turn)
        reply = await turn.cancel()
        assert reply is not None
        assert (reply.outcome, reply.text) == ("interrupted", "begun ")
        assert (await turn.reply()) is reply
        assert (await turn.cancel()) is reply


async def test_a_cancel_that_comes_late_or_twice_never_reaches_the_next_turn(
    open_pool: OpenPool, obedient: Obedient
) -> None:
    pool = await open_pool(**obedient.settings())
    for number in range(100):
        async with pool.turn("c", f"m{number}") as turn:
            cancels = [asyncio.create_task(turn.cancel()) for _ in range(number % 3)]
            await asyncio.sleep(0)
            await asyncio.gather(*cancels)
        assert (await pool.send("c", f"after {number}")).text == f"after {number}"


async def test_a_turn_cancelled_while_it_waits_is_never_run(open_pool: OpenPool, obedient: Obedient) -> None:
    pool = await open_pool(**obedient.settings())
    running = asyncio.create_task(pool.send("c", "wait go"))
    await until(lambda: obedient.marks("begun"), "the turn to run")
    turn = pool.turn("c", "cancelled in line")
    entering = asyncio.create_task(turn.__aenter__())
    await asyncio.sleep(0)
    cancelling = asyncio.create_task(turn.cancel())
    await asyncio.sleep(0)
    obedient.allow("go")
    await entering
    reply = await cancelling
    assert reply is not None
    assert reply.outcome == "interrupted"
    await running
    assert (await pool.send("c", "next")).text == "next"
    assert obedient.marks("begun") == ["wait go", "next"]


async def test_an_agent_deaf_to_a_cancel_is_replaced(open_pool: OpenPool, faulty: Any) -> None:
    pool = await open_pool(agent="echo", timeouts=quick(close_grace_s=0.2, term_grace_s=0.2))
    await pool.send("c", "hi")
    pid = await the_pid(pool, "c")
    os.kill(pid, signal.SIGSTOP)
    sending = asyncio.create_task(pool.send("c", "never read"))
    await until(partial(_is, pool, "c", "busy"), "the turn to be handed over")
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    assert (await pool.send("c", "/count")).text == "2"
    assert not alive(pid)
    assert (await pool.sessions())[0].restart_count == 0


def _is(pool: HermesSessionManager, conversation_id: str, state: str) -> bool:
    return pool._sessions[SessionKey(conversation_id)].state.value == state


async def test_a_worker_killed_in_a_turn_is_replaced_once_and_the_reply_is_right(
    open_pool: OpenPool, obedient: Obedient
) -> None:
    pool = await open_pool(**obedient.settings())
    await pool.send("c", "first")
    events = []
    async with pool.turn("c", "die_once now") as turn:
        events = [event async for event in turn]
        reply = await turn.reply()
    assert (reply.text, reply.restarts) == ("die_once now", 1)
    assert [type(event) for event in events] == [wire.Status]
    assert events[0].attempt == 2
    assert [mark.split()[1:] for mark in obedient.marks("opened")] == [["None", "False"], ["obedient-c", "True"]]
    (row,) = await pool.sessions()
    assert (row.state, row.restart_count, row.incarnation, row.turns) == ("idle", 1, 2, 2)


async def test_a_second_death_in_a_turn_is_a_clean_error_and_the_next_message_works(
    open_pool: OpenPool, obedient: Obedient
) -> None:
    pool = await open_pool(**obedient.settings())
    with pytest.raises(WorkerCrashedError, match="SIGKILL") as caught:
        await pool.send("c", "die")
    assert caught.value.returncode == -9
    assert caught.value.conversation_id == "c"
    assert len(obedient.marks("opened")) == 2
    (row,) = await pool.sessions()
    assert row.state == "stopped"
    assert "SIGKILL" in (row.last_error or "")
    await until(lambda: stored(pool, "c").get("status") == "failed", "the stored status")
    assert (await pool.send("c", "next")).text == "next"
    await until(lambda: stored(pool, "c").get("status") == "healthy", "the stored status")


async def test_a_failure_of_the_agent_is_told_and_costs_no_worker(open_pool: OpenPool, obedient: Obedient) -> None:
    pool = await open_pool(**obedient.settings())
    with pytest.raises(AgentFailedError, match="no credit") as caught:
        await pool.send("c", "fail no credit")
    assert caught.value.reason == "server_error"
    assert (await pool.send("c", "next")).text == "next"
    assert len(obedient.marks("opened")) == 1


async def test_limits_of_time(open_pool: OpenPool, obedient: Obedient) -> None:
    pool = await open_pool(**obedient.settings(), timeouts=quick(progress_s=0.3, turn_s=1.5))
    with pytest.raises(TurnTimeoutError, match=r"timeouts\.progress_s"):
        await pool.send("c", "wait never")
    assert (await pool.send("c", "next")).text == "next"
    with pytest.raises(TurnTimeoutError, match=r"timeouts\.turn_s") as caught:
        await pool.send("c", "tool_then_wait never")
    assert caught.value.limit == "timeouts.turn_s"
    assert (await pool.send("c", "next")).text == "next"


async def test_stop_and_the_message_after_it(open_pool: OpenPool, obedient: Obedient) -> None:
    pool = await open_pool(**obedient.settings())
    running = asyncio.create_task(pool.send("c", "wait never"))
    await until(lambda: obedient.marks("begun"), "the turn to run")
    pid = await the_pid(pool, "c")
    stopped = await pool.stop("c")
    assert stopped is not None
    assert (stopped.how, stopped.exit.returncode) == ("closed", 0)
    assert not alive(pid)
    with pytest.raises(TurnCancelledError, match="stopped") as caught:
        await running
    assert (caught.value.sent, caught.value.retryable, caught.value.http_status) == (True, False, 409)
    assert [row.state for row in await pool.sessions()] == ["stopped"]
    assert await pool.stop("c") is None
    assert await pool.stop("unknown") is None
    assert (await pool.send("c", "next")).text == "next"
    assert [mark.split()[1] for mark in obedient.marks("opened")] == ["None", "obedient-c"]


async def test_stop_during_a_start(open_pool: OpenPool, obedient: Obedient) -> None:
    pool = await open_pool(**obedient.settings(slow_start=True))
    sending = asyncio.create_task(pool.send("c", "hi"))
    await until(lambda: obedient.marks("opened"), "the start")
    pid = int(obedient.marks("opened")[0].split()[0])
    await pool.stop("c")
    assert not alive(pid)
    with pytest.raises(TurnCancelledError) as caught:
        await sending
    assert (caught.value.sent, caught.value.retryable) == (False, True)
    assert [row.state for row in await pool.sessions()] == ["stopped"]
    obedient.allow("may_start")
    assert (await pool.send("c", "next")).text == "next"


async def test_closing_ends_everything_in_order(open_pool: OpenPool, obedient: Obedient) -> None:
    pool = await open_pool(**obedient.settings())
    for name in "abc":
        await pool.send(name, "hi")
    running = asyncio.create_task(pool.send("a", "wait never"))
    await until(lambda: "wait never" in obedient.marks("begun"), "the turn to run")
    acting = pool.turn("b", "tool_then_wait never")
    await acting.__aenter__()
    assert isinstance(await anext(acting), wire.ToolStarted)
    in_line = asyncio.create_task(pool.send("a", "in line"))
    await asyncio.sleep(0)
    ends, again = await asyncio.gather(pool.close(), pool.close())
    assert {key.conversation_id: end.how for key, end in ends.items()} == dict.fromkeys("abc", "closed")
    assert again == {}
    outcomes = await asyncio.gather(running, acting.reply(), in_line, return_exceptions=True)
    # Another pool may run the message, but for the one whose tool may have acted.
    assert [(type(each), each.sent, each.retryable) for each in outcomes if isinstance(each, HermesPoolError)] == [
        (TurnCancelledError, True, True), (TurnCancelledError, True, False), (PoolClosedError, False, False),
    ]  # fmt: skip
    with pytest.raises(PoolClosedError):
        await pool.send("a", "too late")
    assert {stored(pool, name)["status"] for name in "abc"} == {"dormant"}
    assert "in line" not in obedient.marks("begun")


async def test_a_close_whose_caller_gave_up_goes_on_and_the_next_waits_for_it(open_pool: OpenPool) -> None:
    pool = await open_pool()
    await pool.send("c", "hi")
    pid = await the_pid(pool, "c")
    first = asyncio.create_task(pool.close())
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert alive(pid)
    assert await pool.close() == {}
    assert not alive(pid)
    assert stored(pool, "c")["status"] == "dormant"


@pytest.mark.parametrize("launcher", ["auto", "spawn"])
async def test_closing_during_a_recovery_leaves_no_worker(
    open_pool: OpenPool, obedient: Obedient, launcher: str
) -> None:
    for number in range(12):
        pool = await open_pool(**obedient.settings(), launcher=launcher)
        await pool.send("c", "hi")
        running = asyncio.create_task(pool.send("c", "wait never"))
        await until(partial(_is, pool, "c", "busy"), "the turn to run")
        worker = psutil.Process(await the_pid(pool, "c"))
        worker.kill()
        await until(partial(_gone, worker), "it to be dead")
        for _ in range(number * 5):  # close at another moment of the recovery each time
            await asyncio.sleep(0)
        await pool.close()
        (outcome,) = await asyncio.gather(running, return_exceptions=True)
        assert isinstance(outcome, HermesPoolError)


def _gone(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def test_a_full_pool_makes_room_with_the_longest_idle(open_pool: OpenPool, obedient: Obedient) -> None:
    pool = await open_pool(**obedient.settings(), workers_max=2, timeouts=quick(wait_s=0.3))
    await pool.send("a", "hi")
    await pool.send("b", "hi")
    await pool.send("a", "again")
    await pool.send("c", "hi")
    assert {row.conversation_id: row.state for row in await pool.sessions()} == {
        "a": "idle",
        "b": "stopped",
        "c": "idle",
    }
    await until(lambda: stored(pool, "b")["status"] == "dormant", "its last word to be stored")
    running = [asyncio.create_task(pool.send(name, "wait go")) for name in "ac"]
    await until(lambda: obedient.marks("begun").count("wait go") == 2, "both to run")
    with pytest.raises(PoolFullError, match="workers_max"):
        await pool.send("b", "no room")
    waiting = asyncio.create_task(pool.send("b", "waits for room"))
    await asyncio.sleep(0)
    obedient.allow("go")
    assert (await waiting).text == "waits for room"
    await asyncio.gather(*running)


async def test_a_manager_outside_its_life_says_so(open_pool: OpenPool, tmp_path: Any) -> None:
    never_entered = HermesSessionManager(PoolSettings(agent="echo", state_dir=tmp_path / "x"))
    with pytest.raises(PoolClosedError, match="async with"):
        await never_entered.send("c", "hi")
    pool = await open_pool()
    with pytest.raises(PoolClosedError, match="once"):
        await pool.__aenter__()


async def test_opened_used_and_closed_from_different_tasks(open_pool: OpenPool) -> None:
    pool = await asyncio.create_task(open_pool())
    request = asyncio.create_task(pool.send("c", "first"))
    await request
    async with asyncio.timeout(5):
        assert (await asyncio.create_task(pool.send("c", "/first"))).text == "first"
    await asyncio.create_task(pool.close())
