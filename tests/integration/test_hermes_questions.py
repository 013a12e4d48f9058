"""The real Hermes through the pool: who is asked, what is found again, and what does not go before it is written."""

import asyncio
import contextlib
import os
import sqlite3
import sys
from pathlib import Path
from typing import Any

import pytest

from hermes_pool import Question
from hermes_pool.testing.scripted_model import ScriptedModel
from tests.integration.hermes_program import NEEDS_HERMES, said
from tests.support import OpenPool, known, quick, until

pytestmark = NEEDS_HERMES


@pytest.fixture
def hermes(home: Path) -> dict[str, Any]:
    return {"agent": "hermes", "hermes_home": home, "timeouts": quick(start_s=60)}


def victims(folder: Path, *names: str) -> list[Path]:
    for name in names:
        (folder / name).mkdir()
    return [folder / name for name in names]


async def test_what_nobody_can_answer_is_denied_or_decided_at_once(
    open_pool: OpenPool, hermes: dict[str, Any], tmp_path: Path
) -> None:
    pool = await open_pool(**hermes)
    (victim,) = victims(tmp_path, "victim")
    await asyncio.wait_for(pool.send("c", f"[tool rm -rf {victim}]"), 50)
    assert victim.exists()
    reply = await asyncio.wait_for(
        pool.send("c", '[call clarify {"question": "Which colour?", "choices": ["red", "blue"]}]'), 50
    )
    assert "most sensible assumption" in reply.text


async def test_a_subagents_dangerous_command_is_asked_of_the_caller(
    open_pool: OpenPool, hermes: dict[str, Any], tmp_path: Path
) -> None:
    pool = await open_pool(**hermes)
    allowed, denied = victims(tmp_path, "allowed", "denied")
    asked: list[Question] = []
    for victim, answer in ((allowed, "once"), (denied, "deny")):
        goal = f'[call delegate_task {{"goal": "please [tool rm -rf {victim}]"}}]'
        turn = await pool.start("c", goal)
        async for event in turn:
            if isinstance(event, Question):
                asked.append(event)
                assert await turn.answer(event.question_id, answer)
        await turn.reply()
    assert [str(victim) in question.text for victim, question in zip((allowed, denied), asked, strict=True)] == [
        True,
        True,
    ]
    assert (allowed.exists(), denied.exists()) == (False, True)


async def test_a_session_is_found_by_its_conversation_when_every_record_is_lost(
    open_pool: OpenPool, hermes: dict[str, Any], model: ScriptedModel, tmp_path: Path
) -> None:
    pool = await open_pool(**hermes)
    first = await pool.send("c", "I am Ada")
    await pool.send("d", "I am Bob")
    await pool.close()
    for file in (tmp_path / "state").glob("hermes-pool.db*"):
        file.unlink()
    pool = await open_pool(**hermes)
    reply = await pool.send("c", "What is my name?")
    assert (reply.session_id, "Ada" in reply.text) == (first.session_id, True)
    assert "was found in Hermes' database" in (reply.notice or "")
    assert said(model.requests[-1]) == ["I am Ada", "What is my name?"]
    assert (await pool.send("new", "hello")).notice is None


async def test_steering_and_the_transcript_work_through_the_pool(
    open_pool: OpenPool, hermes: dict[str, Any], model: ScriptedModel
) -> None:
    told: list[str] = []
    pool = await open_pool(**hermes, on_turn=lambda _, turn: told.append(turn.text))
    turn = await pool.start("c", "[tool sleep 1] [tool echo b]")
    await until(lambda: model.requests, "the model to be asked")
    assert not await pool.steer("another", "x")
    await until(lambda: pool.steer("c", "be quick"), "the remark to be taken")
    await turn.reply()
    assert any("be quick" in str(message["content"]) for message in model.requests[-1]["messages"])
    (past,) = await pool.transcript("c")
    assert (past.text, past.tools) == ("[tool sleep 1] [tool echo b]", ["terminal", "terminal"])
    await until(lambda: told == [past.text], "the turn to be told")


async def test_a_worker_with_the_only_copy_of_a_turn_does_not_go_before_it_is_written(
    open_pool: OpenPool, hermes: dict[str, Any], home: Path, model: ScriptedModel, caplog: pytest.LogCaptureFixture
) -> None:
    pool = await open_pool(**{**hermes, "timeouts": quick(start_s=60, idle_s=0.5)})
    await pool.send("c", "one")

    def run(statement: str) -> None:
        with contextlib.closing(sqlite3.connect(home / "state.db")) as database:
            database.execute(statement)
            database.commit()

    run("CREATE TRIGGER no BEFORE INSERT ON messages BEGIN SELECT RAISE(FAIL, 'no row today'); END")
    reply = await pool.send("c", "two")
    assert (reply.outcome, reply.kept) == ("completed", False)
    assert "no row today" in (reply.notice or "")
    (row,) = await pool.sessions()
    assert "no row today" in (row.last_error or "")
    log = caplog.records
    await until(lambda: any("history_unwritten" in record.getMessage() for record in log), "an idle end to be refused")
    assert (await pool.sessions())[0].pid == row.pid
    run("DROP TRIGGER no")

    async def gone() -> bool:
        return (await pool.sessions())[0].state == "stopped"

    await until(gone, "the worker to go")
    await pool.send("c", "three")
    assert said(model.requests[-1]) == ["one", "two", "three"]


def open_files(pid: int) -> list[str]:
    found = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it was closed just now
            found.append(os.readlink(descriptor))
    return found


@pytest.mark.slow
async def test_twenty_workers_share_one_home_while_others_read_it(
    open_pool: OpenPool, hermes: dict[str, Any], home: Path, model: ScriptedModel
) -> None:
    pool = await open_pool(**hermes)
    names = [f"c{number}" for number in range(20)]

    async def talk(name: str) -> None:
        for number in range(3):
            await pool.send(name, f"{name} says {number}")

    async def look(*command: str) -> None:
        program = await asyncio.create_subprocess_exec(
            sys.executable, "-m", *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, "HERMES_HOME": str(home), "HERMES_POOL_STATE_DIR": str(pool.settings.state_dir)},
        )  # fmt: skip
        output, _ = await asyncio.wait_for(program.communicate(), 60)
        assert program.returncode == 0, output

    await asyncio.gather(
        *map(talk, names), look("hermes_cli.main", "sessions", "list"), look("hermes_pool", "ps", "--json")
    )
    workers = [known(row.pid) for row in await pool.sessions()]
    assert len(set(workers)) == 20
    files = {pid: open_files(pid) for pid in (*workers, os.getpid())}
    assert [file for file in files.pop(os.getpid()) if "state.db" in file] == []
    assert all(any(file.endswith("state.db") for file in opened) for opened in files.values())
    assert [file for opened in files.values() for file in opened if "(deleted)" in file and "state.db" in file] == []
    last = {said(request)[-1]: said(request) for request in model.requests}
    for name in names:
        assert last[f"{name} says 2"] == [f"{name} says {number}" for number in range(3)]
    with contextlib.closing(sqlite3.connect(home / "state.db")) as database:
        assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        rows = database.execute("SELECT content FROM messages WHERE role = 'user' AND active").fetchall()
    assert sorted(text for (text,) in rows) == sorted(f"{name} says {number}" for name in names for number in range(3))
