"""Turns are hit by random faults: is what callers are told what really happened, and what the model will be told?

Several conversations talk at once. Each message carries a number, and may have an effect: a line in a file. Turns are
cancelled (kept or discarded), run into limits, fail before and after a tool, lose their worker, are stopped, are sent
twice under one id, and watched by those who come and go. Whoever gets a ``retryable`` error sends the message again, as
a host would. In the end the history of each conversation has to have exactly the turns that were told as kept, once
and in order, and no effect may have happened twice. ``scripts/storm --turns`` runs this, and so does
``tests/crash/test_random_turns.py``.
"""

import asyncio
import contextlib
import os
import random
import signal
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hermes_pool import (
    HermesPoolError,
    HermesSessionManager,
    PoolSettings,
    Reply,
    RestartPolicy,
    StartPolicy,
    Timeouts,
    Turn,
    TurnEnded,
    TurnError,
)
from hermes_pool.testing.scripted_model import ScriptedModel, write_hermes_home
from hermes_pool_worker import wire

AGENT = '''
import json
import threading
from pathlib import Path

from hermes_pool_worker.agent import AgentError, Opened, Outcome
from hermes_pool_worker.wire import PastTurn


class Agent:
    """Does what the message says, and keeps its history in a file, truthfully however the turn ends."""

    def open(self, request):
        self.session_id = request.session_id or f"turns-{request.conversation_id}"
        self.file = Path(request.data_dir) / f"{self.session_id}.json"
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.cancelled = threading.Event()
        state = json.loads(self.file.read_text()) if self.file.exists() else {"turns": [], "open": None}
        self.turns_done, left = state["turns"], state["open"]
        recovered, kept, acted = None, False, []
        if left is not None:
            ours = request.unfinished is not None and request.unfinished.turn_id == left["id"]
            if left["done"] and not left["failed"] and ours and not request.given_up:
                recovered = left["text"]
            seen = left["acted"] or (ours and request.given_up and request.said)
            wanted = left["done"] and not (ours and request.given_up)
            keep = wanted or (seen and (request.keep or not ours))
            if keep:
                self.turns_done.append(left["text"])
            kept = bool(keep and ours and not recovered)
            acted = ["hammer"] if kept and left["acted"] else []
        self.save(None)
        return Opened(
            self.session_id, resumed=bool(self.turns_done), committed=self.mark(), recovered=recovered, kept=kept,
            acted=acted,
        )

    def mark(self):
        return str(len(self.turns_done))

    def save(self, left):
        new = self.file.with_suffix(".new")
        new.write_text(json.dumps({"turns": self.turns_done, "open": left}))
        new.replace(self.file)

    def turn(self, text, turn):
        self.cancelled.clear()
        left = {"id": turn.turn_id, "text": text, "acted": False, "done": False, "failed": False}
        self.save(left)
        seen = False
        try:
            for word in text.split()[1:]:
                if turn.cancelled.is_set():
                    return self.interrupted(left, turn, seen)
                if word.startswith("tool"):
                    left["acted"] = True
                    self.save(left)
                    turn.tool_started(f"call-{word}", "hammer", word)
                    seen = True
                    with open("effects", "a") as effects:
                        effects.write(text.split()[0] + "\\n")
                    turn.tool_finished(f"call-{word}", "hammer")
                elif word == "slow":
                    for piece in range(1000):
                        turn.text(f"{piece} ")
                        seen = True
                        if self.cancelled.wait(0.01):
                            return self.interrupted(left, turn, seen)
                elif word == "fail":
                    if left["acted"]:
                        self.done(left, failed=True)
                    raise AgentError("server_error", "as the message says", kept=left["acted"], committed=self.mark())
            turn.text(text)
            self.done(left)
            return Outcome(text, committed=self.mark())
        finally:
            if not left["done"]:
                self.save(None)

    def done(self, left, failed=False):
        """Keep the turn: as done, for whoever finds it when this worker dies before it has told so."""
        left["done"], left["failed"] = True, failed
        self.save(left)
        self.turns_done.append(left["text"])

    def interrupted(self, left, turn, seen):
        keep = turn.keep and seen
        if keep:
            self.done(left)
        return Outcome("", "interrupted", committed=self.mark(), kept=keep)

    def turns(self, after, limit):
        begin = int(after or 0)
        done = self.turns_done[begin : begin + limit]
        return [PastTurn(str(number), text, text) for number, text in enumerate(done, begin + 1)]

    def interrupt(self):
        self.cancelled.set()

    def close(self): ...
'''

WORK = ("talk", "tool", "slow", "tool slow", "fail", "tool fail")
HERMES_WORK = {
    "talk": "", "tool": "[tool echo {id} >> {effects}]", "slow": "[slow 60]",
    "tool slow": "[tool echo {id} >> {effects}] [slow 60]", "fail": "[error 500]",
    "tool fail": "[tool echo {id} >> {effects}] [error 500]",
}  # fmt: skip
"""The same, in the words of the scripted model. Some messages begin as Hermes' own remarks do: see ``_text``."""
FAULTS = ("none", "none", "cancel keep", "cancel discard", "kill", "stop", "twice", "reload")
TRIES_MAX = 4
OUTCOME_S_MAX = 60.0
TURN_S = 4.0
"""The limit of a turn: a slow one that nobody ends runs into it."""


@dataclass
class TurnTally:
    """The counts of one run."""

    seed: int
    faults: Counter[str] = field(default_factory=Counter)
    """How often each fault was put in."""
    outcomes: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def lines(self) -> Iterator[str]:
        """Return the counts as text."""
        yield f"seed {self.seed}, {self.seconds:.1f} s"
        yield f"faults: {sum(self.faults.values())} ({', '.join(f'{n} {c}' for n, c in self.faults.most_common())})"
        yield f"outcomes: {', '.join(f'{name} {count}' for name, count in self.outcomes.most_common())}"
        yield f"violations: {len(self.violations)}"
        yield from (f"    {violation}" for violation in self.violations)


class TurnStorm:
    """One pool, and conversations whose turns are hit by faults. With ``hermes`` it is the real one."""

    def __init__(
        self, folder: Path, *, faults: int, seed: int, hermes: bool = False, conversations: int = 6, **settings: Any
    ) -> None:
        self.tally = TurnTally(seed)
        self._folder = folder
        self._wanted = faults
        self._random = random.Random(seed)
        self._hermes = hermes
        self._names = [f"c{number}" for number in range(conversations)]
        self._kept: dict[str, list[str]] = {name: [] for name in self._names}
        """The texts of the turns that were told as kept, in order."""
        self._last: dict[str, str] = {}
        """How the last turn of each conversation ended."""
        self._model = ScriptedModel() if hermes else None
        self._effects = folder / "effects"
        (folder / "turns_agent.py").write_text(AGENT)
        agent: dict[str, Any] = {"agent": "turns_agent:Agent", "agent_paths": (str(folder),)}
        if self._model is not None:
            home = write_hermes_home(folder / "hermes", self._model.url)
            # The shells of the tools read no file of whoever runs this, and leave nothing half done there.
            agent = {"agent": "hermes", "hermes_home": home, "worker_env": {"HOME": str(folder)}}
        self._settings = PoolSettings(
            **agent,
            state_dir=folder / "state",
            worker_cwd=folder,
            timeouts=Timeouts(turn_s=TURN_S, close_grace_s=8.0, start_s=120.0),
            restarts=RestartPolicy(quarantine_after=0, deaths_in_window_max=1_000_000),
            starts=StartPolicy(failures_max=1_000_000),
            **settings,
        )

    async def run(self) -> TurnTally:
        """Run it and return the counts."""
        began = time.monotonic()
        with self._model or contextlib.nullcontext():
            async with HermesSessionManager(self._settings) as pool:
                await asyncio.gather(*(self._talk(pool, name) for name in self._names))
            # Another host: what was kept has to be there for it as well.
            async with HermesSessionManager(self._settings) as pool:
                await asyncio.gather(*(self._check(pool, name) for name in self._names))
        self._check_effects()
        self.tally.seconds = time.monotonic() - began
        return self.tally

    # --- talking ---

    async def _talk(self, pool: HermesSessionManager, name: str) -> None:
        chooser = random.Random(f"{self.tally.seed} {name}")
        number = 0
        faults = (*FAULTS, "edit") if self._hermes else FAULTS
        while sum(self.tally.faults.values()) < self._wanted:
            number += 1
            work, fault = chooser.choice(WORK), chooser.choice(faults)
            if fault == "edit":
                await self._edit(pool, name, f"{name}-{number} from outside")
            await self._message(pool, name, f"{name}-{number}", work, fault, chooser)

    async def _edit(self, pool: HermesSessionManager, name: str, text: str) -> None:
        """Add a turn to the session, as another program does (``hermes --resume``), while nothing of ours runs."""
        if self._last.get(name) != "reply (completed)":
            return  # a worker that was killed may have left a turn, which the next one has to deal with first
        (session_id,) = [row.session_id for row in await pool.sessions() if row.conversation_id == name]
        with contextlib.closing(sqlite3.connect(self._folder / "hermes" / "state.db", timeout=10)) as database:
            insert = "INSERT INTO messages (session_id, role, content, timestamp, finish_reason) VALUES (?, ?, ?, ?, ?)"
            database.execute(insert, (session_id, "user", text, time.time(), None))
            database.execute(insert, (session_id, "assistant", "from outside, too", time.time(), "stop"))
            database.commit()
        self._kept[name].append(text)

    def _text(self, message_id: str, work: str) -> str:
        if not self._hermes:
            return f"{message_id} {work}"
        begin = "[System: " if self._random.random() < 0.2 else ""  # as Hermes' own remarks do
        return f"{begin}{message_id} {HERMES_WORK[work].format(id=message_id, effects=self._effects)}".strip()

    async def _message(  # noqa: PLR0917 - what a message is made of
        self, pool: HermesSessionManager, name: str, message_id: str, work: str, fault: str, chooser: random.Random
    ) -> None:
        text = self._text(message_id, work)
        if "fail" in work:
            self.tally.faults["fail"] += 1
        elif "slow" in work and fault in ("none", "twice", "reload"):
            self.tally.faults["limit"] += 1
        if fault != "none":
            self.tally.faults[fault] += 1
        for attempt in range(TRIES_MAX):
            try:
                async with asyncio.timeout(OUTCOME_S_MAX):
                    outcome = await self._turn(
                        pool, name, message_id, text, fault if fault != "edit" and not attempt else "none", chooser
                    )
            except TimeoutError:
                self.tally.violations.append(f"{text!r} had no outcome within {OUTCOME_S_MAX:g} s")
                return
            kind = f"reply ({outcome.outcome})" if isinstance(outcome, Reply) else type(outcome).__name__
            self.tally.outcomes[kind] += 1
            self._last[name] = kind
            if outcome.kept if isinstance(outcome, Reply | TurnError) else False:
                self._kept[name].append(text)
            if isinstance(outcome, Reply) or not outcome.retryable or "fail" in work:
                return
            await asyncio.sleep(min(outcome.retry_after_s or 0.0, 0.5))

    async def _turn(  # noqa: PLR0917 - as above
        self,
        pool: HermesSessionManager,
        name: str,
        message_id: str,
        text: str,
        fault: str,
        chooser: random.Random,
    ) -> Reply | HermesPoolError:
        try:
            turn = await pool.start(
                name, text, turn_id=message_id, on_cancel="discard" if fault == "cancel discard" else "keep"
            )
        except HermesPoolError as error:
            return error
        hitting = asyncio.create_task(self._hit(pool, name, text, turn, fault, chooser))
        try:
            return await turn.reply()
        except HermesPoolError as error:
            return error
        finally:
            hitting.cancel()
            await asyncio.wait([hitting])
            if not hitting.cancelled() and (failed := hitting.exception()) is not None:
                self.tally.violations.append(f"{text!r}: {failed!r}")

    async def _hit(  # noqa: PLR0917 - as above
        self, pool: HermesSessionManager, name: str, text: str, turn: Turn, fault: str, chooser: random.Random
    ) -> None:
        """Put the fault in, at a random moment of the turn."""
        if fault == "twice":
            again = await pool.start(name, text, turn_id=turn.turn_id)
            if again != turn:
                self.tally.violations.append(f"{text!r}: the same id is another turn")
            return
        if fault == "reload":
            await self._reload(pool, name, turn, chooser)
            return
        moment = chooser.choice(("queued", "text", "tool", "later"))
        if moment != "queued":
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    async for _, event in pool.events(name):
                        wanted = wire.TextDelta if moment == "text" else wire.ToolStarted
                        if moment != "later" and isinstance(event, wanted):
                            break
        if fault.startswith("cancel"):
            await turn.cancel()
        elif fault == "stop":
            await pool.stop(name)
        elif fault == "kill":
            for row in await pool.sessions():
                if row.conversation_id == name and row.pid is not None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(row.pid, signal.SIGKILL)

    async def _reload(self, pool: HermesSessionManager, name: str, turn: Turn, chooser: random.Random) -> None:
        """Watch the turn as a page that is loaded again and again, and compare its text with the reply."""
        text, attempt, seq = "", 0, None
        while True:
            left = chooser.randint(1, 20)
            async for number, event in pool.events(name, after=seq):
                seq = number
                left -= 1
                if isinstance(event, wire.TextDelta) and event.turn_id == turn.turn_id:
                    text = event.text if event.attempt > attempt else text + event.text
                    attempt = max(attempt, event.attempt)
                if isinstance(event, TurnEnded) and event.turn_id == turn.turn_id:
                    whole = event.outcome
                    if isinstance(whole, Reply) and whole.outcome == "completed" and text != whole.text and attempt:
                        self.tally.violations.append(f"a page shows {text!r:.200} instead of {whole.text!r:.200}")
                    return
                if not left:
                    break

    # --- afterwards ---

    async def _check(self, pool: HermesSessionManager, name: str) -> None:
        """Compare the history with what callers were told."""
        told = self._kept[name]
        if self._model is None:
            history = [turn.text for turn in await pool.transcript(name, limit=100_000)]
        else:
            last = f"{name}-last"
            await pool.send(name, last)
            body = next(body for body in reversed(self._model.requests) if body["messages"][-1].get("content") == last)
            history = [message["content"] for message in body["messages"] if message["role"] == "user"][:-1]
            self._check_pairs(name, body["messages"])
        if history == told:
            return
        for text, times in Counter(history).items():
            if times > told.count(text):
                self.tally.violations.append(
                    f"{name}: {text!r} is {times} times in the history, told as kept {told.count(text)} times"
                )
        lost = [text for text in told if text not in history]
        self.tally.violations += [f"{name}: {text!r} was told as kept, and is not in the history" for text in lost]
        if not lost and sorted(history) == sorted(told):
            self.tally.violations.append(f"{name}: the history has another order: {history}, told {told}")

    def _check_pairs(self, name: str, messages: list[dict[str, Any]]) -> None:
        open_calls: set[str] = set()
        last = None
        for message in messages:
            if message["role"] == "tool":
                if message["tool_call_id"] not in open_calls:
                    self.tally.violations.append(f"{name}: a tool's result without its call")
                open_calls.discard(message["tool_call_id"])
            elif open_calls or message["role"] == last:
                self.tally.violations.append(f"{name}: badly paired before {message!r:.200}")
            open_calls |= {call["id"] for call in message.get("tool_calls") or ()}
            last = message["role"]

    def _check_effects(self) -> None:
        lines = self._effects.read_text().split() if self._effects.exists() else []
        self.tally.violations += [
            f"{message_id} had its effect {times} times" for message_id, times in Counter(lines).items() if times > 1
        ]
