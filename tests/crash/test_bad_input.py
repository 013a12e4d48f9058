"""Ids, messages and stored state that nobody wants, and what is stored of good ones."""

import asyncio
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from hermes_pool.conversation import saver
from hermes_pool.errors import InvalidKeyError, MessageTooLargeError
from tests.crash.outside import gone, hermes_of, never, process_of, put_agent_state, raw_agent_state, row_of, sql
from tests.support import Faulty, OpenPool, children, quick, until

MIB = 1024 * 1024


# --- ids ---


@pytest.mark.parametrize(
    "bad", ["", "x" * MIB, "nul\0byte", "half \ud83d", "\udc97", None, 7, b"bytes"], ids=lambda bad: repr(bad)[:20]
)
async def test_an_id_that_cannot_be_one_is_refused_before_anything_is_started(open_pool: OpenPool, bad: Any) -> None:
    pool = await open_pool()
    before = children()
    with pytest.raises(InvalidKeyError) as caught:
        await pool.send(bad, "hello")
    assert len(str(caught.value)) < 1000
    str(caught.value).encode()
    with pytest.raises(InvalidKeyError):
        await pool.turn(bad, "hello").__aenter__()
    with pytest.raises(InvalidKeyError):
        await pool.stop(bad)
    assert children() == before
    assert await pool.sessions() == []
    assert (await pool.send("c", "hello")).text == "hello"


@pytest.mark.parametrize(
    "strange",
    ["\U0001f600", "../../../tmp/evil", "/", ".", "a b\nc", "-rf", "'; DROP TABLE conversation; --", "%s{0}$HOME", " "],
)
async def test_any_other_id_is_a_name_and_nothing_more(open_pool: OpenPool, tmp_path: Path, strange: str) -> None:
    pool = await open_pool()
    assert (await pool.send(strange, "hello")).text == "hello"
    assert (await pool.send(strange, "/count")).text == "2"
    await pool.stop(strange)
    assert (await pool.send(strange, "/count")).text == "3"
    state = tmp_path / "state"
    assert hermes_of(state, strange)["session_id"] == (await row_of(pool, strange)).session_id
    assert sql(state, "SELECT count(*) FROM conversation") == [(1,)]
    assert os.listdir(tmp_path) == ["state"]
    folders = {name for name in os.listdir(state) if "hermes-pool.db" not in name}
    assert folders <= {"agents", "workspace", "control", "owners"}
    assert len(os.listdir(state / "agents" / "echo")) == 1


# --- messages ---


async def test_messages_of_0_bytes_and_of_8_mib_are_answered(open_pool: OpenPool) -> None:
    pool = await open_pool()
    for text in ("", "x" * (8 * MIB), "", "\0", " "):
        assert (await pool.send("c", text)).text == text
    assert (await pool.send("c", "/count")).text == "6"
    await pool.stop("c")
    assert (await pool.send("c", "/count")).text == "7"


async def test_a_message_over_the_limit_is_refused_and_nothing_is_sent(open_pool: OpenPool) -> None:
    pool = await open_pool(frame_bytes_max=MIB)
    before = children()
    with pytest.raises(MessageTooLargeError, match=r"1,048,\d\d\d bytes is over the limit of 1,048,576") as caught:
        await pool.send("c", "x" * MIB)
    assert caught.value.conversation_id == "c"
    assert children() == before
    assert (await pool.send("c", "hello")).text == "hello"
    worker = await process_of(pool, "c")
    for _ in range(3):
        with pytest.raises(MessageTooLargeError):
            await pool.send("c", "x" * MIB)
    with pytest.raises(MessageTooLargeError):
        async with pool.turn("c", "x" * MIB):
            pass
    assert (await pool.send("c", "/count")).text == "2"
    assert await process_of(pool, "c") == worker
    assert (await row_of(pool, "c")).state == "idle"


async def test_a_message_over_the_limit_is_refused_although_a_turn_runs(open_pool: OpenPool, faulty: Faulty) -> None:
    pool = await open_pool(**faulty("waits_for_cancel"), frame_bytes_max=MIB)
    async with pool.turn("c", "wait") as turn:
        await anext(turn)
        with pytest.raises(MessageTooLargeError):
            await asyncio.wait_for(pool.send("c", "x" * MIB), 1)
    assert (await pool.send("c", "/count")).text == "1"


@pytest.mark.parametrize("bad", [None, b"bytes"], ids=repr)
async def test_a_message_that_is_no_text_is_refused_and_costs_no_worker(open_pool: OpenPool, bad: Any) -> None:
    pool = await open_pool()
    await pool.send("c", "hello")
    worker = await process_of(pool, "c")
    with pytest.raises((TypeError, ValueError)):
        await pool.send("c", bad)
    assert (await pool.send("c", "/count")).text == "2"
    assert await process_of(pool, "c") == worker


# --- what is stored ---


@pytest.mark.parametrize(
    "start", [None, "null", "{}", '{"runtime_state": {"jarvis": {"n": [1, {"deep": null}]}}, "x": 7}']
)
async def test_nested_values_are_stored_anew_after_each_turn(
    open_pool: OpenPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: str | None
) -> None:
    monkeypatch.setattr(saver, "SAVE_EVERY_S", 0.05)
    state = tmp_path / "state"
    put_agent_state(state, "c", start)
    before = json.loads(start or "null") or {}
    pool = await open_pool(sweep_s=60.0)
    seen_at = ""
    for number in range(1, 6):
        reply = await pool.send("c", f"message {number}")
        await until(lambda: hermes_of(state, "c").get("turns") == number, "the row", 5)  # noqa: B023
        stored = hermes_of(state, "c")
        assert stored["session_id"] == reply.session_id
        assert stored["committed"] == str(number)
        assert stored["last_used_at"] > seen_at
        assert (stored["status"], stored["restart_count"]) == ("healthy", 0)
        seen_at = stored["last_used_at"]
    whole = json.loads(raw_agent_state(state, "c") or "")
    assert whole.pop("runtime") == "hermes"
    theirs = whole["runtime_state"]
    theirs.pop("hermes")
    assert theirs == before.get("runtime_state", {})
    assert whole.get("x") == before.get("x")


async def test_a_row_that_others_write_between_turns_keeps_what_they_wrote(
    open_pool: OpenPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver, "SAVE_EVERY_S", 0.05)
    state = tmp_path / "state"
    pool = await open_pool()
    for number in range(1, 4):
        await pool.send("c", f"message {number}")
        await until(lambda: hermes_of(state, "c").get("turns") == number, "the row", 5)  # noqa: B023
        whole = json.loads(raw_agent_state(state, "c") or "")
        assert whole.get("jarvis_says") == (number - 1 or None)
        whole["jarvis_says"] = number
        sql(state, "UPDATE conversation SET agent_state = ? WHERE id = 'c'", json.dumps(whole, indent=2))
    await pool.stop("c")
    assert json.loads(raw_agent_state(state, "c") or "")["jarvis_says"] == 3
    assert (await pool.send("c", "/count")).text == "4"


CORRUPT = {
    "a list": "[1, 2,  3]",
    "a text": '"just text"',
    "a number": "7",
    "no JSON": '{"runtime": "jarvis", oops',
    "empty": "",
    "runtime_state is a list": '{"runtime_state": [1]}',
    "hermes is a text": '{"runtime_state": {"hermes": "mine"}}',
    "a newer schema": '{"runtime_state": {"hermes": {"schema": 999, "session_id": "future-1"}}}',
}


@pytest.mark.parametrize("kind", CORRUPT)
async def test_a_state_that_cannot_be_understood_is_left_as_it_is_and_the_conversation_goes_on(
    open_pool: OpenPool, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    caplog.set_level(logging.WARNING, "hermes_pool")
    state = tmp_path / "state"
    put_agent_state(state, "c", CORRUPT[kind])
    before = raw_agent_state(state, "c")  # the column's affinity makes a number of a number
    pool = await open_pool(timeouts=quick(idle_s=0.2), sweep_s=0.1)
    assert (await pool.send("c", "hello")).text == "hello"
    await pool.send("other", "hello")
    worker, other = await process_of(pool, "c"), await process_of(pool, "other")
    await until(lambda: gone(other), "the other, whose state is fine, to be let go", 5)
    await never(lambda: gone(worker))
    assert (await pool.send("c", "/count")).text == "2"
    assert await process_of(pool, "c") == worker
    assert raw_agent_state(state, "c") == before
    assert "agent_state" in ((await row_of(pool, "c")).last_error or "") or "schema" in caplog.text
    warnings = [message for message in caplog.messages if "'c'" in message]
    assert warnings
    await pool.close()
    assert gone(worker)
    assert raw_agent_state(state, "c") == before


async def test_a_state_that_is_mended_is_written_again_and_its_worker_let_go(
    open_pool: OpenPool, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    put_agent_state(state, "c", "[1]")
    pool = await open_pool(timeouts=quick(idle_s=0.2), sweep_s=0.1)
    first = await pool.send("c", "hello")
    worker = await process_of(pool, "c")
    sql(state, "UPDATE conversation SET agent_state = ? WHERE id = 'c'", '{"list": [1]}')
    await until(lambda: gone(worker), "the worker to be let go", 5)
    assert hermes_of(state, "c")["session_id"] == first.session_id
    assert json.loads(raw_agent_state(state, "c") or "")["list"] == [1]
    assert (await pool.send("c", "/count")).text == "2"
