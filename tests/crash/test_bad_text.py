"""Bytes stay bytes and no character ends a worker, whatever the locale."""

import logging
from pathlib import Path

import pytest

from hermes_pool.errors import AgentFailedError
from hermes_pool_worker import wire
from tests.crash.outside import hermes_of, process_of, row_of
from tests.support import Faulty, OpenPool, until

LAUNCHERS = pytest.mark.parametrize("launcher", ["spawn", "portable"])
PAYLOAD = (
    bytes(range(256)).decode("latin-1")
    + "\n" * 70_000
    + "\r\n" * 1000
    + "\r" * 1000
    + "\x1a" * 1000
    + "\x04\x00"
    + "\U0001f600\U0001f468\u200d\U0001f469 \u6f22\u5b57\u304b\u306a \ud55c\uae00 \ufeff\u2028\x85\uffff\U0010ffff"
)
SOUND = "half \ufffd of \ufffd an emoji"


@pytest.mark.parametrize(
    "variables",
    [
        {"LANG": "C"},
        {"LC_ALL": "POSIX"},
        {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
        {"PYTHONIOENCODING": "cp1252"},
        {"PYTHONIOENCODING": "ascii:strict", "LC_ALL": "C"},
    ],
    ids=lambda variables: ",".join(f"{name}={value}" for name, value in variables.items()),
)
@LAUNCHERS
async def test_text_crosses_unchanged_and_prints_end_nobody_in_any_locale(
    open_pool: OpenPool, faulty: Faulty, caplog: pytest.LogCaptureFixture, variables: dict[str, str], launcher: str
) -> None:
    caplog.set_level(logging.INFO, "hermes_pool")
    pool = await open_pool(**faulty("prints_emoji"), worker_env=variables, launcher=launcher)
    async with pool.turn("\U0001f600-c", PAYLOAD) as turn:
        events = [event async for event in turn]
        reply = await turn.reply()
    assert reply.text == PAYLOAD
    assert events == [wire.TextDelta(turn.turn_id, 1, PAYLOAD)]
    for stream in ("stdout", "stderr", "__stdout__", "__stderr__"):
        line = f"\U0001f600 \u6f22 on {stream}"
        await until(lambda: any(line in message for message in caplog.messages), f"the print to {stream}")  # noqa: B023
    assert (await pool.send("\U0001f600-c", "/count")).text == "2"
    assert (await row_of(pool, "\U0001f600-c")).incarnation == 1


async def test_text_survives_a_restart_under_a_foreign_locale(open_pool: OpenPool) -> None:
    pool = await open_pool(worker_env={"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"})
    await pool.send("c", PAYLOAD)
    await pool.stop("c")
    assert (await pool.send("c", "/first")).text == PAYLOAD


async def test_an_agent_in_a_folder_with_a_foreign_name_is_found(open_pool: OpenPool, tmp_path: Path) -> None:
    folder = tmp_path / "d\u00e9j\u00e0 \U0001f600 \u6f22"
    folder.mkdir()
    (folder / "parrot.py").write_text("from hermes_pool_worker.echo import EchoAgent as Agent\n")
    pool = await open_pool(
        agent="parrot:Agent", agent_paths=(str(folder),), worker_cwd=folder, state_dir=folder / "state",
        worker_env={"LC_ALL": "C", "PYTHONIOENCODING": "cp1252"},
    )  # fmt: skip
    assert (await pool.send("c", "hello")).text == "hello"
    await pool.stop("c")
    assert (await pool.send("c", "/count")).text == "2"


@LAUNCHERS
async def test_half_a_surrogate_pair_becomes_a_replacement_character_in_both_directions(
    open_pool: OpenPool, faulty: Faulty, tmp_path: Path, launcher: str
) -> None:
    pool = await open_pool(**faulty("sends_lone_surrogates"), worker_cwd=tmp_path, launcher=launcher)
    assert (await pool.send("c", "half \udc97 of \ud83d an emoji")).text == SOUND
    worker = await process_of(pool, "c")
    async with pool.turn("c", "in the reply") as turn:
        events = [event async for event in turn]
        reply = await turn.reply()
    assert (reply.text, reply.notice, reply.restarts) == (SOUND, SOUND, 0)
    assert [event.text for event in events if isinstance(event, wire.TextDelta)] == [SOUND]
    assert [event.arguments for event in events if isinstance(event, wire.ToolStarted)] == ["name-\ufffd"]
    with pytest.raises(AgentFailedError, match=SOUND) as caught:
        await pool.send("c", "in the error")
    assert caught.value.reason == "bad_text"
    with pytest.raises(AgentFailedError, match=SOUND):
        await pool.send("c", "out of an exception")
    for number in range(3):
        assert (await pool.send("c", f"fine {number}")).text == f"fine {number}"
    assert await process_of(pool, "c") == worker
    assert (await row_of(pool, "c")).restart_count == 0
    await pool.stop("c")
    assert (await pool.send("c", "/first")).text == SOUND
    assert (await pool.send("c", "/count")).text == "6"
    assert hermes_of(tmp_path / "state", "c")["restart_count"] == 0


async def test_a_message_that_is_only_half_a_pair_is_answered(open_pool: OpenPool) -> None:
    pool = await open_pool()
    assert (await pool.send("c", "\ud83d")).text == "\ufffd"
    assert (await pool.send("c", "\ud83d\ude00")).text == "\U0001f600"
    assert (await pool.send("c", "/count")).text == "3"


async def test_error_texts_do_not_grow_when_they_are_repeated(open_pool: OpenPool, faulty: Faulty) -> None:
    pool = await open_pool(**faulty("sends_lone_surrogates"))
    sizes = set()
    for _ in range(5):
        with pytest.raises(AgentFailedError) as caught:
            await pool.send("c", "in the error")
        sizes.add(len(str(caught.value)))
        await pool.stop("c")
    assert len(sizes) == 1
