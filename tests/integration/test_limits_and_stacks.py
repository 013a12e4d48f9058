"""What a worker sets up for itself: limits that the kernel enforces, and stacks that come even if no thread can run."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import pytest

from hermes_pool.policy.liveness import stacks_of
from hermes_pool.system import processes
from hermes_pool_worker import limits
from hermes_pool_worker.contract import EXIT_UNUSABLE, RLIMITS_VARIABLE, STACKS_SIGNAL

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="has neither")
PACKAGE = Path(limits.__file__).parent.parent

RUN = f"""
import sys; sys.path.insert(0, {str(PACKAGE)!r})
from hermes_pool_worker import limits
limits.arm_stacks(); limits.set_rlimits()
"""


Start = Callable[[str], "subprocess.Popen[bytes]"]
STACKS = STACKS_SIGNAL or signal.SIGTERM
"""The signal where there is one; the second exists for the type checker, since these tests do not run elsewhere."""


def run(program: str, asked: str = "", before: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, RLIMITS_VARIABLE: asked}
    argv = [sys.executable, "-c", before + RUN + program]
    return subprocess.run(argv, check=False, env=environment, capture_output=True, text=True, timeout=20)


def test_limits_are_set_soft_and_hard_and_tools_inherit_them_but_not_the_wish() -> None:
    done = run(
        "import os, resource as r, subprocess\n"
        "print(r.getrlimit(r.RLIMIT_NOFILE), r.getrlimit(r.RLIMIT_CORE), 'HERMES_POOL_RLIMITS' in os.environ)\n"
        "subprocess.run('ulimit -Hn; echo ${HERMES_POOL_RLIMITS-none}', shell=True)",
        "RLIMIT_NOFILE=200 RLIMIT_CORE=0",
    )
    assert done.stdout.split("\n")[:3] in (
        ["(200, 200) (0, 0) False", "200", "none"],
        ["200", "none", "(200, 200) (0, 0) False"],
    ), done


def test_the_kernel_keeps_them() -> None:
    done = run(
        "try: bytearray(2**31)\nexcept MemoryError: print('refused')",
        f"RLIMIT_AS={2**30}",
    )
    assert done.stdout == "refused\n"


@pytest.mark.parametrize("asked", ["500", "-1"])
def test_a_hard_limit_is_never_raised(asked: str) -> None:
    done = run(
        "print(r.getrlimit(r.RLIMIT_NOFILE))",
        f"RLIMIT_NOFILE={asked}",
        before="import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (100, 150))\n",
    )
    assert done.stdout == "(150, 150)\n"


@pytest.mark.parametrize("asked", ["RLIMIT_NONSENSE=1", "getrlimit=1", "RLIMIT_NOFILE", "RLIMIT_NOFILE=x"])
def test_what_cannot_be_set_ends_the_worker_with_the_reason(asked: str) -> None:
    done = run("print('goes on')", asked)
    assert done.returncode == EXIT_UNUSABLE
    assert done.stdout == ""
    assert "worker_rlimits" in done.stderr
    assert asked in done.stderr


def test_without_limits_little_is_imported() -> None:
    done = run(
        "print(sorted({'resource', 'faulthandler', 'signal', 'msgspec', 'threading', 'traceback'} & set(sys.modules)))"
    )
    assert done.stdout == "['faulthandler', 'signal']\n"


# --- stacks -----------------------------------------------------------------------------------------------------------

HOLDS_THE_LOCK_ASLEEP = """
def stuck_here(): ctypes.PyDLL(None).sleep(12)
"""
HOLDS_THE_LOCK_AT_WORK = """
def stuck_here(): 7 ** (10 ** 8)
"""
BLOCKS_SIGNALS_TOO = """
def stuck_here():
    signal.pthread_sigmask(signal.SIG_SETMASK, {signal.SIGTERM, signal.SIGINT, signal.SIGQUIT})
    ctypes.PyDLL(None).sleep(12)
"""
STUCK = (
    RUN
    + """
import ctypes, os, signal, threading, time
begun = threading.Event()
def ticks():
    while True: os.write(1, b"."); begun.set(); time.sleep(0.001)
threading.Thread(target=ticks, daemon=True).start()
begun.wait()
"""
)


def output(process: "subprocess.Popen[bytes]") -> IO[bytes]:
    assert process.stdout is not None
    return process.stdout


def errors(process: "subprocess.Popen[bytes]") -> IO[bytes]:
    assert process.stderr is not None
    return process.stderr


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[subprocess.Popen[bytes]] = []

    def begin(program: str) -> subprocess.Popen[bytes]:
        started.append(
            subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        )
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.wait(10)
        output(process).close()
        errors(process).close()


def written(process: subprocess.Popen[bytes], until: bytes, seconds: float) -> list[str]:
    """What comes on stderr within that time, up to a word."""
    deadline = time.monotonic() + seconds
    data = b""
    while until not in data and select.select([errors(process)], [], [], max(0, deadline - time.monotonic()))[0]:
        data += os.read(errors(process).fileno(), 65536)
    return data.decode().splitlines()


@pytest.mark.parametrize(
    "stuck",
    [
        pytest.param(HOLDS_THE_LOCK_ASLEEP, id="asleep"),
        pytest.param(HOLDS_THE_LOCK_AT_WORK, id="at work"),
        pytest.param(BLOCKS_SIGNALS_TOO, id="blocks other signals"),
    ],
)
def test_the_stacks_come_at_once_though_the_lock_is_held_in_c(start: Start, stuck: str) -> None:
    process = start(STUCK + stuck + "stuck_here()\n")
    assert os.read(output(process).fileno(), 1) == b"."
    while select.select([output(process)], [], [], 0.5)[0]:  # until no other thread gets to run
        assert os.read(output(process).fileno(), 65536)
    assert processes.catches(process.pid, STACKS)
    began = time.monotonic()
    os.kill(process.pid, STACKS)
    stacks = stacks_of(written(process, b"in <module>", 5))
    took_s = time.monotonic() - began
    text = "\n".join(stacks)
    assert "in stuck_here" in text
    assert "in ticks" in text
    assert took_s < 0.5, took_s
    assert process.poll() is None


def test_who_has_not_armed_is_not_to_be_asked(start: Start) -> None:
    process = start("import time; print('up', flush=True); time.sleep(60)")
    assert output(process).readline() == b"up\n"
    assert not processes.catches(process.pid, STACKS)
    assert not processes.catches(2**22 + 5, STACKS)


def test_a_tool_of_the_worker_does_not_inherit_it(start: Start) -> None:
    process = start(
        RUN + "import subprocess\nwith subprocess.Popen(['sleep', '60']) as tool:\n    print(tool.pid, flush=True)\n"
    )
    tool = int(output(process).readline())
    deadline = time.monotonic() + 5
    while processes.catches(tool, STACKS):  # until it has become the tool
        assert time.monotonic() < deadline
        time.sleep(0.005)
    os.kill(tool, signal.SIGKILL)


def test_a_fork_inherits_it_with_its_own_standard_error(start: Start) -> None:
    process = start(
        RUN
        + "import os, time\nnull = os.open(os.devnull, os.O_WRONLY)\n"
        + "def in_the_fork(): print(os.getpid(), flush=True); time.sleep(60)\n"
        + "pid = os.fork()\nif pid == 0: in_the_fork()\nos.dup2(null, 2); os.waitpid(pid, 0)\n"
    )
    fork = int(output(process).readline())
    try:
        assert processes.catches(fork, STACKS)
        os.kill(fork, STACKS)
        assert "in in_the_fork" in "\n".join(stacks_of(written(process, b"in <module>", 5)))
    finally:
        os.kill(fork, signal.SIGKILL)


def test_both_take_less_than_a_tenth_of_a_millisecond() -> None:
    done = run(
        "import time\ntook = []\n"
        "for _ in range(50):\n"
        "    began = time.perf_counter(); limits.arm_stacks(); limits.set_rlimits()\n"
        "    took.append(time.perf_counter() - began)\n"
        "print(sorted(took)[25])"
    )
    assert float(done.stdout) < 0.0001
