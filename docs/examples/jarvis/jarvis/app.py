"""The application: Jarvis' own parts, the pool behind them, and the page."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles

from hermes_pool import ConversationStore, HermesSessionManager, PoolSettings
from hermes_pool.fastapi import add_error_handlers, health, lifespan
from jarvis.database import Conversation, Database
from jarvis.routes import router
from jarvis.runtimes import Runtimes

PAGE = Path(__file__).with_name("page")
CONTENT_POLICY = "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"


def create_app(database_url: str | None = None, settings: PoolSettings | None = None) -> FastAPI:
    """Return the application: over ``JARVIS_DATABASE`` and the ``HERMES_POOL_`` variables, if nothing else is said."""
    database = Database(database_url or os.environ.get("JARVIS_DATABASE", "sqlite:///jarvis.db"))
    runtimes = Runtimes(database)

    def pool() -> HermesSessionManager:
        store = ConversationStore(
            database.engine, Conversation, id_column="id", state_column="agent_state", create_rows=False
        )
        return HermesSessionManager(
            settings or PoolSettings.from_env(), store=store, history=runtimes.history, on_turn=runtimes.take_in
        )

    @asynccontextmanager
    async def opened(app: FastAPI) -> AsyncIterator[None]:
        await asyncio.to_thread(database.migrate)
        async with lifespan(pool)(app):
            runtimes.sessions = app.state.hermes_pool
            yield
        await runtimes.settled()
        database.engine.dispose()

    app = FastAPI(title="Jarvis", lifespan=opened)
    app.state.database, app.state.runtimes = database, runtimes
    add_error_handlers(app)
    app.include_router(health)
    app.include_router(router)
    app.get("/", include_in_schema=False)(page)
    app.get("/c/{conversation_id}", include_in_schema=False)(page)
    app.mount("/page", StaticFiles(directory=PAGE), name="page")
    return app


def page() -> FileResponse:
    """Return the chat page. It may load nothing from anywhere else."""
    headers = {"Content-Security-Policy": CONTENT_POLICY, "Cache-Control": "no-cache"}
    return FileResponse(PAGE / "index.html", headers=headers)
