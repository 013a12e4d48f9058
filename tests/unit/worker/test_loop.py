import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from hermes_pool_worker import loop, wire
from hermes_pool_worker.agent import Open, Opened, Outcome, RunningTurn
from hermes_pool_worker.sender import FrameSender


class Napper:
    """Turns as long as told, in seconds, unless they are interrupted."""

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


class Wire:
    """A worker's loop in a thread, and the supervisor's ends of its wire."""

    def __init__(self, agent: Any) -> None:
        worker_in, self.to_worker = os.pipe()
        self.from_worker, worker_out = os.pipe()
        self.ends = [worker_in, self.to_worker, self.from_worker, worker_out]
        self.decoder: wire.FrameDecoder[Any] = wire.FrameDecoder(wire.FromWorker)
        self.worker = loop.Worker(agent, FrameSender(worker_out, 10**6), worker_in, 10**6)
        self.thread = threading.Thread(target=self.worker.run, daemon=True)
        self.thread.start()

    def send(self, message: wire.Message) -> None:
        os.write(self.to_worker, wire.encode(message))

    def receive(self) -> Any:
        while not (messages := self.decoder.feed(os.read(self.from_worker, 65536))):
            pass
        (message,) = messages
        return message


@pytest.fixture
def napping() -> Iterator[Wire]:
    napping = Wire(Napper())
    yield napping
    napping.send(wire.Close())
    assert napping.receive() == wire.Closed()
    napping.thread.join(5)
    assert not napping.thread.is_alive()
    for end in (*napping.ends, napping.worker._hand_back, napping.worker._ask_back):
        os.close(end)


@pytest.mark.timeout(30)
def test_the_reading_is_handed_over_and_back_however_the_threads_are_scheduled(
    monkeypatch: pytest.MonkeyPatch, napping: Wire
) -> None:
    """A watch that never sleeps looks again before the main thread has had its turn, as it may on a busy machine."""
    monkeypatch.setattr(loop, "WATCH_AFTER_S", 0)
    for number in range(300):
        napping.send(wire.Turn(f"t{number}", 1, "0.001"))
        assert napping.receive().turn_id == f"t{number}"


@pytest.mark.timeout(30)
def test_a_cancel_is_seen_in_every_turn_also_after_the_watch_has_slept(
    monkeypatch: pytest.MonkeyPatch, napping: Wire
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


@pytest.mark.timeout(30)
def test_cancels_and_answers_for_another_turn_are_dropped(napping: Wire) -> None:
    napping.send(wire.Cancel("t1", 1))
    napping.send(wire.Turn("t1", 1, "0.05"))
    napping.send(wire.Cancel("t1", 2))
    napping.send(wire.Cancel("t0", 1))
    napping.send(wire.Answer("t1", 1, "q1", "to nobody"))
    assert napping.receive().outcome == "completed"
    napping.send(wire.Ping(7))
    assert napping.receive() == wire.Pong(7)
