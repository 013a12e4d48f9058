"""Workers that die: between turns, in a turn, again, and with what they leave behind."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from hermes_pool import Reply
from hermes_pool.conversation import active_turn
from hermes_pool.errors import AgentFailedError, TurnInterruptedError, WorkerCrashedError
from hermes_pool_worker import wire
from tests.crash.outside import complaints, gone, gone_pid, hermes_of, lines, process_of, row_of
from tests.support import Faulty, FaultyProgram, OpenPool, quick, until

LAUNCHERS = pytest.mark.parametrize("launcher", ["zygote", "spawn", "portable"])
MIB = 1024 * 1024


async def _is(pool: Any, conversation_id: str, state: str) -> bool:
    return (await row_of(pool, conversation_id)).state == state


# --- between turns ---


@LAUNCHERS
async def test_an_idle_worker_killed_from_outside_is_seen_and_costs_the_next_turn_nothing(
    open_pool: OpenPool, faulty: Faulty, tmp_path: Path, launcher: str
) -> None:
    pool = await open_pool(**faulty("dies_before_doing_anything"), worker_cwd=tmp_path, launcher=launcher)
    await asyncio.gather(*(pool.send(name, "hello") for name in "abc"))
    workers = {name: await process_of(pool, name) for name in "abc"}
    workers["b"].send_signal(signal.SIGKILL)
    await until(lambda: _is(pool, "b", "stopped"), "the death to be seen", 2)
    row = await row_of(pool, "b")
    assert (row.pid, row.health) == (None, "none")
    assert "SIGKILL" in (row.last_error or "")
    await until(lambda: hermes_of(tmp_path / "state", "b").get("status") == "dormant", "the row", 5)
    assert "pid" not in hermes_of(tmp_path / "state", "b")
    assert len(lines(tmp_path / "attempts")) == 3
    reply = await pool.send("b", "die once")  # which needs the one restart of that turn
    assert (reply.text, reply.restarts) == ("die once", 1)
    assert (await pool.send("b", "/count")).text == "3"
    for name in "ac":
        assert await process_of(pool, name) == workers[name]


async def test_a_message_that_races_with_the_death_of_its_worker_is_answered(open_pool: OpenPool) -> None:
    pool = await open_pool()
    await pool.send("c", "hello")
    for number in range(5):
        (await process_of(pool, "c")).send_signal(signal.SIGKILL)
        assert (await asyncio.wait_for(pool.send("c", "/count"), 10)).text == str(number + 2)


@pytest.mark.parametrize("number", [signal.SIGQUIT, signal.SIGSEGV, signal.SIGABRT, signal.SIGKILL])
async def test_any_signal_is_named(open_pool: OpenPool, number: signal.Signals) -> None:
    pool = await open_pool()
    await pool.send("c", "hello")
    (await process_of(pool, "c")).send_signal(number)
    await until(lambda: _is(pool, "c", "stopped"), "the death to be seen", 3)
    assert number.name in ((await row_of(pool, "c")).last_error or "")
    assert (await pool.send("c", "/count")).text == "2"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
@LAUNCHERS
async def test_a_signal_that_tells_the_whole_service_to_go_does_not_end_a_worker(
    open_pool: OpenPool, launcher: str, number: signal.Signals
) -> None:
    pool = await open_pool(launcher=launcher)
    await pool.send("c", "hello")
    worker = await process_of(pool, "c")
    worker.send_signal(number)
    assert (await pool.send("c", "/count")).text == "2"
    assert await process_of(pool, "c") == worker
    assert pool.deaths() == []
    stopped = await pool.stop("c")
    assert stopped is not None
    assert stopped.how == "closed"


# --- in a turn ---


@LAUNCHERS
async def test_a_worker_that_dies_before_doing_anything_is_replaced_once_and_the_turn_replayed(
    open_pool: OpenPool, faulty: Faulty, tmp_path: Path, launcher: str
) -> None:
    pool = await open_pool(**faulty("dies_before_doing_anything"), worker_cwd=tmp_path, launcher=launcher)
    await pool.send("c", "hello")
    async with pool.turn("c", "die once") as turn:
        events = [event async for event in turn]
        reply = await turn.reply()
    assert (reply.text, reply.restarts, reply.turn_id) == ("die once", 1, turn.turn_id)
    assert lines(tmp_path / "attempts")[1:] == [f"{turn.turn_id} 1", f"{turn.turn_id} 2"]
    assert [type(event) for event in events if isinstance(event, wire.Status | wire.TextDelta)] == [
        wire.Status, wire.TextDelta,
    ]  # fmt: skip
    assert (await row_of(pool, "c")).restart_count == 1
    await until(lambda: hermes_of(tmp_path / "state", "c").get("restart_count") == 1, "the count in the row", 5)
    assert (await pool.send("c", "/count")).text == "3"


async def test_nothing_is_replayed_where_the_settings_say_so(
    open_pool: OpenPool, faulty: Faulty, tmp_path: Path
) -> None:
    pool = await open_pool(**faulty("dies_before_doing_anything"), worker_cwd=tmp_path, replay="never")
    with pytest.raises(WorkerCrashedError, match="SIGKILL"):
        await pool.send("c", "die once")
    assert len(lines(tmp_path / "attempts")) == 1
    assert (await row_of(pool, "c")).state == "idle"
    assert (await pool.send("c", "/count")).text == "1"


async def test_a_message_that_just_fits_is_replayed_as_well(
    open_pool: OpenPool, faulty: Faulty, tmp_path: Path
) -> None:
    pool = await open_pool(**faulty("dies_before_doing_anything"), worker_cwd=tmp_path, frame_bytes_max=MIB)
    await pool.send("c", "hello")
    text = "die" + "x" * (MIB - 3 - 100)  # the frame of the reply holds more than the text as well
    with complaints() as complained:
        reply = await pool.send("c", text)
    assert (reply.text == text, reply.restarts) == (True, 1)
    assert complained == []


@LAUNCHERS
async def test_a_second_death_in_one_turn_is_a_clean_error(
    open_pool: OpenPool, faulty: Faulty, tmp_path: Path, launcher: str
) -> None:
    pool = await open_pool(**faulty("dies_every_time"), worker_cwd=tmp_path, launcher=launcher)
    await pool.send("c", "hello")
    with complaints() as complained, pytest.raises(WorkerCrashedError, match="was killed by SIGKILL") as caught:
        await pool.send("c", "die by SIGKILL")
    error = caught.value
    assert type(error) is WorkerCrashedError
    assert (error.returncode, error.conversation_id) == (-9, "c")
    assert "SIGKILL" in error.exit
    assert error.stderr_tail[-1] == "last words of attempt 2"
    assert "last words of attempt 2" in str(error)
    assert len(lines(tmp_path / "attempts")) == 2
    await until(lambda: _is(pool, "c", "stopped"), "the state", 1)
    await until(lambda: hermes_of(tmp_path / "state", "c").get("restart_count") == 1, "the count in the row", 5)
    assert (await pool.send("c", "/count")).text == "2"
    assert (await row_of(pool, "c")).restart_count == 2
    assert complained == []


async def test_a_conversation_that_flaps_takes_nothing_from_another(open_pool: OpenPool, faulty: Faulty) -> None:
    pool = await open_pool(**faulty("dies_every_time"))
    await pool.send("good", "hello")
    worker = await process_of(pool, "good")
    flapping = asyncio.create_task(_flap(pool))
    while not flapping.done():
        assert (await asyncio.wait_for(pool.send("good", "ping"), 2)).restarts == 0
    assert await flapping == 3
    assert await process_of(pool, "good") == worker
    assert (await row_of(pool, "good")).restart_count == 0


async def _flap(pool: Any) -> int:
    signals = ("SIGABRT", "SIGSEGV", "SIGKILL")  # three messages: one and the same would be quarantined
    ends = [await asyncio.gather(pool.send("bad", f"die by {name}"), return_exceptions=True) for name in signals]
    return sum(isinstance(end, WorkerCrashedError) for (end,) in ends)


async def test_callers_in_line_get_their_turn_after_a_crash(open_pool: OpenPool, faulty: Faulty) -> None:
    pool = await open_pool(**faulty("dies_every_time"))
    ends = await asyncio.gather(
        pool.send("c", "die by SIGKILL"),
        pool.send("c", "second"),
        pool.send("c", "die by SIGSEGV"),
        pool.send("c", "fourth"),
        return_exceptions=True,
    )
    assert [end.text if isinstance(end, Reply) else type(end) for end in ends] == [
        WorkerCrashedError, "second", WorkerCrashedError, "fourth",
    ]  # fmt: skip
    assert (await pool.send("c", "/count")).text == "3"


@pytest.mark.parametrize(("text", "status"), [("exit", "status 5"), ("interrupt", "SIGINT|status 1")])
async def test_an_agent_that_leaves_in_its_turn_is_a_crash_with_its_status(
    open_pool: OpenPool, faulty: Faulty, text: str, status: str
) -> None:
    pool = await open_pool(**faulty("exits_in_turn"))
    with pytest.raises(WorkerCrashedError, match=status):
        await asyncio.wait_for(pool.send("c", text), 5)
    assert (await pool.send("c", "/count")).text == "1"


async def test_deaths_that_race_with_the_closing_of_the_pool_are_quiet(open_pool: OpenPool) -> None:
    pool = await open_pool()
    names = [f"c-{number}" for number in range(6)]
    await asyncio.gather(*(pool.send(name, "hello") for name in names))
    workers = [await process_of(pool, name) for name in names]
    with complaints() as complained:
        for worker in workers[::2]:
            worker.send_signal(signal.SIGKILL)
        await asyncio.wait_for(pool.close(), 3)
    assert all(gone(worker) for worker in workers)
    assert complained == []


async def test_a_death_that_races_with_a_stop_is_quiet(open_pool: OpenPool) -> None:
    pool = await open_pool()
    with complaints() as complained:
        for number in range(4):
            assert (await pool.send("c", "/count")).text == str(number + 1)
            (await process_of(pool, "c")).send_signal(signal.SIGKILL)
            await asyncio.wait_for(pool.stop("c"), 3)
            row = await row_of(pool, "c")
            assert (row.state, row.pid) == ("stopped", None)
    assert complained == []


# --- after an effect ---


@LAUNCHERS
async def test_a_turn_whose_tool_had_started_is_not_run_again(
    open_pool: OpenPool, faulty: Faulty, tmp_path: Path, launcher: str
) -> None:
    pool = await open_pool(**faulty("dies_after_tool"), worker_cwd=tmp_path, launcher=launcher)
    await pool.send("c", "hello")
    with pytest.raises(TurnInterruptedError, match="tool may have acted") as caught:
        await pool.send("c", "send the mail")
    assert [tool.name for tool in caught.value.tools] == ["mail"]
    assert (caught.value.returncode, caught.value.retryable) == (-9, False)
    assert len(lines(tmp_path / "effects")) == 1
    assert (await row_of(pool, "c")).state == "idle"
    assert (await pool.send("c", "/count")).text == "2"
    assert len(lines(tmp_path / "effects")) == 1


async def test_with_replay_always_a_second_attempt_is_told_apart(
    open_pool: OpenPool, faulty: Faulty, tmp_path: Path
) -> None:
    pool = await open_pool(**faulty("dies_after_tool"), worker_cwd=tmp_path, replay="always")
    with pytest.raises(WorkerCrashedError):
        await pool.send("c", "send the mail")
    first, second = lines(tmp_path / "effects")
    assert first.split()[0] == second.split()[0]
    assert (first.split()[1], second.split()[1]) == ("1", "2")


@LAUNCHERS
async def test_an_effect_that_was_not_reported_can_be_refused_by_its_turn_id(
    open_pool: OpenPool, faulty: Faulty, tmp_path: Path, launcher: str
) -> None:
    pool = await open_pool(**faulty("dies_after_unreported_effect"), worker_cwd=tmp_path, launcher=launcher)
    with pytest.raises(AgentFailedError, match="attempt 2 refused") as caught:
        await pool.send("c", "send the mail")
    assert caught.value.reason == "done_already"
    assert len(lines(tmp_path / "effects")) == 1
    assert (await pool.send("c", "/count")).text == "1"


@LAUNCHERS
async def test_an_effect_is_told_although_no_new_worker_can_be_started(
    open_pool: OpenPool, faulty: Faulty, tmp_path: Path, launcher: str
) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    pool = await open_pool(**faulty("dies_after_tool"), worker_cwd=folder, launcher=launcher)
    await pool.send("c", "hello")
    moved = folder.rename(tmp_path / "moved")
    with pytest.raises(TurnInterruptedError, match="tool may have acted") as caught:
        await pool.send("c", "send the mail")
    assert [tool.name for tool in caught.value.tools] == ["mail"]
    assert len(lines(moved / "effects")) == 1
    moved.rename(folder)
    assert (await pool.send("c", "/count")).text == "2"


@pytest.mark.parametrize("text", ["fine", "torn"])
@pytest.mark.parametrize("launcher", ["spawn", "portable"])  # its program is no zygote
async def test_a_reply_that_was_written_is_delivered_although_its_worker_died(
    open_pool: OpenPool, instead_of_python: FaultyProgram, tmp_path: Path, text: str, launcher: str
) -> None:
    pool = await open_pool(**instead_of_python("replies_then_dies"), worker_cwd=tmp_path, launcher=launcher)
    for number in range(1, 4):
        reply = await pool.send("c", text)
        assert (reply.text, reply.restarts) == (text, 0)
        await until(lambda: _is(pool, "c", "stopped"), "the death to be seen", 3)
        assert len(lines(tmp_path / "starts")) == number


async def test_a_written_reply_is_delivered_to_a_slow_reader_as_well(
    open_pool: OpenPool, instead_of_python: FaultyProgram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(active_turn, "EVENTS_WAITING_MAX", 2)
    pool = await open_pool(**instead_of_python("replies_then_dies"), worker_cwd=tmp_path, launcher="spawn")
    async with pool.turn("c", "long") as turn:
        worker = await until(lambda: lines(tmp_path / "starts"), "the start")
        await until(lambda: gone_pid(int(worker[0])), "the worker to have written all and to be dead")
        await _a_slow_reader_s_pause()
        events = [event async for event in turn]
        reply = await turn.reply()
    assert (reply.text, reply.restarts) == ("long", 0)
    texts = [event.text for event in events if isinstance(event, wire.TextDelta)]
    assert "".join(texts).split() == [str(number) for number in range(16)]
    assert len(lines(tmp_path / "starts")) == 1


async def _a_slow_reader_s_pause() -> None:
    """Longer than the pool waits for the last bytes of a dead worker."""
    await asyncio.sleep(0.4)


# --- what is left behind ---


@LAUNCHERS
@pytest.mark.parametrize("end", ["killed", "stopped", "closed", "idle"])
async def test_a_tool_with_a_session_of_its_own_is_gone_with_its_worker(
    open_pool: OpenPool, faulty: Faulty, end: str, launcher: str
) -> None:
    pool = await open_pool(
        **faulty("leaves_tools_behind"),
        launcher=launcher,
        timeouts=quick(idle_s=0.2 if end == "idle" else 900.0, background_s=0),
    )
    await pool.send("other", "hello")
    tool = psutil.Process(int((await pool.send("c", "start a tool")).text))
    assert os.getsid(tool.pid) == tool.pid
    worker = await process_of(pool, "c")
    other = psutil.Process(int((await pool.send("other", "start a tool")).text))
    match end:
        case "killed":
            worker.send_signal(signal.SIGKILL)
        case "stopped":
            stopped = await pool.stop("c")
            assert stopped is not None
            assert tool.pid in stopped.strays
            assert gone(tool)
        case "closed":
            await pool.close()
            assert gone(tool)
            assert gone(other)
    await until(lambda: gone(worker) and gone(tool), "the worker and its tool to be gone", 5)
    if end in ("killed", "stopped"):
        assert not gone(other)
        assert (await pool.send("c", "/count")).text == "1"


@LAUNCHERS
async def test_a_helper_that_holds_the_wire_open_hides_no_death(
    open_pool: OpenPool, faulty: Faulty, launcher: str
) -> None:
    pool = await open_pool(**faulty("forks_a_helper"), launcher=launcher)
    helper = psutil.Process(int((await pool.send("c", "fork")).text))
    (await process_of(pool, "c")).send_signal(signal.SIGKILL)
    await until(lambda: _is(pool, "c", "stopped"), "the death to be seen", 2)
    await until(lambda: gone(helper), "the helper to be gone", 5)
    assert (await pool.send("c", "/count")).text == "1"
    helper = psutil.Process(int((await pool.send("c", "fork")).text))
    await asyncio.wait_for(pool.stop("c"), 5)
    assert gone(helper)


@LAUNCHERS
async def test_what_a_host_ignores_its_workers_do_not(open_pool: OpenPool, launcher: str) -> None:
    inherited = (signal.SIGHUP, signal.SIGQUIT)  # as under nohup, or in a server that handles its end itself
    before = {number: signal.signal(number, signal.SIG_IGN) for number in inherited}
    try:
        pool = await open_pool(launcher=launcher)
        await pool.send("c", "hello")
        worker = await process_of(pool, "c")
        worker.send_signal(signal.SIGQUIT)
        await until(lambda: gone(worker), "the worker to obey", 5)
        assert (await pool.send("c", "/count")).text == "2"
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
