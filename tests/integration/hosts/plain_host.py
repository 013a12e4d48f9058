"""A FastAPI host with what ``hermes_pool.fastapi`` has, and nothing else: for ``test_fastapi``."""

import os
from collections.abc import AsyncGenerator, Mapping
from typing import Annotated, Any

from fastapi import Body, FastAPI, Request, Response, WebSocket

from hermes_pool import ConversationEvent, HermesSessionManager, PoolSettings, Reply, SessionSnapshot, TurnStarted
from hermes_pool import fastapi as web

app = FastAPI(lifespan=web.lifespan(lambda: HermesSessionManager(PoolSettings.from_env())))
web.add_error_handlers(app)
app.include_router(web.health)
if "HEARTBEAT_S" in os.environ:
    web.HEARTBEAT_S = float(os.environ["HEARTBEAT_S"])


@app.post("/{conversation}/send")
async def send(conversation: str, text: Annotated[str, Body()], sessions: web.Sessions) -> Reply:
    return await sessions.send(conversation, text)


@app.post("/{conversation}/start/{turn_id}")
async def start(conversation: str, turn_id: str, text: Annotated[str, Body()], sessions: web.Sessions) -> str:
    return (await sessions.start(conversation, text, turn_id=turn_id)).turn_id


@app.get("/{conversation}/events")
async def events(conversation: str, request: Request, after: int | None = None) -> Response:
    return web.sse(request, conversation, after=after)


@app.get("/{conversation}/beginnings")
async def beginnings(conversation: str, request: Request) -> Response:
    def show(event: ConversationEvent) -> Mapping[str, Any] | None:
        return {"type": "begun", "text": event.text} if isinstance(event, TurnStarted) else None

    return web.sse(request, conversation, show=show)


@app.get("/sessions")
async def snapshots(sessions: web.Sessions) -> list[SessionSnapshot]:
    return await sessions.sessions()


@app.post("/drain")
async def drain(sessions: web.Sessions) -> None:
    await sessions.drain(0)


@app.get("/watchers")
async def watchers(sessions: web.Sessions) -> int:
    return sum(session.log.watchers for session in sessions._sessions.values())


@app.websocket("/{conversation}/ws")
async def socket(conversation: str, websocket: WebSocket, sessions: web.Sessions) -> None:
    await websocket.accept()
    await websocket.send_text((await sessions.send(conversation, await websocket.receive_text())).to_json())


@app.get("/{conversation}/with_own")
async def with_own(conversation: str, request: Request) -> Response:
    async def own() -> AsyncGenerator[Mapping[str, Any], None]:
        yield {"type": "own", "text": "a\nb"}

    return web.sse(request, conversation, also=own())
