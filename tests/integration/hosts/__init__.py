"""Hosts of a pool as an application would write them, served by a real server in a process of its own."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx

ROOT = Path(__file__).resolve().parents[3]


class Host:
    """An ASGI application in a uvicorn of its own. Its socket listens at once: requests wait until it is ready."""

    def __init__(self, app: str, folder: Path, *options: str, environ: dict[str, str], port: int = 0) -> None:
        self.log = folder / "host.log"
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HERMES", "XDG_"))}
        own = {"HOME": str(folder), "PYTHONPATH": str(ROOT), "HERMES_POOL_STATE_DIR": str(folder / "state"), **environ}
        with socket.create_server(("127.0.0.1", port)) as listening, self.log.open("ab") as log:
            listening.set_inheritable(True)
            command = [sys.executable, "-m", "uvicorn", app, "--fd", str(listening.fileno()), *options]
            self.process = subprocess.Popen(
                command, cwd=folder, env={**inherited, **own}, pass_fds=[listening.fileno()], stdout=log, stderr=log
            )
            self.port: int = listening.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, timeout=30)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Tell it to end, and return its status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


@dataclass(frozen=True)
class Sent:
    """One event of a stream."""

    seq: int | None
    kind: str | None
    data: Any


@contextlib.asynccontextmanager
async def stream(
    client: httpx.AsyncClient, path: str, headers: dict[str, str] | None = None
) -> AsyncIterator[AsyncIterator[Sent | str]]:
    """Read a stream of events: what was sent, and comments as text."""
    async with client.stream("GET", path, headers=headers) as answer:
        assert answer.status_code == 200, await answer.aread()
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield _read(answer)


async def _read(answer: httpx.Response) -> AsyncIterator[Sent | str]:
    fields: dict[str, str] = {}
    async for line in answer.aiter_lines():
        if line.startswith(":"):
            yield line
        elif line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif "id" in fields or "event" in fields:
            seq = int(fields["id"]) if "id" in fields else None
            yield Sent(seq, fields.get("event"), json.loads(fields.get("data", "null")))
            fields = {}
        else:
            fields = {}


async def until_event(events: AsyncIterator[Sent | str], kind: str, deadline_s: float = 20) -> list[Sent]:
    """Read up to an event of this kind, and return all of them."""
    found: list[Sent] = []
    async with asyncio.timeout(deadline_s):
        async for sent in events:
            if isinstance(sent, Sent):
                found.append(sent)
                if sent.kind == kind:
                    return found
    raise AssertionError(f"the stream ended without {kind}: {found}")
