import contextlib
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest

from hermes_pool.testing.scripted_model import CONTEXT_TOKENS, MODEL_ID, ScriptedModel, reply_to, write_hermes_home


@pytest.fixture
def model() -> Iterator[ScriptedModel]:
    with ScriptedModel() as server:
        yield server


def user(*texts: str) -> list[dict[str, Any]]:
    """A chat in which each text was said by the user and answered by the model."""
    messages = []
    for text in texts:
        messages += [{"role": "user", "content": text}, {"role": "assistant", "content": "..."}]
    return messages[:-1]


def post(model: ScriptedModel, messages: list[dict[str, Any]], *, stream: bool = False) -> str:
    body = json.dumps({"model": MODEL_ID, "messages": messages, "stream": stream}).encode()
    request = urllib.request.Request(model.url + "/chat/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as response:
        assert "scripted" in response.headers["Server"]
        text: str = response.read().decode()
        return text


def deltas(stream: str) -> list[dict[str, Any]]:
    chunks = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    assert stream.endswith("data: [DONE]\n\n")
    assert chunks[-1]["usage"]["total_tokens"] > 0
    return [choice["delta"] for chunk in chunks for choice in chunk["choices"]]


@pytest.mark.parametrize(
    ("said", "reply"),
    [
        (["hello"], '(scripted) You said: "hello" (message 1 of this conversation)'),
        (["a", "b"], '(scripted) You said: "b" (message 2 of this conversation)'),
        (["first", "second", "What did I say first?"], '(scripted) You said first: "first"'),
        (["a", "b", "How many messages?"], "(scripted) You have sent 3 messages."),
        (["Hi, I am Ada.", "What is my name?"], "(scripted) Your name is Ada."),
        (["My name is Ada.", "My name is Zoë.", "what's my name"], "(scripted) Your name is Zoë."),
        (["What is my name?"], "(scripted) You have not told me your name."),
        (["[empty]"], ""),
        (["[surrogate]"], "(scripted) Half a pair: \udc97."),
    ],
)
def test_replies_prove_what_was_in_context(said: list[str], reply: str) -> None:
    assert reply_to(user(*said)) == reply


def test_content_in_parts_is_read_as_well() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]}
    assert '"hello"' in reply_to([message])


def test_a_stream_joins_to_the_reply(model: ScriptedModel) -> None:
    parts = deltas(post(model, user("hello"), stream=True))
    assert len(parts) > 3
    assert "".join(part.get("content", "") for part in parts) == reply_to(user("hello"))


def test_an_answer_in_one_piece(model: ScriptedModel) -> None:
    answer = json.loads(post(model, user("hello")))
    assert answer["choices"][0]["message"]["content"] == reply_to(user("hello"))
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["model"] == "scripted"


def test_slow_sends_further_pieces(model: ScriptedModel) -> None:
    parts = deltas(post(model, user("[slow 3]"), stream=True))
    assert [part["content"] for part in parts[-4:-1]] == [" piece-1", " piece-2", " piece-3"]


def test_reasoning_is_apart_from_the_reply(model: ScriptedModel) -> None:
    parts = deltas(post(model, user("[reason]"), stream=True))
    assert "".join(part.get("reasoning_content", "") for part in parts) == "(scripted) Let me look at the script."
    assert "".join(part.get("content", "") for part in parts) == reply_to(user("[reason]"))


@pytest.mark.parametrize("stream", [True, False])
def test_tools_are_called_one_after_the_other_and_the_last_is_quoted(model: ScriptedModel, stream: bool) -> None:
    chat = user('[tool echo a] then [call clarify {"question": "Which?"}]')
    called = []
    for result in ("a", "this one"):
        if stream:
            (call,) = [part["tool_calls"][0] for part in deltas(post(model, chat, stream=True)) if "tool_calls" in part]
        else:
            (call,) = json.loads(post(model, chat))["choices"][0]["message"]["tool_calls"]
        called.append((call["function"]["name"], json.loads(call["function"]["arguments"])))
        chat += [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": result},
        ]
    assert called == [("terminal", {"command": "echo a"}), ("clarify", {"question": "Which?"})]
    assert json.loads(post(model, chat))["choices"][0]["message"]["content"].endswith("The tool answered: this one")


@pytest.mark.parametrize("code", [400, 429, 500])
def test_errors(model: ScriptedModel, code: int) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(model, user(f"please [error {code}]"), stream=True)
    with caught.value as error:
        assert error.code == code
        assert "(scripted)" in error.read().decode()


def test_it_describes_its_model_and_its_context(model: ScriptedModel) -> None:
    with urllib.request.urlopen(model.url + "/models", timeout=10) as response:
        (entry,) = json.load(response)["data"]
    assert (entry["id"], entry["context_length"]) == ("scripted", CONTEXT_TOKENS)


def test_requests_are_kept_and_can_be_waited_for(model: ScriptedModel) -> None:
    with pytest.raises(TimeoutError):
        model.wait_for_request(1, timeout_s=0.01)
    asking = threading.Thread(target=post, args=(model, user("one")))
    asking.start()
    assert model.wait_for_request(1)["messages"] == user("one")
    asking.join()
    post(model, user("two"))
    assert [body["messages"][0]["content"] for body in model.requests] == ["one", "two"]


@pytest.mark.parametrize("text", ["[hang]", "[stall]"])
def test_closing_is_prompt_with_a_request_that_hangs(text: str) -> None:
    left = threading.Event()

    def ask() -> None:
        with contextlib.suppress(OSError, HTTPException):
            assert "[DONE]" not in post(server, user(text), stream=True)
        left.set()

    with ScriptedModel() as server:
        asking = threading.Thread(target=ask)
        asking.start()
        server.wait_for_request(1)
        assert not left.is_set()
        begun = time.monotonic()
    assert time.monotonic() - begun < 1
    asking.join(5)
    assert left.is_set()


def test_a_home_for_hermes(tmp_path: Path) -> None:
    home = write_hermes_home(tmp_path / "new" / "home", "http://127.0.0.1:1/v1")
    config = (home / "config.yaml").read_text()
    assert '  base_url: "http://127.0.0.1:1/v1"' in config
    assert "  default: scripted" in config
