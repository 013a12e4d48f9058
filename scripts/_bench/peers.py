"""Other ways to keep worker processes, each used as documented. A missing one raises ``ImportError``."""

import asyncio
import concurrent.futures
import contextlib
import multiprocessing
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from _bench import peer_work
from _bench.fleet import WAIT, Fleet, NotSupportedError

SERVERS = str(Path(__file__).with_name("peer_servers.py"))


class Executors(Fleet):
    """Process pools with futures: one pool per session, or one for all (``Situation.pooled``)."""

    def __init__(self, situation: Any) -> None:
        super().__init__(situation)
        self._pools: dict[str, Any] = {}
        self._make = self.maker()

    def maker(self) -> Callable[[int], Any]:
        """Return a function that makes a pool of a given number of workers."""
        raise NotImplementedError

    def _pool(self, key: str) -> Any:
        size = 1
        if self.situation.pooled:
            key, size = "all", self.situation.sessions
        pool = self._pools.get(key)
        if pool is None:
            pool = self._pools[key] = self._make(size)
        return pool

    def _submit(self, key: str, function: Callable[..., Any], *arguments: Any) -> "concurrent.futures.Future[Any]":
        future: concurrent.futures.Future[Any] = self._pool(key).submit(function, *arguments)
        return future

    async def send(self, key: str, text: str) -> str:
        answer: str = await asyncio.wrap_future(self._submit(key, peer_work.answer, text))
        return answer

    async def pid(self, key: str) -> int:
        pid: int = await asyncio.wrap_future(self._submit(key, peer_work.pid))
        return pid

    async def revive(self, key: str) -> None:
        self._pools.pop(key).shutdown(wait=False)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pool in self._pools.values():
            await asyncio.to_thread(pool.shutdown)


class FuturesSpawn(Executors):
    """concurrent.futures with spawned workers."""

    method = "spawn"

    def maker(self) -> Callable[[int], Any]:
        context = multiprocessing.get_context(self.method)
        return lambda size: concurrent.futures.ProcessPoolExecutor(size, mp_context=context)


class FuturesFork(FuturesSpawn):
    """concurrent.futures with forked workers."""

    method = "fork"


class Loky(Executors):
    """loky."""

    def maker(self) -> Callable[[int], Any]:
        from loky.process_executor import ProcessPoolExecutor  # noqa: PLC0415 - may be missing

        return lambda size: ProcessPoolExecutor(size)  # noqa: PLW0108


class Pebble(Executors):
    """pebble."""

    def maker(self) -> Callable[[int], Any]:
        import pebble  # noqa: PLC0415

        return lambda size: pebble.ProcessPool(max_workers=size)

    def _submit(self, key: str, function: Callable[..., Any], *arguments: Any) -> "concurrent.futures.Future[Any]":
        future: concurrent.futures.Future[Any] = self._pool(key).submit(function, None, *arguments)
        return future

    async def revive(self, key: str) -> None:
        """Pebble starts another worker by itself."""

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pool in self._pools.values():
            pool.close()
            await asyncio.to_thread(pool.join)


class Anyio(Fleet):
    """anyio.to_process, which keeps idle workers, any of which may answer."""

    def __init__(self, situation: Any) -> None:
        from anyio import CapacityLimiter, to_process  # noqa: PLC0415

        super().__init__(situation)
        self._run = to_process.run_sync
        self._limiter = CapacityLimiter
        self._seen: set[str] = set()

    async def __aenter__(self) -> Self:
        self._limit = self._limiter(max(self.situation.sessions, 1))
        return self

    async def send(self, key: str, text: str) -> str:
        if not (self.situation.pooled or self.situation.at_once) and self._seen != {key}:
            if self._seen:
                raise NotSupportedError("cannot be made to start another worker")
            self._seen.add(key)
        reply: str = await self._run(peer_work.answer, text, cancellable=True, limiter=self._limit)
        return reply

    async def pid(self, key: str) -> int:
        pid: int = await self._run(peer_work.pid, limiter=self._limit)
        return pid


class Connected(Fleet):
    """SDKs whose connections are context managers. Each lives in its own task."""

    def __init__(self, situation: Any) -> None:
        super().__init__(situation)
        self._clients: dict[str, Any] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ends: dict[str, asyncio.Event] = {}

    def connect(self, key: str) -> AbstractAsyncContextManager[Any]:
        """Return a connection to a new server."""
        raise NotImplementedError

    async def client(self, key: str) -> Any:
        """Return the connection of a session."""
        client = self._clients.get(key)
        if client is None:
            ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            self._ends[key] = end = asyncio.Event()
            self._tasks[key] = asyncio.create_task(self._keep(key, ready, end))
            client = self._clients[key] = await ready
        return client

    async def _keep(self, key: str, ready: "asyncio.Future[Any]", end: asyncio.Event) -> None:
        try:
            async with self.connect(key) as client:
                ready.set_result(client)
                await end.wait()
        except Exception as error:  # noqa: BLE001 - how the connection to a dead server ends is not measured
            if not ready.done():
                ready.set_exception(error)

    async def revive(self, key: str) -> None:
        # The remains of the dead one are cleaned up while the new one starts.
        self._ends[key].set()
        self._clients.pop(key)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for end in self._ends.values():
            end.set()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)


class Mcp(Connected):
    """The MCP SDK over stdio. A message is a tool call."""

    def connect(self, key: str) -> AbstractAsyncContextManager[Any]:
        from mcp import Client, StdioServerParameters  # noqa: PLC0415

        parameters = StdioServerParameters(command=sys.executable, args=[SERVERS, "mcp"], env=dict(os.environ))
        client: AbstractAsyncContextManager[Any] = Client(parameters)
        return client

    async def send(self, key: str, text: str) -> str:
        result = await (await self.client(key)).call_tool("answer", {"text": text})
        if result.is_error:
            raise RuntimeError(result.content[0].text)
        answer: str = result.content[0].text
        return answer

    async def pid(self, key: str) -> int:
        return int((await (await self.client(key)).call_tool("pid", {})).content[0].text)

    async def stream(self, key: str, text: str) -> AsyncIterator[int]:
        pieces: asyncio.Queue[int | None] = asyncio.Queue()

        async def took(_progress: float, _total: float | None, message: str | None) -> None:
            pieces.put_nowait(len(message or ""))

        client = await self.client(key)
        count = int(text.split()[1])
        call = asyncio.create_task(client.call_tool("answer", {"text": text}, progress_callback=took))
        call.add_done_callback(lambda _: pieces.put_nowait(None))
        # The result may overtake notifications.
        ended = False
        while count and not (ended and pieces.empty()):
            size = await pieces.get()
            if size is None:
                ended = True
                continue
            count -= 1
            yield size
        await call


class Acp(Connected):
    """The ACP SDK over stdio. A message is a prompt, and its answer comes in chunks."""

    def __init__(self, situation: Any) -> None:
        super().__init__(situation)
        self._sinks: dict[str, Callable[[str], None]] = {}
        self._pids: dict[str, int] = {}

    @contextlib.asynccontextmanager
    async def connect(self, key: str) -> AsyncIterator[Any]:
        import acp  # noqa: PLC0415

        sinks = self._sinks

        class Client:
            async def session_update(self, session_id: str, update: Any, **_: Any) -> None:
                sinks[key](update.content.text)

            def on_connect(self, conn: Any) -> None:
                pass

        command: Any = (sys.executable, SERVERS, "acp")
        limit = {"limit": 64 * 1024 * 1024}
        async with acp.spawn_agent_process(
            Client(),
            *command,
            env=dict(os.environ),
            transport_kwargs=limit,
        ) as (connection, process):
            await connection.initialize(protocol_version=acp.PROTOCOL_VERSION)
            session = await connection.new_session(cwd=tempfile.gettempdir(), mcp_servers=[])
            self._pids[key] = process.pid
            yield lambda text: connection.prompt(session_id=session.session_id, prompt=[acp.text_block(text)])

    async def send(self, key: str, text: str) -> str:
        prompt = await self.client(key)
        pieces: list[str] = []
        self._sinks[key] = pieces.append
        await prompt(text)
        return "".join(pieces)

    async def pid(self, key: str) -> int:
        await self.client(key)
        return self._pids[key]

    async def stream(self, key: str, text: str) -> AsyncIterator[int]:
        pieces: asyncio.Queue[int] = asyncio.Queue()
        prompt = await self.client(key)
        self._sinks[key] = lambda piece: pieces.put_nowait(len(piece))
        call = asyncio.create_task(prompt(text))
        for _ in range(int(text.split()[1])):
            yield await pieces.get()
        await call


class Jupyter(Connected):
    """jupyter_client with an IPython kernel. A message is a cell, and its answer is the value of the cell."""

    def __init__(self, situation: Any) -> None:
        super().__init__(situation)
        self._pids: dict[str, int] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="hpb-", ignore_cleanup_errors=True)
        for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR"):
            os.environ[name] = self._folder.name

    @contextlib.asynccontextmanager
    async def connect(self, key: str) -> AsyncIterator[Any]:
        import ipykernel  # noqa: F401, PLC0415
        from jupyter_client.manager import start_new_async_kernel  # noqa: PLC0415

        manager, client = await start_new_async_kernel(kernel_name="python3")
        try:
            yield client
        finally:
            client.stop_channels()
            await manager.shutdown_kernel(now=True)

    async def send(self, key: str, text: str) -> str:
        if text == WAIT:
            raise NotSupportedError("its client does not learn that the kernel died")
        client = await self.client(key)
        asked = client.execute(repr(text), store_history=False)
        answer = ""
        while True:
            message = await client.get_iopub_msg(timeout=60)
            if message["parent_header"].get("msg_id") != asked:
                continue
            if message["msg_type"] == "execute_result":
                answer = message["content"]["data"]["text/plain"][1:-1]
            elif message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                break
        await client.get_shell_msg(timeout=60)
        return answer

    async def pid(self, key: str) -> int:
        raise NotSupportedError("its client does not learn that the kernel died")
