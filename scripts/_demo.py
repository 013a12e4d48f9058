"""What hermes-pool does, shown with the real Hermes and a scripted model, measured, and checked from outside.

From outside means: the process table, the two databases by plain SQL, and ``hermes-pool ps`` in a process of its own.
All files are in a temporary folder. ``scripts/demo`` starts this in the right environment.
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
LOOKS_EVERY_S = 0.002
"""How often the process table and the database are looked at where their order matters."""
DEADLINE_S = 30.0
INTERRUPTED = 130


@dataclass
class Demo:
    """The folder, the screen, and what was found so far."""

    folder: Path
    console: Console
    claims: list[tuple[str, bool, str]] = field(default_factory=list)
    workers_seen: dict[int, float] = field(default_factory=dict)
    """The pid and create time of each worker that was ever looked at."""

    # --- the screen ---

    def part(self, title: str) -> None:
        """Begin a part."""
        self.console.print()
        self.console.rule(Text(title, style="bold"), align="left", characters="-")

    def say(self, text: str) -> None:
        """Explain something."""
        self.console.print(Text(text, style="dim"))

    def spoke(self, conversation: str, message: str, reply: str, seconds: float) -> None:
        """Show one message and its reply."""
        line = Text(f"{conversation:>9}  ", style="cyan")
        line.append(f"> {message}\n", style="bold").append(" " * 11).append(f"< {reply}", style="default")
        line.append(f"  [{seconds:.2f} s]", style="dim")
        self.console.print(line)

    def claim(self, what: str, held: Any, figure: object = "") -> None:
        """Record whether something that was promised was found."""
        self.claims.append((what, bool(held), str(figure)))
        mark = Text("  ok      " if held else "  FAILED  ", style="bold green" if held else "bold red")
        self.console.print(mark.append(what, style="default").append(f"  {figure}", style="dim"))

    def summary(self) -> bool:
        """Print all claims with their figures; say whether all held."""
        self.part("Summary")
        if not self.console.is_terminal:
            for what, held, figure in self.claims:
                self.console.print(f"{'ok' if held else 'FAILED':8}{what:74}{figure}".rstrip())
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
        table.add_column("")
        table.add_column("what was checked, from outside", ratio=1)
        table.add_column("found")
        for what, held, figure in self.claims:
            mark = Text("ok", style="green") if held else Text("FAILED", style="bold red")
            table.add_row(mark, Text(what), Text(figure))
        if self.console.is_terminal:
            self.console.print(table)
        failed = sum(not held for _, held, _ in self.claims)
        told = f"{failed} of {len(self.claims)} checks FAILED" if failed else f"all {len(self.claims)} checks held"
        self.console.print()
        self.console.print(Text(told, style="bold red" if failed else "bold green"))
        return not failed

    # --- from outside: hermes-pool ps ---

    def _ps(self, *options: str, **how: Any) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "hermes_pool", "ps", "--state-dir", str(self.folder / "state"), *options]
        # In a session of its own: Ctrl-C is for the demo, and ps ends by itself.
        how = {"start_new_session": True, **how}
        return subprocess.run(command, check=False, text=True, encoding="utf-8", timeout=DEADLINE_S, **how)

    async def show_ps(self) -> None:
        """Run ``hermes-pool ps`` and let it print what it sees."""
        self.console.print()
        self.console.print(Text("$ hermes-pool ps", style="bold"))
        sys.stdout.flush()
        # In a thread: the pool in this loop has to answer it.
        await asyncio.to_thread(self._ps)
        self.console.print()

    async def rows(self) -> dict[str, dict[str, Any]]:
        """Return what ``hermes-pool ps --json`` says, by conversation."""
        done = await asyncio.to_thread(self._ps, "--json", stdout=subprocess.PIPE)
        rows = {row["conversation_id"]: row for row in json.loads(done.stdout)["sessions"]}
        for row in rows.values():
            if row["pid"] is not None:
                self.workers_seen[row["pid"]] = row["create_time"]
        return rows

    # --- from outside: the databases ---

    def state_of(self, conversation: str) -> dict[str, Any]:
        """Return a conversation's ``agent_state`` by plain SQL."""
        with _read_only(self.folder / "state" / "hermes-pool.db") as database:
            row = database.execute("SELECT agent_state FROM conversation WHERE id = ?", (conversation,)).fetchone()
        state: dict[str, Any] = json.loads(row[0]) if row and row[0] else {}
        return state

    def hermes_state_of(self, conversation: str) -> dict[str, Any]:
        """Return what the pool keeps of a conversation, by plain SQL."""
        hermes: dict[str, Any] = self.state_of(conversation).get("runtime_state", {}).get("hermes", {})
        return hermes

    def write_as_jarvis(self, conversation: str, value: str) -> None:
        """Write into the same column what belongs to the other runtime, by plain SQL."""
        with contextlib.closing(sqlite3.connect(self.folder / "state" / "hermes-pool.db", timeout=10)) as database:
            database.execute(
                "UPDATE conversation SET agent_state = json_set(agent_state, '$.runtime_state.jarvis', json_object("
                "'note', ?)) WHERE id = ?",
                (value, conversation),
            )
            database.commit()

    def history(self, session_id: str, role: str, part: str) -> int:
        """Count the messages of a role in Hermes' own history that contain a text, by plain SQL."""
        with _read_only(self.folder / "hermes" / "state.db") as database:
            (count,) = database.execute(
                "SELECT count(*) FROM messages WHERE session_id = ? AND role = ? AND active = 1 "
                "AND instr(content, ?) > 0",
                (session_id, role, part),
            ).fetchone()
        return int(count)

    # --- from outside: the process table ---

    def lives(self, pid: int) -> bool:
        """Say whether a worker that was seen before is still in the process table."""
        try:
            process = psutil.Process(pid)
            return abs(process.create_time() - self.workers_seen[pid]) < 1 and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def workers(self) -> set[int]:
        """Return the workers among our own descendants; what they are forked from, and their guardian, are none."""
        found = set()
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                command = process.cmdline()
                is_helper = "--guardian" in command or ("--zygote" in command and process.ppid() == os.getpid())
                if not is_helper and any("hermes_pool_worker" in argument for argument in command):
                    found.add(process.pid)
        return found

    def left(self) -> list[int]:
        """Return every process that is, or whose environment says that it was, part of this demo."""
        home = str(self.folder / "hermes")
        found = {process.pid for process in psutil.Process().children(recursive=True)}
        found |= {pid for pid in self.workers_seen if self.lives(pid)}
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
    """Send a message, show what came back, and return it with the seconds that it took."""
    began = time.perf_counter()
    reply = await sessions.send(conversation, text)
    took = time.perf_counter() - began
    demo.spoke(conversation, text, reply.text, took)
    return reply, took


async def until(fact: Callable[[], Any], every_s: float = 0.02) -> Any:
    """Wait until something is so; return whether it came to be in time."""
    end = time.monotonic() + DEADLINE_S
    while not (value := fact()):
        if time.monotonic() > end:
            return value
        await asyncio.sleep(every_s)
    return value


# --- the parts --------------------------------------------------------------------------------------------------------


async def side_by_side(demo: Demo, sessions: HermesSessionManager) -> None:
    """Two conversations, each with its own worker and its own memory; what a first and a warm turn cost."""
    demo.part("1. Two conversations side by side")
    _, cold = await send(demo, sessions, ADA, "Hello, I am Ada.")
    first = (await demo.rows())[ADA]
    demo.claim("the first turn of a conversation starts a Hermes and answers", cold < DEADLINE_S, f"{cold:.2f} s")

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
            demo.spoke(ADA, text, reply.text, warm[-1])
        elif number == 3:
            demo.say(f"{'...':>14}")
    name_told = "Your name is Ada." in reply.text
    median = statistics.median(warm)
    demo.claim(
        "a warm turn costs a fraction of that",
        median < cold / 3,
        f"{median * 1000:.0f} ms (median of {len(warm)}), {cold / median:.0f} times less",
    )
    rows = await demo.rows()
    after, grace_pid = rows[ADA], rows[GRACE]["pid"]
    demo.claim(
        f"{TURNS} turns were answered by one process",
        after["pid"] == first["pid"] and after["turns"] == TURNS and running == {first["pid"], grace_pid},
        f"pid {first['pid']}",
    )

    (ada, _), (grace, _) = await asyncio.gather(
        send(demo, sessions, ADA, "What is my name? And how many times have you told me?"),
        send(demo, sessions, GRACE, "What is my name?"),
    )
    demo.claim(
        "each conversation remembers its own name, asked at the same moment",
        name_told and ada.text.endswith("Your name is Ada.") and grace.text.endswith("Your name is Grace."),
        "Ada, Grace",
    )
    pids = {first["pid"], grace_pid}
    demo.claim(
        "each has a process of its own in the process table", len(pids) == 2 and demo.workers() == pids, _pids(pids)
    )
    await demo.show_ps()


async def killed_in_mid_turn(demo: Demo, sessions: HermesSessionManager) -> None:
    """A worker is killed while it answers; the turn is answered all the same, by another one."""
    demo.part("2. A worker is killed with SIGKILL in the middle of an answer")
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
    demo.claim(
        "the turn was answered all the same, completely",
        right and reply.outcome == "completed" and reply.text == shown[2],
        f"{answered - killed_at:.2f} s after the kill; the answer alone takes {PIECES * SLOW_PIECE_S:.1f} s",
    )
    demo.claim(
        "a new process took over, after one restart",
        not demo.lives(pid) and successor not in (None, pid) and reply.restarts == after[ADA]["restart_count"] == 1,
        f"pid {pid} -> {successor}, first word {first_again - killed_at:.2f} s after the kill",
    )
    session_id = after[ADA]["session_id"]
    demo.claim("in the same Hermes session", session_id == before[ADA]["session_id"], session_id)
    asked, told = demo.history(session_id, "user", text), demo.history(session_id, "assistant", wanted)
    demo.claim(
        "Hermes' history holds the message once and its answer once",
        asked == told == 1 and demo.history(session_id, "assistant", "piece-1") == 1,
        f"{asked} and {told}",
    )
    name, _ = await send(demo, sessions, ADA, "What is my name?")
    other = before[GRACE]["pid"]
    demo.claim("and the conversation goes on in context", "Your name is Ada." in name.text, "Ada")
    demo.claim(
        "the other conversation has noticed nothing",
        after[GRACE]["pid"] == before[GRACE]["pid"] and after[GRACE]["restart_count"] == 0 and demo.lives(other),
        f"pid {other}, 0 restarts",
    )
    await demo.show_ps()


async def dormant_and_back(demo: Demo, sessions: HermesSessionManager) -> None:
    """An idle worker goes away, its metadata first; the next message is answered in context."""
    demo.part(f"4. An idle worker goes away, and nothing is lost (timeouts.idle_s={IDLE_TIMEOUT_S:g})")
    reply, took = await send(demo, sessions, ADA, "What is my name?")
    began = time.monotonic()
    row = (await demo.rows())[ADA]
    pid, session_id = row["pid"], row["session_id"]
    demo.claim(
        "another supervisor has resumed the conversation from what was stored",
        "Your name is Ada." in reply.text and reply.session_id == demo.hermes_state_of(ADA).get("session_id"),
        f"{took:.2f} s, pid {pid}",
    )
    demo.say("waiting for the idle worker to go ...")
    saved_while_alive = gone = False
    saved_at = gone_at = began
    stored: dict[str, Any] = {}
    while not gone and time.monotonic() < began + DEADLINE_S:
        # The database first: what it says was so while the process, which is looked at after it, was still there.
        stored = demo.hermes_state_of(ADA)
        gone = not demo.lives(pid)
        if not gone and stored.get("status") == "dormant" and not saved_while_alive:
            saved_while_alive, saved_at = True, time.monotonic()
        gone_at = time.monotonic()
        await asyncio.sleep(LOOKS_EVERY_S)
    demo.claim("the idle worker has gone", gone, f"after {gone_at - began:.1f} s of idleness")
    demo.claim(
        "its metadata was in the database before it went",
        saved_while_alive and stored.get("status") == "dormant" and stored.get("session_id") == session_id,
        f"status {stored.get('status')}, {(gone_at - saved_at) * 1000:.0f} ms before",
    )
    await demo.show_ps()

    reply, took = await send(demo, sessions, ADA, "How many messages have I sent?")
    row = (await demo.rows())[ADA]
    sent = TURNS + 5
    demo.claim(
        "the next message resumed the same session, in context",
        row["session_id"] == session_id == reply.session_id and f"You have sent {sent} messages." in reply.text,
        f"{session_id}, {sent} messages, {took:.2f} s",
    )
    demo.claim(
        "in a new process", row["pid"] not in (None, pid) and demo.lives(row["pid"]), f"pid {pid} -> {row['pid']}"
    )
    note = demo.state_of(ADA).get("runtime_state", {}).get("jarvis")
    demo.claim(
        "what another runtime wrote into the same column is untouched", note == {"note": "mine"}, json.dumps(note)
    )


async def closed(demo: Demo, sessions: HermesSessionManager) -> None:
    """Close a pool, and look for what is left."""
    began = time.perf_counter()
    stopped = await sessions.close()
    took = time.perf_counter() - began
    rungs = ", ".join(f"{key.conversation_id} {end.how}" for key, end in stopped.items() if end) or "no worker ran"
    await until(lambda: not demo.left())
    left = demo.left()
    demo.claim(
        "close() leaves nothing in the process table", not left, _pids(left) if left else f"{took:.2f} s; {rungs}"
    )


def _shortened(text: str, begin: int = 26, end: int = 17) -> str:
    return f"{text[:begin]} [...] {text[-end:]}"


def _pids(pids: Any) -> str:
    return "pids " + ", ".join(str(pid) for pid in sorted(pids))


# --- all of it --------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def pool(demo: Demo, **more: Any) -> AsyncIterator[HermesSessionManager]:
    """Open a pool whose every file is in the demo's folder."""
    home = demo.folder / "home"
    home.mkdir(exist_ok=True)
    settings = PoolSettings(
        agent="hermes",
        hermes_home=demo.folder / "hermes",
        state_dir=demo.folder / "state",
        # Nothing of the person who runs this is read or written.
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
        demo.say("No supervisor runs now; what ps shows is what is stored.")
        await demo.show_ps()
    async with pool(demo, timeouts=Timeouts(idle_s=IDLE_TIMEOUT_S)) as sessions:
        await dormant_and_back(demo, sessions)
        demo.part("5. The end")
        await closed(demo, sessions)


def main() -> int:
    """Return 0 if all that is claimed was found, 1 if not, 130 if interrupted."""
    # Whoever ends this politely gets the same tidying as Ctrl-C.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    if reconfigure := getattr(sys.stdout, "reconfigure", None):
        reconfigure(errors="replace")
    console = Console(highlight=False, emoji=False, markup=False, soft_wrap=not sys.stdout.isatty())
    began = time.monotonic()
    console.print(Text("hermes-pool: the real Hermes Agent, a scripted model", style="bold"))
    console.print(
        "The model is a SCRIPTED MODEL: a small server on loopback that answers by rule.\n"
        "Hermes is the real one: its start, its sessions and its history are what they\n"
        "always are. So the times are those of Hermes and of this machine; a real\n"
        "model's thinking comes on top. No key, no network, no file of yours."
    )
    # Resolved: on macOS the temporary folder is behind a link, and paths are compared below.
    with tempfile.TemporaryDirectory(prefix="hermes-pool-demo-", ignore_cleanup_errors=True) as folder:
        demo = Demo(Path(folder).resolve(), console)
        with ScriptedModel() as model:
            write_hermes_home(demo.folder / "hermes", model.url)
            try:
                asyncio.run(show(demo))
            except KeyboardInterrupt:
                console.print(Text("\ninterrupted", style="bold"))
                return INTERRUPTED
            except Exception as error:  # noqa: BLE001 - whatever it is, the claims so far are still told
                traceback.print_exc()
                demo.claim("the demo ran to its end", held=False, figure=f"{type(error).__name__}: {error}")
        held = demo.summary()
    console.print(Text(f"{time.monotonic() - began:.0f} s; the answers came from a scripted model", style="dim"))
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
