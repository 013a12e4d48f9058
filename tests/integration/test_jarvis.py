"""The example host of the documents, asked by a real HTTP client."""

import asyncio
import contextlib
import signal
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.hosts import stream, until_event
from tests.integration.hosts.jarvis import Jarvis, answer_to, messages, say
from tests.support import until

pytestmark = pytest.mark.skipif("sys.platform == 'win32'", reason="a server cannot take over a socket there")


@pytest.fixture(scope="module")
def jarvis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jarvis]:
    with Jarvis(tmp_path_factory.mktemp("jarvis")) as jarvis:
        yield jarvis


def rows(jarvis: Jarvis, sql: str) -> list[Any]:
    with contextlib.closing(sqlite3.connect(jarvis.folder / "jarvis.db")) as database:
        return database.execute(sql).fetchall()


async def test_a_message_is_answered_and_both_are_stored(jarvis: Jarvis) -> None:
    async with jarvis.client() as client:
        assert (await say(client, "plain", "m1", "say Hello; tool hammer nail")).status_code == 202
        answer = await answer_to(client, "plain", "m1")
        assert (answer["text"], answer["state"], answer["runtime"]) == ("Hello\n\n", "done", "hermes")
        assert answer["tools"] == [{"name": "hammer", "arguments": "nail", "ok": True}]
        assert [message["role"] for message in await messages(client, "plain")] == ["user", "assistant"]
        assert {"id": "plain", "title": "say Hello; tool hammer nail"} in (await client.get("/conversations")).json()


async def test_the_same_message_sent_many_times_at_once_runs_once(jarvis: Jarvis) -> None:
    async with jarvis.client() as client:
        sent = await asyncio.gather(*(say(client, "twice", "m1", "say once") for _ in range(8)))
        assert {answer.status_code for answer in sent} == {202}
        await answer_to(client, "twice", "m1")
        assert (await say(client, "twice", "m1", "say once")).status_code == 202
        assert len(await messages(client, "twice")) == 2
    assert jarvis.asked.count("say once") == 1


async def test_an_id_of_another_message_is_refused_and_changes_nothing(jarvis: Jarvis) -> None:
    async with jarvis.client() as client:
        await say(client, "other", "m1", "wait other")
        refused = await say(client, "other", "m1", "say something else")
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "turn_id_conflict")
        jarvis.allow("other")
        await answer_to(client, "other", "m1")
        assert (await messages(client, "other"))[0]["text"] == "wait other"


async def test_a_watcher_is_told_when_messages_are_stored(jarvis: Jarvis) -> None:
    async with jarvis.client() as client, stream(client, "/conversations/told/events") as events:
        await say(client, "told", "m1", "say Hello")
        told = await until_event(events, "turn_ended")
        assert "messages_changed" in [sent.kind for sent in told]
        await until_event(events, "messages_changed")
        await answer_to(client, "told", "m1")


async def test_a_question_is_answered_once(jarvis: Jarvis) -> None:
    async with jarvis.client() as client, stream(client, "/conversations/asks/events") as events:
        await say(client, "asks", "m1", "approve rm -rf x")
        asked = (await until_event(events, "question"))[-1].data
        open_ones = (await client.get("/conversations/asks")).json()["questions"]
        assert list(open_ones) == [asked["question_id"]]
        assert 0 < open_ones[asked["question_id"]] <= asked["timeout_s"]
        path = f"/conversations/asks/questions/{asked['question_id']}"
        assert (await client.post(path, json={"text": "once"})).status_code == 204
        assert (await client.post(path, json={"text": "deny"})).status_code == 410
        answered = (await until_event(events, "question_answered"))[-1].data
        assert (answered["question_id"], answered["text"]) == (asked["question_id"], "once")
        assert (await answer_to(client, "asks", "m1"))["text"] == "Approval: once.\n\n"


async def test_a_turn_is_steered_and_stopped(jarvis: Jarvis) -> None:
    async with jarvis.client() as client, stream(client, "/conversations/stops/events") as events:
        assert (await client.post("/conversations/stops/steer", json={"text": "shorter"})).status_code == 409
        await say(client, "stops", "m1", "say begun; wait never")
        await until_event(events, "text_delta")
        assert (await client.post("/conversations/stops/steer", json={"text": "shorter"})).status_code == 204
        assert (await until_event(events, "turn_steered"))[-1].data["text"] == "shorter"
        assert (await client.delete("/conversations/stops/turns/m1")).status_code == 204
        answer = await answer_to(client, "stops", "m1")
        assert (answer["state"], answer["text"]) == ("stopped", "begun\n\n")


async def test_a_message_that_waits_can_be_withdrawn(jarvis: Jarvis) -> None:
    async with jarvis.client() as client:
        await say(client, "line", "m1", "wait line")
        await say(client, "line", "m2", "say never")
        assert (await client.get("/conversations/line")).json()["turns"] == ["m1", "m2"]
        await client.delete("/conversations/line/turns/m2")

        async def gone() -> bool:
            return [message["turn_id"] for message in await messages(client, "line")] == ["m1"]

        await until(gone, "the message is withdrawn")
        jarvis.allow("line")
        await answer_to(client, "line", "m1")
    assert "say never" not in jarvis.asked


async def test_an_answer_that_failed_says_why(jarvis: Jarvis) -> None:
    async with jarvis.client() as client:
        await say(client, "fails", "m1", "start nail; fail The provider is down")
        answer = await answer_to(client, "fails", "m1")
    assert answer["state"] == "failed"
    assert "The provider is down" in answer["note"]
    assert answer["tools"] == [{"name": "hammer", "arguments": "nail", "ok": None}]


async def test_either_runtime_answers_and_keeps_its_half_of_the_column(jarvis: Jarvis) -> None:
    async with jarvis.client() as client:
        assert (await client.put("/conversations/both/runtime", json={"runtime": "jarvis"})).status_code == 204
        await say(client, "both", "m1", "Hello")
        own = await answer_to(client, "both", "m1")
        assert own["runtime"] == "jarvis"
        assert "> Hello" in own["text"]
        assert (await client.put("/conversations/both/runtime", json={"runtime": "hermes"})).status_code == 204
        await say(client, "both", "m2", "say I am Hermes")
        assert (await answer_to(client, "both", "m2"))["runtime"] == "hermes"
        assert (await client.get("/conversations/both")).json()["runtime"] == "hermes"
    ((state,),) = rows(jarvis, "SELECT agent_state FROM conversation WHERE id = 'both'")
    assert '"runtime":"hermes"' in state.replace(" ", "")


async def test_jarvis_answers_where_no_worker_can_start(tmp_path: Path) -> None:
    with Jarvis(tmp_path, environ={"HERMES_POOL_AGENT": "missing:Agent"}) as jarvis:
        async with jarvis.client() as client:
            for number in (1, 2):
                assert (await say(client, "c", f"m{number}", "Hello")).status_code == 202
                answer = await answer_to(client, "c", f"m{number}")
                assert answer["runtime"] == "jarvis"
                assert "Hermes is not available now" in answer["note"]
            assert (await client.get("/readyz")).status_code == 503
            assert len(await messages(client, "c")) == 4


async def test_a_conversation_goes_on_in_the_next_process(tmp_path: Path) -> None:
    with Jarvis(tmp_path) as first:
        async with first.client() as client:
            await say(client, "c", "m1", "say before")
            await answer_to(client, "c", "m1")
    with Jarvis(tmp_path) as second:
        async with second.client() as client:
            assert len(await messages(client, "c")) == 2
            assert (await say(client, "c", "m1", "say before")).status_code == 202
            await say(client, "c", "m2", "say after")
            await answer_to(client, "c", "m2")
            assert [message["text"] for message in await messages(client, "c")] == [
                "say before", "before\n\n", "say after", "after\n\n",
            ]  # fmt: skip
        assert second.asked == ["say before", "say after"]
        assert second.stop(signal.SIGTERM) in (0, -signal.SIGTERM)
    marks = [mark for (mark,) in rows(second, "SELECT mark FROM message WHERE role = 'assistant' ORDER BY id")]
    assert len(marks) == len(set(marks)) == 2


async def test_a_turn_in_which_the_host_was_killed_is_asked_again_and_stored_once(tmp_path: Path) -> None:
    first = Jarvis(tmp_path)
    async with first.client() as client, stream(client, "/conversations/c/events") as events:
        await say(client, "c", "m1", "say one; wait c")
        await until_event(events, "text_delta")
        first.process.kill()
        await asyncio.to_thread(first.process.wait)
    first.allow("c")
    with Jarvis(tmp_path) as second:
        async with second.client() as client:
            assert [message["role"] for message in await messages(client, "c")] == ["user"]
            assert (await client.get("/conversations/c")).json()["turns"] == []
            await asyncio.gather(*(say(client, "c", "m1", "say one; wait c") for _ in range(4)))
            assert (await answer_to(client, "c", "m1"))["text"] == "one\n\n"
            await say(client, "c", "m2", "say two")
            await answer_to(client, "c", "m2")
            assert [message["text"] for message in await messages(client, "c")] == [
                "say one; wait c", "one\n\n", "say two", "two\n\n",
            ]  # fmt: skip


async def test_the_page_and_its_parts_are_served_and_may_load_nothing_else(jarvis: Jarvis) -> None:
    async with jarvis.client() as client:
        page = await client.get("/c/some-conversation")
        assert page.headers["content-type"].startswith("text/html")
        assert "default-src 'self'" in page.headers["content-security-policy"]
        for name in ("main.js", "style.css", "icon.svg"):
            assert f"/page/{name}" in page.text
            assert (await client.get(f"/page/{name}")).status_code == 200
