"""What hermes-pool does with the real Hermes and a scripted model: shown, measured, and checked from outside.

"From outside" means by the process table, by plain SQL on the two databases, and by ``hermes-pool ps`` in a process of
its own. All files are in a temporary folder. ``scripts/demo`` runs this in the right environment.
"""

import asyncio
import contextlib
import json
import os
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hermes_pool import HermesSessionManager, PoolSettings, Reply, TextDelta, Timeouts
from hermes_pool.testing.scripted_model import SLOW_PIECE_S, ScriptedModel, write_hermes_home

ADA, GRACE = "ada", "grace"
TURNS = 10
PIECES = 40
KILLED_AFTER_PIECES = 10
IDLE_TIMEOUT_S = 2.0
POLL_S = 0.002
"""Interval between looks at the process table and the database, where their order matters."""
DEADLINE_S = 30.0
INTERRUPTED = 130


@dataclass
class Demo:
    """The folder, the screen, and the checks so far."""

    folder: Path
    console: Console
    checks: list[tuple[str, bool, str]] = field(default_factory=list)
    workers_seen: dict[int, float] = field(default_factory=dict)
    """Create times of all workers seen so far, by pid."""

    # --- the screen ---

    def part(self, title: str) -> None:
        """Begin a part."""
        self.console.print()
        self.console.rule(Text(title, style="bold"), align="left", characters="-")

    def say(self, text: str) -> None:
        """Print an explanation."""
        self.console.print(Text(text, style="dim"))

    def show_exchange(self, conversation: str, message: str, reply: str, seconds: float) -> None:
        """Print one message and its reply."""
        line = Text(f"{conversation:>9}  ", style="cyan")
        line.append(f"> {message}\n", style="bold").append(" " * 11).append(f"< {reply}", style="default")
        line.append(f"  [{seconds:.2f} s]", style="dim")
        self.console.print(line)

    def check(self, what: str, passed: Any, figure: object = "") -> None:
        """Record and print whether a promise was kept."""
        self.checks.append((what, bool(passed), str(figure)))
        mark = Text("  ok      " if passed else "  FAILED  ", style="bold green" if passed else "bold red")
        self.console.print(mark.append(what, style="default").append(f"  {figure}", style="dim"))

    def summary(self) -> bool:
        """Print all checks with their figures. Return whether all passed."""
        self.part("Summary")
        if not self.console.is_terminal:
            for what, passed, figure in self.checks:
                self.console.print(f"{'ok' if passed else 'FAILED':8}{what:74}{figure}".rstrip())
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
        table.add_column("")
        table.add_column("check, from outside", ratio=1)
        table.add_column("result")
        for what, passed, figure in self.checks:
            mark = Text("ok", style="green") if passed else Text("FAILED", style="bold red")
            table.add_row(mark, Text(what), Text(figure))
        if self.console.is_terminal:
            self.console.print(table)
        failed = sum(not passed for _, passed, _ in self.checks)
        verdict = f"{failed} of {len(self.checks)} checks FAILED" if failed else f"all {len(self.checks)} checks passed"
        self.console.print()
        self.console.print(Text(verdict, style="bold red" if failed else "bold green"))
        return not failed

    # --- from outside: hermes-pool ps ---

    def _ps(self, *options: str, **popen_options: Any) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "hermes_pool", "ps", "--state-dir", str(self.folder / "state"), *options]
        # In a session of its own, so that Ctrl-C reaches only the demo. ps ends by itself.
        popen_options = {"start_new_session": True, **popen_options}
        return subprocess.run(command, check=False, text=True, encoding="utf-8", timeout=DEADLINE_S, **popen_options)

    async def show_ps(self) -> None:
        """Run ``hermes-pool ps`` and let it print its table."""
        self.console.print()
        self.console.print(Text("$ hermes-pool ps", style="bold"))
        sys.stdout.flush()
        # In a thread, because the pool in this event loop has to answer it.
        await asyncio.to_thread(self._ps)
        self.console.print()

    async def rows(self) -> dict[str, dict[str, Any]]:
        """Return the sessions of ``hermes-pool ps --json``, by conversation."""
        done = await asyncio.to_thread(self._ps, "--json", stdout=subprocess.PIPE)
        rows = {row["conversation_id"]: row for row in json.loads(done.stdout)["sessions"]}
        for row in rows.values():
            if row["pid"] is not None:
                self.workers_seen[row["pid"]] = row["create_time"]
        return rows

    # --- from outside: the databases ---

    def state_of(self, conversation: str) -> dict[str, Any]:
        """Read a conversation's ``agent_state`` with plain SQL."""
        with _read_only(self.folder / "state" / "hermes-pool.db") as database:
            row = database.execute("SELECT agent_state FROM conversation WHERE id = ?", (conversation,)).fetchone()
        state: dict[str, Any] = json.loads(row[0]) if row and row[0] else {}
        return state

    def hermes_state_of(self, conversation: str) -> dict[str, Any]:
        """Read what the pool stores of a conversation, with plain SQL."""
        hermes: dict[str, Any] = self.state_of(conversation).get("runtime_state", {}).get("hermes", {})
        return hermes

    def write_as_jarvis(self, conversation: str, value: str) -> None:
        """Write a value of another runtime into the same column, with plain SQL."""
        with contextlib.closing(sqlite3.connect(self.folder / "state" / "hermes-pool.db", timeout=10)) as database:
            database.execute(
                "UPDATE conversation SET agent_state = json_set(agent_state, '$.runtime_state.jarvis', json_object("
                "'note', ?)) WHERE id = ?",
                (value, conversation),
            )
            database.commit()

    def history(self, session_id: str, role: str, part: str) -> int:
        """Count the messages of a role in Hermes' own history that contain ``part``, with plain SQL."""
        with _read_only(self.folder / "hermes" / "state.db") as database:
            (count,) = database.execute(
                "SELECT count(*) FROM messages WHERE session_id = ? AND role = ? AND active = 1 "
                "AND instr(content, ?) > 0",
                (session_id, role, part),
            ).fetchone()
        return int(count)

    # --- from outside: the process table ---

    def is_alive(self, pid: int) -> bool:
        """Return whether a worker that was seen before is still in the process table."""
        try:
            process = psutil.Process(pid)
            return abs(process.create_time() - self.workers_seen[pid]) < 1 and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def workers(self) -> set[int]:
        """Return the workers among our descendants. Their zygote and their guardian do not count."""
        found = set()
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                command = process.cmdline()
                is_helper = "--guardian" in command or ("--zygote" in command and process.ppid() == os.getpid())
                if not is_helper and any("hermes_pool_worker" in argument for argument in command):
                    found.add(process.pid)
        return found

    def remaining(self) -> list[int]:
        """Return all processes of this demo: our descendants, and any whose environment names its folder."""
        home = str(self.folder / "hermes")
        found = {process.pid for process in psutil.Process().children(recursive=True)}
        found |= {pid for pid in self.workers_seen if self.is_alive(pid)}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get("HERMES_HOME") == home:
                    found.add(process.pid)
        return sorted(found)


@contextlib.contextmanager
def _read_only(file: Path) -> Any:
    with contextlib.closing(sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True, timeout=10)) as database:
        yield database


async def send(demo: Demo, sessions: HermesSessionManager, conversation: str, text: str) -> tuple[Reply, float]:
    """Send a message, show the reply, and return it with its duration in seconds."""
    began = time.perf_counter()
    reply = await sessions.send(conversation, text)
    took = time.perf_counter() - began
    demo.show_exchange(conversation, text, reply.text, took)
    return reply, took


async def until(condition: Callable[[], Any], every_s: float = 0.02) -> Any:
    """Wait until ``condition`` holds, for ``DEADLINE_S`` at most, and return its last value."""
    end = time.monotonic() + DEADLINE_S
    while not (value := condition()):
        if time.monotonic() > end:
            return value
        await asyncio.sleep(every_s)
    return value


# --- the parts --------------------------------------------------------------------------------------------------------


async def side_by_side(demo: Demo, sessions: HermesSessionManager) -> None:
    """Two conversations have their own workers and memories. A first turn is compared with a warm one."""
    demo.part("1. Two conversations side by side")
    _, cold = await send(demo, sessions, ADA, "Hello, I am Ada.")
    first = (await demo.rows())[ADA]
    demo.check("the first turn of a conversation starts Hermes and answers", cold < DEADLINE_S, f"{cold:.2f} s")

    await send(demo, sessions, GRACE, "Hello, my name is Grace.")
    warm: list[float] = []
    running: set[int] = set()
    for number in range(2, TURNS + 1):
        text = "What is my name?" if number == TURNS else f"This is message {number}."
        began = time.perf_counter()
        reply = await sessions.send(ADA, text)
        warm.append(time.perf_counter() - began)
        running |= demo.workers()
        if number in (2, TURNS):
            demo.show_exchange(ADA, text, reply.text, warm[-1])
        elif number == 3:
            demo.say(f"{'...':>14}")
    knows_name = "Your name is Ada." in reply.text
    median = statistics.median(warm)
    demo.check(
        "a warm turn takes a fraction of that",
        median < cold / 3,
        f"{median * 1000:.0f} ms (median of {len(warm)}), {cold / median:.0f} times faster",
    )
    rows = await demo.rows()
    after, grace_pid = rows[ADA], rows[GRACE]["pid"]
    demo.check(
        f"one process answered {TURNS} turns",
        after["pid"] == first["pid"] and after["turns"] == TURNS and running == {first["pid"], grace_pid},
        f"pid {first['pid']}",
    )

    (ada, _), (grace, _) = await asyncio.gather(
        send(demo, sessions, ADA, "What is my name? And how many times have you told me?"),
        send(demo, sessions, GRACE, "What is my name?"),
    )
    demo.check(
        "asked at the same moment, each conversation remembers its own name",
        knows_name and ada.text.endswith("Your name is Ada.") and grace.text.endswith("Your name is Grace."),
        "Ada, Grace",
    )
    pids = {first["pid"], grace_pid}
    demo.check("each has its own process in the process table", len(pids) == 2 and demo.workers() == pids, _pids(pids))
    await demo.show_ps()


async def killed_in_mid_turn(demo: Demo, sessions: HermesSessionManager) -> None:
    """A worker is killed while it answers. Another one takes over and answers the turn."""
    demo.part("2. A worker is killed by SIGKILL in the middle of an answer")
    before = await demo.rows()
    pid = before[ADA]["pid"]
    text = f"Tell me a long story. [slow {PIECES}]"
    demo.console.print(Text(f"{ADA:>9}  ", style="cyan").append(f"> {text}", style="bold"))
    killed_at = first_again = 0.0
    shown = {1: "", 2: ""}
    async with sessions.turn(ADA, text) as turn:
        async for event in turn:
            if not isinstance(event, TextDelta):
                continue
            shown[event.attempt] = shown.get(event.attempt, "") + event.text
            if event.attempt == 1 and not killed_at and f"piece-{KILLED_AFTER_PIECES}" in event.text:
                demo.console.print(Text(f"{'':>9}  < {_shortened(shown[1])}"), end="")
                demo.console.print(Text(f"   kill -9 {pid}", style="bold red"))
                killed_at = time.perf_counter()
                psutil.Process(pid).kill()
            elif event.attempt == 2 and not first_again:
                first_again = time.perf_counter()
        reply = await turn.reply()
    answered = time.perf_counter()
    demo.console.print(Text(f"{'':>9}  < {_shortened(reply.text)}"))

    after = await demo.rows()
    successor = after[ADA]["pid"]
    wanted = "".join(f" piece-{number}" for number in range(1, PIECES + 1))
    right = reply.text.startswith("(scripted) You said:") and reply.text.endswith(wanted)
    demo.check(
        "the turn was still answered, and completely",
        right and reply.outcome == "completed" and reply.text == shown[2],
        f"{answered - killed_at:.2f} s after the kill; the answer alone takes {PIECES * SLOW_PIECE_S:.1f} s",
    )
    demo.check(
        "a new process took over after one restart",
        not demo.is_alive(pid) and successor not in (None, pid) and reply.restarts == after[ADA]["restart_count"] == 1,
        f"pid {pid} -> {successor}, first word {first_again - killed_at:.2f} s after the kill",
    )
    session_id = after[ADA]["session_id"]
    demo.check("in the same Hermes session", session_id == before[ADA]["session_id"], session_id)
    messages, answers = demo.history(session_id, "user", text), demo.history(session_id, "assistant", wanted)
    demo.check(
        "Hermes' history contains the message once and its answer once",
        messages == answers == 1 and demo.history(session_id, "assistant", "piece-1") == 1,
        f"{messages} and {answers}",
    )
    name, _ = await send(demo, sessions, ADA, "What is my name?")
    other = before[GRACE]["pid"]
    demo.check("the conversation continues in context", "Your name is Ada." in name.text, "Ada")
    demo.check(
        "the other conversation was not affected",
        after[GRACE]["pid"] == before[GRACE]["pid"] and after[GRACE]["restart_count"] == 0 and demo.is_alive(other),
        f"pid {other}, 0 restarts",
    )
    await demo.show_ps()


async def dormant_and_back(demo: Demo, sessions: HermesSessionManager) -> None:
    """An idle worker is stopped after its metadata is saved. The next message is answered in context."""
    demo.part(f"4. An idle worker is stopped, and nothing is lost (timeouts.idle_s={IDLE_TIMEOUT_S:g})")
    reply, took = await send(demo, sessions, ADA, "What is my name?")
    began = time.monotonic()
    row = (await demo.rows())[ADA]
    pid, session_id = row["pid"], row["session_id"]
    demo.check(
        "another supervisor resumed the conversation from the stored metadata",
        "Your name is Ada." in reply.text and reply.session_id == demo.hermes_state_of(ADA).get("session_id"),
        f"{took:.2f} s, pid {pid}",
    )
    demo.say("waiting for the idle worker to be stopped ...")
    saved_while_alive = gone = False
    saved_at = gone_at = began
    stored: dict[str, Any] = {}
    while not gone and time.monotonic() < began + DEADLINE_S:
        # The database first: if the process is still there afterwards, the data was saved while it was alive.
        stored = demo.hermes_state_of(ADA)
        gone = not demo.is_alive(pid)
        if not gone and stored.get("status") == "dormant" and not saved_while_alive:
            saved_while_alive, saved_at = True, time.monotonic()
        gone_at = time.monotonic()
        await asyncio.sleep(POLL_S)
    demo.check("the idle worker was stopped", gone, f"after {gone_at - began:.1f} s of idleness")
    demo.check(
        "its metadata was in the database before that",
        saved_while_alive and stored.get("status") == "dormant" and stored.get("session_id") == session_id,
        f"status {stored.get('status')}, {(gone_at - saved_at) * 1000:.0f} ms before",
    )
    await demo.show_ps()

    reply, took = await send(demo, sessions, ADA, "How many messages have I sent?")
    row = (await demo.rows())[ADA]
    sent = TURNS + 5
    demo.check(
        "the next message resumed the same session, in context",
        row["session_id"] == session_id == reply.session_id and f"You have sent {sent} messages." in reply.text,
        f"{session_id}, {sent} messages, {took:.2f} s",
    )
    demo.check(
        "in a new process", row["pid"] not in (None, pid) and demo.is_alive(row["pid"]), f"pid {pid} -> {row['pid']}"
    )
    note = demo.state_of(ADA).get("runtime_state", {}).get("jarvis")
    demo.check(
        "what another runtime wrote into the same column is unchanged", note == {"note": "mine"}, json.dumps(note)
    )


async def closed(demo: Demo, sessions: HermesSessionManager) -> None:
    """Close a pool, and check that nothing is left."""
    began = time.perf_counter()
    stopped = await sessions.close()
    took = time.perf_counter() - began
    ends = (
        ", ".join(f"{key.conversation_id} {end.how}" for key, end in stopped.items() if end) or "no worker was running"
    )
    await until(lambda: not demo.remaining())
    left = demo.remaining()
    demo.check(
        "close() leaves nothing in the process table", not left, _pids(left) if left else f"{took:.2f} s; {ends}"
    )


def _shortened(text: str, begin: int = 26, end: int = 17) -> str:
    return f"{text[:begin]} [...] {text[-end:]}"


def _pids(pids: Any) -> str:
    return "pids " + ", ".join(str(pid) for pid in sorted(pids))


# --- the whole demo --------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def pool(demo: Demo, **more: Any) -> AsyncIterator[HermesSessionManager]:
    """Open a pool that keeps all its files in the demo's folder."""
    home = demo.folder / "home"
    home.mkdir(exist_ok=True)
    settings = PoolSettings(
        agent="hermes",
        hermes_home=demo.folder / "hermes",
        state_dir=demo.folder / "state",
        # Nothing in the home of the user who runs this is read or written.
        worker_env={"HOME": str(home), "USERPROFILE": str(home)},
        **more,
    )
    async with HermesSessionManager(settings) as sessions:
        yield sessions


async def show(demo: Demo) -> None:
    """Run all parts."""
    async with pool(demo) as sessions:
        await side_by_side(demo, sessions)
        await until(lambda: demo.hermes_state_of(ADA).get("session_id"))
        demo.write_as_jarvis(ADA, "mine")
        await killed_in_mid_turn(demo, sessions)
        demo.part("3. The supervisor closes")
        await closed(demo, sessions)
        demo.say("No supervisor is running now, so ps shows the stored sessions.")
        await demo.show_ps()
    async with pool(demo, timeouts=Timeouts(idle_s=IDLE_TIMEOUT_S)) as sessions:
        await dormant_and_back(demo, sessions)
        demo.part("5. The end")
        await closed(demo, sessions)


def main() -> int:
    """Return 0 if all checks passed, 1 if not, 130 if interrupted."""
    # SIGTERM cleans up like Ctrl-C.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    if reconfigure := getattr(sys.stdout, "reconfigure", None):
        reconfigure(errors="replace")
    console = Console(highlight=False, emoji=False, markup=False, soft_wrap=not sys.stdout.isatty())
    began = time.monotonic()
    console.print(Text("hermes-pool: the real Hermes Agent, a scripted model", style="bold"))
    console.print(
        "The model is a SCRIPTED MODEL: a small local server that replies by fixed rules.\n"
        "Hermes is the real one: it starts, and keeps sessions and history, as it always\n"
        "does. So the times are those of Hermes on this machine; a real model's thinking\n"
        "time would come on top. No key, no network, and none of your files is touched."
    )
    # Resolved, because the temporary folder of macOS is behind a link, and paths are compared below.
    with tempfile.TemporaryDirectory(prefix="hermes-pool-demo-", ignore_cleanup_errors=True) as folder:
        demo = Demo(Path(folder).resolve(), console)
        with ScriptedModel() as model:
            write_hermes_home(demo.folder / "hermes", model.url)
            try:
                asyncio.run(show(demo))
            except KeyboardInterrupt:
                console.print(Text("\ninterrupted", style="bold"))
                return INTERRUPTED
            except Exception as error:  # noqa: BLE001 - whatever it is, the checks so far are still reported
                traceback.print_exc()
                demo.check("the demo ran to its end", passed=False, figure=f"{type(error).__name__}: {error}")
        passed = demo.summary()
    console.print(Text(f"{time.monotonic() - began:.0f} s; all answers came from a scripted model", style="dim"))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
