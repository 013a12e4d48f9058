"""The catalogue of faults: each program of ``faulty_workers/``, what becomes of its conversation, and nothing is left.

A row says what is said to the program, how each turn of it ends, and which way its session goes meanwhile, as the log
tells it: word by word the events of ``lifecycle``. After that the next message is answered, the conversation is
stopped, and neither a process nor a descriptor, task or error in the log is left. That a fault harms no *other*
conversation, and what it costs, is told by the tests of each fault.
"""

import asyncio
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import psutil
import pytest

from hermes_pool.errors import (
    AgentFailedError,
    HermesPoolError,
    PoolUnavailableError,
    PoolUnusableError,
    TurnInterruptedError,
    TurnTimeoutError,
    WorkerCrashedError,
    WorkerStartError,
    WorkerStartTimeoutError,
    WorkerUnusableError,
)
from hermes_pool.lifecycle import WORKER, WorkerChange, WorkerState
from hermes_pool_worker import wire
from tests.crash.outside import complaints, gone, process_of, row_of
from tests.support import FAULTY, Faulty, FaultyProgram, OpenPool, Pool, quick, until

PROGRAMS_LEAST = 30
LINES_MOST = 25
"""Of code: blank lines and comments are not counted."""
MIB = 1024 * 1024


class Ends(Enum):
    """How a turn may end, beside with a text or with an error."""

    TELLS_A_PID = "with the pid of a process that it leaves"
    WHEN_CANCELLED = "as interrupted, once it was cancelled"


End = str | type[HermesPoolError] | Ends

# The ways that sessions go, in the words of the log.
READY = "start_begun opened"
FAILED = "start_begun start_failed"
TURN = "turn_begun turn_ended"
LOST = "turn_begun died"
"""The worker dies in the turn."""
TWICE = f"{READY} {LOST} {READY} {LOST}"
"""So does the one that takes over."""
FORCED = "turn_begun stop_begun died"
"""The worker does not obey the cancel, and is killed."""
STOP = "stop_begun died"

DEAF = {"close_grace_s": 0.2, "term_grace_s": 0.2}


@dataclass(frozen=True, kw_only=True)
class Row:
    """What is done to one program, and what becomes of it."""

    turns: Mapping[str, End]
    """What is said to it one after the other, and how each turn ends: its reply, or its exact error."""
    path: str
    """The way of its session up to there."""
    state: WorkerState = WorkerState.IDLE
    """Where that has led to, as ``sessions()`` tells it."""
    kill: bool = False
    """Whether its worker is killed then, from outside."""
    restarts: int = 0
    """How many dead workers were replaced."""
    failed_tries: int = 0
    """How many launches failed, without which a start may still have succeeded."""
    then: tuple[str, End] = ("hello again", "hello again")
    """The next message, and how that turn ends."""
    then_path: str | None = None
    """The way of that one; ``None``: of any turn that has a worker, or gets one."""
    how: str | None = "closed"
    """What it takes to stop the worker in the end; ``None``: there is none any more."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    """What lies in its working folder."""
    is_worker: bool = False
    """Whether it stands in the place of the whole worker, shim and all, and not of the agent. Then it is no zygote."""


def crashes(*texts: str, **more: Any) -> Row:
    """The row of a program that ends two workers with each of these messages."""
    return Row(
        turns=dict.fromkeys(texts, WorkerCrashedError),
        path=" ".join([TWICE] * len(texts)),
        state=WorkerState.STOPPED,
        restarts=len(texts) * 2 - 1,
        **more,
    )


def cannot_start(error: type[HermesPoolError], tries: int, again: type[HermesPoolError], **more: Any) -> Row:
    """The row of a program that never gets ready; ``again`` is the error of the next message."""
    return Row(
        turns={"hello": error},
        path=FAILED,
        state=WorkerState.FAILED,
        failed_tries=tries,
        then=("hello again", again),
        then_path="" if issubclass(again, PoolUnavailableError) else FAILED,
        how=None,
        **more,
    )


def harmless(*texts: str, **more: Any) -> Row:
    """The row of a program whose fault is no more than that: each turn is answered with its text."""
    return Row(turns=dict(zip(texts, texts, strict=True)), path=" ".join([READY] + [TURN] * len(texts)), **more)


ROWS: dict[str, Row] = {
    "answers_before_it_is_asked": Row(
        turns={"hello": "hello", "die before": "die before"}, path=f"{READY} {TURN} {LOST} {READY} {TURN}", restarts=1
    ),
    "closes_its_input": Row(
        turns={"close": "closed", "/count": "1"}, path=f"{READY} {TURN} {LOST} {READY} {TURN}", restarts=1
    ),
    "closes_the_wire": Row(
        turns={"close": "close"}, path=f"{READY} {LOST} {READY} {TURN}", restarts=1, is_worker=True
    ),
    "deaf_to_cancel": Row(
        turns={"do not listen": TurnTimeoutError},
        path=f"{READY} {FORCED}",
        state=WorkerState.STOPPED,
        settings={"timeouts": quick(turn_s=0.3, **DEAF)},
    ),
    "deaf_to_everything": harmless("hello", how="killed", settings={"timeouts": quick(**DEAF)}),
    "dies_after_tool": Row(
        turns={"send the mail": TurnInterruptedError}, path=f"{READY} {LOST} {READY}", restarts=1
    ),
    "dies_after_unreported_effect": Row(
        turns={"send the mail": AgentFailedError}, path=f"{READY} {LOST} {READY} {TURN}", restarts=1
    ),
    "dies_before_doing_anything": Row(
        turns={"die once": "die once"}, path=f"{READY} {LOST} {READY} {TURN}", restarts=1
    ),
    "dies_before_hello": harmless("hello", is_worker=True, failed_tries=1, files={"before Hello": b""}),
    "dies_every_time": crashes("die by SIGSEGV"),
    "dies_where_told": Row(
        turns={"hello": "hello"},
        path=f"{READY} {LOST} {READY}",  # the reply was in the history already
        restarts=1,
        failed_tries=1,
        files={"before Opened": b"", "inside TurnDone": b""},
    ),
    "exits_3_at_import": cannot_start(WorkerStartError, 2, WorkerStartError),
    "exits_in_turn": crashes("exit", "interrupt"),
    "floods_stderr": Row(
        turns={"one line": "one line", "one line/die": WorkerCrashedError},
        path=f"{READY} {TURN} {LOST} {READY} {LOST}",
        state=WorkerState.STOPPED,
        restarts=1,
        then=("one line", "one line"),
    ),
    "floods_stderr_in_its_start": harmless("hello"),
    "floods_with_what_a_file_holds": crashes(
        "flood/wire/20", files={"flood": bytes(wire.encode(wire.TextDelta("nobody's", 1, "x"))) * 1000}
    ),
    "forks_a_helper": Row(
        turns={"fork": Ends.TELLS_A_PID}, kill=True, path=f"{READY} {TURN} died", state=WorkerState.STOPPED
    ),
    "greets_instead_of_hello": cannot_start(WorkerStartError, 2, WorkerStartError, is_worker=True),
    "hangs_or_grows": Row(
        turns={"deadlock": TurnTimeoutError},
        path=f"{READY} {FORCED}",
        state=WorkerState.STOPPED,
        settings={"timeouts": quick(turn_s=0.3, **DEAF)},
    ),
    "holds_the_gil": Row(
        turns={"hold": TurnTimeoutError},
        path=f"{READY} {FORCED}",
        state=WorkerState.STOPPED,
        settings={"timeouts": quick(turn_s=0.3, **DEAF)},
    ),
    "ignores_sigterm_beside_a_tool": Row(
        turns={"hello": Ends.TELLS_A_PID},
        path=f"{READY} {TURN}",
        then=("hello again", Ends.TELLS_A_PID),
        how="killed",
        settings={"timeouts": quick(**DEAF)},
    ),
    "keeps_a_thread": harmless("hello"),
    "leaves_a_shell_running": Row(
        turns={"shell never": Ends.TELLS_A_PID},
        path=f"{READY} {TURN}",
        settings={"agent_options": {"server": True}},
    ),
    "leaves_all_kinds_of_tools": Row(
        turns=dict.fromkeys(["tool ", "tool deaf", "tool setsid", "tool setsid daemon cleared deaf"], Ends.TELLS_A_PID),
        path=f"{READY} {TURN} {TURN} {TURN} {TURN}",
    ),
    "leaves_tools_behind": Row(turns={"start a tool": Ends.TELLS_A_PID}, path=f"{READY} {TURN}"),
    "marks_signals": Row(turns={"wait": Ends.WHEN_CANCELLED}, path=f"{READY} {TURN}"),
    "needs_what_is_not_installed": cannot_start(WorkerUnusableError, 1, PoolUnusableError),
    "never_opens": cannot_start(
        WorkerStartTimeoutError, 1, WorkerStartTimeoutError, settings={"timeouts": quick(start_s=0.6)}
    ),
    "never_says_hello": cannot_start(
        WorkerStartTimeoutError, 1, WorkerStartTimeoutError, settings={"timeouts": quick(start_s=0.5)}, is_worker=True
    ),
    "prints_emoji": harmless("hello"),
    "prints_on_the_wire": harmless("hello", "and more"),
    "reads_no_more": Row(
        turns={"read no more": "deaf from here on", "x" * 200_000: TurnTimeoutError},
        path=f"{READY} {TURN} {FORCED}",
        state=WorkerState.STOPPED,
        settings={"timeouts": quick(progress_s=0.4, **DEAF)},
    ),
    "repeats_old_frames": harmless("one", "two", "three", is_worker=True),
    "replies_big": Row(
        turns={str(MIB + 1): AgentFailedError, "3": "xxx"},
        path=f"{READY} {TURN} {TURN}",
        then=("1", "x"),
        settings={"frame_bytes_max": MIB},
    ),
    "replies_then_dies": Row(
        turns={"fine": "fine", "torn": "torn"},
        path=f"{READY} {TURN} died {READY} {TURN} died",
        state=WorkerState.STOPPED,
        restarts=1,
        then_path=f"{READY} {TURN} died",
        how=None,
        is_worker=True,
    ),
    "returns_what_is_no_outcome": Row(
        turns=dict.fromkeys(["nothing", "an unknown kind", "what cannot be encoded"], AgentFailedError),
        path=f"{READY} {TURN} {TURN} {TURN}",
    ),
    "segfaults_at_import": cannot_start(WorkerStartError, 2, WorkerStartError),
    "sends_bogus_bytes": crashes("instead:0000000107", is_worker=True),
    "sends_lone_surrogates": Row(
        turns={"in the error": AgentFailedError, "in the reply": "half \ufffd of \ufffd an emoji"},
        path=f"{READY} {TURN} {TURN}",
    ),
    "sends_oversize_frame": crashes(
        str(MIB + 1), then=("1", "x"), settings={"frame_bytes_max": MIB}, is_worker=True
    ),
    "speaks_another_protocol": cannot_start(WorkerUnusableError, 1, PoolUnusableError, is_worker=True),
    "talks_for_ever": Row(
        turns={"talk": TurnTimeoutError}, path=f"{READY} {TURN}", settings={"timeouts": quick(turn_s=0.3)}
    ),
    "tools_read_stdin": Row(
        turns={"run them": TurnTimeoutError},
        path=f"{READY} {TURN}",
        then=("run them again", TurnTimeoutError),  # it waits for a cancel in each turn
        settings={"timeouts": quick(turn_s=0.3, close_grace_s=10.0)},
    ),
    "waits_for_cancel": Row(turns={"wait": Ends.WHEN_CANCELLED}, path=f"{READY} {TURN}"),
    "works_after_its_turn": harmless("job made", "end made", "job never"),
    "writes_what_a_file_holds": crashes("in turn and wait", files={"in turn": b"Traceback (most recent call last):\n"}),
}  # fmt: skip

CASES = [
    pytest.param(name, "spawn" if row.is_worker else "zygote", id=f"{name}-{'spawn' if row.is_worker else 'zygote'}")
    for name, row in ROWS.items()
] + [
    pytest.param(name, "spawn", id=f"{name}-spawn", marks=pytest.mark.slow)
    for name, row in ROWS.items()
    if not row.is_worker
]


class Told(logging.Handler):
    """What the log says of conversation ``c``: the way that it goes, and how many launches have failed."""

    LINE = re.compile(r"(\w+) .*?conversation_id='c'(?: state='(\w+)' before='(\w+)'| step=)")

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.changes: list[tuple[WorkerState, WorkerChange, WorkerState]] = []
        self.failed_tries = 0
        self._read = 0

    def emit(self, record: logging.LogRecord) -> None:
        found = self.LINE.match(record.getMessage())
        if found and found[2]:
            self.changes.append((WorkerState(found[3]), WorkerChange(found[1]), WorkerState(found[2])))
        elif found and found[1] == "start_failed":
            self.failed_tries += 1

    def path(self) -> str:
        """The events since this was asked the last time."""
        events = [event.value for _, event, _ in self.changes[self._read :]]
        self._read = len(self.changes)
        return " ".join(events)


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Iterator[Told]:
    caplog.set_level(logging.DEBUG, "hermes_pool")
    handler, log = Told(), logging.getLogger("hermes_pool")
    log.addHandler(handler)
    yield handler
    log.removeHandler(handler)
    state = WorkerState.STOPPED
    for before, event, follows in handler.changes:
        assert before == state
        assert follows == WORKER[before][event]
        state = follows
    assert [each.getMessage() for each in caplog.get_records("call") if each.levelno >= logging.ERROR] == []


async def say(pool: Pool, text: str, end: End, left: list[psutil.Process]) -> None:
    """Have a turn, and see that it ends as it should; a process that it leaves is added to ``left``."""
    match end:
        case str():
            assert (await pool.send("c", text)).text == end
        case Ends.TELLS_A_PID:
            left.append(psutil.Process(int((await pool.send("c", text)).text)))
        case Ends.WHEN_CANCELLED:
            async with pool.turn("c", text) as turn:
                await anext(turn)
                reply = await turn.cancel()
            assert reply is not None
            assert reply.outcome == "interrupted"
        case _:
            with pytest.raises(end) as caught:
                await pool.send("c", text)
            assert type(caught.value) is end
            assert caught.value.conversation_id == "c"


async def is_in(pool: Pool, state: WorkerState) -> bool:
    return (await row_of(pool, "c")).state == state


@pytest.mark.parametrize(("name", "launcher"), CASES)
async def test_a_fault_ends_as_its_row_says_and_leaves_nothing(  # noqa: PLR0917 - fixtures
    open_pool: OpenPool,
    faulty: Faulty,
    instead_of_python: FaultyProgram,
    told: Told,
    tmp_path: Path,
    name: str,
    launcher: str,
) -> None:
    row = ROWS[name]
    for file, content in row.files.items():
        tmp_path.joinpath(file).write_bytes(content)
    program = instead_of_python(name) if row.is_worker else faulty(name)
    pool = await open_pool(**{**program, "worker_cwd": tmp_path, "launcher": launcher, **row.settings})
    left: list[psutil.Process] = []
    with complaints() as complained:
        for text, end in row.turns.items():
            await asyncio.wait_for(say(pool, text, end, left), 15)
            if row.how is None and row.state is WorkerState.STOPPED:  # it dies after each turn, and not in the next one
                await until(lambda: is_in(pool, WorkerState.STOPPED), "the death", 5)
        if row.kill:
            (await process_of(pool, "c")).kill()
        await until(lambda: is_in(pool, row.state), f"the state {row.state}", 5)
        shown = await row_of(pool, "c")
        assert (shown.pid is None) == (row.state in (WorkerState.STOPPED, WorkerState.FAILED))
        assert shown.restart_count == row.restarts
        assert told.failed_tries == row.failed_tries
        assert told.path() == row.path

        await asyncio.wait_for(say(pool, *row.then, left), 15)
        if row.how is None:
            await until(lambda: is_in(pool, row.state), f"the state {row.state} again", 5)
        then_path = row.then_path
        if then_path is None:
            then_path = TURN if row.state is WorkerState.IDLE else f"{READY} {TURN}"
        assert told.path() == then_path

        stopped = await pool.stop("c")
        assert (None if stopped is None else stopped.how) == row.how
        assert stopped is None or not stopped.left
        assert told.path() == ("" if row.how is None else STOP)
        shown = await row_of(pool, "c")
        assert (shown.pid, shown.state) == (None, row.state if row.how is None else WorkerState.STOPPED)
        await until(lambda: all(map(gone, left)), "what its tools have left to be gone", 5)
    assert complained == []


def test_each_program_of_the_catalogue_has_a_row_and_each_row_a_program() -> None:
    assert set(ROWS) == {file.stem for file in FAULTY.glob("*.py")}
    assert len(ROWS) >= PROGRAMS_LEAST


@pytest.mark.parametrize("name", ROWS)
def test_a_program_of_the_catalogue_is_short(name: str) -> None:
    lines = [line.strip() for line in (FAULTY / f"{name}.py").read_text().splitlines()]
    assert len([line for line in lines if line and not line.startswith("#")]) <= LINES_MOST
