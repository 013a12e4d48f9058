"""The command line as people and scripts use it: real processes, pipes and a terminal."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.support import known

CLI = [sys.executable, "-m", "hermes_pool"]

Run = Callable[..., "subprocess.CompletedProcess[str]"]

HOST = """
import asyncio, sys
from hermes_pool import ConversationStore, HermesSessionManager, PoolSettings, SessionKey

async def main():
    settings = PoolSettings(agent="echo", state_dir=sys.argv[1])
    async with HermesSessionManager(settings) as sessions:
        await sessions.send("c-1", "hello")
        await sessions.send(SessionKey("c-2", "ada"), "hello")
        store = ConversationStore.from_url(settings.store_url)
        async with asyncio.timeout(10):
            while len(await store.records()) < 2:  # they are stored beside the turns
                await asyncio.sleep(0.01)
        await store.close()
        print("ready", flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)

asyncio.run(main())
"""

SLOW_AGENT = """
import time
from hermes_pool_worker.agent import AgentError, Opened, Outcome

class Slow:
    def open(self, request):
        return Opened("slow-1")

    def turn(self, text, turn):
        if text == "fail":
            raise AgentError("weather", "it \\x1b[31mrains")
        if text == "die" and turn.attempt == 1:
            turn.text("first try ")
            time.sleep(0.2)
            import os, signal
            os.kill(os.getpid(), signal.SIGKILL)
        if text == "ask":
            turn.tool_started("1", "terminal", "rm -rf x")
            answer = turn.ask("approval", "rm -rf x", ["once", "deny"], 20)
            turn.tool_finished("1", "terminal")
            turn.text(f"answered {answer}")
            return Outcome(f"answered {answer}")
        if text == "long":
            turn.reasoning("hm ")
            turn.text("begun ")
            turn.cancelled.wait(30)
            return Outcome("begun ", "interrupted")
        if text == "deaf":
            turn.text("begun ")
            time.sleep(60)
        turn.text(text.upper())
        return Outcome(text.upper())

    def interrupt(self): pass
    def close(self): pass
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    agents = tmp_path / "agents"
    agents.mkdir()
    (agents / "slow_agent.py").write_text(SLOW_AGENT)
    cleaned = {name: value for name, value in os.environ.items() if not name.startswith("HERMES_POOL_")}
    return cleaned | {
        "HERMES_POOL_STATE_DIR": str(tmp_path / "state"),
        "HERMES_POOL_AGENT_PATHS": str(agents),
        "PYTHONWARNINGS": "error::ResourceWarning",
        "NO_COLOR": "1",
        "COLUMNS": "80",
        "TERM": "xterm",
    }


@pytest.fixture
def run(environment: dict[str, str]) -> Run:
    def run_it(*arguments: str, said: str = "", **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*CLI, *arguments],
            input=said,
            env=environment | more,
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=40,
            check=False,
            cwd="/",
        )

    return run_it


@pytest.fixture
def host(environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOST, environment["HERMES_POOL_STATE_DIR"]],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert known(process.stdout).readline() == "ready\n"
    yield process
    process.send_signal(signal.SIGCONT)
    known(process.stdin).close()
    try:
        process.wait(20)
    finally:
        process.kill()
        process.wait(10)
        known(process.stdout).close()


def test_nothing_is_stored_yet_and_nothing_is_made(run: Run, environment: dict[str, str]) -> None:
    done = run("ps")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == "no supervisor is running, and no session is stored\n"
    assert json.loads(run("ps", "--json").stdout) == {"source": "stored", "supervisors": [], "sessions": []}
    assert not Path(environment["HERMES_POOL_STATE_DIR"]).exists()


def test_ps_and_stop_of_a_running_host(run: Run, host: subprocess.Popen[str]) -> None:
    seen = json.loads(run("ps", "--json").stdout)
    assert seen["source"] == "supervisor"
    assert [(each["pid"], each["problem"]) for each in seen["supervisors"]] == [(host.pid, None)]
    rows = {(row["conversation_id"], row["user_id"]): row for row in seen["sessions"]}
    assert set(rows) == {("c-1", None), ("c-2", "ada")}
    row = rows["c-1", None]
    assert (row["state"], row["health"], row["turns"], row["supervisor_pid"]) == ("idle", "alive", 1, host.pid)
    assert row["rss_bytes"] > 1_000_000
    assert psutil.Process(row["pid"]).create_time() == pytest.approx(row["create_time"], abs=1.5)

    table = run("ps")
    assert table.returncode == 0
    assert "\x1b" not in table.stdout
    assert "c-2 [ada]" in table.stdout

    assert run("stop", "c-1").stdout == "stopped\n"
    assert not psutil.pid_exists(row["pid"])
    again = run("stop", "c-1")
    assert (again.returncode, again.stderr) == (1, "hermes-pool: conversation 'c-1': it has no running worker\n")
    assert run("stop", "c-2", "--user", "ada").returncode == 0


def test_a_host_that_was_killed_leaves_what_is_stored(run: Run, host: subprocess.Popen[str]) -> None:
    host.kill()
    host.wait(10)
    deadline = time.monotonic() + 10
    while True:
        done = run("ps", "--json")
        seen = json.loads(done.stdout)
        if all(row["pid"] is None for row in seen["sessions"]) or time.monotonic() > deadline:
            break
    assert (done.returncode, done.stderr) == (0, "")
    assert (seen["source"], seen["supervisors"]) == ("stored", [])
    rows = {row["conversation_id"]: row for row in seen["sessions"]}
    assert set(rows) == {"c-1", "c-2"}
    assert rows["c-1"]["session_id"].startswith("echo-")
    assert rows["c-1"]["pid"] is None
    table = run("ps")
    assert table.stderr == "no supervisor is running; these are the stored sessions:\n"
    assert "c-2 [ada]" in table.stdout


def test_a_host_that_is_frozen_is_told_in_time(run: Run, host: subprocess.Popen[str]) -> None:
    host.send_signal(signal.SIGSTOP)
    before = time.monotonic()
    done = run("ps")
    assert time.monotonic() - before < 3
    assert done.returncode == 1
    assert f"supervisor {host.pid} is not responding" in done.stderr
    assert "Traceback" not in done.stderr


def test_all_shows_stored_sessions_beside_the_running_ones(run: Run, environment: dict[str, str]) -> None:
    assert run("chat", "before", "--agent", "echo", said="hi\n").returncode == 0
    chat = subprocess.Popen(
        [*CLI, "chat", "now", "--agent", "echo"], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        known(chat.stdin).write(b"hi\n")
        known(chat.stdin).flush()
        assert known(chat.stdout).readline() == b"hi\n"
        names = {row["conversation_id"] for row in json.loads(run("ps", "--json").stdout)["sessions"]}
        assert names == {"now"}
        names = {row["conversation_id"] for row in json.loads(run("ps", "--json", "--all").stdout)["sessions"]}
        assert names == {"now", "before"}
    finally:
        chat.communicate(timeout=20)
    assert chat.returncode == 0


def test_each_line_of_a_pipe_is_a_message(run: Run) -> None:
    done = run("chat", "--agent", "echo", said="hello\n\n\u00fc \U0001f600\n/count", PYTHONIOENCODING="utf-8")
    assert (done.returncode, done.stdout) == (0, "hello\n\u00fc \U0001f600\n3\n")
    assert "Traceback" not in done.stderr
    assert run("chat", "--agent", "echo", said="/first\n").stdout == "hello\n", "it remembers"


def test_a_locale_that_can_show_little_ends_nothing(run: Run) -> None:
    done = run("chat", "--agent", "echo", said="\u00fc\n", PYTHONIOENCODING="ascii", LC_ALL="C", PYTHONUTF8="0")
    assert (done.returncode, done.stdout) == (0, "\\xfc\n")


def test_a_failed_turn_is_told_and_the_rest_goes_on(run: Run) -> None:
    done = run("chat", "--agent", "slow_agent:Slow", said="fail\nhello\nask\n")
    assert done.returncode == 1
    assert done.stdout == "HELLO\nanswered deny\n"
    assert "it \\x1b[31mrains" in done.stderr
    assert "declined, because the input is not a terminal" in done.stderr
    assert "Traceback" not in done.stderr


def test_errors_are_one_line_and_not_a_traceback(run: Run) -> None:
    done = run("ps", HERMES_POOL_WORKERS_MAX="many")
    assert done.returncode == 1
    assert "HERMES_POOL_WORKERS_MAX" in done.stderr
    assert done.stderr.count("\n") == 1
    assert run("stop", "c").returncode == 1
    assert run("--version").stdout.startswith("hermes-pool ")


IN_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
)
"""Makes the terminal the one whose keys send signals, and goes on as the program it is given."""
SGR = re.compile(r"\x1b\[[\d;]*m")
"""Bold, dim and plain again: what the chat itself sends to a terminal."""


class Screen:
    """A chat in a terminal of its own, and what has appeared on it."""

    def __init__(self, environment: dict[str, str], *arguments: str) -> None:
        self.master, terminal = pty.openpty()
        termios.tcsetwinsize(terminal, (24, 80))
        self.process = subprocess.Popen(
            [sys.executable, "-c", IN_TERMINAL, *CLI, "chat", *arguments],
            env=environment,
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            start_new_session=True,
        )
        os.close(terminal)
        self.text = ""

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def wait_for(self, text: str, timeout_s: float = 20) -> str:
        """Wait until ``text`` appears; return what came before it, and forget both."""
        deadline = time.monotonic() + timeout_s
        while text not in self.text:
            left = deadline - time.monotonic()
            assert left > 0, f"{text!r} did not appear in {self.text!r}"
            if select.select([self.master], [], [], left)[0]:
                try:
                    self.text = SGR.sub("", self.text + os.read(self.master, 65536).decode())
                except OSError:
                    raise AssertionError(f"{text!r} did not appear before the end: {self.text!r}") from None
        before, _, self.text = self.text.partition(text)
        return before

    def end(self, timeout_s: float = 20) -> int:
        return self.process.wait(timeout_s)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(10)
        os.close(self.master)


@pytest.fixture
def screen(environment: dict[str, str]) -> Iterator[Callable[..., Screen]]:
    screens: list[Screen] = []

    def make(*arguments: str) -> Screen:
        screens.append(Screen(environment, *arguments))
        return screens[-1]

    yield make
    for each in screens:
        each.close()


def test_a_chat_in_a_terminal(screen: Callable[..., Screen], run: Run) -> None:
    chat = screen("--agent", "slow_agent:Slow")
    chat.wait_for("> ")
    chat.type("hello\n")
    chat.wait_for("HELLO\r\n> ")
    shown = {row["conversation_id"] for row in json.loads(run("ps", "--json").stdout)["sessions"]}
    assert shown == {"terminal"}

    chat.type("long\n")
    chat.wait_for("hm begun ")
    chat.type("\x03")
    chat.wait_for("stopped\r\n> ")

    chat.type("ask\n")
    chat.wait_for("1) once\r\n  2) deny\r\n? ")
    chat.type("what\n")
    chat.wait_for("2) deny\r\n? ")
    chat.type("1\n")
    chat.wait_for("answered once\r\n> ")

    chat.type("die\n")
    chat.wait_for("first try ")
    chat.wait_for("was replaced")
    chat.wait_for("DIE\r\n> ")

    chat.type("fail\n")
    chat.wait_for("it \\x1b[31mrains\r\n> ")
    chat.type("\x04")
    assert chat.end() == 0


def test_ctrl_c_at_the_prompt_leaves(screen: Callable[..., Screen]) -> None:
    chat = screen("--agent", "echo")
    chat.wait_for("> ")
    chat.type("\x03")
    assert chat.end() == 0
    with pytest.raises(AssertionError, match="before the end"):
        chat.wait_for("Traceback")


def test_ctrl_c_twice_leaves_in_the_middle_of_a_turn(
    screen: Callable[..., Screen], environment: dict[str, str]
) -> None:
    environment.update(HERMES_POOL_TIMEOUTS__CLOSE_GRACE_S="1", HERMES_POOL_TIMEOUTS__TERM_GRACE_S="0.2")
    chat = screen("--agent", "slow_agent:Slow")
    chat.wait_for("> ")
    chat.type("deaf\n")
    chat.wait_for("begun ")
    chat.type("\x03")
    chat.wait_for("Ctrl-C again leaves")
    chat.type("\x03")
    assert chat.end() == 130
    with pytest.raises(AssertionError, match="before the end"):
        chat.wait_for("Traceback")


def test_chat_with_the_real_hermes_and_a_scripted_model_needs_nothing(tmp_path: Path) -> None:
    chat = subprocess.run(
        [sys.executable, "-m", "hermes_pool", "chat", "--scripted"],
        input="My name is Ada\nWhat is my name?\n",
        env={**os.environ, "HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert chat.returncode == 0, chat.stderr
    assert chat.stdout.splitlines()[-1] == "(scripted) Your name is Ada."
    assert "SCRIPTED" in chat.stderr
    assert not (tmp_path / ".hermes").exists()
