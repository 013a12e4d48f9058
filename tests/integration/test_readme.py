"""What the README shows is run as it stands."""

import os
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import JSON, Column, create_engine, text
from sqlalchemy.orm import registry
from sqlmodel import Field, SQLModel

README = (Path(__file__).parents[2] / "README.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_first_example_runs_as_it_stands(tmp_path: Path) -> None:
    environment = {**os.environ, "HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-c", PYTHON[0]], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    assert run.stdout.splitlines()[-1] == "Hi, I am Ada."
    assert run.stdout.startswith("TextDelta ")
    assert len([line for line in PYTHON[0].splitlines() if line.strip()]) <= 14


class JarvisModel(SQLModel, registry=registry()):
    """Keeps the table below out of everybody else's metadata."""


class Conversation(JarvisModel, table=True):
    id: str = Field(primary_key=True)
    title: str
    agent_state: dict[str, Any] | None = Field(default=None, sa_column=Column(JSON))


async def test_the_fastapi_example_runs_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (source,) = [code for code in PYTHON if "FastAPI(lifespan=lifespan)" in code]
    database = types.ModuleType("jarvis.database")
    database.Conversation = Conversation  # type: ignore[attr-defined] # a module made here
    database.engine = engine = create_engine(f"sqlite:///{tmp_path}/jarvis.db")  # type: ignore[attr-defined] # the same
    monkeypatch.setitem(sys.modules, "jarvis", types.ModuleType("jarvis"))
    monkeypatch.setitem(sys.modules, "jarvis.database", database)
    Conversation.metadata.create_all(engine)
    with engine.begin() as connection:
        connection.execute(
            text("INSERT INTO conversation VALUES ('c', 'Jarvis'' own', :state)"),
            {"state": '{"runtime_state": {"jarvis": {"x": 1}}}'},
        )
    settings = f"PoolSettings(agent='echo', state_dir={str(tmp_path / 'state')!r})"
    module: dict[str, Any] = {"__name__": "jarvis.app"}
    exec(compile(source.replace("PoolSettings()", settings), "README.md", "exec"), module)
    app = module["app"]
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://jarvis") as client,
    ):
        for message in ("Hello", "/first"):
            answer = await client.post("/conversations/c/messages", params={"text": message})
            assert (answer.status_code, answer.json()) == (200, {"text": "Hello"})
        answer = await client.post(f"/conversations/{'x' * 600}/messages", params={"text": "Hello"})
        assert answer.status_code == 500
    with engine.begin() as connection:
        (title, state) = connection.execute(text("SELECT title, agent_state FROM conversation")).one()
    engine.dispose()
    assert title == "Jarvis' own"
    assert '"jarvis":{"x":1}' in state
    assert '"status":"dormant"' in state
