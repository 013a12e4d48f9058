"""The control socket, with real sockets, real supervisors in other processes, and bad company."""

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from hermes_pool.control import client, messages
from hermes_pool.control import server as server_module
from hermes_pool.control.client import QueryResult
from hermes_pool.control.messages import Done, Failed, Ps, PsReply, Stop
from hermes_pool.control.server import ControlServer
from hermes_pool.crash_report import DeathReport
from hermes_pool.errors import StoreError
from hermes_pool.snapshot import SessionSnapshot
from hermes_pool_worker import wire
from tests.support import known

DEATH = DeathReport(
    report_id="3f2a91cd", conversation_id="c-1", at="2026-01-02T03:04:05.678+00:00", pid=4711, incarnation=2,
    uptime_s=1.5, exit="was killed by SIGKILL (signal 9)", returncode=-9, turn_id="t-1", attempt=1,
    last_event="TextDelta", silent_s=0.25, tools_open=("terminal",), memory=((2.5, 1 << 40), (0.5, 7)),
    verdict="wedged", stacks=("here",), stderr_tail=("last words", "\ufffd"),
)  # fmt: skip
SESSION = SessionSnapshot(conversation_id="c-1", state="idle", pid=4711, rss_bytes=1 << 40, idle_s=1.5)


async def answer(request: messages.Request) -> messages.Response:
    match request:
        case Ps():
            return PsReply([SESSION], os.getpid(), "1.2.3", "2026-01-02T03:04:05+00:00")
        case messages.Deaths():
            return messages.DeathsReply([DEATH])
        case messages.Reset(conversation_id=None):
            return Done("all")
        case Stop(conversation_id="late"):
            await asyncio.Event().wait()
        case Stop(conversation_id="refused"):
            raise StoreError("no such luck")
        case Stop(conversation_id="broken"):
            raise ZeroDivisionError
    assert isinstance(request, Stop | messages.Reset | messages.Release)
    return Done(f"{request.conversation_id} {request.user_id}")


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[ControlServer]:
    listening = ControlServer(tmp_path, answer)
    await listening.start()
    yield listening
    await listening.close()


async def ask(state_dir: Path, request: messages.Request, timeout_s: float = 5.0) -> list[QueryResult]:
    return await asyncio.to_thread(client.query, state_dir, request, timeout_s)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - it is set by nobody who could tell
            await asyncio.sleep(0.002)


def address(state_dir: Path) -> str:
    (pointer,) = (state_dir / "control").glob("*.lock")
    return pointer.read_text().partition("\n")[2]


# --- asking -----------------------------------------------------------------------------------------------------------


async def test_requests_and_their_responses(server: ControlServer, tmp_path: Path) -> None:
    (told,) = await ask(tmp_path, Ps())
    assert told == QueryResult(os.getpid(), PsReply([SESSION], os.getpid(), "1.2.3", "2026-01-02T03:04:05+00:00"))
    assert [a.response for a in await ask(tmp_path, Stop("a", "b"))] == [Done("a b")]
    assert [a.response for a in await ask(tmp_path, Stop("refused"))] == [Failed("no such luck")]
    assert [a.response for a in await ask(tmp_path, messages.Deaths())] == [messages.DeathsReply([DEATH])]
    assert [a.response for a in await ask(tmp_path, messages.Reset())] == [Done("all")]
    assert [a.response for a in await ask(tmp_path, messages.Reset("a", "b"))] == [Done("a b")]
    assert [a.response for a in await ask(tmp_path, messages.Release("a", "cafe"))] == [Done("a None")]


async def test_a_bug_in_the_handler_is_told(
    server: ControlServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (told,) = await ask(tmp_path, Stop("broken"))
    assert isinstance(told.response, Failed)
    assert "ZeroDivisionError" in told.response.text
    assert "control request failed" in caplog.text


async def test_a_handler_that_takes_too_long_is_not_waited_for(server: ControlServer, tmp_path: Path) -> None:
    before = time.monotonic()
    (told,) = await ask(tmp_path, Stop("late"), 0.2)
    assert told.problem == "is not responding"
    assert time.monotonic() - before < 2


async def test_closing_hangs_up_and_leaves_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = ControlServer(tmp_path, answer)
    where = known(await server.start())
    assert await server.start() == where
    waiting = asyncio.create_task(ask(tmp_path, Stop("late"), 20))
    await until(lambda: server._clients)
    await server.close()
    await server.close()
    assert [known(a.problem).startswith("is not responding (") for a in await waiting] == [True]
    assert caplog.text == ""
    assert list((tmp_path / "control").iterdir()) == []
    assert not where.exists()


async def test_two_servers_of_one_process_are_two_supervisors(server: ControlServer, tmp_path: Path) -> None:
    other = ControlServer(tmp_path, answer)
    await other.start()
    assert len(await ask(tmp_path, Ps())) == 2
    await other.close()
    assert len(await ask(tmp_path, Ps())) == 1


async def test_where_there_are_no_unix_sockets_nothing_starts_and_nothing_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(socket, "AF_UNIX")
    server = ControlServer(tmp_path, answer)
    assert await server.start() is None
    await server.close()
    assert client.query(tmp_path, Ps()) == []
    assert list(tmp_path.iterdir()) == []


# --- bad company ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\0\0\0\1\xc1",
        b"\xff\xff\xff\xff" + b"x" * 200_000,
        wire.encode({"type": "Unheard", "of": 1}),
        wire.encode({"type": "Stop"}),
        wire.encode({"type": "Stop", "conversation_id": "x" * 70_000}),
    ],
)
async def test_what_is_no_request_gets_an_explanation(server: ControlServer, tmp_path: Path, data: bytes) -> None:
    reader, writer = await asyncio.open_unix_connection(address(tmp_path))
    with contextlib.suppress(OSError):
        writer.write(data)
        await writer.drain()
    with contextlib.suppress(ConnectionError):
        decoder: wire.FrameDecoder[messages.Response] = wire.FrameDecoder(messages.Response)
        (told,) = decoder.feed(await reader.read(10_000))
        assert isinstance(told, Failed)
        assert "does not understand" in told.text
    writer.close()
    assert [a.problem for a in await ask(tmp_path, Ps())] == [None]


async def test_silent_clients_take_nobodys_place(server: ControlServer, tmp_path: Path) -> None:
    silent = [await asyncio.open_unix_connection(address(tmp_path)) for _ in range(3 * server_module.CONNECTIONS_MAX)]
    for _, writer in silent[::2]:
        writer.write(b"\0\0")
    assert [a.problem for a in await ask(tmp_path, Ps())] == [None]
    # The first ones were hung up on to make room.
    assert await silent[1][0].read() == b""
    assert len(server._clients) <= server_module.CONNECTIONS_MAX
    for _, writer in silent:
        writer.close()


async def test_a_client_that_dawdles_is_hung_up_on(
    server: ControlServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "REQUEST_TIMEOUT_S", 0.05)
    reader, writer = await asyncio.open_unix_connection(address(tmp_path))
    writer.write(b"\0")
    async with asyncio.timeout(5):
        assert await reader.read() == b""
    writer.close()


async def test_a_client_that_never_reads_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def much(_request: messages.Request) -> messages.Response:
        return Done("x" * 5_000_000)

    monkeypatch.setattr(server_module, "REQUEST_TIMEOUT_S", 0.2)
    server = ControlServer(tmp_path, much)
    where = known(await server.start())
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.connect(str(where))
        deaf.sendall(wire.encode(Ps()))
        (told,) = await ask(tmp_path, Ps())
        assert isinstance(told.response, Done)
        assert len(told.response.text) == 5_000_000
        await until(lambda: not server._clients)
    await server.close()


async def test_clients_that_leave_at_once_harm_nobody(server: ControlServer, tmp_path: Path) -> None:
    for cut in range(0, 8, 2):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(address(tmp_path))
            client.sendall(wire.encode(Ps())[:cut])
    assert [a.problem for a in await ask(tmp_path, Ps())] == [None]
    await until(lambda: not server._clients)
