"""The real Hermes in the real worker program, over raw frames, with a scripted model on loopback."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from hermes_pool.testing.scripted_model import CONTEXT_TOKENS, ScriptedModel
from hermes_pool_worker import wire
from tests.integration.hermes_program import (
    END,
    NEEDS_HERMES,
    Start,
    assert_well_paired,
    done_of,
    of,
    rows,
    said,
    text_of,
)
from tests.support import known

pytestmark = NEEDS_HERMES


# --- turns ---


def test_turns_in_context_with_tools_reasoning_and_bad_text(start: Start, home: Path, model: ScriptedModel) -> None:
    config = (home / "config.yaml").read_bytes()
    worker = start(HERMES_SESSION_CHAT_ID="another-chat", HERMES_SESSION_KEY="another", TERMINAL_CWD="/")
    opened = worker.open()
    assert (opened.resumed, opened.recovered, opened.notice) == (False, None, None)

    first = worker.turn("Hi, I am Ada.")
    assert (
        text_of(first) == done_of(first).text == '(scripted) You said: "Hi, I am Ada." (message 1 of this conversation)'
    )
    assert len(of(first, wire.TextDelta)) > 3
    assert done_of(first).session_id == opened.session_id
    second = worker.ask("What is my name?")
    assert second.text == "(scripted) Your name is Ada."
    assert len({opened.committed, done_of(first).committed, second.committed}) == 3
    # Counts are of the turn, not of the session.
    assert second.usage["api_calls"] == 1
    assert second.usage["input_tokens"] < 2 * done_of(first).usage["input_tokens"]

    used = worker.turn("[tool echo chat=$HERMES_SESSION_CHAT_ID in $PWD]")
    (started,), (finished,) = of(used, wire.ToolStarted), of(used, wire.ToolFinished)
    assert used.index(started) < used.index(finished)
    assert (started.name, started.call_id) == ("terminal", finished.call_id)
    assert "echo chat=" in started.arguments
    assert finished.ok
    assert finished.duration_s > 0
    assert f"chat= in {home.parent}" in finished.result
    assert f"chat= in {home.parent}" in done_of(used).text
    (failed_tool,) = of(worker.turn("[tool seq 9999; false]"), wire.ToolFinished)
    assert not failed_tool.ok
    assert len(failed_tool.result) <= 500

    thought = worker.turn("[reason]")
    assert "".join(delta.text for delta in of(thought, wire.ReasoningDelta)) == "(scripted) Let me look at the script."

    half = worker.turn("[surrogate] \ud83d in, \udc97 out")
    assert done_of(half).text == text_of(half) == "(scripted) Half a pair: \N{REPLACEMENT CHARACTER}."
    assert said(model.requests[-1])[-1] == "[surrogate] \N{REPLACEMENT CHARACTER} in, \N{REPLACEMENT CHARACTER} out"
    worker.ask('[call terminal {"command": "sleep 600", "background": true}]')
    last = worker.ask("how many messages")
    assert last.text == "(scripted) You have sent 8 messages."

    assert worker.close() < 3
    assert start.left() == []
    assert (home / "config.yaml").read_bytes() == config
    resumed = start()
    again = resumed.open(session_id=opened.session_id, committed=last.committed)
    assert (again.resumed, again.session_id, again.notice) == (True, opened.session_id, None)
    assert again.committed == last.committed
    assert resumed.ask("What did I say first?").text == '(scripted) You said first: "Hi, I am Ada."'


def test_a_failed_turn_in_which_nothing_was_done_leaves_no_trace(
    start: Start, home: Path, model: ScriptedModel
) -> None:
    worker = start()
    opened = worker.open(safe_tools=["terminal"])
    committed = worker.ask("one").committed
    for text, reason in (
        ("[error 400] poison", "bad_request"),
        ("[error 500] poison", "server_error"),
        ("[tool echo a] [error 400] poison", "bad_request"),
        ("[System: poison] [error 400]", "bad_request"),
        ("[empty] poison", "empty_response"),
    ):
        failed = worker.turn(text)[-1]
        assert isinstance(failed, wire.TurnFailed), failed
        assert (failed.reason, failed.committed) == (reason, committed)
    worker.ask("two")
    assert said(model.requests[-1]) == ["one", "two"]
    assert [content for role, content, active in rows(home, opened.session_id) if role == "user" and active] == [
        "one",
        "two",
    ]


# --- cancelling ---


def test_cancelling(start: Start, home: Path, model: ScriptedModel) -> None:
    worker = start()
    opened = worker.open()
    worker.ask("one")

    def cancel(turn: wire.Turn) -> wire.TurnDone:
        worker.send(wire.Cancel(turn.turn_id, turn.attempt, keep=True, why="it was cancelled"))
        begun = time.monotonic()
        done = done_of(worker.until(*END))
        # Hermes looks every five seconds after the tools that it runs, and then gives them three to end.
        assert time.monotonic() - begun < 9
        assert (type(done), done.outcome, done.turn_id) == (wire.TurnDone, "interrupted", turn.turn_id)
        return done

    # At once: whether the turn has begun by then or not.
    assert cancel(worker.begin("at once [hang]")).text == ""

    # In the middle of the reply: what there is of it is kept, and told.
    turn = worker.begin("in the reply [stall]")
    worker.until(wire.TextDelta)
    assert cancel(turn).text == "(scripted) This reply is never finished"

    # While the model is silent: the turn has not been.
    seen = len(model.requests)
    turn = worker.begin("in silence [hang]")
    model.wait_for_request(seen + 1)
    assert cancel(turn).text == ""

    # In the middle of a tool: it ends, and the model will know of it.
    turn = worker.begin("in a tool [tool sleep 60]")
    worker.until(wire.ToolStarted)
    assert cancel(turn).text == ""

    assert worker.ask("how many messages").text == "(scripted) You have sent 4 messages."
    assert said(model.requests[-1]) == ["one", "in the reply [stall]", "in a tool [tool sleep 60]", "how many messages"]
    assert_well_paired(model.requests[-1])
    # A cancel that comes too late does not touch the next turn.
    worker.send(wire.Cancel("turn-1", 1))
    assert worker.ask("how many messages").text == "(scripted) You have sent 5 messages."
    assert not [content for _, content, active in rows(home, opened.session_id) if active and "[hang]" in content]


# --- crashes ---


@pytest.mark.slow
def test_killed_in_the_middle_of_a_reply(start: Start, home: Path, model: ScriptedModel) -> None:
    worker = start()
    opened = worker.open()
    committed = worker.ask("one").committed
    lost = worker.begin("lost [stall]")
    worker.until(wire.TextDelta)
    worker.kill()
    assert [(content, active) for role, content, active in rows(home, opened.session_id)][-1] == ("lost [stall]", 1)

    worker = start()
    again = worker.open(session_id=opened.session_id, committed=committed, unfinished=lost)
    assert (again.session_id, again.resumed, again.recovered) == (opened.session_id, True, None)
    assert again.committed == committed
    # As the supervisor does when it runs the turn again: its text is in the history once.
    worker.begin(lost.text)
    worker.until(wire.TextDelta)
    assert said(model.requests[-1]) == ["one", "lost [stall]"]
    worker.kill()

    # And when it does not: not at all. The host knew nothing of it this time.
    worker = start()
    worker.open(session_id=opened.session_id, committed=committed)
    worker.ask("two")
    assert said(model.requests[-1]) == ["one", "two"]
    active = [content for role, content, active in rows(home, opened.session_id) if role == "user" and active]
    assert active == ["one", "two"]


def test_killed_in_the_middle_of_a_tool(start: Start, model: ScriptedModel) -> None:
    worker = start()
    opened = worker.open()
    kept = worker.ask("keep [tool echo a]")
    worker.begin("lost [tool echo b] [tool sleep 60]")
    worker.until(wire.ToolFinished)
    worker.until(wire.ToolStarted)
    worker.kill()

    worker = start()
    again = worker.open(session_id=opened.session_id, committed=kept.committed)
    assert "tools may have acted" in known(again.notice)
    worker.ask("two")
    # The model knows what may have been done, and the user's text is there once.
    assert said(model.requests[-1]) == ["keep [tool echo a]", "lost [tool echo b] [tool sleep 60]", "two"]
    assert_well_paired(model.requests[-1])


@pytest.mark.slow
def test_a_finished_turn_whose_reply_got_lost(start: Start, model: ScriptedModel) -> None:
    worker = start()
    opened = worker.open()
    committed = worker.ask("one").committed
    reply = worker.ask("two [tool echo a]")
    worker.kill()

    # The host died before it had stored the mark, and so does not know that the turn was ever begun.
    worker = start()
    kept = worker.open(session_id=opened.session_id, committed=committed)
    assert (kept.recovered, kept.committed, kept.notice) == (None, reply.committed, None)
    count = worker.ask("how many messages")
    assert count.text == "(scripted) You have sent 3 messages."

    # The worker died with the reply on its lips.
    lost = worker.begin(" three \ud83d [slow 2]\n")
    reply = done_of(worker.until(*END))
    worker.kill()
    seen = len(model.requests)
    worker = start()
    again = worker.open(session_id=opened.session_id, committed=count.committed, unfinished=lost)
    assert again.recovered == reply.text
    assert again.committed == reply.committed
    assert len(model.requests) == seen
    last = worker.ask("how many messages")
    assert last.text == "(scripted) You have sent 5 messages."

    # The same, and its caller was told that it had failed: nothing of it shall be in any later prompt.
    lost = worker.begin("told as failed")
    worker.until(*END)
    worker.kill()
    worker = start()
    again = worker.open(session_id=opened.session_id, committed=last.committed, unfinished=lost, given_up=True)
    assert (again.recovered, again.committed) == (None, last.committed)
    worker.ask("after it")
    assert "told as failed" not in said(model.requests[-1])


def test_an_unknown_session_is_told(start: Start) -> None:
    worker = start()
    opened = worker.open(session_id="20200101_000000_nobody", committed="7.abc")
    assert not opened.resumed
    assert opened.session_id != "20200101_000000_nobody"
    assert "does not know the session 20200101_000000_nobody" in known(opened.notice)
    worker.close()

    # A session that has had no turn is not on Hermes' disk, and nothing of it can be lost.
    worker = start()
    again = worker.open(session_id=opened.session_id, committed=opened.committed)
    assert (again.session_id, again.notice) == (opened.session_id, None)
    done = worker.ask("one")
    assert done.session_id == opened.session_id
    worker.close()

    # A mark of a history that is gone, as after a restored backup of Hermes' database.
    worker = start()
    assert "ends before" in known(worker.open(session_id=opened.session_id, committed="9999.abc").notice)


@pytest.mark.parametrize("in_place", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_compaction_keeps_the_place_of_the_marks(
    start: Start, home: Path, model: ScriptedModel, in_place: bool
) -> None:
    options = {"context_length": 64_000, "config": {"compression": {"in_place": in_place}}}
    worker = start()
    opened = worker.open(options=options)
    marks = [opened.committed]
    moved = None
    long = "word " * 9_000
    while not (model.requests and "[CONTEXT COMPACTION" in json.dumps(model.requests[-1]["messages"])):
        assert len(marks) < 12
        messages = worker.turn(f"number {len(marks)}: {long}")
        last = done_of(messages)
        marks.append(last.committed)
        moved = next((message.session_id for message in of(messages, wire.SessionMoved)), moved)
    assert (moved is None) == in_place
    lost = wire.Turn(last.turn_id, 1, f"number {len(marks) - 1}: {long}")
    worker.kill()

    # The mark of the turn before the compaction, in a row that has been archived and written anew.
    worker = start()
    again = worker.open(session_id=opened.session_id, committed=marks[-2], unfinished=lost, options=options)
    assert again.session_id == (moved or opened.session_id)
    assert again.recovered == done_of(messages).text
    assert again.committed == marks[-1]
    assert again.notice is None
    assert_well_paired(model.requests[-1])


# --- questions ---


def test_dangerous_commands_are_asked_about(start: Start, home: Path, tmp_path: Path) -> None:
    folder = tmp_path / "precious"
    folder.mkdir()
    config = (home / "config.yaml").read_text()
    worker = start()
    worker.open(options={"context_length": 70_000, "config": {"approvals": {"timeout": 1}}})
    command = f"rm -rf {folder}"

    def ask(answer: str | None) -> wire.ToolFinished:
        turn = worker.begin(f"[tool {command}]")
        question = worker.first(wire.Question)
        assert (question.kind, question.choices) == ("approval", ["once", "session", "always", "deny"])
        assert command in question.text
        assert question.timeout_s == 1
        assert folder.exists()
        if answer is not None:
            worker.send(wire.Answer(turn.turn_id, turn.attempt, question.question_id, answer))
        messages = worker.until(*END)
        (finished,) = of(messages, wire.ToolFinished)
        return finished

    for answer in (None, "deny", "certainly"):
        assert not ask(answer).ok
        assert folder.exists()
    assert ask("once").ok
    folder.mkdir()
    assert (home / "config.yaml").read_text() == config
    assert ask("always").ok
    # No further question; and in the user's configuration nothing has changed but this.
    folder.mkdir()
    assert not of(worker.turn(f"[tool {command}]"), wire.Question)
    assert not folder.exists()
    changed = (home / "config.yaml").read_text().splitlines()
    assert [line for line in config.splitlines() if line not in changed] == []
    assert [line for line in changed if line not in config] == ["command_allowlist:", "  - recursive delete"]

    turn = worker.begin('[call clarify {"question": "Which?", "choices": ["red", "blue"]}]')
    question = worker.first(wire.Question)
    assert (question.kind, question.text, question.choices) == ("clarify", "Which?", ["red", "blue"])
    worker.send(wire.Answer(turn.turn_id, turn.attempt, question.question_id, "gr\ud83dn"))
    assert '"user_response": "gr\N{REPLACEMENT CHARACTER}n"' in done_of(worker.until(*END)).text

    # A cancel takes the place of an answer.
    turn = worker.begin('[call clarify {"question": "Still there?"}]')
    worker.until(wire.Question)
    worker.send(wire.Cancel(turn.turn_id, turn.attempt))
    assert done_of(worker.until(*END)).outcome == "interrupted"
    worker.ask("two")


# --- starting ---


def test_options_choose_the_model_and_the_tools(start: Start, home: Path, model: ScriptedModel, tmp_path: Path) -> None:
    (home / "config.yaml").unlink()
    (tmp_path / "elsewhere").mkdir()
    worker = start()
    worker.open(
        options={
            "base_url": model.url,
            "model": "scripted",
            "context_length": CONTEXT_TOKENS,
            "enabled_toolsets": ["terminal"],
            "system_prompt": "Answer in rhymes.",
            "max_iterations": 1,
            "approvals": "off",
            "cwd": str(tmp_path / "elsewhere"),
        }
    )
    messages = worker.turn("[tool pwd; rm -rf ../hermes/none] [tool pwd]")
    assert not of(messages, wire.Question)
    assert str(tmp_path / "elsewhere") in of(messages, wire.ToolFinished)[0].result
    assert (done_of(messages).outcome, "max_iterations" in known(done_of(messages).notice)) == ("partial", True)
    first = model.requests[0]
    assert "Answer in rhymes." in json.dumps(first["messages"][0])
    assert {tool["function"]["name"] for tool in first["tools"]} == {"terminal", "process"}
    assert not (home / "config.yaml").exists()


@pytest.mark.parametrize(
    ("options", "remedy"),
    [({"modle": "x"}, "unknown field `modle`"), ({"provider": "nonsense"}, "hermes model"), ({}, "hermes model")],
)
def test_what_trying_again_cannot_mend(start: Start, home: Path, options: dict[str, Any], remedy: str) -> None:
    (home / "config.yaml").unlink()
    worker = start()
    worker.send(wire.Open("conversation", options=options))
    assert isinstance(worker.receive(), wire.Hello)
    with pytest.raises(EOFError) as log:
        worker.receive()
    assert remedy in str(log.value)
    assert worker.process.wait(10) == 78
