"""A turn belongs to its conversation: begun by one task, watched and answered by others, ended truthfully."""

import asyncio
import random
from typing import Any

import pytest

from hermes_pool import (
    ConversationBusyError,
    EventsMissed,
    HermesSessionManager,
    InvalidMessageError,
    InvalidUseError,
    PastTurn,
    PoolClosedError,
    QueueLimits,
    Reply,
    SessionKey,
    StoreError,
    TurnCancelledError,
    TurnEnded,
    TurnError,
    TurnIdConflictError,
    TurnInterruptedError,
    TurnStarted,
    TurnTimeoutError,
)
from hermes_pool.conversation import event_log, session
from hermes_pool_worker import wire
from tests.support import Faulty, Obedient, OpenPool, known, quick, until

PIECES = 60


async def watch(
    pool: HermesSessionManager, *, after: int | None = None, stop_after: int | None = None
) -> tuple[str, int, list[Any]]:
    """Watch the conversation until a turn ends, or for so many events; return the text, the last number, the events."""
    text, seq, events = "", 0, []
    watching = pool.events("c", after=after)
    async for number, event in watching:
        seq = number
        events.append(event)
        if isinstance(event, wire.TextDelta):
            text += event.text
        if isinstance(event, TurnEnded) or len(events) == stop_after:
            break
    await watching.aclose()
    return text, seq, events


async def test_a_turn_goes_on_without_the_task_that_began_it(open_pool: OpenPool, obedient: Obedient) -> None:
    pool = await open_pool(**obedient.settings())

    async def request() -> None:
        await pool.start("c", "stream_and_wait go", turn_id="m1", metadata={"row": 7})
        await asyncio.sleep(3600)

    browser = asyncio.create_task(request())
    await until(lambda: "stream_and_wait go" in obedient.marks("begun"), "the turn to run")
    browser.cancel()
    turn = known(pool.turn_of("c"))
    assert (turn.turn_id, turn.metadata, turn.outcome) == ("m1", {"row": 7}, None)
    watching = asyncio.create_task(watch(pool))
    await until(lambda: pool._sessions[SessionKey("c")].log.watchers, "the watcher")
    obedient.allow("go")
    text, _, events = await watching
    assert text == "begun "
    assert isinstance(events[0], TurnStarted)
    assert (events[0].text, events[0].metadata) == ("stream_and_wait go", {"row": 7})
    ended = events[-1]
    assert isinstance(ended, TurnEnded)
    assert ended.outcome == await turn.reply()
    assert pool.turn_of("c") is None


async def reload_in_mid_answer(pool: HermesSessionManager, chance: random.Random, number: int) -> None:
    """A page that is loaded again, several times in one answer, ends up with the text of an undisturbed one."""
    turn = await pool.start("c", f"stream {PIECES}", turn_id=f"m{number}")
    undisturbed = asyncio.create_task(watch(pool))
    seq: int | None = None
    text = ""
    ended = False
    while not ended:
        await asyncio.sleep(0)
        part, seq, events = await watch(pool, after=seq, stop_after=chance.randint(1, 25))
        text += part
        ended = isinstance(events[-1], TurnEnded)
    whole = "".join(f"{piece} " for piece in range(PIECES))
    assert text == (await undisturbed)[0] == whole
    assert isinstance(turn.outcome, Reply)


@pytest.mark.parametrize("rounds", [20, pytest.param(200, marks=pytest.mark.slow)])
async def test_a_reload_in_mid_answer_loses_and_doubles_nothing(
    open_pool: OpenPool, obedient: Obedient, rounds: int
) -> None:
    pool = await open_pool(**obedient.settings())
    await pool.send("c", "hello")
    chance = random.Random(rounds)
    for number in range(rounds):
        await reload_in_mid_answer(pool, chance, number)
    log = pool._sessions[SessionKey("c")].log
    assert log.watchers == 0


async def test_who_comes_too_late_is_told_what_is_missed_and_goes_on_from_a_snapshot(
    open_pool: OpenPool, obedient: Obedient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_log, "EVENTS_KEPT", 10)
    pool = await open_pool(**obedient.settings())
    await pool.start("c", "stream 50")
    _, first, events = await watch(pool, stop_after=1)
    assert isinstance(events[0], TurnStarted)
    await until(lambda: pool.turn_of("c") is None, "the turn to end")
    turn = await pool.start("c", "stream_and_wait go")
    await until(lambda: "stream_and_wait go" in obedient.marks("begun"), "the turn to run")
    await until(lambda: known(known(pool._sessions[SessionKey("c")]).turn).said, "the first piece")

    async for seq, event in pool.events("c", after=first):
        assert isinstance(event, EventsMissed)
        assert event.count == seq - first
        snapshot = known(event.snapshot)
        assert (snapshot.turn_id, snapshot.said) == (turn.turn_id, "begun ")
        break
    async for _, event in pool.events("c", after=5):  # of a host that has ended long ago
        assert isinstance(event, EventsMissed)
        assert event.count is None
        break
    obedient.allow("go")
    await turn.reply()


async def test_the_same_id_is_the_same_turn(open_pool: OpenPool, obedient: Obedient) -> None:
    pool = await open_pool(**obedient.settings())
    first, second = await asyncio.gather(*(pool.start("c", "wait go", turn_id="m1") for _ in range(2)))
    third = asyncio.create_task(pool.send("c", "wait go", turn_id="m1"))
    assert first == second
    with pytest.raises(TurnIdConflictError):
        await pool.start("c", "another", turn_id="m1")
    for wrong in ("", "x" * 129, 5):
        with pytest.raises(InvalidMessageError):
            await pool.start("c", "text", turn_id=wrong)  # type: ignore[arg-type]  # as a host may
    obedient.allow("go")
    assert await first.reply() == await second.reply() == await third
    assert await (await pool.start("c", "wait go", turn_id="m1")).reply() == await first.reply()
    assert obedient.marks("begun") == ["wait go"]
    # A caller of the same turn that gives up does not end it for the others.
    turn = await pool.start("c", "wait later", turn_id="m2")
    waiting = asyncio.create_task(pool.send("c", "wait later", turn_id="m2"))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert turn.outcome is None
    obedient.allow("later")
    assert (await turn.reply()).outcome == "completed"


async def test_messages_in_line_are_listed_and_withdrawn(open_pool: OpenPool, obedient: Obedient) -> None:
    pool = await open_pool(**obedient.settings(), queues=QueueLimits(turns_max=2))
    running = await pool.start("c", "wait go")
    await until(lambda: obedient.marks("begun"), "the turn to run")
    second, third = [await pool.start("c", text) for text in ("second", "third")]
    with pytest.raises(ConversationBusyError):
        await pool.start("c", "one too many")
    assert pool.waiting("c") == [second, third]
    withdrawn = await pool.cancel("c", second.turn_id)
    assert (known(withdrawn).outcome, known(withdrawn).kept, known(withdrawn).attempts) == ("interrupted", False, 0)
    assert pool.waiting("c") == [third]
    fourth = await pool.start("c", "fourth")
    obedient.allow("go")
    assert [(await turn.reply()).text for turn in (running, third, fourth)] == ["wait go", "third", "fourth"]
    assert obedient.marks("begun") == ["wait go", "third", "fourth"]
    assert await pool.cancel("c", "unknown") is None
    assert await pool.cancel("unknown") is None


async def test_a_turn_is_cancelled_while_its_worker_starts(open_pool: OpenPool, obedient: Obedient) -> None:
    pool = await open_pool(**obedient.settings(slow_start=True))
    turn = await pool.start("c", "never")
    await until(lambda: obedient.marks("opened"), "the worker to start")
    reply = known(await asyncio.wait_for(pool.cancel("c"), 5))
    assert (reply.outcome, reply.kept) == ("interrupted", False)
    assert await turn.reply() == reply
    obedient.allow("may_start")
    assert (await pool.send("c", "next")).text == "next"
    assert obedient.marks("begun") == ["next"]


async def test_a_started_turn_has_any_number_of_readers(open_pool: OpenPool, obedient: Obedient) -> None:
    pool = await open_pool(**obedient.settings())
    turn = await pool.start("c", "stream 3")

    async def read() -> list[wire.TurnEvent]:
        return [event async for event in turn]

    first, second = await asyncio.gather(read(), read())
    assert [event.text for event in first if isinstance(event, wire.TextDelta)] == ["0 ", "1 ", "2 "]
    assert first == second == await read()


async def test_wrong_use_raises_and_sends_nothing(open_pool: OpenPool, obedient: Obedient) -> None:
    pool = await open_pool(**obedient.settings())
    turn = pool.turn("c", "once")
    for use in (turn.reply, turn.cancel, lambda: anext(turn)):
        with pytest.raises(InvalidUseError, match="not entered"):
            await use()
    async with turn:
        with pytest.raises(InvalidUseError, match="entered once"):
            await turn.__aenter__()
        assert [event async for event in turn] == []
        with pytest.raises(InvalidUseError, match="read once"):
            [event async for event in turn]
        await turn.reply()
    with pytest.raises(InvalidUseError):
        async with turn:
            pass
    async with pool.turn("c", "wait go") as turn:
        first = asyncio.ensure_future(anext(turn))
        await asyncio.sleep(0)
        with pytest.raises(InvalidUseError, match="another task"):
            await anext(turn)
        obedient.allow("go")
        with pytest.raises(StopAsyncIteration):
            await first
    assert obedient.marks("begun") == ["once", "wait go"]


# --- questions --------------------------------------------------------------------------------------------------------


async def test_a_question_that_nobody_can_see_is_answered_at_once(open_pool: OpenPool, obedient: Obedient) -> None:
    pool = await open_pool(**obedient.settings())
    assert (await asyncio.wait_for(pool.send("c", "ask sure?"), 5)).text == "answer: None"
    async with pool.turn("c", "ask again?") as turn:
        reply = await asyncio.wait_for(turn.reply(), 5)  # reads no events
    assert reply.text == "answer: None"


async def test_a_policy_answers_in_the_place_of_a_person(open_pool: OpenPool, obedient: Obedient) -> None:
    seen = []

    async def policy(key: SessionKey, question: wire.Question) -> str | None:
        await asyncio.sleep(0)
        seen.append((key.conversation_id, question.kind, question.text))
        if question.text == "fail?":
            raise OSError
        return "yes" if question.text == "sure?" else None

    pool = await open_pool(**obedient.settings(), on_question=policy)
    assert (await pool.send("c", "ask sure?")).text == "answer: yes"
    assert (await pool.send("c", "ask really?")).text == "answer: None"
    assert (await pool.send("c", "ask fail?")).text == "answer: None"
    assert seen[0] == ("c", "clarify", "sure?")
    reply = await pool.send("c", "ask sure?", on_question=lambda *_: "no")
    assert reply.text == "answer: no"


async def test_a_question_is_listed_and_answered_by_its_id_from_anywhere(
    open_pool: OpenPool, obedient: Obedient
) -> None:
    pool = await open_pool(**obedient.settings())
    turn = await pool.start("c", "ask sure?")
    (asked,) = await until(pool.questions, "the question")
    assert (asked.conversation_id, asked.question.text) == ("c", "sure?")
    assert 0 < asked.left_s <= 10
    assert [each.question for each in pool.questions("c")] == [asked.question]
    assert pool.questions("d") == []
    assert not await pool.answer("c", "another", "yes")
    assert await pool.answer("c", asked.question.question_id, "yes")
    assert not await pool.answer("c", asked.question.question_id, "no")
    assert (await turn.reply()).text == "answer: yes"
    assert pool.questions() == []


async def test_a_question_waits_a_while_for_a_page_that_is_loaded_again(
    open_pool: OpenPool, obedient: Obedient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "WATCHER_GRACE_S", 0.3)
    pool = await open_pool(**obedient.settings())
    turn = await pool.start("c", "ask sure?")
    async for _, event in pool.events("c"):
        if isinstance(event, wire.Question):
            break  # the page is loaded again
    async for _, event in pool.events("c"):
        if isinstance(event, wire.Question):
            assert await pool.answer("c", event.question_id, "yes")
            break
    assert (await turn.reply()).text == "answer: yes"
    turn = await pool.start("c", "ask nobody?")
    assert (await asyncio.wait_for(turn.reply(), 5)).text == "answer: None"


async def test_a_turn_that_nobody_watches_ends_if_the_host_wants_that(open_pool: OpenPool, obedient: Obedient) -> None:
    pool = await open_pool(**obedient.settings(), timeouts=quick(unwatched_s=0.2))
    turn = await pool.start("c", "wait never")
    assert (await asyncio.wait_for(turn.reply(), 5)).outcome == "interrupted"
    assert (await pool.send("c", "short")).text == "short"


# --- how a turn ends --------------------------------------------------------------------------------------------------


async def test_every_ending_tells_what_was_said_and_done(open_pool: OpenPool, obedient: Obedient) -> None:
    pool = await open_pool(**obedient.settings(), timeouts=quick(turn_s=0.5))
    obedient.allow("go2")
    reply = await pool.send("c", "tool_then_wait go2")
    (tool,) = reply.tools
    assert (tool.name, tool.arguments, tool.finished, tool.ok, tool.may_have_acted) == (
        "hammer", "go2", True, True, True,
    )  # fmt: skip
    assert (reply.attempts, reply.kept) == (1, True)

    turn = await pool.start("c", "tool_then_wait never")
    with pytest.raises(TurnTimeoutError) as late:
        await turn.reply()
    error = late.value
    assert [(each.name, each.finished) for each in error.tools] == [("hammer", False)]
    assert (error.retryable, error.kept, error.turn_id, error.http_status) == (False, True, turn.turn_id, 500)

    turn = await pool.start("c", "stream_and_wait never")
    with pytest.raises(TurnTimeoutError) as late:
        await turn.reply()
    assert (late.value.text, late.value.kept, late.value.retryable) == ("begun ", True, False)

    turn = await pool.start("c", "wait never")
    with pytest.raises(TurnTimeoutError) as late:
        await turn.reply()
    assert (late.value.text, late.value.kept, late.value.retryable) == ("partly", False, True)

    turn = await pool.start("c", "stream_and_wait never", on_cancel="discard")
    with pytest.raises(TurnTimeoutError) as late:
        await turn.reply()
    assert (late.value.text, late.value.kept, late.value.retryable) == ("begun ", False, True)


async def test_a_stop_tells_the_same(open_pool: OpenPool, obedient: Obedient) -> None:
    pool = await open_pool(**obedient.settings())
    turn = await pool.start("c", "stream_and_wait never")
    await until(lambda: known(pool._sessions[SessionKey("c")].turn).said, "the first piece")
    await pool.stop("c")
    with pytest.raises(TurnCancelledError) as stopped:
        await turn.reply()
    assert (stopped.value.text, stopped.value.kept, stopped.value.http_status) == ("begun ", True, 409)


async def test_tools_that_are_named_safe_do_not_count(open_pool: OpenPool, faulty: Faulty, tmp_path: Any) -> None:
    pool = await open_pool(**faulty("dies_after_tool"), worker_cwd=tmp_path, safe_tools=("mail",))
    await pool.send("c", "hello")
    with pytest.raises(TurnError) as died:
        await pool.send("c", "send the mail")
    assert not isinstance(died.value, TurnInterruptedError)
    assert (died.value.retryable, died.value.attempts) == (True, 2)
    assert {(each.name, each.may_have_acted) for each in died.value.tools} == {("mail", False)}


# --- turns of before, and of other runtimes ---------------------------------------------------------------------------


async def test_the_host_is_told_each_turn_once_and_in_order_and_can_catch_up(open_pool: OpenPool) -> None:
    told: list[PastTurn] = []

    async def on_turn(key: SessionKey, turn: PastTurn) -> None:
        assert key == SessionKey("c")
        told.append(turn)
        if turn.text == "two":
            raise OSError("the host's database is away")

    pool = await open_pool(on_turn=on_turn)
    for text in ("one", "two", "three"):
        await pool.send("c", text)
    await pool.close()
    assert [(turn.text, turn.reply, turn.committed) for turn in told] == [
        ("one", "one", "1"), ("two", "two", "2"), ("three", "three", "3"),
    ]  # fmt: skip
    pool = await open_pool(on_turn=on_turn)
    assert [turn.text for turn in await pool.transcript("c", after="1")] == ["two", "three"]
    await pool.send("c", "four")
    await pool.close()
    assert [turn.text for turn in told] == ["one", "two", "three", "four"]
    pool = await open_pool()
    with pytest.raises(StoreError, match="history"):
        await pool.transcript("c", after="77")
    assert [turn.text for turn in await pool.transcript("c", limit=2)] == ["one", "two"]


async def test_what_was_said_before_is_in_context(open_pool: OpenPool) -> None:
    asked = []

    def history(key: SessionKey) -> list[dict[str, str]]:
        asked.append(key.conversation_id)
        if key.conversation_id == "broken":
            raise OSError("away")
        return [
            {"role": "system", "content": "be kind"},
            {"role": "user", "content": "I am Ada"},
            {"role": "assistant", "content": "Hello Ada"},
        ]

    pool = await open_pool(history=history)
    assert (await pool.send("c", "/first")).text == "I am Ada"
    await pool.stop("c")
    assert (await pool.send("c", "/first")).text == "I am Ada"
    assert asked == ["c"]
    with pytest.raises(StoreError, match="away"):
        await pool.send("broken", "hi")


async def test_a_closed_pool_ends_all_watching(open_pool: OpenPool) -> None:
    pool = await open_pool()
    await pool.send("c", "hi")
    watching = asyncio.create_task(watch(pool))
    await until(lambda: pool._sessions[SessionKey("c")].log.watchers, "the watcher")
    await pool.close()
    assert (await asyncio.wait_for(watching, 5))[2] == []
    with pytest.raises(PoolClosedError):
        await watch(pool)
