"""What every FastAPI host of a pool would write: its lifespan, a dependency, event streams, errors and health.

    app = FastAPI(lifespan=lifespan(lambda: HermesSessionManager(PoolSettings.from_env())))
    add_error_handlers(app)
    app.include_router(health)

    @app.post("/conversations/{conversation_id}/messages")
    async def message(conversation_id: str, text: str, sessions: Sessions) -> Reply:
        return await sessions.send(conversation_id, text)

    @app.get("/conversations/{conversation_id}/events")
    async def events(conversation_id: str, request: Request) -> Response:
        return sse(request, conversation_id)

It needs the extra ``fastapi`` of hermes-pool. Nothing else in the package imports this module.
"""

import asyncio
import math
import signal
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, contextmanager, suppress
from types import FrameType
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, FastAPI, Request, Response, WebSocket
from fastapi.requests import HTTPConnection
from fastapi.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from hermes_pool.conversation.events import ConversationEvent
from hermes_pool.errors import HermesPoolError, PoolClosedError
from hermes_pool.manager import HermesSessionManager
from hermes_pool.scheduling.pool_state import PoolState
from hermes_pool.settings import SessionKey
from hermes_pool.snapshot import BreakerState
from hermes_pool_worker.plain import json_text, plain, type_word

__all__ = ["Sessions", "add_error_handlers", "error_response", "health", "lifespan", "sessions", "sse"]

HEARTBEAT_S = 15.0
"""How often a stream without events sends a comment, in seconds: proxies close what is silent."""
RECONNECT_MS = 1000
"""After how many milliseconds a browser connects again."""
SEQ_BELOW = 2**53
"""Where the numbers end that a browser can hold."""
TRY_AGAIN_LATER, INTERNAL_ERROR = 1013, 1011
"""With which codes a WebSocket is closed after an error."""

T = TypeVar("T")
Show = Callable[[ConversationEvent], Mapping[str, Any] | None]
"""What a stream shows of an event: a mapping with ``type``, or ``None`` for nothing."""


# --- the pool of an application ---------------------------------------------------------------------------------------


def lifespan(
    make: Callable[[], HermesSessionManager],
) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    """Return a lifespan for ``FastAPI(lifespan=...)`` that opens the pool which ``make`` returns, and closes it.

    A lifespan of your own uses it with ``async with lifespan(make)(app):``. When the process is told to end (SIGTERM,
    Ctrl-C), the streams of ``sse`` end as well: servers wait for open connections before they end the lifespan. A
    stream whose conversation is at a turn goes on for up to ``timeouts.drain_s``.
    """

    @asynccontextmanager
    async def opened(app: FastAPI) -> AsyncIterator[None]:
        leaving = asyncio.Event()
        with _told_to_end(leaving):
            async with make() as manager:
                app.state.hermes_pool, app.state.hermes_pool_leaving = manager, leaving
                try:
                    yield
                finally:
                    leaving.set()

    return opened


@contextmanager
def _told_to_end(leaving: asyncio.Event) -> Iterator[None]:
    """Set the event when a signal tells the process to end, and leave to the server what it does about it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    before: dict[int, Any] = {}

    def told(number: int, frame: FrameType | None) -> None:
        with suppress(RuntimeError):  # a loop that has ended needs no word
            loop.call_soon_threadsafe(leaving.set)
        if callable(before[number]):
            before[number](number, frame)

    for number in (int(signal.SIGTERM), int(signal.SIGINT)):
        handler = signal.getsignal(number)
        if callable(handler):  # with the default action nobody waits for streams
            before[number] = handler
            signal.signal(number, told)
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is told:
                signal.signal(number, handler)


def sessions(connection: HTTPConnection) -> HermesSessionManager:
    """Return the pool of the application: a dependency, for requests and for WebSockets."""
    manager: HermesSessionManager | None = getattr(connection.app.state, "hermes_pool", None)
    if manager is None:
        raise PoolClosedError("this application has no pool: use FastAPI(lifespan=hermes_pool.fastapi.lifespan(...))")
    return manager


Sessions = Annotated[HermesSessionManager, Depends(sessions)]
"""The type of a route's parameter that gets the pool."""


# --- server-sent events -----------------------------------------------------------------------------------------------


def sse(
    request: Request,
    conversation: str | SessionKey,
    *,
    after: int | None = None,
    show: Show | None = None,
    also: AsyncGenerator[Mapping[str, Any], None] | None = None,
) -> Response:
    """Return the events of a conversation as a ``text/event-stream``, which a browser's ``EventSource`` reads.

    Each event has its ``seq`` as ``id``, its type word as ``event`` and its JSON as ``data``. The stream goes on after
    the header ``Last-Event-ID``, which a browser sends when it connects again, else after ``after``, else from the
    beginning of the running turn. A client that leaves never ends a turn; one that is slow never slows the worker down.

    ``show`` changes or leaves out what your clients may not see. ``also`` yields events of your own: mappings that have
    ``type``. They have no ``id``, so a client that was away does not get them later. It is closed with the stream.

    Raises ``InvalidKeyError`` and ``PoolClosedError``.
    """
    manager = sessions(request)
    key = conversation if isinstance(conversation, SessionKey) else SessionKey(conversation)
    if manager.pool().state in (PoolState.NEW, PoolState.CLOSED):
        raise PoolClosedError("the pool is closed", conversation_id=key.conversation_id)
    seen = request.headers.get("Last-Event-ID", "")
    if seen.isascii() and seen.isdecimal() and len(seen) <= len(str(SEQ_BELOW)):
        after = int(seen)
    leaving: asyncio.Event = request.app.state.hermes_pool_leaving
    return _EventStream(manager, key, after=after, show=show, also=also, leaving=leaving)


class _EventStream(Response):
    """A response that goes on until its client leaves, the pool closes, or the process is told to end."""

    media_type = "text/event-stream"

    def __init__(
        self,
        manager: HermesSessionManager,
        key: SessionKey,
        *,
        after: int | None,
        show: Show | None,
        also: AsyncGenerator[Mapping[str, Any], None] | None,
        leaving: asyncio.Event,
    ) -> None:
        # A proxy must neither keep nor gather what is meant for now.
        super().__init__(headers={"Cache-Control": "no-store, no-transform", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._manager, self._key, self._after, self._leaving = manager, key, after, leaving
        self._show, self._also = show, also or _nothing()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until one side ends it. Not Starlette's own streaming, which may not notice that the client left."""
        writing = asyncio.ensure_future(self._write(send))
        gone = asyncio.ensure_future(_client_gone(receive))
        tasks = {writing, gone}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        if gone.cancelled() and not writing.cancelled():
            with suppress(OSError):  # the client left just now
                writing.result()
                await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, send: Send) -> None:
        async with aclosing(self._texts()) as texts:
            first = await anext(texts)
            # From here on it watches: what a client asks for once it sees the answer cannot fall between the two.
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send(_body(first))
            async for text in texts:
                await send(_body(text))

    async def _texts(self) -> AsyncGenerator[str, None]:
        """Yield the events as text, and a comment where none comes for a while."""
        leave: asyncio.Future[Any] = asyncio.ensure_future(self._told_to_leave())
        async with aclosing(self._manager.events(self._key, after=self._after)) as events, aclosing(self._also) as also:
            coming, own = _next(events), _next(also)
            try:
                await asyncio.sleep(0)
                yield f"retry: {RECONNECT_MS}\n\n"
                while True:
                    every: set[asyncio.Future[Any]] = {coming, own, leave}
                    await asyncio.wait(every, timeout=HEARTBEAT_S, return_when=asyncio.FIRST_COMPLETED)
                    if coming.done():
                        if (found := coming.result()) is None:
                            return
                        coming = _next(events)
                        yield self._text(*found)
                    elif own.done():
                        if (mine := own.result()) is not None:
                            yield f"event: {mine['type']}\ndata: {json_text(plain(mine))}\n\n"
                        own = _next(also) if mine is not None else asyncio.get_running_loop().create_future()
                    elif leave.done():  # and all that there was has been told
                        return
                    else:
                        yield ":\n\n"
            finally:
                every = {coming, own, leave}
                for each in every:
                    each.cancel()
                await asyncio.wait(every)

    def _text(self, seq: int, event: ConversationEvent) -> str:
        if self._show is None:
            return f"id: {seq}\nevent: {type_word(type(event))}\ndata: {event.to_json()}\n\n"
        shown = self._show(event)
        if shown is None:  # its number is told nevertheless: who connects again goes on behind it
            return f"id: {seq}\n\n"
        return f"id: {seq}\nevent: {shown['type']}\ndata: {json_text(plain(shown))}\n\n"

    async def _told_to_leave(self) -> None:
        """Return once the process is told to end and the conversation is at no turn, or has had its time."""
        await self._leaving.wait()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._manager.settings.timeouts.drain_s):
                while (turn := self._manager.turn_of(self._key)) is not None:
                    with suppress(HermesPoolError):
                        await turn.reply()
                    await asyncio.sleep(0)


def _next(source: AsyncGenerator[T, None]) -> "asyncio.Future[T | None]":
    async def ask() -> T | None:
        return await anext(source, None)

    return asyncio.ensure_future(ask())


async def _nothing() -> AsyncGenerator[Mapping[str, Any], None]:
    return
    yield {}


async def _client_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _body(text: str) -> dict[str, Any]:
    return {"type": "http.response.body", "body": text.encode(), "more_body": True}


# --- errors -----------------------------------------------------------------------------------------------------------


def add_error_handlers(app: FastAPI) -> None:
    """Answer each ``HermesPoolError`` that leaves a route with its ``http_status``, ``Retry-After`` and its JSON.

    The body is ``{"detail": message, "error": error.to_dict()}``. A WebSocket is closed with 1013 if it is worth trying
    again, else with 1011; the reason is the error's ``code``.
    """
    app.add_exception_handler(HermesPoolError, _error_answer)


async def _error_answer(connection: HTTPConnection, error: Exception) -> Any:
    assert isinstance(error, HermesPoolError)  # noqa: S101 - it was registered for these
    if isinstance(connection, WebSocket):
        await connection.close(TRY_AGAIN_LATER if error.retryable else INTERNAL_ERROR, reason=error.code)
        return None
    return error_response(error)


def error_response(error: HermesPoolError) -> JSONResponse:
    """Return the answer to an error: what ``add_error_handlers`` sends."""
    shown = error.to_dict()
    wait = {} if error.retry_after_s is None else {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
    return JSONResponse({"detail": shown["message"], "error": shown}, error.http_status, wait)


# --- health -----------------------------------------------------------------------------------------------------------

health = APIRouter(tags=["health"])
"""Two routes: ``/healthz`` (the loop runs) and ``/readyz`` (a new message would be taken, else 503)."""


@health.get("/healthz")
async def healthz(pool: Sessions) -> dict[str, Any]:
    """Answer as long as the event loop runs and the pool is not closed."""
    seen = pool.pool()
    if seen.state == PoolState.CLOSED:
        raise PoolClosedError("the pool is closed")
    return {"status": "ok", "state": seen.state}


@health.get("/readyz")
async def readyz(pool: Sessions) -> Response:
    """Answer 200 if the pool would take a message of a new conversation now, else 503 and why not."""
    seen = pool.pool()
    why, wait_s = None, None
    if seen.state != PoolState.OPEN:
        why = f"the pool is {seen.state}"
    elif seen.starts is not None and seen.starts.state == BreakerState.OPEN:
        why, wait_s = "workers cannot be started", seen.starts.retry_after_s
    body = {
        "status": "ready" if why is None else "not ready",
        "why": why,
        "state": seen.state,
        "workers": seen.workers,
        "workers_max": seen.workers_max,
        "waiting": seen.waiting,
    }
    wait = {} if wait_s is None else {"Retry-After": str(max(1, math.ceil(wait_s)))}
    return JSONResponse(body, 200 if why is None else 503, wait)
