"""The real Hermes in the real worker program, over raw frames; and what a request to the model holds."""

import contextlib
import os
import select
import sqlite3
import time
import uuid
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest

from hermes_pool_worker import wire
from tests.integration.warm_worker import Warm

Frame = TypeVar("Frame", bound=wire.Message)

WORKER = Path(wire.__file__).with_name("__main__.py")
FRAME_BYTES_MAX = 16 * 1024 * 1024
END = (wire.TurnDone, wire.TurnFailed)
JOBS = (wire.BackgroundStarted, wire.BackgroundFinished)

NEEDS_HERMES = [
    pytest.mark.skipif(find_spec("run_agent") is None, reason="Hermes is not installed in this environment"),
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks for what is left in /proc"),
]


class Worker:
    """A worker program and both ends of its wire."""

    def __init__(self, warm: Warm, folder: Path, **environ: str) -> None:
        self.log = folder / f"worker-{uuid.uuid4().hex}.log"
        self.process = warm.start(
            [str(WORKER), "hermes", str(FRAME_BYTES_MAX)],
            cwd=folder,
            env={"PATH": os.environ["PATH"], "HOME": str(folder), **environ},
            stderr=self.log,
        )
        self.decoder: wire.FrameDecoder[wire.FromWorker] = wire.FrameDecoder(wire.FromWorker, FRAME_BYTES_MAX)
        self.waiting: list[wire.FromWorker] = []
        self.turns = 0

    def send(self, message: wire.ToWorker) -> None:
        self.process.stdin.write(wire.encode(message))
        self.process.stdin.flush()

    def receive(self, *, timeout_s: float = 30) -> wire.FromWorker:
        """Return the next message; ``EOFError`` at the end of the wire."""
        while not self.waiting:
            ready, _, _ = select.select([self.process.stdout], [], [], timeout_s)
            assert ready, f"no frame in {timeout_s} s; {self.log.read_text()}"
            data = os.read(self.process.stdout.fileno(), 65536)
            if not data:
                raise EOFError(self.log.read_text())
            self.waiting += self.decoder.feed(data)
            assert self.decoder.failed is None
        return self.waiting.pop(0)

    def until(self, *types: type[wire.Message]) -> list[wire.FromWorker]:
        """Return all messages up to and with the first one of these types."""
        messages = [self.receive()]
        while not isinstance(messages[-1], types):
            messages.append(self.receive())
        return messages

    def first(self, kind: type[Frame]) -> Frame:
        """Return the first message of this type; those before it are dropped."""
        message = self.until(kind)[-1]
        assert isinstance(message, kind)
        return message

    def open(self, **fields: Any) -> wire.Opened:
        self.send(wire.Open("conversation", **fields))
        return self.first(wire.Opened)

    def begin(self, text: str) -> wire.Turn:
        self.turns += 1
        turn = wire.Turn(f"turn-{self.turns}", 1, text)
        self.send(turn)
        return turn

    def turn(self, text: str) -> list[wire.FromWorker]:
        """Run a turn; return its messages, the last one of which ends it."""
        begun = self.begin(text)
        messages: list[wire.FromWorker] = []
        for message in self.until(*END):
            if not isinstance(message, JOBS):  # which are of no turn
                assert isinstance(message, wire.TurnMessage)
                assert (message.turn_id, message.attempt) == (begun.turn_id, 1)
                messages.append(message)
        return messages

    def ask(self, text: str) -> wire.TurnDone:
        """Run a turn that is to be completed; return how it ended."""
        done = done_of(self.turn(text))
        assert done.outcome == "completed"
        return done

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> float:
        """Have it put everything away and leave; return how long that took, in seconds."""
        begun = time.monotonic()
        self.send(wire.Close())
        self.until(wire.Closed)
        assert self.process.wait(10) == 0, self.log.read_text()
        return time.monotonic() - begun


class Start(NamedTuple):
    """Starts a worker; ``left`` returns the pids of all processes that descend from those of this test."""

    worker: Callable[..., Worker]
    left: Callable[[], list[int]]

    def __call__(self, **environ: str) -> Worker:
        return self.worker(**environ)


def rows(home: Path, session_id: str) -> list[tuple[str, str, int]]:
    """Return (role, content, active) of all messages of a session, as any other program finds them on disk."""
    with contextlib.closing(sqlite3.connect(f"file:{home / 'state.db'}?mode=ro", uri=True)) as database:
        select_all = "SELECT role, content, active FROM messages WHERE session_id = ? ORDER BY id"
        return list(database.execute(select_all, (session_id,)))


def said(body: dict[str, Any]) -> list[str]:
    """Return what the user said in the messages of a request to the model."""
    return [message["content"] for message in body["messages"] if message["role"] == "user"]


def assert_well_paired(body: dict[str, Any]) -> None:
    """A provider refuses a request in which a tool call has no result, or two messages of the user follow."""
    open_calls: set[str] = set()
    last = None
    for message in body["messages"]:
        if message["role"] == "tool":
            open_calls.remove(message["tool_call_id"])
        else:
            assert not open_calls
            assert message["role"] != last
        open_calls |= {call["id"] for call in message.get("tool_calls") or ()}
        last = message["role"]
    assert not open_calls


def done_of(messages: list[wire.FromWorker]) -> wire.TurnDone:
    """Return how a turn ended that did not fail."""
    assert isinstance(messages[-1], wire.TurnDone), messages[-1]
    return messages[-1]


def text_of(messages: list[wire.FromWorker]) -> str:
    return "".join(message.text for message in messages if isinstance(message, wire.TextDelta))


def of(messages: list[wire.FromWorker], kind: type[Frame]) -> list[Frame]:
    return [message for message in messages if isinstance(message, kind)]
