"""Kill -9 at every await of a turn's life: before, inside and after each frame, and of the zygote at its own points.

``faulty_workers/dies_where_told.py`` looks for an order, which is an empty file with the name of the point, and kills
itself there: between two system calls, where no signal from outside could be aimed. One order is one death.
"""

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from hermes_pool import HermesPoolError, Reply, RestartPolicy, StartPolicy
from hermes_pool.conversation.worker_slot import WorkerSlot
from hermes_pool.errors import TurnInterruptedError, WorkerCrashedError, WorkerDiedError, WorkerStartError
from hermes_pool.process.connection import WorkerConnection
from hermes_pool.testing.scripted_model import ScriptedModel, write_hermes_home
from hermes_pool_worker import wire
from tests.crash.outside import complaints, gone, hermes_of, lines, process_of, row_of
from tests.support import Faulty, FaultyProgram, OpenPool, Pool, known, quick, until

pytestmark = pytest.mark.timeout(60)
LAUNCHERS = pytest.mark.parametrize("launcher", ["zygote", "spawn"])
UNBOUNDED = {
    "restarts": RestartPolicy(quarantine_after=0, deaths_in_window_max=1000),
    "starts": StartPolicy(failures_max=1000),
}
"""No breaker may hide what happens at the next death."""
TOOL = "use a tool"


@dataclass(frozen=True)
class Ended:
    """How a turn ended, and what its caller saw of it."""

    outcome: Reply | HermesPoolError
    events: list[wire.TurnEvent]

    @property
    def attempts(self) -> set[int]:
        return {event.attempt for event in self.events}


async def turn_of(pool: Pool, text: str, name: str = "c") -> Ended:
    events: list[wire.TurnEvent] = []
    try:
        async with pool.turn(name, text) as turn:
            async for event in turn:
                events.append(event)  # noqa: PERF401 - those before an error count as well
            return Ended(await turn.reply(), events)
    except HermesPoolError as error:
        return Ended(error, events)


@asynccontextmanager
async def bystander(pool: Pool) -> AsyncIterator[None]:
    """Another conversation of the same pool: its worker stays the same one and answers."""
    await pool.send("other", "hello")
    worker = await process_of(pool, "other")
    with complaints() as complained:
        yield
        reply = await asyncio.wait_for(pool.send("other", "/count"), 5)
    assert (reply.text, reply.restarts) == ("2", 0)
    assert await process_of(pool, "other") == worker
    assert (await row_of(pool, "other")).last_error is None
    assert complained == []


async def history_is(pool: Pool, *texts: str, name: str = "c") -> None:
    """The next turn is answered in the context of exactly these before it."""
    assert (await asyncio.wait_for(pool.send(name, "/count"), 10)).text == str(len(texts) + 1)
    assert (await pool.send(name, "/first")).text == (texts[0] if texts else "/count")
    row = await row_of(pool, name)
    assert (row.state, row.health, row.waiting, row.last_error) == ("idle", "alive", 0, None)


Case = TypeVar("Case")


async def with_each(cases: Iterable[Case], run: Callable[[str, Case], Awaitable[None]]) -> None:
    """Run each case in a conversation of its own; the pool is shared, for its start would take most of the time."""
    for number, case in enumerate(cases):
        try:
            await asyncio.wait_for(run(f"c{number}", case), 15)
        except BaseException as error:
            error.add_note(f"the case: {case}")
            raise


@pytest.fixture(autouse=True)
def no_bug_of_ours_is_logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Dead workers are warnings; an error in the log is a task of the pool that has failed."""
    yield
    assert [each.getMessage() for each in caplog.get_records("call") if each.levelno >= logging.ERROR] == []


# --- in a start ---


@LAUNCHERS
async def test_a_worker_killed_in_its_start_is_one_more_launch_and_no_restart(
    open_pool: OpenPool, faulty: Faulty, instead_of_python: FaultyProgram, tmp_path: Path, launcher: str
) -> None:
    settings = faulty("dies_where_told")
    points = [f"{when} {kind}" for kind in ("Hello", "Opened") for when in ("before", "inside", "after")]
    if launcher == "spawn":  # it greets before any agent is imported, so only the program before it can be killed
        settings |= instead_of_python("dies_before_hello")
        points = [point for point in points if point not in ("inside Hello", "after Hello")]
    pool = await open_pool(**settings, worker_cwd=tmp_path, **UNBOUNDED, launcher=launcher)

    async def killed_at(name: str, point: str) -> None:
        (tmp_path / point).touch()
        ended = await turn_of(pool, "hello", name)
        assert isinstance(ended.outcome, Reply)
        assert ended.outcome.text == "hello"
        assert not (tmp_path / point).exists()
        row = await row_of(pool, name)
        # After its last frame of the start it may be taken over before it is seen to be dead.
        assert ended.outcome.restarts <= row.restart_count <= int(point == "after Opened")
        assert ended.outcome.notice is None  # there was nothing to forget
        assert row.incarnation == 2
        await history_is(pool, "hello", name=name)

    async with bystander(pool):
        await with_each(points, killed_at)


@LAUNCHERS
async def test_two_deaths_in_one_start_are_an_error_that_names_the_step(
    open_pool: OpenPool, faulty: Faulty, tmp_path: Path, launcher: str
) -> None:
    pool = await open_pool(**faulty("dies_where_told"), worker_cwd=tmp_path, **UNBOUNDED, launcher=launcher)
    async with bystander(pool):
        for order in ("before Opened", "inside Opened again"):
            (tmp_path / order).touch()
        ended = await turn_of(pool, "hello")
        assert type(ended.outcome) is WorkerStartError
        assert (ended.outcome.step, ended.outcome.conversation_id) == ("open", "c")
        assert (await row_of(pool, "c")).state == "failed"
        await history_is(pool)


@pytest.mark.parametrize("when", ["before", "inside", "after"])
async def test_a_spare_that_is_killed_while_it_gets_ready_is_nobody_s_trouble(
    open_pool: OpenPool, faulty: Faulty, tmp_path: Path, when: str
) -> None:
    (tmp_path / f"{when} Prepared").touch()
    pool = await open_pool(**faulty("dies_where_told"), worker_cwd=tmp_path, **UNBOUNDED, launcher="zygote", spares=1)
    await until(lambda: not (tmp_path / f"{when} Prepared").exists(), "the spare to die")
    await history_is(pool)


# --- in a turn ---


@dataclass(frozen=True)
class Expected:
    """What becomes of the turn whose worker is killed at ``points``, one after the other."""

    points: tuple[str, ...]
    text: str = "work"
    error: type[HermesPoolError] | None = None
    restarts: int = 1
    attempts: frozenset[int] = frozenset({1, 2})
    """Of the events that its caller saw."""
    effects: int = 0
    """How often the tool acted."""
    or_error: type[HermesPoolError] | None = None
    """How it may end as well, where two events race."""

    def check(self, ended: Ended, conversation_id: str) -> None:
        outcome = ended.outcome
        if isinstance(outcome, Reply):
            assert self.error is None
            assert (outcome.text, outcome.restarts) == (self.text, self.restarts)
        else:
            assert type(outcome) is (self.error or self.or_error)
            assert outcome.conversation_id == conversation_id
            assert outcome.sent, "the first worker had the message, also where no other one could be started"
        if isinstance(outcome, WorkerDiedError):
            assert outcome.returncode == -signal.SIGKILL
            assert outcome.report is not None
            assert outcome.report.report_id in str(outcome)
        if isinstance(outcome, TurnInterruptedError):
            assert [tool.name for tool in outcome.tools] == ["hammer"]
        assert ended.attempts <= self.attempts


NONE, FIRST, SECOND = frozenset[int](), frozenset({1}), frozenset({2})

IN_A_TURN = [
    # Nothing has happened yet, and nothing was seen: once more.
    Expected(("before TextDelta",), attempts=SECOND),
    Expected(("inside TextDelta",), attempts=SECOND),
    Expected(("after TextDelta",)),
    # The tool has not acted before it is announced.
    Expected(("before ToolStarted",), TOOL, attempts=SECOND, effects=1),
    Expected(("inside ToolStarted",), TOOL, attempts=SECOND, effects=1),
    # From here on it may have acted.
    Expected(("after ToolStarted",), TOOL, TurnInterruptedError, attempts=FIRST),
    Expected(("before ToolFinished",), TOOL, TurnInterruptedError, attempts=FIRST, effects=1),
    Expected(("inside ToolFinished",), TOOL, TurnInterruptedError, attempts=FIRST, effects=1),
    Expected(("after ToolFinished",), TOOL, TurnInterruptedError, attempts=FIRST, effects=1),
    # The turn is in the history: its reply is taken from there.
    Expected(("before TurnDone",), attempts=FIRST),
    Expected(("inside TurnDone",), attempts=FIRST),
    Expected(("before TurnDone",), TOOL, attempts=FIRST, effects=1),
    Expected(("inside TurnDone",), TOOL, attempts=FIRST, effects=1),
    # The reply was written: it is delivered.
    Expected(("after TurnDone",), restarts=0, attempts=FIRST),
    Expected(("after TurnDone",), TOOL, restarts=0, attempts=FIRST, effects=1),
    # And the one that takes over is killed as well.
    Expected(("before TextDelta", "before TextDelta again"), error=WorkerCrashedError, attempts=SECOND),
    Expected(("after TextDelta", "inside TextDelta again"), error=WorkerCrashedError),
    Expected(("before TextDelta", "before Opened"), attempts=SECOND),
    Expected(("before TextDelta", "inside Opened", "before Opened again"), error=WorkerStartError, attempts=NONE),
    Expected(("after ToolStarted", "before Opened", "before Opened again"), TOOL, TurnInterruptedError, attempts=FIRST),
    Expected(("before ToolStarted", "after ToolStarted"), TOOL, TurnInterruptedError, attempts=SECOND),
    Expected(("before TurnDone", "before Opened"), attempts=FIRST),
    Expected(("before TextDelta", "after Opened"), attempts=SECOND, or_error=WorkerCrashedError),
]


@pytest.mark.parametrize("launcher", ["zygote", pytest.param("spawn", marks=pytest.mark.slow)])
async def test_a_worker_killed_in_a_turn(open_pool: OpenPool, faulty: Faulty, tmp_path: Path, launcher: str) -> None:
    pool = await open_pool(**faulty("dies_where_told"), worker_cwd=tmp_path, **UNBOUNDED, launcher=launcher)

    async def killed(name: str, expected: Expected) -> None:
        effects = len(lines(tmp_path / "effects"))
        await pool.send(name, "hello")
        orders = [tmp_path / point for point in expected.points]
        for order in orders:
            order.touch()
        ended = await turn_of(pool, expected.text, name)
        await until(lambda: not any(order.exists() for order in orders), "all orders to be obeyed", 3)
        expected.check(ended, name)
        assert len(lines(tmp_path / "effects")) - effects == expected.effects
        assert (await row_of(pool, name)).state in ("idle", "stopped", "failed")
        done = (expected.text,) if isinstance(ended.outcome, Reply) else ()
        await history_is(pool, "hello", *done, name=name)
        assert len(lines(tmp_path / "effects")) - effects == expected.effects

    async with bystander(pool):
        await with_each(IN_A_TURN, killed)


@LAUNCHERS
async def test_a_turn_that_ended_with_an_error_is_in_no_history(
    open_pool: OpenPool, faulty: Faulty, tmp_path: Path, launcher: str
) -> None:
    pool = await open_pool(**faulty("dies_where_told"), worker_cwd=tmp_path, **UNBOUNDED, launcher=launcher)
    await pool.send("c", "hello")
    for point in ("before TextDelta", "before TurnDone"):
        (tmp_path / point).touch()
    assert type((await turn_of(pool, "work")).outcome) is WorkerCrashedError
    await history_is(pool, "hello")


def _until_dead_without_a_turn_of_the_loop(process: psutil.Process) -> None:
    """Wait while the host hears of nothing: the death, and all that was written before, reach it at one moment."""
    end = time.monotonic() + 5
    while not gone(process):
        assert time.monotonic() < end
        time.sleep(0.001)  # on purpose not asyncio's


@LAUNCHERS
async def test_a_turn_that_is_handed_to_a_worker_already_dead_is_run_by_the_next(
    open_pool: OpenPool, faulty: Faulty, tmp_path: Path, launcher: str
) -> None:
    pool = await open_pool(**faulty("dies_where_told"), worker_cwd=tmp_path, **UNBOUNDED, launcher=launcher)
    async with bystander(pool):
        await pool.send("c", "hello")
        worker = await process_of(pool, "c")
        worker.kill()
        _until_dead_without_a_turn_of_the_loop(worker)
        ended = await turn_of(pool, TOOL)
        assert isinstance(ended.outcome, Reply)
        assert (ended.outcome.text, ended.outcome.restarts) == (TOOL, 1)
        assert len(lines(tmp_path / "effects")) == 1
        await history_is(pool, "hello", TOOL)


@LAUNCHERS
async def test_a_reply_and_the_death_after_it_that_come_at_one_moment_are_a_reply(
    open_pool: OpenPool, faulty: Faulty, tmp_path: Path, launcher: str
) -> None:
    pool = await open_pool(**faulty("dies_where_told"), worker_cwd=tmp_path, **UNBOUNDED, launcher=launcher)
    async with bystander(pool):
        await pool.send("c", "hello")
        worker = await process_of(pool, "c")
        (tmp_path / "after TurnDone").touch()
        async with pool.turn("c", TOOL) as turn:
            _until_dead_without_a_turn_of_the_loop(worker)
            reply = await turn.reply()
        assert (reply.text, reply.restarts) == (TOOL, 0)
        assert len(lines(tmp_path / "effects")) == 1
        await history_is(pool, "hello", TOOL)


@pytest.mark.parametrize("start", ["first", "spare", "replacement"])
@LAUNCHERS
async def test_a_worker_that_is_dead_before_it_is_taken_over(
    open_pool: OpenPool, faulty: Faulty, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, start: str, launcher: str
) -> None:
    pool = await open_pool(
        **faulty("dies_where_told"), worker_cwd=tmp_path, **UNBOUNDED, launcher=launcher, spares=int(start == "spare")
    )
    if start == "spare":
        await until(lambda: _is(pool, "", "spare"), "the spare")
    async with bystander(pool):
        if start == "replacement":
            await pool.send("c", "hello")
            (tmp_path / "before TextDelta").touch()
        doomed: list[WorkerConnection] = []
        open_connection = WorkerConnection.open

        async def open_and_kill(connection: WorkerConnection, *arguments: Any) -> None:
            await open_connection(connection, *arguments)
            if not doomed:
                doomed.append(connection)
                process = psutil.Process(known(connection.process).pid)
                process.kill()
                _until_dead_without_a_turn_of_the_loop(process)

        monkeypatch.setattr(WorkerConnection, "open", open_and_kill)
        ended = await asyncio.wait_for(turn_of(pool, "work"), 10)
        assert len(doomed) == 1
        if start == "replacement":  # the second death of one turn
            assert type(ended.outcome) is WorkerCrashedError
            await history_is(pool, "hello")
        else:
            assert isinstance(ended.outcome, Reply)
            assert ended.outcome.text == "work"
            await history_is(pool, "work")


@LAUNCHERS
async def test_a_replacement_that_dies_the_moment_it_is_taken_over_ends_the_turn_once(
    open_pool: OpenPool, faulty: Faulty, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: str
) -> None:
    pool = await open_pool(**faulty("dies_where_told"), worker_cwd=tmp_path, **UNBOUNDED, launcher=launcher)
    async with bystander(pool):
        await pool.send("c", "hello")
        (tmp_path / "before TextDelta").touch()
        killed: list[psutil.Process] = []
        take = WorkerSlot._take

        def taken_and_killed(slot: WorkerSlot, connection: WorkerConnection) -> wire.Opened:
            opened = take(slot, connection)
            if not killed:
                killed.append(psutil.Process(known(connection.process).pid))
                killed[0].kill()
                _until_dead_without_a_turn_of_the_loop(killed[0])
            return opened

        monkeypatch.setattr(WorkerSlot, "_take", taken_and_killed)
        ending = asyncio.create_task(turn_of(pool, "work"))
        behind = [asyncio.create_task(pool.send("c", f"behind {number}")) for number in range(2)]
        ended = await asyncio.wait_for(ending, 10)
        assert type(ended.outcome) is WorkerCrashedError
        assert [reply.text for reply in await asyncio.wait_for(asyncio.gather(*behind), 10)] == ["behind 0", "behind 1"]
        await history_is(pool, "hello", "behind 0", "behind 1")


async def test_a_forked_worker_killed_while_it_tells_what_it_imported_has_answered(
    open_pool: OpenPool, faulty: Faulty, tmp_path: Path
) -> None:
    pool = await open_pool(**faulty("dies_where_told"), worker_cwd=tmp_path, **UNBOUNDED, launcher="zygote")
    async with bystander(pool):
        (tmp_path / "inside Imported").touch()
        reply = await pool.send("c", "hello")
        assert (reply.text, reply.restarts) == ("hello", 0)
        await until(lambda: _is(pool, "c", "stopped"), "the death to be seen", 3)
        await history_is(pool, "hello")


async def _is(pool: Pool, conversation_id: str, state: str) -> bool:
    return (conversation_id, state) in [(row.conversation_id, row.state) for row in await pool.sessions()]


@pytest.mark.skipif(find_spec("run_agent") is None, reason="Hermes is not installed in this environment")
async def test_the_real_hermes_killed_in_a_reply_in_a_tool_and_at_rest_has_the_right_history(
    open_pool: OpenPool, tmp_path: Path
) -> None:
    with ScriptedModel() as model:
        home = write_hermes_home(tmp_path / "hermes", model.url)
        pool = await open_pool(
            agent="hermes", hermes_home=home, launcher="zygote", timeouts=quick(start_s=60), **UNBOUNDED
        )
        await pool.send("c", "I am Ada.")
        worker = await process_of(pool, "c")
        async with pool.turn("c", "[slow 8] once") as turn:
            async for event in turn:
                if isinstance(event, wire.TextDelta) and "piece-3" in event.text and not gone(worker):
                    worker.kill()
            reply = await turn.reply()
        assert reply.restarts == 1
        assert "piece-8" in reply.text
        worker = await process_of(pool, "c")
        async with pool.turn("c", "[tool exec sleep 1001]") as turn:
            async for event in turn:
                if isinstance(event, wire.ToolStarted):
                    (tool,) = await until(lambda: _commands(worker, "sleep 1001"), "the tool to run")
                    worker.kill()
            with pytest.raises(TurnInterruptedError) as caught:
                await turn.reply()
        assert [tool.name for tool in caught.value.tools] == ["terminal"]
        await until(lambda: gone(tool), "the tool to go", 5)
        worker = await process_of(pool, "c")
        worker.kill()
        _until_dead_without_a_turn_of_the_loop(worker)
        reply = await pool.send("c", "what is my name?")
        assert reply.restarts == 1
        assert "Ada" in reply.text
        # The one whose tool was running is among them, once: the model must know what may have been done.
        asked = [message["content"] for message in model.requests[-1]["messages"] if message["role"] == "user"]
        assert [text[:8] for text in asked] == ["I am Ada", "[slow 8]", "[tool ex", "what is "]


def _commands(worker: psutil.Process, command: str) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return [each for each in worker.children(recursive=True) if " ".join(each.cmdline()) == command]
    return []


# --- on the way out ---


CLOSING = ["before Closed", "inside Closed", "after Closed"]


@LAUNCHERS
async def test_a_worker_killed_while_it_is_stopped_is_no_crash(
    open_pool: OpenPool, faulty: Faulty, tmp_path: Path, launcher: str
) -> None:
    pool = await open_pool(**faulty("dies_where_told"), worker_cwd=tmp_path, **UNBOUNDED, launcher=launcher)

    async def killed_at(name: str, point: str) -> None:
        await pool.send(name, "hello")
        (tmp_path / point).touch()
        stopped = await pool.stop(name)
        assert stopped is not None
        assert (stopped.how, stopped.exit.returncode, stopped.strays) == ("closed", -9, ())
        row = await row_of(pool, name)
        assert (row.state, row.pid, row.restart_count, row.last_error) == ("stopped", None, 0, None)
        await history_is(pool, "hello", name=name)
        assert (await row_of(pool, name)).restart_count == 0

    async with bystander(pool):
        await with_each(CLOSING, killed_at)


@LAUNCHERS
async def test_a_worker_killed_while_it_goes_dormant_is_no_crash(
    open_pool: OpenPool, faulty: Faulty, tmp_path: Path, launcher: str
) -> None:
    pool = await open_pool(
        **faulty("dies_where_told"), worker_cwd=tmp_path, **UNBOUNDED, launcher=launcher, timeouts=quick(idle_s=0.2)
    )

    async def killed_at(name: str, point: str) -> None:
        await pool.send(name, "hello")
        (tmp_path / point).touch()
        await until(lambda: _is(pool, name, "stopped"), "the idle worker to go", 5)
        assert not (tmp_path / point).exists()
        row = await row_of(pool, name)
        assert (row.pid, row.restart_count, row.last_error) == (None, 0, None)
        assert hermes_of(tmp_path / "state", name)["status"] == "dormant"
        assert (await pool.send(name, "/count")).text == "2"
        assert (await row_of(pool, name)).restart_count == 0
        await pool.stop(name)  # or its going dormant would meet the next order

    await with_each(CLOSING, killed_at)


@pytest.mark.parametrize("saved_by", ["turn", "stop", "sweep"])
@LAUNCHERS
async def test_a_worker_killed_while_its_metadata_is_being_saved(
    open_pool: OpenPool,
    faulty: Faulty,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    saved_by: str,
    launcher: str,
) -> None:
    pool = await open_pool(
        **faulty("dies_where_told"), worker_cwd=tmp_path, **UNBOUNDED, launcher=launcher,
        timeouts=quick(idle_s=0.3 if saved_by == "sweep" else 900.0),
    )  # fmt: skip
    saving, go_on = asyncio.Event(), asyncio.Event()
    save = pool._store.save

    async def slow_save(key: Any, record: Any) -> None:
        if saved_by == "turn" or record.status == "dormant":
            saving.set()
            await go_on.wait()
        await save(key, record)

    monkeypatch.setattr(pool._store, "save", slow_save)
    await pool.send("c", "hello")
    stopping = asyncio.create_task(pool.stop("c")) if saved_by == "stop" else None
    await asyncio.wait_for(saving.wait(), 5)
    worker = await process_of(pool, "c")
    worker.kill()
    await until(lambda: _is(pool, "c", "stopped"), "the death to be seen", 3)
    go_on.set()
    if stopping is not None:
        assert await asyncio.wait_for(stopping, 5) is None  # it was gone before anything was sent to it
    await until(lambda: hermes_of(tmp_path / "state", "c").get("status") == "dormant", "the row", 5)
    assert "pid" not in hermes_of(tmp_path / "state", "c")
    row = await row_of(pool, "c")
    assert (row.state, row.pid) == ("stopped", None)
    await history_is(pool, "hello")


# --- the zygote ---


def zygotes() -> list[psutil.Process]:
    return [each for each in psutil.Process().children() if each.name() == "hermes-zygote" and not gone(each)]


@pytest.mark.parametrize("when", ["before Preloaded", "after Preloaded", "before Forked", "after Forked"])
async def test_a_zygote_killed_at_its_work_costs_no_message(
    open_pool: OpenPool, faulty: Faulty, tmp_path: Path, when: str
) -> None:
    (tmp_path / when).touch()
    pool = await open_pool(**faulty("dies_where_told"), worker_cwd=tmp_path, **UNBOUNDED, launcher="zygote")
    replies = await asyncio.wait_for(asyncio.gather(*(pool.send(name, "hello") for name in "abc")), 15)
    assert [(reply.text, reply.restarts) for reply in replies] == [("hello", 0)] * 3
    assert not (tmp_path / when).exists()
    await history_is(pool, "hello")
    for name in "ab":
        assert (await pool.send(name, "/count")).text == "2"


@pytest.mark.parametrize("busy", ["idle", "in a turn"])
async def test_workers_outlive_their_zygote_and_the_next_start_has_another(
    open_pool: OpenPool, faulty: Faulty, tmp_path: Path, busy: str
) -> None:
    pool = await open_pool(**faulty("waits_for_cancel"), worker_cwd=tmp_path, **UNBOUNDED, launcher="zygote")
    async with bystander(pool):
        await pool.send("c", "hello")
        turn = await pool.turn("c", "wait" if busy == "in a turn" else "go on").__aenter__()
        await anext(turn)
        worker = await process_of(pool, "c")
        (zygote,) = zygotes()
        zygote.kill()
        await until(lambda: gone(zygote), "the zygote to die")
        assert await process_of(pool, "c") == worker
        reply = await turn.cancel() if busy == "in a turn" else await turn.reply()
        assert reply is not None
        assert (reply.outcome, reply.restarts) == ("interrupted" if busy == "in a turn" else "completed", 0)
        assert (await pool.send("new", "hello")).text == "hello"
        assert len(zygotes()) == 1
        # Whoever was left without a zygote dies as anybody else does.
        worker.kill()
        await until(lambda: _is(pool, "c", "stopped"), "the death to be seen", 2)
        assert (await pool.send("c", "/count")).text == ("2" if busy == "in a turn" else "3")


@pytest.mark.parametrize("stopped", [False, True])
async def test_a_zygote_killed_between_a_request_and_its_fork_is_replaced_by_a_spawn(
    open_pool: OpenPool, tmp_path: Path, stopped: bool
) -> None:
    pool = await open_pool(**UNBOUNDED, launcher="zygote")
    async with bystander(pool):
        (zygote,) = zygotes()
        zygote.suspend()
        sending = asyncio.create_task(pool.send("c", "hello"))
        await until(lambda: _is(pool, "c", "starting"), "the start")
        stop = asyncio.create_task(pool.stop("c")) if stopped else None
        zygote.kill()
        if stop is None:
            reply = await asyncio.wait_for(sending, 10)
            assert (reply.text, reply.restarts) == ("hello", 0)
            await history_is(pool, "hello")
        else:
            await asyncio.wait_for(stop, 10)
            with pytest.raises(HermesPoolError, match="stop"):
                await asyncio.wait_for(sending, 10)
            await history_is(pool)


async def test_a_zygote_killed_before_it_reports_a_death_leaves_the_death_known(
    open_pool: OpenPool, faulty: Faulty, tmp_path: Path
) -> None:
    pool = await open_pool(**faulty("dies_where_told"), worker_cwd=tmp_path, **UNBOUNDED, launcher="zygote")
    async with bystander(pool):
        await pool.send("c", "hello")
        (tmp_path / "before Reaped").touch()
        os.kill((await process_of(pool, "c")).pid, signal.SIGKILL)
        await until(lambda: _is(pool, "c", "stopped"), "the death to be seen", 2)
        error = (await row_of(pool, "c")).last_error or ""
        assert "SIGKILL" in error or "unknown" in error
        await until(lambda: not (tmp_path / "before Reaped").exists(), "the zygote to die")
        await history_is(pool, "hello")
