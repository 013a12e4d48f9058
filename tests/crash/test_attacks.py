"""Workers that attack their supervisor: what they send, and what they do not take, harms no other conversation.

In each test an innocent conversation is talked to all the while: every turn of it succeeds, by the same worker, and
within ``BOUND_S``. The attacker's own conversation gets its stream or a typed error, and its next message works. What
is sent by broken programs, and what it costs, is in ``test_wire_abuse`` too.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from hermes_pool import HermesSessionManager, Reply, RestartPolicy
from hermes_pool.errors import (
    HermesPoolError,
    TurnTimeoutError,
    WorkerCrashedError,
    WorkerStartError,
)
from hermes_pool_worker import wire
from tests.crash.outside import complaints, gone, hermes_of, memory_growth, process_of, row_of
from tests.support import Faulty, OpenPool, quick, until

LAUNCHERS = pytest.mark.parametrize("launcher", ["zygote", "spawn"])
MIB = 1024 * 1024
BOUND_S = 0.5
"""Longest turn of an innocent conversation under attack: one takes 1 ms alone, and 50 ms where many tests run."""


@asynccontextmanager
async def innocent(pool: HermesSessionManager, name: str = "innocent") -> AsyncIterator[SimpleNamespace]:
    """Talk to a conversation all the while, and see that it notices nothing."""
    await pool.send(name, "hello")
    worker = await process_of(pool, name)
    seen = SimpleNamespace(turns=0, worst_s=0.0)

    async def talk() -> None:
        while True:
            began = time.monotonic()
            async with asyncio.timeout(10):  # wait_for of Python 3.11 may swallow the cancel below
                reply = await pool.send(name, f"message {seen.turns}")
            seen.worst_s = max(seen.worst_s, time.monotonic() - began)
            assert (reply.text, reply.restarts) == (f"message {seen.turns}", 0)
            seen.turns += 1
            await asyncio.sleep(0.005)  # a pace

    talking = asyncio.create_task(talk())
    try:
        yield seen
        turns = seen.turns
        await until(lambda: talking.done() or seen.turns > turns, "a further turn of the innocent")
    finally:
        talking.cancel()
        await asyncio.wait({talking})
    if not talking.cancelled():
        talking.result()
    assert await process_of(pool, name) == worker
    print(f"{name}: {seen.turns} turns, the slowest took {seen.worst_s * 1000:.0f} ms")
    assert seen.worst_s < BOUND_S


async def attack(
    pool: HermesSessionManager, cwd: Path, make: Callable[[str, int], bytes], text: str
) -> tuple[Reply | HermesPoolError, list[wire.TurnEvent]]:
    """Have the worker of conversation ``c`` send bytes in a turn; return the reply or the error, and the events."""
    turn = pool.turn("c", text)
    cwd.joinpath("in turn").write_bytes(make(turn.turn_id, 1))
    async with turn:
        events = [event async for event in turn]
        try:
            return await asyncio.wait_for(turn.reply(), 10), events
        except HermesPoolError as error:
            return error, events


# --- what is no message ---


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


def packed(*fields: Any) -> bytes:
    """A frame of anything at all, in the shape of a message."""
    return framed(msgspec.msgpack.encode(fields))


def of(turn_id: str, more: bytes, count: int = 4) -> bytes:
    """A ``TextDelta`` of ``count`` fields that ends with raw bytes."""
    head = msgspec.msgpack.encode("TextDelta") + msgspec.msgpack.encode(turn_id) + b"\x01"
    return framed(bytes([0x90 + count]) + head + more)


HUGE = b"\xff\xff\xff\xff"
BREAKS: dict[str, Callable[[str, int], bytes]] = {
    "random bytes": lambda *_: random.Random(4).randbytes(5000),
    "text": lambda *_: b"Traceback (most recent call last):\n" * 100,
    "zeroes": lambda *_: bytes(1000),
    "the longest length there is": lambda *_: HUGE + b"x" * 1000,
    "a length of one byte too many, and the next frame": lambda t, a: (
        (len(wire.encode(wire.TextDelta(t, a, "x"))) - 3).to_bytes(4, "big")
        + bytes(wire.encode(wire.TextDelta(t, a, "x")))[4:]
        + bytes(wire.encode(wire.TextDelta(t, a, "y")))
    ),
    "too few fields": lambda t, _: packed("TextDelta", t),
    "a tag alone": lambda *_: packed("TurnDone"),
    "no fields": lambda *_: packed(),
    "a map": lambda t, a: framed(
        msgspec.msgpack.encode({"type": "TextDelta", "turn_id": t, "attempt": a, "text": "x"})
    ),
    "a tag that is a number": lambda t, a: packed(7, t, a, "x"),
    "a tag that is nothing": lambda t, a: packed(None, t, a, "x"),
    "a message in a message": lambda t, a: packed(["TextDelta", t, a, "x"]),
    "a text that is a number": lambda t, a: packed("TextDelta", t, a, 7),
    "a text that is bytes": lambda t, a: packed("TextDelta", t, a, b"x"),
    "a text that is not UTF-8": lambda t, _: of(t, b"\xa2\xff\xfe"),
    "a text of 4 GiB": lambda t, _: of(t, b"\xdb" + HUGE + b"x"),
    "an extension type": lambda t, _: of(t, b"\xc9\xff\xff\xff\xff\x01x"),
    "a turn that is a list": lambda _, a: packed("TextDelta", [], a, "x"),
    "an attempt that is a fraction": lambda t, _: packed("TextDelta", t, 1.5, "x"),
    "an attempt that is a text": lambda t, _: packed("TextDelta", t, "1", "x"),
    "an outcome that is none": lambda t, a: packed("TurnDone", t, a, "x", "s", "finished"),
    "counts that are texts": lambda t, a: packed("TurnDone", t, a, "x", "s", "completed", None, {"tokens": "many"}),
    "counts by the billion": lambda t, _: framed(
        b"\x98" + b"".join(map(msgspec.msgpack.encode, ("TurnDone", t, 1, "x", "s", "completed", None)))
        + b"\xdf" + HUGE + b"\xa1x"
    ),
    "modules by the billion": lambda *_: framed(b"\x92\xa8Imported\xdd" + HUGE + b"\xa1x"),
    "a question of no kind": lambda t, a: packed("Question", t, a, "q", "order", "Do it!", [], 1.0),
    "a session that is nothing": lambda t, a: packed("SessionMoved", t, a, None),
    "lists 100,000 deep in a field too many": lambda t, _: of(t, b"\xa1x" + b"\x91" * 100_000 + b"\xc0", 5),
    "maps 100,000 deep in a field too many": lambda t, _: of(t, b"\xa1x" + b"\x81\xa1k" * 100_000 + b"\xc0", 5),
    "maps 100,000 deep instead of counts": lambda t, _: framed(
        b"\x98" + b"".join(map(msgspec.msgpack.encode, ("TurnDone", t, 1, "x", "s", "completed", None)))
        + b"\x81\xa1k" * 100_000 + b"\xc0"
    ),
}  # fmt: skip


@LAUNCHERS
async def test_whatever_is_no_message_ends_its_worker_and_nothing_else(
    open_pool: OpenPool, faulty: Faulty, tmp_path: Path, launcher: str
) -> None:
    pool = await open_pool(
        **faulty("writes_what_a_file_holds"),
        worker_cwd=tmp_path,
        launcher=launcher,
        restarts=RestartPolicy(replacements_per_turn_max=0, quarantine_after=0),
    )
    await pool.send("c", "hello")
    with complaints() as complained, memory_growth() as growth:
        async with innocent(pool):
            # A worker that is spawned takes its time to start: every third will do.
            kinds = list(BREAKS.items())[:: 1 if launcher == "zygote" else 3]
            for number, (kind, make) in enumerate(kinds, 1):
                worker = await process_of(pool, "c")
                began = time.monotonic()
                error, events = await attack(pool, tmp_path, make, "in turn and wait")
                assert isinstance(error, WorkerCrashedError), (kind, error)
                assert "broke the protocol" in error.exit, kind
                assert "Traceback" not in str(error), kind
                assert time.monotonic() - began < 2, kind
                assert len(events) <= 1, kind
                assert gone(worker), kind
                reply = await asyncio.wait_for(pool.send("c", "/count"), 10)
                assert (reply.text, reply.restarts) == (str(number + 1), 0), kind
    assert growth.mib < 50
    assert complained == []


@LAUNCHERS
async def test_the_same_before_the_worker_is_ready_is_a_start_error(
    open_pool: OpenPool, faulty: Faulty, tmp_path: Path, launcher: str
) -> None:
    pool = await open_pool(**faulty("writes_what_a_file_holds"), worker_cwd=tmp_path, launcher=launcher)
    async with innocent(pool):
        for kind in ("random bytes", "too few fields"):
            tmp_path.joinpath("in open").write_bytes(BREAKS[kind]("t", 1))
            with pytest.raises(WorkerStartError, match="broke the protocol") as caught:
                await asyncio.wait_for(pool.send("c", "hello"), 10)
            assert (caught.value.step, caught.value.conversation_id) == ("open", "c")
            assert (await row_of(pool, "c")).pid is None
            tmp_path.joinpath("in open").unlink()
            assert (await asyncio.wait_for(pool.send("c", "hello"), 10)).text == "hello", kind
            await pool.stop("c")


@pytest.mark.parametrize(("launcher", "cut"), [("zygote", 1), ("zygote", 4), ("zygote", 20), ("spawn", 3)])
async def test_half_a_frame_and_then_silence_ends_at_the_limit_of_silence(
    open_pool: OpenPool, faulty: Faulty, tmp_path: Path, launcher: str, cut: int
) -> None:
    pool = await open_pool(
        **faulty("writes_what_a_file_holds"), worker_cwd=tmp_path, launcher=launcher,
        timeouts=quick(progress_s=0.3, close_grace_s=0.2, term_grace_s=0.2),
    )  # fmt: skip
    await pool.send("c", "hello")
    async with innocent(pool):
        half = lambda t, a: bytes(wire.encode(wire.TextDelta(t, a, "x" * 100)))[:cut]  # noqa: E731
        began = time.monotonic()
        error, events = await attack(pool, tmp_path, half, "in turn and wait")
        assert time.monotonic() - began < 0.3 + 0.4 + 1
        assert isinstance(error, TurnTimeoutError | WorkerCrashedError)
        assert events == []
        assert (await asyncio.wait_for(pool.send("c", "/count"), 10)).text == "2"


# --- what is a message, and not meant for it ---


@LAUNCHERS
async def test_frames_of_other_turns_attempts_and_conversations_reach_nobody(
    open_pool: OpenPool, faulty: Faulty, tmp_path: Path, launcher: str
) -> None:
    pool = await open_pool(**faulty("writes_what_a_file_holds"), worker_cwd=tmp_path, launcher=launcher)
    await pool.send("c", "hello")
    session_id = (await row_of(pool, "c")).session_id
    victim = pool.turn("victim", "in turn of the victim and wait")
    here = wire.Status(victim.turn_id, 1, "here")
    tmp_path.joinpath("in turn of the victim").write_bytes(wire.encode(here))
    async with innocent(pool), victim:
        assert await anext(victim) == here

        def of_others(turn_id: str, attempt: int) -> bytes:
            prefix, number = turn_id.split("-")
            ids = [(victim.turn_id, 1), (f"{prefix}-{int(number) + 1}", 1), ("", 0)]
            ids += [(turn_id, other) for other in (0, -1, attempt + 1, 2**63, -(2**63))]
            frames = bytearray()
            for each in ids:
                frames += wire.encode(wire.TextDelta(*each, "evil"))
                frames += wire.encode(wire.ToolStarted(*each, "call", "evil", ""))
                frames += wire.encode(wire.Question(*each, "q", "approval", "evil?", ["once"], 1e9))
                frames += wire.encode(wire.SessionMoved(*each, "evil"))
                frames += wire.encode(wire.TurnFailed(*each, "evil", "evil", "evil", "evil"))
                frames += wire.encode(wire.TurnDone(*each, "evil", "evil"))
            for again in (wire.Hello(99, 1, "evil", {}), wire.Prepared(["evil"]), wire.Opened("evil"), wire.Pong(-1)):
                frames += wire.encode(again)
            return bytes(frames + packed("TextDelta", turn_id, attempt, "a newer worker", "knows", {"more": 1}))

        reply, events = await attack(pool, tmp_path, of_others, "in turn")
        assert isinstance(reply, Reply)
        assert (reply.text, reply.session_id, reply.restarts) == ("waited", session_id, 0)
        assert [event.text for event in events if isinstance(event, wire.TextDelta)] == ["a newer worker"]
        assert len(events) == 1
        assert victim.outcome is None
        assert (victim._turn.tools, victim._turn.questions) == ([], {})
        assert (await row_of(pool, "c")).session_id == session_id
        end = await victim.cancel()
        assert end is not None
        assert end.text == "waited"
    assert (await pool.send("c", "/count")).text == "2"


@LAUNCHERS
async def test_a_worker_that_takes_over_cannot_end_the_turn_before_it_is_given_it(
    open_pool: OpenPool, faulty: Faulty, launcher: str
) -> None:
    pool = await open_pool(**faulty("answers_before_it_is_asked"), launcher=launcher)
    session_id = (await pool.send("c", "hello")).session_id
    with complaints() as complained:
        async with pool.turn("c", "die before") as turn:
            events = [event async for event in turn if not isinstance(event, wire.Status)]
            reply = await turn.reply()
        assert isinstance(reply, Reply)
        assert (reply.text, reply.session_id, reply.restarts) == ("die before", session_id, 1)
        assert events == [wire.TextDelta(turn.turn_id, 2, "die before")]
        assert (await pool.send("c", "/count")).text == "3"
        assert (await row_of(pool, "c")).turns == 3
    assert complained == []


@LAUNCHERS
async def test_names_without_an_end_are_not_kept_nor_stored(
    open_pool: OpenPool, faulty: Faulty, tmp_path: Path, launcher: str
) -> None:
    pool = await open_pool(
        **faulty("writes_what_a_file_holds"),
        worker_cwd=tmp_path,
        launcher=launcher,
        restarts=RestartPolicy(replacements_per_turn_max=0, quarantine_after=0),
    )
    await pool.send("c", "hello")
    session_id = (await row_of(pool, "c")).session_id
    long = "x" * 500_000
    attacks: list[Callable[[str, int], Any]] = [
        lambda turn, attempt: wire.SessionMoved(turn, attempt, long),
        lambda turn, attempt: wire.TurnDone(turn, attempt, "x", long),
        lambda turn, attempt: wire.TurnDone(turn, attempt, "x", "s", "completed", long),
        lambda turn, attempt: wire.ToolStarted(turn, attempt, long, "tool", ""),
        lambda turn, attempt: wire.ToolStarted(turn, attempt, "call", long, ""),
    ]
    for make in attacks:
        ended, _ = await attack(pool, tmp_path, lambda *of, make=make: bytes(wire.encode(make(*of))), "in turn")
        assert isinstance(ended, WorkerCrashedError), ended
        assert "broke the protocol" in ended.exit
        row = await row_of(pool, "c")
        assert row.session_id == session_id
        assert len(repr(row)) < 20_000
        assert (await asyncio.wait_for(pool.send("c", "hello again"), 10)).text == "hello again"
    await pool.stop("c")
    assert hermes_of(tmp_path / "state", "c")["session_id"] == session_id
    assert len(repr(hermes_of(tmp_path / "state", "c"))) < 2000


# --- too much ---


def many(frame: Callable[[int], Any], count: int, times: int) -> Callable[[], tuple[bytes, int]]:
    return lambda: (b"".join(bytes(wire.encode(frame(number))) for number in range(count)), times)


def floods(turn_id: str) -> dict[str, Callable[[], tuple[bytes, int]]]:
    """What is sent, and how many times: 100 MB of each, or (of what costs us more than it costs the sender) 10."""
    of = turn_id, 1
    word = "w" * 400
    return {
        "deltas of 1 MB": many(lambda _: wire.TextDelta(*of, "x" * 1_000_000), 1, 100),
        "deltas of 1 KB": many(lambda _: wire.TextDelta(*of, "x" * 1000), 1000, 100),
        "deltas of 1 byte": many(lambda _: wire.TextDelta(*of, "x"), 25_000, 10),
        "tools": many(lambda n: wire.ToolStarted(*of, f"{n}{word}", word, word * 50), 100, 50),
        "tool calls": many(lambda n: wire.ToolStarted(*of, f"{n}{word}", f"{n}{word}", ""), 10_000, 1),
        "questions": many(lambda n: wire.Question(*of, f"{n}{word}", "clarify", "", [], 1e9), 20_000, 1),
        "sessions": many(lambda n: wire.SessionMoved(*of, f"{n}"), 20_000, 10),
        "imports": many(lambda n: wire.Imported([f"{word}{n}"]), 2000, 1),
        "answers that nobody asked for": many(wire.Pong, 50_000, 10),
        "frames of nobody's turn": many(lambda n: wire.TextDelta("nobody", n, "x"), 25_000, 10),
    }


KINDS = list(floods(""))


@pytest.mark.parametrize("kind", KINDS)
async def test_a_flood_that_nobody_reads_is_slowed_down_or_dropped(
    open_pool: OpenPool, faulty: Faulty, tmp_path: Path, kind: str
) -> None:
    pool = await open_pool(**faulty("floods_with_what_a_file_holds"), worker_cwd=tmp_path, launcher="zygote")
    await pool.send("c", "hello")
    turn = pool.turn("c", "")
    data, times = floods(turn.turn_id)[kind]()
    tmp_path.joinpath("flood").write_bytes(data)
    turn._turn.text = f"flood/wire/{times}"
    del data
    with complaints() as complained, memory_growth() as growth:
        async with innocent(pool) as seen, turn:
            turns = seen.turns
            await until(lambda: seen.turns > turns + 50, "fifty turns beside the flood")
            if "deltas" in kind:
                assert turn._turn.lags
                text = 0
                async for event in turn:  # at last
                    assert isinstance(event, wire.TextDelta)
                    text += len(event.text)
                assert (
                    text == {"deltas of 1 MB": 100 * 10**6, "deltas of 1 KB": 10**8, "deltas of 1 byte": 250_000}[kind]
                )
                assert (await turn.reply()).text == "flooded"
            else:
                ended = await asyncio.wait_for(asyncio.gather(turn.reply(), return_exceptions=True), 20)
                assert isinstance(ended[0], WorkerCrashedError) or getattr(ended[0], "text", "") == "flooded"
                assert len(str(ended[0])) < 400_000
    assert growth.mib < 40
    assert complained == []
    assert (await asyncio.wait_for(pool.send("c", "hello again"), 10)).text == "hello again"
    await pool.close()
    assert sum(file.stat().st_size for file in tmp_path.joinpath("state").rglob("*") if file.is_file()) < 10 * MIB
    # What one worker has said has not spoilt the starts of all others, either.
    pool = await open_pool(worker_cwd=tmp_path, launcher="zygote", state_dir=tmp_path / "state")
    assert (await asyncio.wait_for(pool.send("d", "hello"), 10)).text == "hello"
    assert await process_of(pool, "d")


@LAUNCHERS
@pytest.mark.parametrize("kind", ["frames of nobody's turn", "answers that nobody asked for"])
async def test_a_flood_of_an_idle_worker_holds_up_nobody(
    open_pool: OpenPool, faulty: Faulty, tmp_path: Path, kind: str, launcher: str
) -> None:
    pool = await open_pool(**faulty("floods_with_what_a_file_holds"), worker_cwd=tmp_path, launcher=launcher)
    data, times = floods("")[kind]()
    tmp_path.joinpath("flood").write_bytes(data)
    with complaints() as complained, memory_growth() as growth:
        async with innocent(pool) as seen:
            assert (await pool.send("c", f"flood on/wire/{times}")).text == "flooded"
            turns = seen.turns
            await until(lambda: seen.turns > turns + 50, "fifty turns beside the flood")
            assert (await asyncio.wait_for(pool.send("c", "hello again"), 10)).text == "hello again"
    assert growth.mib < 20
    assert complained == []


@LAUNCHERS
async def test_5_mb_of_empty_lines_on_stderr_hold_up_nobody(
    open_pool: OpenPool, faulty: Faulty, tmp_path: Path, launcher: str
) -> None:
    pool = await open_pool(**faulty("floods_with_what_a_file_holds"), worker_cwd=tmp_path, launcher=launcher)
    tmp_path.joinpath("flood").write_bytes(b"\n" * 100_000)
    with memory_growth() as growth:
        async with innocent(pool):
            assert (await asyncio.wait_for(pool.send("c", "flood/stderr/50"), 20)).text == "flooded"
            assert (await pool.send("c", "hello again")).text == "hello again"
    assert growth.mib < 20


# --- too little ---


@LAUNCHERS
@pytest.mark.parametrize("size", [200_000, 5_000_000])
async def test_a_worker_that_reads_no_more_holds_up_nobody_else(
    open_pool: OpenPool, faulty: Faulty, launcher: str, size: int
) -> None:
    pool = await open_pool(
        **faulty("reads_no_more"),
        launcher=launcher,
        timeouts=quick(progress_s=0.5, close_grace_s=0.2, term_grace_s=0.2),
    )
    assert (await pool.send("c", "read no more")).text == "deaf from here on"
    with complaints() as complained, memory_growth() as growth:
        async with innocent(pool), innocent(pool, "another innocent"):
            began = time.monotonic()
            with pytest.raises(TurnTimeoutError) as caught:
                await asyncio.wait_for(pool.send("c", "x" * size), 10)
            assert caught.value.limit == "timeouts.progress_s"
            assert time.monotonic() - began < 0.5 + 0.4 + 1
            reply = await asyncio.wait_for(pool.send("c", "/count"), 10)
            assert (reply.text, reply.restarts) == ("1", 0)
    assert growth.mib < 40
    assert complained == []


@LAUNCHERS
async def test_answers_queued_for_a_worker_that_reads_no_more_hold_up_nobody_else(
    open_pool: OpenPool, faulty: Faulty, launcher: str
) -> None:
    pool = await open_pool(
        **faulty("reads_no_more"), launcher=launcher, timeouts=quick(close_grace_s=0.2, term_grace_s=0.2)
    )
    async with innocent(pool):
        async with pool.turn("c", "read no more and ask") as turn:
            question = await anext(turn)
            assert isinstance(question, wire.Question)
            for _ in range(25):
                await turn.answer(question.question_id, "x" * 200_000)
            began = time.monotonic()
            end = await turn.cancel()
            assert time.monotonic() - began < 0.4 + 1
            assert end is not None
            assert end.outcome == "interrupted"
        assert (await asyncio.wait_for(pool.send("c", "/count"), 10)).text == "1"


@LAUNCHERS
async def test_a_worker_that_closes_its_input_is_replaced_as_soon_as_somebody_writes_to_it(
    open_pool: OpenPool, faulty: Faulty, launcher: str
) -> None:
    pool = await open_pool(**faulty("closes_its_input"), launcher=launcher)
    async with innocent(pool):
        assert (await pool.send("c", "close")).text == "closed"
        reply = await asyncio.wait_for(pool.send("c", "/count"), 5)
        assert (reply.text, reply.restarts) == ("1", 1)
