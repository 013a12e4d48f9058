"""Supervisors in other processes, asked over their control sockets."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hermes_pool.control import client
from hermes_pool.control.messages import Ps, PsReply
from hermes_pool_worker import wire
from tests.support import known


def address(state_dir: Path) -> str:
    (pointer,) = (state_dir / "control").glob("*.lock")
    return pointer.read_text().partition("\n")[2]


HOST = """
import asyncio, os, sys
from pathlib import Path
from hermes_pool.control.messages import PsReply
from hermes_pool.control.server import ControlServer

async def answer(request):
    return PsReply([], os.getpid(), "1.2.3", "2026-01-02T03:04:05+00:00")

async def main():
    server = ControlServer(Path(sys.argv[1]), answer)
    print(await server.start(), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


class Hosts:
    """Supervisors in processes of their own."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, state_dir: Path) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", HOST, str(state_dir)],
            stdout=subprocess.PIPE,
            text=True,
        )
        self.processes.append(process)
        return process

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait(10)
            known(process.stdout).close()


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    hosts = Hosts()
    yield hosts
    hosts.close()


def test_supervisors_of_one_state_dir_are_all_asked(hosts: Hosts, tmp_path: Path) -> None:
    processes = [hosts.start(tmp_path), hosts.start(tmp_path)]
    assert all(known(process.stdout).readline() for process in processes)
    answers = client.query(tmp_path, Ps(), 5)
    assert [a.supervisor_pid for a in answers] == sorted(process.pid for process in processes)
    for each in answers:
        assert isinstance(each.response, PsReply)
        assert each.response.supervisor_pid == each.supervisor_pid


def test_a_frozen_supervisor_costs_its_time_and_no_more(hosts: Hosts, tmp_path: Path) -> None:
    frozen, fine = hosts.start(tmp_path), hosts.start(tmp_path)
    assert known(frozen.stdout).readline()
    assert known(fine.stdout).readline()
    os.kill(frozen.pid, signal.SIGSTOP)
    before = time.monotonic()
    answers = {a.supervisor_pid: a for a in client.query(tmp_path, Ps(), 1)}
    assert time.monotonic() - before < 2
    assert answers[frozen.pid].problem == "is not responding"
    assert answers[fine.pid].response is not None
    # Its backlog is full: connecting is bounded as well.
    with contextlib.ExitStack() as stack:
        where = next(p for p in (tmp_path / "control").glob(f"{frozen.pid}-*.sock"))
        with contextlib.suppress(BlockingIOError):
            while True:
                caller = stack.enter_context(socket.socket(socket.AF_UNIX))
                caller.setblocking(False)
                caller.connect(str(where))
        before = time.monotonic()
        answers = {a.supervisor_pid: a for a in client.query(tmp_path, Ps(), 0.5)}
        assert time.monotonic() - before < 1.5
        assert answers[frozen.pid].problem == "is not responding"


def test_what_a_killed_supervisor_left_is_removed(hosts: Hosts, tmp_path: Path) -> None:
    process = hosts.start(tmp_path)
    left = Path(known(process.stdout).readline().strip())
    process.kill()
    process.wait(10)
    assert left.exists()
    assert client.query(tmp_path, Ps()) == []
    assert list((tmp_path / "control").iterdir()) == []


WATCHED = """
import os, stat, sys, threading
os.umask(0)
seen = set()
going = True
def watch():
    while going:
        for folder, _, names in os.walk(sys.argv[1]):
            for path in [folder] + [os.path.join(folder, name) for name in names]:
                try:
                    found = os.lstat(path)
                except FileNotFoundError:
                    continue
                kind = "socket" if stat.S_ISSOCK(found.st_mode) else "folder" if stat.S_ISDIR(found.st_mode) else "file"
                seen.add((kind, stat.S_IMODE(found.st_mode), path.endswith(".sock")))
sys.setswitchinterval(1e-5)
watcher = threading.Thread(target=watch)
watcher.start()
import asyncio
from pathlib import Path
from hermes_pool.control.server import ControlServer
async def main():
    for _ in range(20):
        server = ControlServer(Path(sys.argv[1]) / "state", None)
        await server.start()
        await server.close()
    await server.start()
    await asyncio.sleep(0.05)
    await server.close()
asyncio.run(main())
going = False
watcher.join()
assert os.umask(0) == 0
print(sorted((kind, oct(mode)) for kind, mode, _ in seen))
"""


def test_nobody_else_may_connect_at_any_moment_whatever_the_umask() -> None:
    with tempfile.TemporaryDirectory() as short:  # a socket with a long path would be somewhere else
        done = subprocess.run(
            [sys.executable, "-c", WATCHED, short], capture_output=True, text=True, timeout=30, check=True
        )
    seen = set(eval(done.stdout))
    assert ("socket", "0o600") in seen
    assert seen <= {("socket", "0o600"), ("folder", "0o700"), ("file", "0o600")}


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        (b"", "closed the connection"),
        (b"\0\0", "closed the connection"),
        (b"HTTP/1.1 200 OK\r\n\r\n", "sent an unreadable response"),
        (wire.encode({"type": "Unheard"}), "sent an unreadable response"),
    ],
)
def test_a_strange_supervisor_is_no_trouble(hosts: Hosts, tmp_path: Path, said: bytes, problem: str) -> None:
    real = hosts.start(tmp_path)
    assert known(real.stdout).readline()
    where = Path(address(tmp_path))
    where.unlink()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(where))
        listener.listen()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(said)

        thread = threading.Thread(target=serve)
        thread.start()
        (told,) = client.query(tmp_path, Ps(), 5)
        thread.join()
    assert told.response is None
    assert problem in known(told.problem)


def test_a_supervisor_of_another_host_is_left_alone(hosts: Hosts, tmp_path: Path) -> None:
    process = hosts.start(tmp_path)
    assert known(process.stdout).readline()
    (pointer,) = (tmp_path / "control").glob("*.lock")
    where = Path(address(tmp_path))
    where.rename(where.with_name("away"))
    assert "does not work" in known(client.query(tmp_path, Ps())[0].problem)
    with pointer.open("r+") as file:
        file.write("elsewhere\n" + str(where))
        file.truncate()
    assert client.query(tmp_path, Ps()) == []
    assert pointer.exists()
