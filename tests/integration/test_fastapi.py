"""``hermes_pool.fastapi`` in a real server, asked by a real HTTP client: streams, errors, health, and the way out."""

import asyncio
import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.integration.hosts import Host, Sent, stream, until_event
from tests.support import AGENTS, Obedient, known, until

APP = "tests.integration.hosts.plain_host:app"
ECHO = {"HERMES_POOL_AGENT": "echo"}

pytestmark = pytest.mark.skipif("sys.platform == 'win32'", reason="a server cannot take over a socket there")


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    with Host(APP, tmp_path_factory.mktemp("host"), environ={**ECHO, "HEARTBEAT_S": "0.2"}) as host:
        yield host


async def test_a_stream_tells_a_turn_from_its_beginning_to_its_end(host: Host) -> None:
    async with host.client() as client, stream(client, "/one/events") as events:
        assert (await client.post("/one/start/t1", json="Hello\r\n\nworld \u2028 é")).json() == "t1"
        told = await until_event(events, "turn_ended")
    assert [sent.kind for sent in told] == ["turn_started", "text_delta", "turn_ended"]
    assert [sent.data["type"] for sent in told] == [sent.kind for sent in told]
    first = known(told[0].seq)
    assert [sent.seq for sent in told] == list(range(first, first + 3))
    assert told[1].data["text"] == told[2].data["outcome"]["text"] == "Hello\r\n\nworld \u2028 é"


async def test_a_browser_that_connects_again_gets_what_it_has_not_seen(host: Host) -> None:
    async with host.client() as client:
        async with stream(client, "/again/events") as events:
            await client.post("/again/start/t1", json="first")
            told = await until_event(events, "turn_ended")
        await client.post("/again/send", json="second")
        for path, headers in (
            ("/again/events?after=7", {"Last-Event-ID": str(told[-1].seq)}),
            (f"/again/events?after={told[-1].seq}", {"Last-Event-ID": "nonsense"}),
            (f"/again/events?after={told[-1].seq}", {}),
        ):
            async with stream(client, path, headers) as events:
                more = await until_event(events, "turn_ended")
            assert more[0].seq == known(told[-1].seq) + 1
            assert more[-1].data["outcome"]["text"] == "second"


async def test_a_number_of_an_earlier_process_is_told_as_missed(host: Host) -> None:
    async with host.client() as client:
        await client.post("/missed/send", json="first")
        async with stream(client, "/missed/events", {"Last-Event-ID": "12"}) as events:
            (missed,) = await until_event(events, "events_missed")
    assert missed.data == {"type": "events_missed", "count": None, "snapshot": None}


async def test_what_a_host_does_not_show_is_left_out(host: Host) -> None:
    async with host.client() as client, stream(client, "/shown/beginnings") as events:
        await client.post("/shown/start/t1", json="Hello")
        told: list[Sent] = []
        async with asyncio.timeout(20):
            async for sent in events:
                told += [sent] if isinstance(sent, Sent) else []
                if len(told) == 3:
                    break
    assert [(sent.kind, sent.data) for sent in told] == [
        ("begun", {"type": "begun", "text": "Hello"}), (None, None), (None, None),
    ]  # fmt: skip


async def test_a_host_has_events_of_its_own_in_the_same_stream(host: Host) -> None:
    async with host.client() as client, stream(client, "/own/with_own") as events:
        (own,) = await until_event(events, "own")
        assert (own.seq, own.data) == (None, {"type": "own", "text": "a\nb"})
        await client.post("/own/start/t1", json="Hello")
        assert (await until_event(events, "turn_ended"))[0].kind == "turn_started"


async def test_a_silent_stream_sends_a_comment_now_and_then(host: Host) -> None:
    async with host.client() as client, stream(client, "/silent/events") as events:
        async with asyncio.timeout(20):
            assert await anext(events) == ":"


async def test_a_client_that_leaves_is_a_watcher_no_more(host: Host) -> None:
    async with host.client() as client:
        async with stream(client, "/left/events") as events:
            async with asyncio.timeout(20):
                await anext(events)
            assert (await client.get("/watchers")).json() == 1

        async def nobody_watches() -> bool:
            return bool((await client.get("/watchers")).json() == 0)

        await until(nobody_watches, "the watcher left", 5)


async def test_replies_and_snapshots_are_response_models(host: Host) -> None:
    async with host.client() as client:
        reply = (await client.post("/model/send", json="Hello")).json()
        assert (reply["type"], reply["text"], reply["kept"]) == ("reply", "Hello", True)
        rows = (await client.get("/sessions")).json()
        assert "model" in [row["conversation_id"] for row in rows]
        assert {row["type"] for row in rows} == {"session_snapshot"}
        schemas = (await client.get("/openapi.json")).json()["components"]["schemas"]
    assert schemas["Reply"]["properties"]["type"] == {"const": "reply"}


async def test_an_error_is_answered_with_its_status_and_all_that_a_client_may_know(host: Host) -> None:
    async with host.client() as client:
        answer = await client.post(f"/{'x' * 600}/send", json="Hello")
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "invalid_key"
        assert answer.json()["detail"] == answer.json()["error"]["message"]
        assert (await client.get(f"/{'x' * 600}/events")).status_code == 400
        await client.post("/twice/start/t1", json="one")
        assert (await client.post("/twice/start/t1", json="one")).status_code == 200
        assert (await client.post("/twice/start/t1", json="another")).status_code == 409


async def test_a_host_is_well_and_ready_until_its_pool_is_drained(tmp_path: Path) -> None:
    with Host(APP, tmp_path, environ=ECHO) as host:
        async with host.client() as client:
            assert (await client.get("/healthz")).json() == {"status": "ok", "state": "open"}
            ready = await client.get("/readyz")
            assert (ready.status_code, ready.json()["status"]) == (200, "ready")
            await client.post("/drain")
            ready = await client.get("/readyz")
            assert (ready.status_code, ready.json()["why"]) == (503, "the pool is drained")
            refused = await client.post("/c/send", json="Hello")
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "pool_draining")
            assert (await client.get("/healthz")).status_code == 200


async def test_a_host_whose_workers_cannot_start_is_not_ready_and_says_when_to_come_back(tmp_path: Path) -> None:
    with Host(APP, tmp_path, environ={"HERMES_POOL_AGENT": "missing:Agent"}) as host:
        async with host.client() as client:
            failed = await client.post("/c/send", json="Hello")
            assert failed.status_code == 500
            assert "Traceback" not in failed.text
            ready = await client.get("/readyz")
            assert ready.status_code == 503
            assert int(ready.headers["Retry-After"]) >= 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_open_streams_do_not_hold_up_the_end_of_the_host(number: int, tmp_path: Path) -> None:
    host = Host(APP, tmp_path, environ=ECHO)
    async with host.client() as client, stream(client, "/c/events") as events:
        await client.post("/c/start/t1", json="Hello")
        await until_event(events, "turn_ended")
        began = time.monotonic()
        assert await asyncio.to_thread(host.stop, number) in (0, -number)
        assert time.monotonic() - began < 5
        with pytest.raises(StopAsyncIteration):  # ended in order, not broken off
            await anext(events)


async def test_a_stream_stays_for_the_end_of_a_turn_that_the_host_waits_for(tmp_path: Path, obedient: Obedient) -> None:
    environ = {
        "HERMES_POOL_AGENT": "obedient:Agent",
        "HERMES_POOL_AGENT_PATHS": str(AGENTS),
        "HERMES_POOL_AGENT_OPTIONS": json.dumps({"folder": str(obedient.folder)}),
        "HERMES_POOL_TIMEOUTS__DRAIN_S": "20",
    }
    host = Host(APP, tmp_path, environ=environ)
    async with host.client() as client, stream(client, "/c/events") as events:
        await client.post("/c/start/t1", json="until finish")
        await until_event(events, "turn_started")
        stopped = asyncio.create_task(asyncio.to_thread(host.stop))

        async def refused() -> bool:
            try:
                async with host.client() as other:
                    await other.get("/healthz")
            except httpx.TransportError:
                return True
            return False

        await until(refused, "the server takes no more requests")
        obedient.allow("finish")
        told = await until_event(events, "turn_ended")
        assert told[-1].data["outcome"]["type"] == "reply"
        assert await stopped in (0, -signal.SIGTERM)
