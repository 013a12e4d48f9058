"""What the operating system says: asked of real processes, in every state that one can be in."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from hermes_pool.system import processes
from hermes_pool.system.processes import IdentityCheck
from hermes_pool_worker.contract import MARKER_VARIABLE
from tests.support import known

Start = Callable[..., "subprocess.Popen[bytes]"]

SLEEPER = """
import time
while time.process_time() < 0.1: pass
print("up", flush=True)
time.sleep(60)
"""


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start Python programs that print a word when they are ready, and end them after the test."""
    started: list[subprocess.Popen[bytes]] = []

    def begin(program: str, env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=env)
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait(10)
        known(process.stdout).close()


def created(pid: int) -> float:
    return psutil.Process(pid).create_time()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_living_process_is_current_and_used_something(start: Start) -> None:
    process = start(SLEEPER)
    assert known(process.stdout).readline()
    at = created(process.pid)
    assert processes.identify(process.pid, at) is IdentityCheck.CURRENT
    tree = processes.inspect_tree(process.pid, at)
    assert tree.health == "alive"
    assert known(tree.rss_bytes) > 1_000_000
    assert known(tree.cpu_s) > 0
    assert tree.descendants == 0


def test_a_boot_time_that_jumps_by_a_second_replaces_nobody(start: Start) -> None:
    process = start(SLEEPER)
    at = created(process.pid)
    assert processes.identify(process.pid, at + 1.01) is IdentityCheck.CURRENT
    assert processes.identify(process.pid, at - 1.01) is IdentityCheck.CURRENT


def test_another_create_time_is_another_process(start: Start) -> None:
    process = start(SLEEPER)
    at = created(process.pid) - 100
    assert processes.identify(process.pid, at) is IdentityCheck.REPLACED
    assert processes.inspect_tree(process.pid, at) == processes.TreeInfo("dead")
    assert processes.descendants(process.pid, at) == []


def test_a_zombie_is_gone(start: Start) -> None:
    process = start(SLEEPER)
    assert known(process.stdout).readline()
    at = created(process.pid)
    os.kill(process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert psutil.pid_exists(process.pid)
    assert processes.identify(process.pid, at) is IdentityCheck.GONE
    assert processes.inspect_tree(process.pid, at).health == "dead"


def test_a_vanished_process_is_gone(start: Start) -> None:
    process = start(SLEEPER)
    at = created(process.pid)
    process.kill()
    process.wait(10)
    assert processes.identify(process.pid, at) is IdentityCheck.GONE


def test_a_stopped_process_is_frozen(start: Start) -> None:
    process = start(SLEEPER)
    assert known(process.stdout).readline()
    at = created(process.pid)
    os.kill(process.pid, signal.SIGSTOP)
    until(lambda: processes.inspect_tree(process.pid, at).health == "frozen")
    assert processes.identify(process.pid, at) is IdentityCheck.CURRENT


TREE = """
import os, subprocess, sys
child = "import subprocess, sys; g = subprocess.Popen([sys.executable, '-c', %r]); print(g.pid, flush=True); g.wait()"
leaf = "import time; x = bytearray(20_000_000); time.sleep(60)"
c = subprocess.Popen([sys.executable, "-c", child % leaf])
c.wait()
"""


def test_one_pass_shows_whole_trees_in_order(start: Start) -> None:
    tree, single = start(TREE), start(SLEEPER)
    grandchild = int(known(tree.stdout).readline())
    until(lambda: psutil.Process(grandchild).memory_info().rss > 20_000_000)
    at = created(tree.pid)
    below = processes.descendants(tree.pid, at)
    try:
        assert below[1].pid == grandchild
        trees = processes.inspect_trees([(single.pid, created(single.pid)), (tree.pid, at), (tree.pid, at - 50)])
        assert [tree.descendants for tree in trees] == [0, 2, 0]
        assert [tree.health for tree in trees] == ["alive", "alive", "dead"]
        assert known(trees[1].rss_bytes) > known(trees[0].rss_bytes) + 20_000_000
    finally:
        assert sorted(processes.kill(below)) == sorted(process.pid for process in below)


def test_looking_does_not_depend_on_who_may_be_read(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    process = start(SLEEPER)
    assert known(process.stdout).readline()
    at = created(process.pid)

    def denied(self: psutil.Process, *_: object) -> None:
        raise psutil.AccessDenied(self.pid)

    def vanished(self: psutil.Process, *_: object) -> None:
        raise psutil.NoSuchProcess(self.pid)

    with monkeypatch.context() as patched:
        patched.setattr(psutil.Process, "memory_info", denied)
        tree = processes.inspect_tree(process.pid, at)
        assert (tree.health, tree.rss_bytes) == ("alive", None)
        assert known(tree.cpu_s) > 0
    with monkeypatch.context() as patched:
        patched.setattr(psutil.Process, "cpu_times", denied)
        assert processes.inspect_tree(process.pid, at).cpu_s is None
    with monkeypatch.context() as patched:
        patched.setattr(psutil.Process, "create_time", denied)
        assert processes.identify(process.pid, at) is IdentityCheck.UNKNOWN
        assert processes.inspect_tree(process.pid, at) == processes.TreeInfo("unknown")
        assert processes.descendants(process.pid, at) == []
    with monkeypatch.context() as patched:
        patched.setattr(psutil.Process, "status", denied)
        assert processes.identify(process.pid, at) is IdentityCheck.UNKNOWN
        assert processes.kill([psutil.Process(process.pid)]) == [], "unknown is never signalled"
    with monkeypatch.context() as patched:
        patched.setattr(psutil.Process, "status", vanished)
        assert processes.inspect_tree(process.pid, at).health == "dead"
    assert process.poll() is None


DAEMON = """
import subprocess, sys
lost = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
print(lost.pid, flush=True)
lost.returncode = 0
"""


def test_a_process_that_went_off_is_found_by_its_marker(start: Start) -> None:
    marker = f"test-{os.getpid()}-{time.monotonic_ns()}"
    parent = start(DAEMON, env=os.environ | {MARKER_VARIABLE: marker})
    lost = int(known(parent.stdout).readline())
    parent.wait(10)
    assert [process.pid for process in processes.find_by_marker(marker)] == [lost]
    assert processes.find_by_marker(marker[:-1]) == []
    assert processes.find_by_marker(marker + "1") == []
    assert processes.kill(processes.find_by_marker(marker)) == [lost]
    assert processes.find_by_marker(marker) == []


@pytest.mark.parametrize("pidfd", ["with", "without"])
def test_kill_leaves_the_exit_status_to_the_parent(start: Start, pidfd: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if pidfd == "without":
        monkeypatch.setattr(processes, "_pidfd", lambda _pid: None)
    children = [start(SLEEPER), start(SLEEPER)]
    for process in children:
        assert known(process.stdout).readline()
    os.kill(children[1].pid, signal.SIGSTOP)
    pids = [process.pid for process in children]
    assert processes.kill([psutil.Process(pid) for pid in pids]) == pids
    assert [process.wait(10) for process in children] == [-signal.SIGKILL] * 2


def test_kill_passes_by_who_is_gone_or_must_not_be_killed(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    process = start(SLEEPER)
    old = psutil.Process(process.pid)
    process.kill()
    process.wait(10)
    own = psutil.Process()
    assert processes.kill([old, own]) == []
    replaced = psutil.Process(start(SLEEPER).pid)
    monkeypatch.setattr(replaced, "_ident", (replaced.pid, -1.0))
    assert processes.kill([replaced]) == []
    assert psutil.pid_exists(replaced.pid)


def test_kill_gives_up_on_time(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    process = start(SLEEPER)
    monkeypatch.setattr(processes, "_signal", lambda *_: True)
    before = time.monotonic()
    assert processes.kill([psutil.Process(process.pid)], 0.05) == []
    assert time.monotonic() - before < 2
