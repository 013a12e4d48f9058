"""Several processes on one store: any of them answers any conversation, and only one has its worker."""

import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from hermes_pool import (
    ConversationBusyError,
    EventsMissed,
    HermesSessionManager,
    InvalidMessageError,
    OwnerStoppedError,
    Question,
    TextDelta,
    TurnEnded,
    TurnInterruptedError,
    TurnStarted,
)
from tests.integration.databases import postgres_server, postgres_url  # noqa: F401 - fixtures
from tests.support import AGENTS, Obedient, OpenPool, known, until

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no Unix sockets")
MEMBER = Path(__file__).with_name("hosts") / "member.py"


class Member:
    """Another process of the cluster."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self.reading = asyncio.create_task(self._read())

    @property
    def pid(self) -> int:
        return self.process.pid

    async def _read(self) -> None:
        while line := await known(self.process.stdout).readline():
            told = json.loads(line)
            if not (answer := self._answers.pop(told["number"])).done():
                answer.set_result(told)
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(EOFError())

    async def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        number = next(self._numbers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        known(self.process.stdin).write(json.dumps({"number": number, "do": do, **arguments}).encode() + b"\n")
        answer: dict[str, Any] = await asyncio.wait_for(self._answers[number], 40)
        return answer

    async def send(self, conversation: str, text: str) -> str:
        told = await self.ask("send", conversation=conversation, text=text)
        assert "error" not in told, told
        return str(told["answer"]["text"])

    async def kill(self) -> None:
        self.process.kill()
        await self.process.wait()


Members = Callable[..., Awaitable[Member]]
Sentinel = tuple[dict[str, Any], Path]


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    """The settings that all members share."""
    return {"agent": "echo", "state_dir": str(tmp_path / "state")}


@pytest.fixture
async def member(settings: dict[str, Any], nothing_left: None) -> AsyncIterator[Members]:
    members: list[Member] = []

    async def start(**more: Any) -> Member:
        process = await asyncio.create_subprocess_exec(
            sys.executable, MEMBER, json.dumps({**settings, **more}), stdin=-1, stdout=-1, limit=1 << 26
        )
        line = await asyncio.wait_for(known(process.stdout).readline(), 30)
        assert json.loads(line)["ready"] == process.pid
        members.append(Member(process))
        return members[-1]

    yield start
    for each in members:
        if each.process.returncode is None:
            each.process.send_signal(signal.SIGCONT)
            known(each.process.stdin).close()
            await asyncio.wait_for(each.process.wait(), 40)
        await each.reading


@pytest.fixture
async def pool(open_pool: OpenPool, settings: dict[str, Any]) -> HermesSessionManager:
    """The member that the test itself is."""
    return await open_pool(**settings, cluster="machine")


async def test_any_process_answers_any_conversation_and_one_has_its_worker(
    pool: HermesSessionManager, member: Members
) -> None:
    other = await member()
    assert await other.send("c", "one") == "one"
    assert (await pool.send("c", "two")).text == "two"
    assert await other.send("c", "/count") == "3"
    assert (await pool.send("c", "/first")).text == "one"
    with pytest.raises(InvalidMessageError):
        await pool.send("c", 5)  # type: ignore[arg-type]  # the fault
    with pytest.raises(InvalidMessageError, match="metadata"):
        await (await pool.start("c", "hello", metadata={"what": object()})).reply()
    assert (await pool.owner("c"), (await other.ask("owner", conversation="c"))["answer"]) == (other.pid, other.pid)
    assert await pool.owner("nobody knows") is None
    assert await pool.sessions() == []
    for text in ("x" * 1_000_000 + "\U0001f600", "half \ud83d a pair", "NUL \0"):
        assert (await pool.send("c", text)).text == (await pool.send("mine", text)).text


async def test_a_turn_of_another_process_has_all_that_a_local_one_has(
    open_pool: OpenPool, obedient: Obedient, member: Members, settings: dict[str, Any]
) -> None:
    settings |= obedient.settings()
    pool = await open_pool(**settings, cluster="machine")
    other = await member()
    await other.send("c", "hello")

    async with pool.turn("c", "stream 200") as turn:
        told = [event.text async for event in turn if isinstance(event, TextDelta)]
        reply = await turn.reply()
    assert ("".join(told), reply.text) == ("".join(f"{n} " for n in range(200)), "stream 200")
    assert (reply.turn_id, reply.conversation_id, reply.usage) == (turn.turn_id, "c", {"input_tokens": 10})

    async with pool.turn("c", "ask sure?") as turn:
        async for event in turn:
            if isinstance(event, Question):
                assert await turn.answer(event.question_id, "yes")
                assert not await turn.answer(event.question_id, "no")
        assert (await turn.reply()).text == "answer: yes"
    assert (await pool.send("c", "ask again?", on_question=lambda _, question: question.text)).text == "answer: again?"

    async with pool.turn("c", "stream_and_wait never") as turn:
        await anext(turn)
        cancelled = known(await turn.cancel())
        assert (cancelled.outcome, cancelled.text) == ("interrupted", "begun ")
    sending = asyncio.create_task(pool.send("c", "wait for nothing"))
    await until(lambda: "wait for nothing" in obedient.marks("begun"), "the turn to run")
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    assert (await asyncio.wait_for(pool.send("c", "next"), 10)).text == "next"

    started = await pool.start("c", "wait go", turn_id="m1", metadata={"from": "here"})
    assert (await pool.start("c", "wait go", turn_id="m1")).turn_id == "m1"
    obedient.allow("go")
    assert (await started.reply()).text == "wait go"
    assert obedient.marks("begun").count("wait go") == 1


async def test_watching_answering_and_cancelling_work_from_any_process(
    open_pool: OpenPool, obedient: Obedient, member: Members, settings: dict[str, Any]
) -> None:
    settings |= obedient.settings()
    pool = await open_pool(**settings, cluster="machine")
    other = await member()
    await other.send("c", "hello")
    seen: list[Any] = []

    async def watch() -> None:
        async for _, event in pool.events("c"):
            seen.append(event)

    watching = asyncio.create_task(watch())
    await other.ask("start", conversation="c", text="stream_and_wait never")
    await until(lambda: any(isinstance(event, TextDelta) for event in seen), "the watcher to see a piece")
    assert isinstance(seen[0], TurnStarted)
    reply = known(await pool.cancel("c"))
    assert (reply.outcome, reply.text) == ("interrupted", "begun ")
    await until(lambda: isinstance(seen[-1], TurnEnded), "the watcher to see the end")

    turn = await pool.start("c", "ask sure?")
    question = await until(lambda: next((e for e in seen if isinstance(e, Question)), None), "a question")
    assert (await other.ask("answer", conversation="c", question_id=question.question_id, text="yes"))["answer"]
    assert (await turn.reply()).text == "answer: yes"
    assert not await pool.answer("c", question.question_id, "too late")
    assert known(await pool.stop("c")).how == "closed"
    watching.cancel()


async def test_a_refusal_of_the_owner_is_the_same_error_here(
    open_pool: OpenPool, obedient: Obedient, member: Members, settings: dict[str, Any]
) -> None:
    settings |= obedient.settings()
    pool = await open_pool(**settings, cluster="machine")
    other = await member(busy="reject")
    running = asyncio.create_task(other.ask("send", conversation="c", text="wait go"))
    await until(lambda: "wait go" in obedient.marks("begun"), "the turn to run")
    with pytest.raises(ConversationBusyError) as refused:
        await pool.send("c", "no room")
    assert (refused.value.retryable, refused.value.conversation_id) == (True, "c")
    obedient.allow("go")
    await running


async def test_an_owner_that_is_killed_is_followed_in_context(pool: HermesSessionManager, member: Members) -> None:
    other = await member()
    for number in range(3):
        await other.send("c", f"message {number}")
    await other.kill()
    began = time.monotonic()
    assert (await pool.send("c", "/count")).text == "4"
    print(f"taken over and answered after {(time.monotonic() - began) * 1000:.0f} ms")
    assert await pool.owner("c") == os.getpid()


@pytest.mark.parametrize("case", [("send", False), ("send", True), ("start", False), ("start", True)])
async def test_a_turn_in_which_the_owner_is_killed_runs_again_or_is_told(
    open_pool: OpenPool, obedient: Obedient, member: Members, settings: dict[str, Any], case: tuple[str, bool]
) -> None:
    face, acts = case
    settings |= obedient.settings(kept=acts)
    pool = await open_pool(**settings, cluster="machine")
    other = await member()
    await other.send("c", "hello")
    text = "tool_then_wait go" if acts else "wait go"
    turn = await pool.start("c", text) if face == "start" else None
    outcome = turn.reply() if turn is not None else pool.send("c", text)
    answering = asyncio.ensure_future(outcome)
    await until(lambda: text in obedient.marks("begun"), "the turn to run")
    await other.kill()
    if acts:
        with pytest.raises(TurnInterruptedError) as ended:
            await asyncio.wait_for(answering, 20)
        assert ([tool.name for tool in ended.value.tools], ended.value.retryable) == (["hammer"], False)
    else:
        await until(lambda: obedient.marks("begun").count(text) == 2, "the turn to run again")
        obedient.allow("go")
        assert (await asyncio.wait_for(answering, 20)).text == text
    assert obedient.marks("begun").count(text) == (1 if acts else 2)
    assert (await pool.send("c", "next")).text == "next"


def stored_turns(pool: HermesSessionManager, conversation: str) -> int | None:
    with contextlib.closing(sqlite3.connect(pool.settings.state_dir / "hermes-pool.db")) as database:
        rows = database.execute("SELECT turns FROM hermes_pool_session WHERE id = ?", (conversation,)).fetchall()
    return int(rows[0][0]) if rows else None


def is_unlocked(pool: HermesSessionManager) -> bool:
    """Whether nobody writes to the database at the moment."""
    path = pool.settings.state_dir / "hermes-pool.db"
    with (
        contextlib.closing(sqlite3.connect(path, timeout=0)) as database,
        contextlib.suppress(sqlite3.OperationalError),
    ):
        database.execute("BEGIN IMMEDIATE")
        return True
    return False


async def test_an_owner_that_is_stopped_keeps_its_conversation_and_is_told(
    pool: HermesSessionManager, member: Members
) -> None:
    other = await member()
    await other.send("c", "one")
    # A process that is stopped in a write to SQLite holds the lock of the database.
    await until(
        lambda: stored_turns(pool, "c") == 1 and is_unlocked(pool), "the turn to be stored, and nobody to write"
    )
    other.process.send_signal(signal.SIGSTOP)
    with pytest.raises(OwnerStoppedError) as stopped:
        await asyncio.wait_for(pool.send("c", "two"), 10)
    assert (stopped.value.pid, stopped.value.retryable) == (other.pid, True)
    assert await pool.owner("c") == other.pid
    other.process.send_signal(signal.SIGCONT)
    assert int((await pool.send("c", "/count")).text) in (2, 3)  # whether the one that waited was cancelled in time


async def test_a_conversation_that_nobody_uses_is_given_up_and_goes_where_the_next_message_comes(
    pool: HermesSessionManager, member: Members
) -> None:
    other = await member(timeouts={"idle_s": 0.2})
    await other.send("c", "one")

    async def is_free() -> bool:
        return await pool.owner("c") is None

    await until(is_free, "the conversation to be given up")
    assert (await pool.send("c", "/count")).text == "2"
    assert await pool.owner("c") == os.getpid()
    assert await other.send("c", "/count") == "3"


async def test_a_watcher_keeps_its_conversation_and_moves_with_it(pool: HermesSessionManager, member: Members) -> None:
    other = await member()
    seen: list[Any] = []

    async def watch() -> None:
        async for _, event in pool.events("c"):
            seen.append(event)

    watching = asyncio.create_task(watch())
    assert await other.send("c", "one") == "one"
    await until(lambda: seen and isinstance(seen[-1], TurnEnded), "the watcher to see the turn")
    watching.cancel()
    await asyncio.wait([watching])
    await pool.stop("c")


async def test_a_watcher_goes_on_after_its_owner_is_killed(pool: HermesSessionManager, member: Members) -> None:
    other = await member()
    await other.send("c", "one")
    seen: list[Any] = []

    async def watch() -> None:
        async for _, event in pool.events("c"):
            seen.append(event)

    async def sees_a_turn() -> bool:
        await other.send("c", "two")
        return any(isinstance(event, TurnEnded) for event in seen)

    watching = asyncio.create_task(watch())
    await until(sees_a_turn, "the watcher to see a turn")
    await other.kill()
    await pool.send("c", "three")

    def replies() -> list[str]:
        return [event.outcome.text for event in seen if isinstance(event, TurnEnded) and hasattr(event.outcome, "text")]

    await until(lambda: "three" in replies(), "the watcher to see the next turn")
    assert any(isinstance(event, EventsMissed) for event in seen)
    watching.cancel()


async def test_a_flood_for_a_reader_that_waits_stays_with_its_worker(
    open_pool: OpenPool, obedient: Obedient, member: Members, settings: dict[str, Any]
) -> None:
    settings |= obedient.settings()
    pool = await open_pool(**settings, cluster="machine")
    other = await member()
    await other.send("c", "hello")
    owner = psutil.Process(other.pid)
    async with pool.turn("c", "stream 150000") as turn:
        await anext(turn)
        await asyncio.wait_for(pool.send("beside", "hello"), 20)
        before = owner.memory_info().rss, psutil.Process().memory_info().rss
        await asyncio.sleep(0.5)  # time in which it would grow
        after = owner.memory_info().rss, psutil.Process().memory_info().rss
        assert (after[0] - before[0]) / 2**20 < 8
        assert (after[1] - before[1]) / 2**20 < 8
        count = 1
        async for _ in turn:
            count += 1
        assert count == 150_000


async def test_what_is_no_request_is_thrown_out(pool: HermesSessionManager, settings: dict[str, Any]) -> None:
    await pool.send("c", "hello")
    (pointer,) = Path(settings["state_dir"]).joinpath("doors").glob("*.lock")
    address = Path(pointer.read_text().partition("\n")[2])
    assert address.stat().st_mode & 0o777 == 0o600
    # Each announces a frame that is too long, or is a frame of no message.
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 5000, b"\x7f\xff\xff\xff", b"\0\0\0\1\xc0"):
        reader, writer = await asyncio.open_unix_connection(address)
        writer.write(garbage)
        try:
            assert await asyncio.wait_for(reader.read(), 5) == b""
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
    assert (await pool.send("c", "/count")).text == "2"


@pytest.fixture
def sentinel(settings: dict[str, Any], tmp_path: Path) -> Sentinel:
    """The settings, for workers that notice each other; and the folder in which they say so."""
    folder = tmp_path / "sentinel"
    folder.mkdir()
    settings |= {"agent": "sentinel:Agent", "agent_paths": [str(AGENTS)], "agent_options": {"folder": str(folder)}}
    return settings, folder


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/shared.db"
    return str(request.getfixturevalue("postgres_url"))


@asynccontextmanager
async def restarting(member: Members, others: list[Member], how: int, times: int) -> AsyncIterator[None]:
    """End the others in turn, and start new ones in their places."""

    async def restart() -> None:
        for number in range(times):
            at = number % len(others)
            ending = others[at]
            others[at] = await member()
            ending.process.send_signal(how)
            await asyncio.wait_for(ending.process.wait(), 40)

    task = asyncio.create_task(restart())
    yield
    await task


@pytest.mark.parametrize("rounds", [2, pytest.param(30, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
async def test_a_rolling_restart_loses_and_doubles_nothing(
    open_pool: OpenPool, member: Members, sentinel: Sentinel, rounds: int
) -> None:
    settings, folder = sentinel
    pool = await open_pool(**{**settings, "agent_paths": (str(AGENTS),)}, cluster="machine")
    others = [await member(), await member()]
    chance = random.Random(rounds)
    sent: list[str] = []
    over = False

    async def talk(name: str) -> None:
        for number in itertools.count():
            text = f"{name} says {number}"
            sent.append(text)
            assert (await pool.send(name, text)).text == text
            if over:
                return
            await asyncio.sleep(chance.random() / 50)

    for number in range(6):  # so that the others own them
        await others[number % 2].ask("send", conversation=f"c{number}", text="hello")
    talking = [asyncio.create_task(talk(f"c{number}")) for number in range(6)]
    async with restarting(member, others, signal.SIGTERM, rounds):
        pass
    over = True
    await asyncio.gather(*talking)
    ran = Counter(json.loads(line)[0] for line in folder.joinpath("ran").read_text().splitlines())
    assert [text for text in sent if ran[text] != 1] == []
    assert not folder.joinpath("overlaps").exists()


@pytest.mark.parametrize("kills", [2, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])])
async def test_random_sends_and_kills_find_one_worker_and_one_history(
    store_url: str, open_pool: OpenPool, member: Members, sentinel: Sentinel, kills: int
) -> None:
    """Messages come from all processes to all conversations, and processes are killed: none is answered twice."""
    settings, folder = sentinel
    settings["database_url"] = store_url
    pool = await open_pool(**{**settings, "agent_paths": (str(AGENTS),)}, cluster="machine")
    others = [await member(), await member()]
    chance = random.Random(kills)
    answered: Counter[str] = Counter()
    over = False

    async def talk(name: str) -> None:
        for number in itertools.count():
            if over:
                return
            text = f"{name} says {number}"
            try:
                at = chance.randrange(3)
                reply = await others[at].send(name, text) if at < 2 else (await pool.send(name, text)).text
                assert reply == text
                answered[name] += 1
            except EOFError:  # the process to which it was said was killed
                continue
            await asyncio.sleep(chance.random() / 50)

    talking = [asyncio.create_task(talk(f"c{number}")) for number in range(6)]
    for _ in range(kills):
        await asyncio.sleep(chance.random() / 2)
        at = chance.randrange(2)
        killed, others[at] = others[at], await member()
        await killed.kill()
    over = True
    await asyncio.gather(*talking)
    ran = Counter(json.loads(line)[0] for line in folder.joinpath("ran").read_text().splitlines())
    assert min(answered.values()) > 0
    assert not folder.joinpath("overlaps").exists()
    for number in range(6):
        name = f"c{number}"
        count = int((await pool.send(name, "/count")).text)
        told = sum(text.startswith(f"{name} says") for text in ran)
        assert answered[name] <= count - 1 <= told, (name, answered[name], count, told)


async def test_a_turn_whose_owner_was_killed_is_not_run_again_where_nobody_can_look_any_more(
    open_pool: OpenPool, obedient: Obedient, member: Members, settings: dict[str, Any]
) -> None:
    """Another message was faster: its worker has opened the session, and knows nothing of the turn."""
    settings |= obedient.settings()
    pool = await open_pool(**settings, cluster="machine")
    owner, other = await member(), await member()
    await owner.send("c", "hello")
    asking = asyncio.create_task(other.ask("send", conversation="c", text="wait for nothing"))
    await until(lambda: "wait for nothing" in obedient.marks("begun"), "the turn to run")
    other.process.send_signal(signal.SIGSTOP)
    await owner.kill()
    assert (await pool.send("c", "faster")).text == "faster"
    other.process.send_signal(signal.SIGCONT)
    told = (await asking)["error"]
    assert (told["code"], told["retryable"], told["sent"]) == ("turn_interrupted", False, True)
    assert obedient.marks("begun").count("wait for nothing") == 1
