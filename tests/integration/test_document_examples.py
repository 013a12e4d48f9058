"""The examples of the documents, run as they stand.

Every fenced ``python`` block of every page runs in a process of its own, all blocks of a page in one folder and in
their order. A comment before a block says what is special about it: ``with: NAME`` runs a fragment in the surroundings
``NAME`` (``SURROUNDINGS`` below), ``file: NAME`` saves it, and ``prints`` compares the ``text`` block with what the
block before it printed; ``...`` in it stands for anything.
"""

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).resolve().parents[2]
SLOW = {"docs/how-to/configure-hermes.md"}
"""Pages that start the real Hermes many times."""
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(
    r"^(?:<!-- (?P<marker>[^>]+) -->\n)?```(?P<language>\w+)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)
EXAMPLE_S = 60.0
"""Longest that one example may take."""
FIRST_EXAMPLE_LINES_MAX = 14

PUBLIC = """
import ast, asyncio, inspect, sys
from pathlib import Path
import hermes_pool

PUBLIC = {name: getattr(hermes_pool, name) for name in dir(hermes_pool) if not name.startswith("_")}
globals().update(PUBLIC)


async def run_example(**more):
    names = {"Path": Path, **PUBLIC, **more}
    code = compile(Path("example.py").read_text(), "example.py", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    running = eval(code, names)
    if running is not None:
        await running
    return names
"""

SETTINGS = (
    PUBLIC
    + """
asyncio.run(run_example())
"""
)

SESSIONS = (
    PUBLIC
    + """
async def main():
    async with HermesSessionManager(PoolSettings(agent="echo")) as sessions:
        await run_example(sessions=sessions)

asyncio.run(main())
"""
)

QUESTION = (
    PUBLIC
    + '''
Path("asker.py").write_text("""
from hermes_pool_worker.agent import Outcome
from hermes_pool_worker.echo import EchoAgent


class Agent(EchoAgent):
    def turn(self, text, turn):
        approval = turn.ask("approval", text, ["once", "deny"], 10)
        return Outcome(f"{approval}; {turn.ask('clarify', 'Which one?', ['The first one.'], 10)}")
""")

async def main():
    async with HermesSessionManager(PoolSettings(agent="asker:Agent", agent_paths=(".",))) as sessions:
        names = await run_example(sessions=sessions, text="rm -rf x")
        assert names["reply"].text == "once; The second one.", names["reply"]

asyncio.run(main())
'''
)

JARVIS = (
    PUBLIC
    + '''
import os, types
import httpx
from sqlalchemy import JSON, Column, create_engine, text
from sqlmodel import Field, SQLModel

class Conversation(SQLModel, table=True):
    id: str = Field(primary_key=True)
    title: str
    agent_state: dict | None = Field(default=None, sa_column=Column(JSON))

engine = create_engine("sqlite:///jarvis.db")
SQLModel.metadata.create_all(engine)
with engine.begin() as connection:
    state = """{"runtime_state": {"jarvis": {"x": 1}}}"""
    connection.execute(text("INSERT INTO conversation VALUES ('c', 'Jarvis'' own', :state)"), {"state": state})
database = types.ModuleType("jarvis.database")
database.Conversation, database.engine = Conversation, engine
sys.modules["jarvis"], sys.modules["jarvis.database"] = types.ModuleType("jarvis"), database
os.environ["HERMES_POOL_AGENT"] = "echo"

module = types.ModuleType("jarvis.app")
sys.modules["jarvis.app"] = module
exec(compile(Path("example.py").read_text(), "example.py", "exec"), vars(module))

async def main():
    transport = httpx.ASGITransport(module.app)
    async with (
        module.app.router.lifespan_context(module.app),
        httpx.AsyncClient(transport=transport, base_url="http://jarvis") as client,
    ):
        for message in ("Hello", "/first"):
            answer = await client.post("/conversations/c/messages", params={"text": message})
            assert (answer.status_code, answer.json()["text"]) == (200, "Hello"), answer.text
        answer = await client.post(f"/conversations/{'x' * 600}/messages", params={"text": "Hello"})
        assert answer.status_code == InvalidKeyError.http_status, answer.text
        assert "600 characters" in answer.json()["detail"]

asyncio.run(main())
with engine.begin() as connection:
    (title, state) = connection.execute(text("SELECT title, agent_state FROM conversation")).one()
assert title == "Jarvis' own"
assert '"jarvis":{"x":1}' in state, state
assert '"status":"dormant"' in state, state
'''
)

WEB = (
    PUBLIC
    + """
import os, types
import httpx

os.environ["HERMES_POOL_AGENT"] = "echo"
module = types.ModuleType("app")
sys.modules["app"] = module
exec(compile(Path("example.py").read_text(), "example.py", "exec"), vars(module))

async def main():
    transport = httpx.ASGITransport(module.app)
    async with (
        module.app.router.lifespan_context(module.app),
        httpx.AsyncClient(transport=transport, base_url="http://host") as client,
    ):
        for _ in range(2):
            answer = await client.post("/conversations/c/messages/m", json="Hello")
            assert answer.status_code == 202, answer.text
        answer = await client.post("/conversations/c/questions/q", json="once")
        assert answer.json() is False
        assert (await client.delete("/conversations/c/turns/unknown")).json() is None
        assert (await client.get("/readyz")).status_code == 200

asyncio.run(main())
"""
)

SURROUNDINGS = {"settings": SETTINGS, "sessions": SESSIONS, "question": QUESTION, "jarvis": JARVIS, "web": WEB}
"""What a fragment runs in: a program that finds it in ``example.py``."""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    marker: str
    language: str
    code: str
    line: int

    def argument_of(self, word: str) -> str | None:
        """What the marker says behind ``word``."""
        name, _, argument = self.marker.partition(": ")
        return argument if name == word else None


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for found in BLOCK.finditer(text):
        line = text.count("\n", 0, found.start("code"))
        yield Block(found["marker"] or "", found["language"], found["code"], line)


def run(program: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, program], cwd=folder, env=environment(folder), capture_output=True, text=True,
        timeout=EXAMPLE_S, check=False,
    )  # fmt: skip


def environment(folder: Path) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith(("HERMES", "XDG_"))}
    return {**own, "HOME": str(folder / "home"), "XDG_STATE_HOME": str(folder / "home" / "state")}


def as_pattern(text: str) -> str:
    return ".*".join(re.escape(part) for part in text.split("..."))


def with_python(page: Path) -> bool:
    return any(block.language == "python" for block in blocks(page))


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, id=name_of(page), marks=[pytest.mark.slow] * (name_of(page) in SLOW))
     for page in filter(with_python, PAGES)],
)  # fmt: skip
def test_the_examples_of_a_page_run_and_print_what_it_says(page: Path, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    printed: str | None = None
    for block in blocks(page):
        where = f"{page.name}, line {block.line}"
        if block.marker == "prints":
            assert printed is not None, f"{where}: nothing was run before it"
            assert re.fullmatch(as_pattern(block.code), printed, re.DOTALL), f"{where}: it prints\n{printed}"
        if block.language != "python":
            continue
        printed = None
        if (name := block.argument_of("file")) is not None:
            (tmp_path / name).write_text(block.code, encoding="utf-8")
            continue
        surroundings = block.argument_of("with")
        if surroundings == "hermes" and find_spec("run_agent") is None:
            continue
        (tmp_path / "example.py").write_text(block.code, encoding="utf-8")
        program = "example.py"
        if surroundings in SURROUNDINGS:
            program = "surroundings.py"
            (tmp_path / program).write_text(SURROUNDINGS[surroundings], encoding="utf-8")
        else:
            assert surroundings in (None, "hermes"), f"{where}: there are no surroundings {surroundings!r}"
        done = run(program, tmp_path)
        assert done.returncode == 0, f"{where}:\n{done.stderr}"
        assert done.stderr == "", f"{where}:\n{done.stderr}"
        printed = done.stdout


def test_the_first_example_of_the_readme_is_short_and_shows_a_turn(tmp_path: Path) -> None:
    first = next(block for block in blocks(ROOT / "README.md") if block.language == "python")
    assert len([line for line in first.code.splitlines() if line.strip()]) <= FIRST_EXAMPLE_LINES_MAX
    (tmp_path / "home").mkdir()
    (tmp_path / "example.py").write_text(first.code, encoding="utf-8")
    done = run("example.py", tmp_path)
    assert done.stdout.startswith("TextDelta "), done.stderr
    assert done.stdout.splitlines()[-1] == "Hi, I am Ada."


async def test_the_host_of_the_tutorial_answers_as_it_says(tmp_path: Path) -> None:
    page = ROOT / "docs" / "tutorial.md"
    (app,) = [block for block in blocks(page) if block.argument_of("file") == "app.py"]
    (asked,) = [block for block in blocks(page) if block.marker == "asks"]
    exchanges = re.findall(r"\$ curl -X (\w+) '([^']+)'\n([^$]*)\n", asked.code)
    assert len(exchanges) == asked.code.count("$ ")
    (tmp_path / "home").mkdir()
    (tmp_path / "app.py").write_text(app.code, encoding="utf-8")
    await ask_host(tmp_path, exchanges)
    again = [exchange for exchange in exchanges if exchange[1].endswith("/first")]
    await ask_host(tmp_path, again)  # the conversation goes on in the next host
    with contextlib.closing(sqlite3.connect(tmp_path / "app.db")) as database:
        ((state,),) = database.execute("SELECT agent_state FROM conversation").fetchall()
    assert list(json.loads(state)["runtime_state"]) == ["hermes"]


async def ask_host(folder: Path, exchanges: Sequence[tuple[str, str, str]]) -> None:
    """Start ``app.py``, send it requests (method, URL and the expected answer), and stop it with Ctrl-C."""
    port, host = start_host(folder)
    with host:
        try:
            async with httpx.AsyncClient(timeout=30) as client:
                for method, url, expected in exchanges:
                    answer = await client.request(method, url.replace(":8000", f":{port}"))
                    assert (answer.status_code, answer.text) == (200, expected), url
        finally:
            host.send_signal(signal.SIGINT)
            await asyncio.to_thread(host.wait, 20)
        assert host.stderr is not None
        assert host.stderr.read() == ""


def start_host(folder: Path) -> tuple[int, "subprocess.Popen[str]"]:
    """Start ``app.py`` with a socket that listens already: requests wait until it is ready, and fail if it dies."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        descriptor = listening.fileno()
        command = [sys.executable, "-m", "uvicorn", "app:app", "--fd", str(descriptor), "--log-level", "warning"]
        environ = {**environment(folder), "HERMES_POOL_AGENT": "echo"}
        host = subprocess.Popen(
            command, cwd=folder, env=environ, pass_fds=[descriptor], stderr=subprocess.PIPE, text=True
        )
        return listening.getsockname()[1], host


def test_the_source_distribution_holds_all_that_the_readme_links_to(tmp_path: Path) -> None:
    isolation = ["--no-isolation", "--skip-dependency-check"] if find_spec("hatchling") else []
    done = subprocess.run(
        [sys.executable, "-m", "build", "--sdist", *isolation, "--outdir", tmp_path, ROOT],
        cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(file) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    links = re.findall(r"\]\(([^)#\s]+)", (ROOT / "README.md").read_text(encoding="utf-8"))
    inside = {link for link in links if "://" not in link}
    assert inside
    assert inside <= names
    assert {page.relative_to(ROOT).as_posix() for page in PAGES} <= names
