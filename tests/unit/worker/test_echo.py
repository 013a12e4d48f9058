from pathlib import Path
from typing import Any

import pytest

from hermes_pool_worker import wire
from hermes_pool_worker.agent import AgentError, Open, Opened, RunningTurn
from hermes_pool_worker.echo import EchoAgent
from hermes_pool_worker.running_turn import WireTurn
from hermes_pool_worker.sender import FrameSender


class Session:
    """An echo agent with a session, and a turn that nobody watches."""

    def __init__(self, folder: Path, **request: Any) -> None:
        self.agent = EchoAgent()
        self.folder = folder
        self.opened: Opened = self.agent.open(Open("c", data_dir=str(folder), **request))

    def say(self, text: str) -> tuple[str, str | None]:
        sender = FrameSender(-1, 10**6)  # for a turn that sends nothing
        turn: RunningTurn = WireTurn(wire.Turn("t", 1, text, streams=False), sender)
        outcome = self.agent.turn(text, turn)
        return outcome.text, outcome.committed

    @property
    def file(self) -> Path:
        return self.folder / f"{self.opened.session_id}.jsonl"

    def again(self, **request: Any) -> "Session":
        return Session(self.folder, session_id=self.opened.session_id, **request)


def test_it_repeats_quotes_and_counts(tmp_path: Path) -> None:
    session = Session(tmp_path)
    assert (session.opened.resumed, session.opened.committed) == (False, "0")
    replies = [session.say(text) for text in ("one", "two", "/first", "/count")]
    assert replies == [("one", "1"), ("two", "2"), ("one", "3"), ("4", "4")]


def test_a_session_outlives_its_worker(tmp_path: Path) -> None:
    first = Session(tmp_path)
    first.say("line\nbreak and \N{GRINNING FACE}")
    second = first.again(committed="1")
    assert (second.opened.resumed, second.opened.committed, second.opened.notice) == (True, "1", None)
    assert second.say("/first") == ("line\nbreak and \N{GRINNING FACE}", "2")


def test_an_unknown_session_starts_again_and_says_so(tmp_path: Path) -> None:
    session = Session(tmp_path, session_id="lost", committed="7")
    assert (session.opened.session_id, session.opened.resumed) == ("lost", False)
    assert "lost" in (session.opened.notice or "")
    assert Session(tmp_path, session_id="new", committed="0").opened.notice is None


def test_a_line_that_a_kill_cut_off_is_dropped(tmp_path: Path) -> None:
    first = Session(tmp_path)
    first.say("whole")
    first.file.write_bytes(first.file.read_bytes() + b'"torn')
    second = first.again(committed="1")
    assert second.opened.committed == "1"
    assert second.say("next") == ("next", "2")
    assert first.file.read_bytes() == b'"whole"\n"next"\n'


def test_an_unfinished_turn_that_is_in_the_history_is_recovered(tmp_path: Path) -> None:
    first = Session(tmp_path)
    first.say("one")
    first.say("two")
    opened = first.again(committed="1", unfinished=wire.Turn("t", 1, "two")).opened
    assert (opened.recovered, opened.committed) == ("two", "2")
    opened = first.again(committed="1", unfinished=wire.Turn("t", 1, "another")).opened
    assert opened.recovered is None


@pytest.mark.parametrize(("known", "quoted"), [("1", "one"), ("0", "/first")])
def test_a_turn_that_was_given_up_is_removed(tmp_path: Path, known: str, quoted: str) -> None:
    first = Session(tmp_path)
    for text in ["one", "two"][: int(known) + 1]:
        first.say(text)
    unfinished = wire.Turn("t", 1, "two" if known == "1" else "one")
    second = first.again(committed=known, unfinished=unfinished, given_up=True)
    assert (second.opened.recovered, second.opened.committed) == (None, known)
    assert second.say("/first") == (quoted, str(int(known) + 1))


def test_a_history_that_cannot_be_written_fails_the_turn_and_leaves_no_trace(tmp_path: Path) -> None:
    session = Session(tmp_path)
    session.file.mkdir()  # which no one can append to
    with pytest.raises(AgentError, match="could not be written") as caught:
        session.say("lost")
    assert caught.value.reason == "history"
    session.file.rmdir()
    assert session.say("/first") == ("/first", "1")


def test_without_durability_nothing_is_written(tmp_path: Path) -> None:
    session = Session(tmp_path, options={"durable": False})
    assert session.say("one") == ("one", "1")
    assert list(tmp_path.iterdir()) == []
