"""What an agent's own output, its tools and broken programs do to the wire."""

import asyncio
import json
import logging
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import hermes_pool_worker
from hermes_pool import RestartPolicy
from hermes_pool.errors import AgentFailedError, WorkerCrashedError, WorkerStartError, WorkerUnusableError
from hermes_pool_worker import wire
from tests.crash.outside import complaints, gone, lines, memory_growth, process_of, row_of
from tests.support import FAULTY, Faulty, FaultyProgram, OpenPool, known, quick, until

LAUNCHERS = pytest.mark.parametrize("launcher", ["spawn", "portable"])
WORKER_PROGRAM = Path(hermes_pool_worker.__file__).with_name("__main__.py")
MIB = 1024 * 1024
WAYS = ("print", "__stdout__", "os.write", "C", "child", "warning")


@LAUNCHERS
async def test_noise_on_stdout_goes_to_the_log_and_never_into_a_reply(
    open_pool: OpenPool, faulty: Faulty, caplog: pytest.LogCaptureFixture, launcher: str
) -> None:
    caplog.set_level(logging.INFO, "hermes_pool")
    pool = await open_pool(**faulty("prints_on_the_wire"), launcher=launcher)

    def logged() -> str:
        return "\n".join(
            text for text in caplog.messages if text.startswith("worker_stderr") and "conversation_id='noisy'" in text
        )

    for number in range(3):
        text = f"message {number}"
        async with pool.turn("noisy", text) as turn:
            events = [event async for event in turn]
            reply = await turn.reply()
        assert events == [wire.TextDelta(turn.turn_id, 1, text)]
        assert (reply.text, reply.restarts, reply.notice) == (text, 0, None)
        await until(lambda: logged().count("after-reply by warning") > number, "the noise after the reply")  # noqa: B023
    for when in ("at-import", "mid-turn", "after-reply"):
        for way in WAYS:
            assert f"{when} by {way}" in logged()
    assert (await row_of(pool, "noisy")).incarnation == 1


@LAUNCHERS
async def test_tools_that_read_stdin_see_its_end_and_take_nothing_from_the_wire(
    open_pool: OpenPool, faulty: Faulty, launcher: str
) -> None:
    pool = await open_pool(**faulty("tools_read_stdin"), launcher=launcher, timeouts=quick(close_grace_s=15.0))
    async with pool.turn("c", "run them") as turn:
        await anext(turn)
        reply = await turn.cancel()
    assert reply is not None
    seen = json.loads(reply.text)
    assert seen["cancelled"]
    assert max(seen["seconds"]) < 0.5


def test_a_ping_is_answered_while_tools_run_that_inherit_the_standard_descriptors() -> None:
    command = [sys.executable, "-P", str(WORKER_PROGRAM), "tools_read_stdin:Agent", str(MIB), str(FAULTY)]
    decoder: wire.FrameDecoder[Any] = wire.FrameDecoder(wire.FromWorker)
    received: list[Any] = []
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
    ) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None

        def write(*frames: wire.Message) -> None:
            known(worker.stdin).write(b"".join(wire.encode(frame) for frame in frames))

        write(wire.Open("c"), wire.Turn("t-1", 1, "run them"))
        while not any(isinstance(frame, wire.Status) for frame in received):
            received += decoder.feed(worker.stdout.read(65536))
        write(*map(wire.Ping, range(50)), wire.Cancel("t-1", 1), wire.Close())
        while data := worker.stdout.read(65536):
            received += decoder.feed(data)
        assert worker.wait(timeout=15) == 0
    assert decoder.failed is None
    assert not decoder.mid_frame
    done = next(number for number, frame in enumerate(received) if isinstance(frame, wire.TurnDone))
    assert [frame.number for frame in received[:done] if isinstance(frame, wire.Pong)] == list(range(50))
    seen = json.loads(received[done].text)
    assert seen["cancelled"]
    assert max(seen["seconds"]) < 0.5
    assert isinstance(received[-1], wire.Closed)


async def test_a_reply_over_the_limit_is_an_error_and_the_worker_lives_on(open_pool: OpenPool, faulty: Faulty) -> None:
    pool = await open_pool(**faulty("replies_big"), frame_bytes_max=4 * MIB)
    with pytest.raises(AgentFailedError, match=r"4,194,3\d\d bytes is over the limit of 4,194,304 bytes") as caught:
        await pool.send("c", str(4 * MIB + 1))
    assert caught.value.reason == "frame_too_large"
    assert caught.value.conversation_id == "c"
    worker = await process_of(pool, "c")
    for size in (1, 2, 3):
        assert (await pool.send("c", str(size))).text == "x" * size
    for _ in range(50):
        assert len((await pool.send("c", str(MIB))).text) == MIB
    assert await process_of(pool, "c") == worker


async def test_an_event_over_the_limit_costs_the_event_and_not_the_turn(open_pool: OpenPool, faulty: Faulty) -> None:
    pool = await open_pool(**faulty("replies_big"), frame_bytes_max=MIB)
    reply = await pool.send("c", f"{2 * 1000 * 1000 // 2 - 10} in deltas of {999_990}")
    assert len(reply.text) == 999_990


@LAUNCHERS
async def test_a_program_that_breaks_the_limit_is_replaced(
    open_pool: OpenPool, instead_of_python: FaultyProgram, launcher: str
) -> None:
    pool = await open_pool(**instead_of_python("sends_oversize_frame"), frame_bytes_max=4 * MIB, launcher=launcher)
    assert (await pool.send("c", "1")).text == "x"
    worker = await process_of(pool, "c")
    with complaints() as complained, pytest.raises(WorkerCrashedError, match="broke the protocol") as caught:
        await pool.send("c", str(4 * MIB + 1))
    assert "bytes is over the limit of 4,194,304 bytes" in str(caught.value)
    assert "4,194,3" in str(caught.value)
    assert (await row_of(pool, "c")).incarnation == 2
    await until(lambda: gone(worker), "the worker to go")
    for size in (1, 2, 3):
        assert (await pool.send("c", str(size))).text == "x" * size
    for _ in range(50):
        assert len((await pool.send("c", str(MIB))).text) == MIB
    assert (await row_of(pool, "c")).incarnation == 3
    assert complained == []


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


TEN = b"0123456789"
BOGUS = {
    "a length of 2 GiB": (2**31 - 1).to_bytes(4, "big") + TEN,
    "a bare array32 header": b"\xdd\xff\xff\xff\xff" + TEN,
    "a bare bin32 header": b"\xc6\xff\xff\xff\xff" + TEN,
    "an array32 header in a frame": framed(b"\xdd\xff\xff\xff\xff" + TEN),
    "a bin32 header in a frame": framed(b"\xc6\xff\xff\xff\xff" + TEN),
    "a bin32 text in a frame": framed(b"\x94\xa9TextDelta\xa1t\x01\xdb\xff\xff\xff\xff" + TEN),
    "trailing bytes": framed(bytes(wire.encode(wire.Closed()))[4:] + b"\x00"),
    "a bare integer": framed(b"\x07"),
    "an empty frame": framed(b""),
    "an unknown message": framed(b"\x91\xa5Bogus"),
    "a message of the other direction": bytes(wire.encode(wire.Close())),
    "deep nesting": framed(b"\x91" * 100_000),
}


@pytest.mark.parametrize("kind", BOGUS)
async def test_bogus_bytes_in_a_turn_end_that_worker_at_once(
    open_pool: OpenPool, instead_of_python: FaultyProgram, kind: str
) -> None:
    pool = await open_pool(
        **instead_of_python("sends_bogus_bytes"),
        restarts=RestartPolicy(replacements_per_turn_max=0),
        frame_bytes_max=64 * MIB,
    )
    assert (await pool.send("c", "hello")).text == "hello"
    worker = await process_of(pool, "c")
    began = time.monotonic()
    with memory_growth() as growth, complaints() as complained:
        with pytest.raises(WorkerCrashedError, match="broke the protocol") as caught:
            await pool.send("c", f"instead:{BOGUS[kind].hex()}")
        assert time.monotonic() - began < 1
    assert growth.mib < 50
    assert caught.value.conversation_id == "c"
    assert gone(worker)
    assert (await pool.send("c", "hello again")).text == "hello again"
    assert await process_of(pool, "c") != worker
    assert complained == []


@pytest.mark.parametrize("kind", ["a length of 2 GiB", "trailing bytes", "a bare integer"])
async def test_bogus_bytes_after_a_reply_cost_the_worker_and_no_turn(
    open_pool: OpenPool, instead_of_python: FaultyProgram, kind: str
) -> None:
    pool = await open_pool(
        **instead_of_python("sends_bogus_bytes"), restarts=RestartPolicy(replacements_per_turn_max=0)
    )
    assert (await pool.send("c", f"fine:{BOGUS[kind].hex()}")).text == "fine"
    await until(lambda: _is_stopped(pool), "the worker to be discarded", 2)
    assert "broke the protocol" in ((await row_of(pool, "c")).last_error or "")
    reply = await pool.send("c", "hello")
    assert (reply.text, reply.restarts) == ("hello", 0)


async def _is_stopped(pool: Any) -> bool:
    row = await row_of(pool, "c")
    return row.state == "stopped" and row.pid is None


async def test_bogus_bytes_in_every_attempt_are_one_error_after_one_restart(
    open_pool: OpenPool, instead_of_python: FaultyProgram
) -> None:
    pool = await open_pool(**instead_of_python("sends_bogus_bytes"))
    with pytest.raises(WorkerCrashedError, match="broke the protocol"):
        await asyncio.wait_for(pool.send("c", f"instead:{BOGUS['a length of 2 GiB'].hex()}"), 5)
    assert (await row_of(pool, "c")).incarnation == 2


async def test_a_worker_that_we_have_killed_is_not_said_to_be_out_of_memory(
    open_pool: OpenPool, instead_of_python: FaultyProgram
) -> None:
    pool = await open_pool(
        **instead_of_python("sends_bogus_bytes"), restarts=RestartPolicy(replacements_per_turn_max=0)
    )
    with pytest.raises(WorkerCrashedError) as caught:
        await pool.send("c", f"instead:{BOGUS['a bare integer'].hex()}")
    assert "out of memory" not in str(caught.value)
    assert "broke the protocol" in caught.value.exit


@LAUNCHERS
async def test_a_banner_instead_of_the_hello_is_a_start_error(
    open_pool: OpenPool, instead_of_python: FaultyProgram, tmp_path: Path, launcher: str
) -> None:
    pool = await open_pool(**instead_of_python("greets_instead_of_hello"), worker_cwd=tmp_path, launcher=launcher)
    with pytest.raises(WorkerStartError, match="broke the protocol") as caught:
        await asyncio.wait_for(pool.send("c", "hello"), 5)
    assert caught.value.step == "hello"
    assert len(lines(tmp_path / "starts")) == 2
    assert (await row_of(pool, "c")).state == "failed"


@LAUNCHERS
async def test_a_worker_that_closes_its_side_of_the_wire_is_replaced(
    open_pool: OpenPool, instead_of_python: FaultyProgram, launcher: str
) -> None:
    pool = await open_pool(**instead_of_python("closes_the_wire"), launcher=launcher)
    await pool.send("c", "hello")
    worker = await process_of(pool, "c")
    reply = await asyncio.wait_for(pool.send("c", "close"), 4)
    assert (reply.text, reply.restarts) == ("close", 1)
    assert gone(worker)


async def test_frames_of_other_turns_and_attempts_reach_nobody(
    open_pool: OpenPool, instead_of_python: FaultyProgram
) -> None:
    pool = await open_pool(**instead_of_python("repeats_old_frames"))
    for number in range(20):
        text = f"message {number}"
        async with pool.turn("c", text) as turn:
            events = [event async for event in turn]
            reply = await turn.reply()
        assert events == [wire.TextDelta(turn.turn_id, 1, text)]
        assert (reply.text, reply.session_id) == (text, "raw-1")
    row = await row_of(pool, "c")
    assert (row.turns, row.incarnation, row.state) == (20, 1, "idle")


async def test_a_worker_of_another_protocol_is_refused_and_not_tried_again(
    open_pool: OpenPool, instead_of_python: FaultyProgram, tmp_path: Path
) -> None:
    pool = await open_pool(**instead_of_python("speaks_another_protocol"), worker_cwd=tmp_path)
    with pytest.raises(WorkerUnusableError, match="protocol 2 and this supervisor 1") as caught:
        await asyncio.wait_for(pool.send("c", "hello"), 5)
    assert caught.value.conversation_id == "c"
    assert len(lines(tmp_path / "starts")) == 1


@pytest.mark.parametrize(
    "text",
    [
        "nothing",
        "a number as text",
        "an unknown kind",
        "a fraction in usage",
        "what cannot be encoded",
        "a number as delta",
    ],
)
async def test_a_wrong_type_out_of_an_agent_fails_its_turn_and_not_its_worker(
    open_pool: OpenPool, faulty: Faulty, text: str
) -> None:
    pool = await open_pool(**faulty("returns_what_is_no_outcome"))
    await pool.send("c", "hello")
    worker = await process_of(pool, "c")
    async with pool.turn("c", text) as turn:
        with pytest.raises(AgentFailedError) as caught:
            await turn.reply()
    assert caught.value.reason == "agent_error"
    assert (await pool.send("c", "hello again")).text == "hello again"
    assert await process_of(pool, "c") == worker
