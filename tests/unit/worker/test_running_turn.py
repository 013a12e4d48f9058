import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hermes_pool_worker import running_turn, wire
from hermes_pool_worker.agent import RunningTurn
from hermes_pool_worker.running_turn import WireTurn
from hermes_pool_worker.sender import FrameSender

pytestmark = pytest.mark.timeout(30)


class Watcher:
    """A running turn, and what the supervisor receives of it."""

    def __init__(self, *, streams: bool = True, frame_bytes_max: int = 10**6, timeout_s: float = math.inf) -> None:
        self.read_end, self.write_end = os.pipe()
        sender = FrameSender(self.write_end, frame_bytes_max)
        self.turn = WireTurn(wire.Turn("t1", 2, "hello", streams), sender, timeout_s)
        self.decoder: wire.FrameDecoder[wire.FromWorker] = wire.FrameDecoder(wire.FromWorker)

    def receive(self) -> list[wire.FromWorker]:
        """Return what has come with the next read."""
        return self.decoder.feed(os.read(self.read_end, 65536))

    def has_received(self) -> bool:
        os.set_blocking(self.read_end, False)
        try:
            return bool(self.receive())
        except BlockingIOError:
            return False
        finally:
            os.set_blocking(self.read_end, True)


Watch = Callable[..., Watcher]


@pytest.fixture
def watch() -> Iterator[Watch]:
    watchers: list[Watcher] = []

    def start(**how: Any) -> Watcher:
        watchers.append(Watcher(**how))
        return watchers[-1]

    yield start
    for each in watchers:
        os.close(each.read_end)
        os.close(each.write_end)


EVENTS: list[tuple[Callable[[RunningTurn], None], wire.FromWorker]] = [
    (lambda turn: turn.text("piece"), wire.TextDelta("t1", 2, "piece")),
    (lambda turn: turn.reasoning("hm"), wire.ReasoningDelta("t1", 2, "hm")),
    (lambda turn: turn.tool_started("c", "sh", "ls"), wire.ToolStarted("t1", 2, "c", "sh", "ls")),
    (
        lambda turn: turn.tool_finished("c", "sh", ok=False, result="no", duration_s=1),
        wire.ToolFinished("t1", 2, "c", "sh", False, "no", 1.0),
    ),
    (lambda turn: turn.status("retrying"), wire.Status("t1", 2, "retrying")),
    (lambda turn: turn.session_moved("s2"), wire.SessionMoved("t1", 2, "s2")),
    (lambda turn: turn.background_started("j", "tests"), wire.BackgroundStarted("j", "tests")),
    (lambda turn: turn.background_finished("j", "ok"), wire.BackgroundFinished("j", "ok")),
]


@pytest.mark.parametrize(("act", "frame"), EVENTS, ids=lambda value: type(value).__name__)
def test_each_event_becomes_a_frame_of_this_attempt(
    watch: Watch, act: Callable[[RunningTurn], None], frame: wire.FromWorker
) -> None:
    watcher = watch()
    act(watcher.turn)
    assert watcher.receive() == [frame]


def test_names_are_cut_and_so_is_the_result_of_a_job(watch: Watch) -> None:
    watcher = watch()
    watcher.turn.background_finished("j" * 1000, "x" * 1000)
    (frame,) = watcher.receive()
    assert isinstance(frame, wire.BackgroundFinished)
    assert (len(frame.job_id), len(frame.result)) == (wire.NAME_CHARS_MAX, running_turn.JOB_RESULT_CHARS_MAX)


def test_empty_pieces_are_not_sent(watch: Watch) -> None:
    watcher = watch()
    watcher.turn.text("")
    watcher.turn.reasoning("")
    assert not watcher.has_received()


def test_what_is_not_text_raises_in_the_agent(watch: Watch) -> None:
    wrong: Any = b"bytes"
    turn = watch().turn
    for act in (turn.text, turn.reasoning, turn.status, turn.session_moved):
        with pytest.raises(TypeError, match="bytes"):
            act(wrong)


def test_an_event_over_the_limit_is_dropped_and_reported(watch: Watch, capsys: pytest.CaptureFixture[str]) -> None:
    watcher = watch(frame_bytes_max=100)
    watcher.turn.text("x" * 200)
    watcher.turn.status("x" * 200)
    watcher.turn.status("fits")
    assert watcher.receive() == [wire.Status("t1", 2, "fits")]
    log = capsys.readouterr().err
    assert "TextDelta was not sent" in log
    assert "Status was not sent" in log


def test_unwatched_text_is_sent_now_and_then(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    watcher = watch(streams=False)
    watcher.turn.text("unseen")
    watcher.turn.tool_started("c", "sh")
    assert watcher.receive() == [wire.ToolStarted("t1", 2, "c", "sh", "")], "events other than text are always sent"
    now += running_turn.PROGRESS_SIGN_S
    watcher.turn.text("a sign")
    watcher.turn.text("unseen")
    watcher.turn.reasoning("unseen")
    assert watcher.receive() == [wire.TextDelta("t1", 2, "a sign")]


# --- questions --------------------------------------------------------------------------------------------------------


class Asker:
    """A thread that asks, as an agent's tool may do."""

    def __init__(self, watcher: Watcher, timeout_s: float = 20.0) -> None:
        self.reply: list[str | None] = []
        self.thread = threading.Thread(
            target=lambda: self.reply.append(watcher.turn.ask("clarify", "What?", ["this", "that"], timeout_s))
        )
        self.thread.start()
        (question,) = watcher.receive()
        assert isinstance(question, wire.Question)
        self.question = question

    def result(self) -> str | None:
        self.thread.join(20)
        (reply,) = self.reply
        return reply


def test_an_answer_reaches_the_thread_that_asked(watch: Watch) -> None:
    watcher = watch()
    first, second = Asker(watcher), Asker(watcher)
    assert (first.question.kind, first.question.text, first.question.choices) == ("clarify", "What?", ["this", "that"])
    watcher.turn.answer("q9", "to nobody")
    watcher.turn.answer(second.question.question_id, "to the second")
    watcher.turn.answer(first.question.question_id, "to the first")
    assert (first.result(), second.result()) == ("to the first", "to the second")
    watcher.turn.answer(first.question.question_id, "too late")


def test_an_unanswered_question_ends_at_its_timeout(watch: Watch) -> None:
    assert Asker(watch(), 0.01).result() is None


def test_the_settings_may_allow_less_time(watch: Watch) -> None:
    asker = Asker(watch(timeout_s=0.01), 1000.0)
    assert asker.question.timeout_s == 0.01
    assert asker.result() is None


def test_a_cancel_releases_every_thread_that_waits_and_no_question_is_asked_after_it(watch: Watch) -> None:
    watcher = watch()
    askers = [Asker(watcher), Asker(watcher)]
    watcher.turn.cancel()
    assert [asker.result() for asker in askers] == [None, None]
    assert watcher.turn.ask("clarify", "And now?") is None
    assert not watcher.has_received()


def test_the_event_of_a_cancel_is_set_whenever_it_is_first_asked_for(watch: Watch) -> None:
    before, after = watch().turn, watch().turn
    event = before.cancelled
    assert not event.is_set()
    before.cancel()
    after.cancel()
    assert event.is_set()
    assert before.cancelled is event
    assert after.cancelled.is_set()
    assert before.is_cancelled
    assert after.is_cancelled
