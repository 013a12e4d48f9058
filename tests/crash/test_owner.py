"""Nothing outlives its owner: supervisors, zygotes and guardians that are killed, alone and together."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import urllib.parse
import urllib.request
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from hermes_pool.process import lifeline
from tests.crash.outside import gone, process_of, row_of
from tests.support import FAULTY, Faulty, OpenPool, alive, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the nets of other systems are weaker")

LAUNCHERS = pytest.mark.parametrize("launcher", ["zygote", "spawn"])

HIDES = ("", "deaf", "cleared", "setsid", "setsid daemon", "setsid daemon deaf", "setsid daemon cleared")
"""The ways in which a tool of ``leaves_all_kinds_of_tools`` makes itself hard to find or to end."""

HOST = """
    import asyncio, json, os, sys, threading
    from hermes_pool import HermesSessionManager, PoolSettings

    async def main():
        settings = PoolSettings(**json.loads(sys.argv[1]))
        pool = await HermesSessionManager(settings).__aenter__()
        tools, turns = [], []
        for number, text in enumerate(json.loads(sys.argv[2])):
            turn = pool.turn(f"c{number % 3}" if "stay" not in text and text != "hold" else f"t{number}", text)
            turns.append(turn)
            await turn.__aenter__()
            if "stay" in text or text == "hold":
                event = await anext(aiter(turn))
                tools.append(event.text)
            else:
                tools.append((await turn.reply()).text)
                await turn.__aexit__(None, None, None)
        if sys.argv[3:] == ["fork"] and os.fork() == 0:
            threading.Event().wait()
        workers = [row.pid for row in await pool.sessions()]
        print(json.dumps({"tools": tools, "workers": workers}), flush=True)
        await asyncio.to_thread(sys.stdin.readline)

    asyncio.run(main())
    threading.Event().wait()
"""


class Host:
    """A program with a pool, seen from outside."""

    def __init__(self, popen: "subprocess.Popen[str]") -> None:
        self.popen = popen
        self.family: list[psutil.Process] = []
        self.tools: list[psutil.Process] = []
        self.workers: list[psutil.Process] = []

    async def ready(self) -> "Host":
        assert self.popen.stdout is not None
        told = json.loads(await asyncio.wait_for(asyncio.to_thread(self.popen.stdout.readline), 60))
        self.tools = [psutil.Process(int(each)) for each in told["tools"] if each.isdecimal()]
        self.workers = [psutil.Process(pid) for pid in told["workers"]]
        below = psutil.Process(self.popen.pid).children(recursive=True)
        self.family = [*below, *(tool for tool in self.tools if tool not in below)]
        assert not [each for each in (*self.tools, *self.workers) if gone(each)]
        return self

    def helper(self, name: str) -> psutil.Process:
        children = psutil.Process(self.popen.pid).children()
        (found,) = [each for each in children if f"--{name}" in _command(each)]
        return found

    async def kill(self, *others: str) -> None:
        """Kill it, and with it its zygote or its guardian, so that none can do anything when another is dead."""
        # Itself last, or a worker could see the end of its wire before the lifeline reaches it, and sweep up.
        doomed = [*(self.helper(name) for name in others), psutil.Process(self.popen.pid)]
        for each in doomed:
            each.send_signal(signal.SIGSTOP)
        for each in doomed:
            each.send_signal(signal.SIGKILL)
            await until(partial(gone, each), "the process to end", 5)

    async def nothing_left(self, seconds: float = 3.0) -> None:
        def left() -> list[psutil.Process]:
            return [each for each in self.family if not gone(each)]

        try:
            await until(lambda: not left(), "everything to go", seconds)
        except AssertionError:
            raise AssertionError(f"left: {[(each, _command(each)) for each in left()]}") from None


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


StartHost = Callable[..., Awaitable[Host]]


@pytest.fixture
def host(tmp_path: Path) -> Iterator[StartHost]:
    """Start a program with a pool whose tools hide; end at last whatever of it is still there."""
    hosts: list[Host] = []

    def start(launcher: str, texts: list[str], *more: str, agent: str = "leaves_all_kinds_of_tools") -> Awaitable[Host]:
        file = tmp_path / f"host{len(hosts)}.py"
        file.write_text(textwrap.dedent(HOST))
        settings = {
            "agent": f"{agent}:Agent",
            "agent_paths": [str(FAULTY)],
            "state_dir": str(tmp_path / "state"),
            "launcher": launcher,
        }
        command = [sys.executable, str(file), json.dumps(settings), json.dumps(texts), *more]
        popen = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        hosts.append(Host(popen))
        return hosts[-1].ready()

    yield start
    for each in hosts:
        each.popen.kill()
        each.popen.wait()
        for pipe in (each.popen.stdin, each.popen.stdout):
            assert pipe is not None
            pipe.close()
        for process in each.family:
            if not gone(process):
                process.kill()


EVERY_KIND = [f"tool {hides}".strip() + " " for hides in HIDES] + ["tool setsid daemon cleared deaf stay"]


# --- the supervisor is killed ---


@LAUNCHERS
async def test_when_the_host_is_killed_in_a_turn_every_tool_goes_however_it_hides(
    host: StartHost, launcher: str
) -> None:
    one = await host(launcher, EVERY_KIND)
    await one.kill()
    await one.nothing_left()


async def test_when_host_and_zygote_are_killed_together_every_tool_goes_all_the_same(host: StartHost) -> None:
    one = await host("zygote", EVERY_KIND)
    await one.kill("zygote")
    await one.nothing_left()


async def test_when_host_and_guardian_are_killed_together_the_zygote_sees_to_every_tool(
    host: StartHost,
) -> None:
    one = await host("zygote", EVERY_KIND)
    await one.kill("guardian")
    await one.nothing_left()


@pytest.mark.parametrize("killed", [("zygote", "guardian"), ("guardian",)])
async def test_what_nobody_is_left_to_end_the_next_start_ends(
    open_pool: OpenPool, host: StartHost, killed: tuple[str, ...]
) -> None:
    launcher = "zygote" if "zygote" in killed else "spawn"
    one = await host(launcher, ["tool setsid daemon deaf"])
    other = await host(launcher, ["tool setsid daemon"])
    await one.kill(*killed)
    await until(lambda: all(gone(worker) for worker in one.workers), "the kernel to kill the workers", 1)
    (tool,) = one.tools
    assert not gone(tool)
    await open_pool()
    await one.nothing_left()
    assert not [each for each in other.family if gone(each)]


@pytest.mark.parametrize("launcher", ["zygote", pytest.param("spawn", marks=pytest.mark.slow)])
@pytest.mark.parametrize("killed", [(), ("guardian",)])
async def test_a_worker_that_holds_the_interpreter_with_all_signals_blocked_dies_with_its_host(
    host: StartHost, launcher: str, killed: tuple[str, ...]
) -> None:
    one = await host(launcher, ["hold"], agent="holds_the_gil")
    await one.kill(*killed)
    await one.nothing_left(1.0)


@pytest.mark.parametrize(("launcher", "killed"), [("zygote", ()), ("zygote", ("guardian",)), ("spawn", ())])
async def test_a_fork_of_the_host_does_not_keep_its_workers(
    host: StartHost, launcher: str, killed: tuple[str, ...]
) -> None:
    one = await host(launcher, ["tool setsid"], "fork")
    (fork,) = [each for each in one.family if _command(each) == _command(psutil.Process(one.popen.pid))]
    one.family.remove(fork)
    try:
        await one.kill(*killed)
        await one.nothing_left()
        assert not gone(fork)
    finally:
        fork.kill()


@LAUNCHERS
async def test_an_event_loop_that_ends_without_close_takes_everything_with_it(host: StartHost, launcher: str) -> None:
    one = await host(launcher, EVERY_KIND[:-1])
    print(file=one.popen.stdin, flush=True)
    await one.nothing_left()
    assert one.popen.poll() is None


# --- a zygote or a guardian is killed ---


async def _the_helper(name: str) -> psutil.Process | None:
    found = [each for each in psutil.Process().children() if f"--{name}" in _command(each) and not gone(each)]
    return found[0] if found else None


async def test_strays_of_a_worker_that_dies_after_its_zygote_are_ended(open_pool: OpenPool, faulty: Faulty) -> None:
    pool = await open_pool(**faulty("leaves_all_kinds_of_tools"), launcher="zygote")
    texts = ("tool ", "tool deaf", "tool setsid daemon")
    tools = [psutil.Process(int((await pool.send("c", text)).text)) for text in texts]
    worker = await process_of(pool, "c")
    family = {*worker.children(recursive=True), *tools}
    assert len(family) >= 5, "the forks without a program of their own count as well"
    zygote = await _the_helper("zygote")
    assert zygote is not None
    zygote.kill()
    await until(lambda: gone(zygote), "the zygote to go")
    assert not [each for each in (worker, *tools) if gone(each)]
    worker.kill()
    await until(lambda: not [each for each in family if not gone(each)], "all that it left to go", 5)


@LAUNCHERS
async def test_the_death_of_the_guardian_harms_nobody_and_is_healed(
    open_pool: OpenPool, launcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifeline, "RETRY_AFTER_S", 0.0)
    pool = await open_pool(launcher=launcher)
    await pool.send("a", "hello")
    guardian = await until(lambda: _the_helper("guardian"), "the guardian")
    guardian.send_signal(signal.SIGTERM)
    guardian.kill()
    await until(lambda: not psutil.pid_exists(guardian.pid), "the guardian to be reaped")
    assert (await pool.send("a", "/count")).text == "2"
    if launcher == "spawn":
        await pool.send("b", "hello")
        successor = await until(lambda: _the_helper("guardian"), "another guardian")
        assert successor != guardian


# --- a worker ends ---


@pytest.mark.parametrize("end", ["killed", "stopped", "closed"])
@LAUNCHERS
async def test_a_daemon_that_shows_no_marker_goes_with_its_worker_and_with_no_other(
    open_pool: OpenPool, faulty: Faulty, end: str, launcher: str
) -> None:
    if (end, launcher) == ("killed", "spawn"):
        pytest.skip("nothing is left that could find it; docs/how-to/deployment.md says so")
    pool = await open_pool(**faulty("leaves_all_kinds_of_tools"), launcher=launcher)
    hidden = "tool setsid daemon cleared deaf"
    tool, other = [psutil.Process(int((await pool.send(name, hidden)).text)) for name in ("c", "other")]
    worker = await process_of(pool, "c")
    assert tool.ppid() == worker.pid
    match end:
        case "killed":
            worker.kill()
        case "stopped":
            await pool.stop("c")
        case "closed":
            await pool.close()
            await until(lambda: gone(other), "the other one's as well", 5)
    await until(lambda: gone(tool), "the tool to go", 5)
    if end != "closed":
        assert not gone(other)
        assert (await pool.send("other", "hello")).text == "hello"


REAPER = """
    import os, subprocess, sys, time
    sys.path.insert(0, sys.argv[1])
    from hermes_pool_worker import process_tree

    process_tree.adopt_orphans()
    own = [subprocess.Popen(["sh", "-c", "exit 3"]), subprocess.Popen(["sh", "-c", "exit 4"], start_new_session=True)]
    tool = subprocess.Popen(["sh", "-c", "sleep 0.05 & echo $!"], start_new_session=True, stdout=subprocess.PIPE)
    orphan = int(tool.communicate()[0])
    state = lambda pid: open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[:2]
    while {state(pid)[0] for pid in (orphan, own[0].pid, own[1].pid)} != {"Z"}:
        time.sleep(0.005)
    assert state(orphan)[1] == str(os.getpid())
    process_tree.reap_adopted()
    print(os.path.exists(f"/proc/{orphan}"), [each.wait() for each in own])
    process_tree.reap_adopted()
"""


async def test_a_worker_reaps_what_it_has_adopted_and_leaves_what_it_has_started() -> None:
    worker = str(Path(lifeline.__file__).parent.parent / "worker")
    command = [sys.executable, "-c", textwrap.dedent(REAPER), worker]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=20)
    assert (done.stdout.strip(), done.stderr) == ("False [3, 4]", "")


# --- the lifeline costs little ---


async def test_the_tools_of_an_agent_do_not_inherit_the_lifeline(open_pool: OpenPool, faulty: Faulty) -> None:
    pool = await open_pool(**faulty("leaves_all_kinds_of_tools"))
    tool = int((await pool.send("c", "tool ")).text)
    row = await row_of(pool, "c")
    pipes = {os.readlink(f"/proc/{row.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{row.pid}/fd")}
    held = {os.readlink(f"/proc/{tool}/fd/{fd}") for fd in os.listdir(f"/proc/{tool}/fd")}
    ours = {os.readlink(f"/proc/self/fd/{fd}") for fd in _descriptors_of_pipes()}
    # Its output goes into the worker's log, and nothing else of the worker's or ours is open in it.
    assert len(held & pipes & ours) == 1
    assert "HERMES_POOL_LIFELINE" not in psutil.Process(tool).environ()


def _descriptors_of_pipes() -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{fd}").startswith("pipe:"):
                found.append(fd)
        except OSError:
            continue
    return found


# --- uvicorn --reload ---

APP = """
    import asyncio, os
    from contextlib import asynccontextmanager
    from pathlib import Path
    from fastapi import FastAPI
    from hermes_pool import HermesSessionManager, PoolSettings, Timeouts

    settings = PoolSettings(
        agent="leaves_all_kinds_of_tools:Agent", agent_paths=(os.environ["FAULTY"],), launcher=os.environ["LAUNCHER"],
        state_dir=os.environ["STATE"], timeouts=Timeouts(close_grace_s=0.5, term_grace_s=0.2),
    )

    @asynccontextmanager
    async def lifespan(app):
        async with HermesSessionManager(settings) as app.state.pool:
            yield

    app = FastAPI(lifespan=lifespan)

    @app.post("/{conversation_id}")
    async def say(conversation_id: str, text: str):
        return {"text": (await app.state.pool.send(conversation_id, text)).text, "supervisor": os.getpid()}
"""


class Server:
    """A server that reloads itself."""

    def __init__(self, folder: Path, launcher: str) -> None:
        self.pools: set[str] = set()
        self.source = folder / "app.py"
        self.source.write_text(textwrap.dedent(APP))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [
            *(sys.executable, "-m", "uvicorn", "app:app", "--reload", "--port", str(self.port)),
            *("--reload-delay", "0.05", "--timeout-graceful-shutdown", "1"),
        ]
        more = {"FAULTY": str(FAULTY), "LAUNCHER": launcher, "STATE": str(folder / "state")}
        self.log = (folder / "log").open("w")
        self.popen = subprocess.Popen(
            command, cwd=folder, env={**os.environ, **more}, stdout=self.log, stderr=self.log, start_new_session=True
        )

    def change(self, more: str) -> None:
        """Change the source, at one moment, so that it is one reload."""
        scratch = self.source.with_suffix(".new")
        scratch.write_text(self.source.read_text() + more)
        scratch.replace(self.source)

    async def say(self, conversation_id: str, text: str) -> dict[str, Any]:
        url = f"http://127.0.0.1:{self.port}/{conversation_id}?text={urllib.parse.quote(text)}"
        request = urllib.request.Request(url, method="POST")

        def ask() -> dict[str, Any]:
            with urllib.request.urlopen(request, timeout=30) as answer:
                said: dict[str, Any] = json.loads(answer.read())
                return said

        return await asyncio.to_thread(ask)

    async def says(self, conversation_id: str, text: str) -> dict[str, Any] | None:
        try:
            return await self.say(conversation_id, text)
        except OSError:  # it is being reloaded
            return None

    def pool_processes(self) -> dict[int, str]:
        """What carries a marker of one of its pools: the helpers, the workers and their tools."""
        carry = {}
        for process in psutil.process_iter():
            try:
                if marker := process.environ().get("HERMES_POOL_WORKER"):
                    carry[process.pid] = marker.partition("-")[0]
                    if process.cwd().startswith(str(self.source.parent)):
                        self.pools.add(carry[process.pid])
            except psutil.Error:
                continue
        return {pid: pool for pid, pool in carry.items() if pool in self.pools}

    def workers(self, supervisor: int) -> list[psutil.Process]:
        """Its pools' processes that run the worker's program and are neither a zygote nor a guardian."""
        found = [psutil.Process(pid) for pid in self.pool_processes()]
        return [
            each
            for each in found
            if any(part.endswith("__main__.py") for part in _command(each))
            and not (each.ppid() == supervisor and {"--zygote", "--guardian"} & set(_command(each)))
        ]

    def listeners(self) -> set[int]:
        """Who holds the listening socket."""
        line = re.compile(rf"^\s*\d+: 0100007F:{self.port:04X} 00000000:0000 0A (?:\S+ +){{5}}(\d+)", re.MULTILINE)
        (inode,) = line.findall(Path("/proc/net/tcp").read_text())
        holders = set()
        for process in psutil.process_iter():
            with suppress(OSError):  # the process ended
                for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
                    with suppress(OSError):  # it closed this one, and only this one
                        if os.readlink(descriptor) == f"socket:[{inode}]":
                            holders.add(process.pid)
        return holders


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Callable[[str], Server]]:
    servers: list[Server] = []

    def start(launcher: str) -> Server:
        servers.append(Server(tmp_path, launcher))
        return servers[-1]

    yield start
    for each in servers:
        if each.popen.poll() is None:
            family = psutil.Process(each.popen.pid).children(recursive=True)
            each.popen.kill()
            for process in family:
                if not gone(process):
                    process.kill()
        each.popen.wait()
        each.log.close()


@pytest.mark.parametrize(
    ("launcher", "reloads"),
    [
        ("zygote", 2),
        pytest.param("spawn", 5, marks=pytest.mark.slow),
        pytest.param("zygote", 5, marks=pytest.mark.slow),
    ],
)
async def test_under_uvicorn_reload_no_worker_and_no_port_outlives_a_reload(
    server: Callable[[str], Server], launcher: str, reloads: int
) -> None:
    pytest.importorskip("uvicorn")
    one = server(launcher)

    async def up(after: int = 0) -> dict[str, Any] | None:
        said = await one.says("a", "hello")
        return said if said is not None and said["supervisor"] != after else None

    def more_than(before: set[int]) -> bool:
        return len(set(one.pool_processes()) - before) >= 3

    def all_gone(pids: Iterable[int]) -> bool:
        return not [pid for pid in pids if alive(pid)]

    supervisor = (await until(up, "the server"))["supervisor"]
    for number in range(reloads):
        before = set(one.pool_processes())
        await one.say("b", "tool setsid daemon")
        hanging = asyncio.create_task(one.says("b", "tool setsid stay"))
        await until(partial(more_than, before), "the tool in mid-turn")
        left = one.pool_processes()
        if number == reloads - 1:  # the last time without a chance to close
            os.kill(supervisor, signal.SIGKILL)
            await until(partial(all_gone, left), "all that was to go", 5)
        one.change(f"# {number}\n")
        supervisor = (await until(partial(up, supervisor), "the next one"))["supervisor"]
        await hanging
        await until(partial(all_gone, left), "what was before to be gone", 5)
        assert len(one.workers(supervisor)) == 1  # that of conversation a
        assert one.listeners() == {one.popen.pid, supervisor}
    one.popen.terminate()
    await until(lambda: one.popen.poll() is not None, "the server to end", 10)
    await until(lambda: not one.pool_processes(), "nothing to be left", 5)
