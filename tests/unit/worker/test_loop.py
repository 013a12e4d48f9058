import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hermes_pool_worker import loop, wire
from hermes_pool_worker.agent import Agent, AgentError, Open, Opened, Outcome, RunningTurn
from hermes_pool_worker.sender import FrameSender

pytestmark = pytest.mark.timeout(30)


@pytest.fixture(autouse=True)
def small_heap() -> Iterator[None]:
    """Let a worker that is at rest collect its own garbage only, as in its own process: pytest's takes far longer."""
    gc.freeze()
    yield
    gc.unfreeze()


class Napper:
    """Its turns take as long as told, in seconds, unless they are interrupted."""

    def __init__(self) -> None:
        self.interrupted = threading.Event()

    def open(self, request: Open) -> Opened:
        return Opened("napper")

    def turn(self, text: str, turn: RunningTurn) -> Outcome:
        self.interrupted.clear()
        over = self.interrupted.wait(float(text))
        return Outcome(text, "interrupted" if over else "completed")

    def interrupt(self) -> None:
        self.interrupted.set()

    def close(self) -> None: ...


class Actor:
    """Does in its turn what the test gives it."""

    def __init__(self, act: Callable[[RunningTurn], Any]) -> None:
        self.act = act
        self.closed = False

    def open(self, request: Open) -> Opened:
        return Opened(request.session_id or "new", committed="1")

    def turn(self, text: str, turn: RunningTurn) -> Outcome:
        outcome: Outcome = self.act(turn)
        return outcome

    def interrupt(self) -> None:
        raise RuntimeError("it cannot be interrupted")

    def close(self) -> None:
        self.closed = True
        raise RuntimeError("it cannot be closed")


class Host:
    """A worker's loop in a thread, and the supervisor's ends of its wire."""

    def __init__(self, agent: Agent, frame_bytes_max: int = 10**6, born_with: frozenset[str] | None = None) -> None:
        worker_in, self.to_worker = os.pipe()
        self.from_worker, worker_out = os.pipe()
        self.ends = [worker_in, self.to_worker, self.from_worker, worker_out]
        self.decoder: wire.FrameDecoder[wire.FromWorker] = wire.FrameDecoder(wire.FromWorker)
        self.received: list[wire.FromWorker] = []
        sender = FrameSender(worker_out, frame_bytes_max)
        self.worker = loop.Worker(agent, sender, worker_in, frame_bytes_max, born_with)
        self.thread = threading.Thread(target=self.worker.run, daemon=True)
        self.thread.start()

    def send(self, message: wire.ToWorker) -> None:
        os.write(self.to_worker, wire.encode(message))

    def receive(self) -> Any:
        while not self.received:
            self.received += self.decoder.feed(os.read(self.from_worker, 65536))
        return self.received.pop(0)

    def close(self) -> None:
        self.send(wire.Close())
        assert self.receive() == wire.Closed()
        self.thread.join(5)
        assert not self.thread.is_alive()
        for end in (*self.ends, self.worker._hand_back, self.worker._ask_back):
            os.close(end)


Start = Callable[..., Host]


@pytest.fixture
def start() -> Iterator[Start]:
    hosts: list[Host] = []

    def begin(agent: Agent, **more: Any) -> Host:
        hosts.append(Host(agent, **more))
        return hosts[-1]

    yield begin
    for host in hosts:
        host.close()


@pytest.fixture
def napping(start: Start) -> Host:
    return start(Napper())


# --- two threads and one wire -----------------------------------------------------------------------------------------


def test_the_reading_is_handed_over_and_back_however_the_threads_are_scheduled(
    monkeypatch: pytest.MonkeyPatch, napping: Host
) -> None:
    """A watch thread that never pauses looks again before the main thread runs, as it may on a busy machine."""
    monkeypatch.setattr(loop, "WATCH_AFTER_S", 0)
    for number in range(300):
        napping.send(wire.Turn(f"t{number}", 1, "0.001"))
        assert napping.receive().turn_id == f"t{number}"


def test_a_cancel_is_seen_in_every_turn_also_after_the_watch_has_slept(
    monkeypatch: pytest.MonkeyPatch, napping: Host
) -> None:
    monkeypatch.setattr(loop, "WATCH_AFTER_S", 0.001)
    monkeypatch.setattr(loop, "WATCH_LOOKS", 3)
    asleep = napping.worker._watch_wakes
    for number in range(100):
        if number % 2:
            deadline = time.monotonic() + 5
            while asleep.is_set():
                assert time.monotonic() < deadline
                time.sleep(0.0005)
        napping.send(wire.Turn(f"t{number}", 1, "20"))
        napping.send(wire.Cancel(f"t{number}", 1))
        assert napping.receive().outcome == "interrupted"


def test_cancels_and_answers_for_another_turn_are_dropped(napping: Host) -> None:
    napping.send(wire.Cancel("t1", 1))
    napping.send(wire.Turn("t1", 1, "0.05"))
    napping.send(wire.Cancel("t1", 2))
    napping.send(wire.Cancel("t0", 1))
    napping.send(wire.Answer("t1", 1, "q1", "to nobody"))
    assert napping.receive().outcome == "completed"
    napping.send(wire.Ping(7))
    assert napping.receive() == wire.Pong(7)


def test_a_ping_is_answered_in_the_middle_of_a_turn(napping: Host) -> None:
    napping.send(wire.Turn("t1", 1, "20"))
    napping.send(wire.Ping(7))
    assert napping.receive() == wire.Pong(7)
    napping.send(wire.Cancel("t1", 1))
    assert napping.receive().outcome == "interrupted"


def test_a_turn_that_is_cancelled_before_it_runs_never_reaches_the_agent(start: Start) -> None:
    host = start(Napper())
    host.send(wire.Turn("t1", 1, "20"))
    host.send(wire.Turn("t2", 1, "not a number"))
    host.send(wire.Cancel("t2", 1))
    host.send(wire.Cancel("t1", 1))
    assert [host.receive().outcome for _ in range(2)] == ["interrupted", "interrupted"]


def test_an_answer_reaches_the_agent_that_asked(start: Start) -> None:
    host = start(Actor(lambda turn: Outcome(turn.ask("clarify", "What?") or "nothing")))
    host.send(wire.Turn("t1", 1, ""))
    question = host.receive()
    host.send(wire.Answer("t1", 1, question.question_id, "this"))
    assert host.receive().text == "this"


def test_the_time_for_questions_comes_with_the_session(start: Start) -> None:
    host = start(Actor(lambda turn: Outcome(turn.ask("clarify", "What?", timeout_s=1000.0) or "nothing")))
    host.send(wire.Open("c", question_timeout_s=0.01))
    assert host.receive().session_id == "new"
    host.send(wire.Turn("t1", 1, ""))
    assert host.receive().timeout_s == 0.01
    assert host.receive().text == "nothing"


# --- how turns end ----------------------------------------------------------------------------------------------------


def test_what_the_agent_does_not_say_is_as_before(start: Start) -> None:
    outcomes = iter([Outcome("a"), Outcome("b", session_id="moved", committed="2"), Outcome("c")])
    host = start(Actor(lambda _: next(outcomes)))
    host.send(wire.Open("c", "old"))
    host.receive()
    ends = []
    for number in range(3):
        host.send(wire.Turn(f"t{number}", 1, ""))
        end = host.receive()
        ends.append((end.text, end.session_id, end.committed))
    assert ends == [("a", "old", "1"), ("b", "moved", "2"), ("c", "moved", "2")]


def failing(error: Exception) -> Callable[[RunningTurn], Outcome]:
    def act(turn: RunningTurn) -> Outcome:
        raise error

    return act


@pytest.mark.parametrize(
    ("act", "reason", "text"),
    [
        (failing(AgentError("rate_limit", "try later")), "rate_limit", "try later"),
        (failing(ValueError("a bug")), "agent_error", "ValueError: a bug"),
        (lambda _: "no outcome", "agent_error", "must return an Outcome"),
        (lambda _: Outcome(b"bytes"), "agent_error", "ValidationError"),  # type: ignore[arg-type] # the fault
        (lambda turn: turn.text(7), "agent_error", "TypeError"),
        (lambda _: Outcome("x" * 10_000), "frame_too_large", "does not fit on the wire"),
    ],
)
def test_a_failure_ends_the_turn_and_not_the_worker(
    start: Start, act: Callable[[RunningTurn], Any], reason: str, text: str
) -> None:
    actor = Actor(act)
    host = start(actor, frame_bytes_max=5000)
    host.send(wire.Open("c", "s"))
    host.receive()
    host.send(wire.Turn("t1", 1, ""))
    failed = host.receive()
    assert (failed.turn_id, failed.reason, failed.session_id, failed.committed) == ("t1", reason, "s", "1")
    assert text in failed.text
    actor.act = lambda _: Outcome("it works again")
    host.send(wire.Turn("t2", 1, ""))
    assert host.receive().text == "it works again"


def test_a_session_that_moved_before_the_failure_has_moved(start: Start) -> None:
    def act(turn: RunningTurn) -> Outcome:
        turn.session_moved("moved")
        raise AgentError("server_error", "no")

    host = start(Actor(act))
    host.send(wire.Turn("t1", 1, ""))
    assert host.receive() == wire.SessionMoved("t1", 1, "moved")
    assert host.receive().session_id == "moved"


def test_an_agent_that_cannot_be_interrupted_or_closed_does_not_stop_the_loop(start: Start) -> None:
    actor = Actor(lambda turn: Outcome("over", "interrupted" if turn.cancelled.wait(20) else "completed"))
    host = start(actor)
    host.send(wire.Turn("t1", 1, ""))
    host.send(wire.Cancel("t1", 1))
    assert host.receive().outcome == "interrupted"
    host.send(wire.Ping(1))
    assert host.receive() == wire.Pong(1)


def test_close_closes_the_agent_first(start: Start) -> None:
    actor = Actor(lambda _: Outcome(""))
    host = Host(actor)
    host.close()
    assert actor.closed


# --- getting ready ----------------------------------------------------------------------------------------------------


def test_an_agent_without_prepare_is_ready_at_once(start: Start) -> None:
    host = start(Napper())
    host.send(wire.Prepare({"model": "x"}))
    assert host.receive() == wire.Prepared([])


def test_prepare_gets_the_options_and_names_the_files(start: Start) -> None:
    class Prepared(Napper):
        def prepare(self, options: dict[str, Any]) -> tuple[str, ...]:
            return (f"{options['home']}/config",)

    host = start(Prepared())
    host.send(wire.Prepare({"home": "/home"}))
    assert host.receive() == wire.Prepared(["/home/config"])


def test_a_forked_worker_reports_once_what_it_imported(start: Start) -> None:
    missing = "wave"  # in the standard library, and in no way part of a test run
    sys.modules.pop(missing, None)
    born_with = frozenset(sys.modules)

    def act(_: RunningTurn) -> Outcome:
        __import__(missing)
        return Outcome("done")

    host = start(Actor(act), born_with=born_with)
    for number in range(2):
        host.send(wire.Turn(f"t{number}", 1, ""))
        assert host.receive().text == "done"
        if number == 0:
            imported = host.receive()
            assert isinstance(imported, wire.Imported)
            assert missing in imported.modules
            assert not born_with & set(imported.modules)
