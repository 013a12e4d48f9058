"""A scripted stand-in for a language model: an OpenAI-compatible chat-completions server on loopback.

It lets the real Hermes run without a provider, a key or the network: in tests, in the demo, on a first try. It is not a
language model, and says so in each reply, in its model id (``scripted``) and in its ``Server`` header. Only the text of
the last user message decides what it does. The words below may stand anywhere in it:

======================== ==============================================================================================
in the last user message what the server does
======================== ==============================================================================================
(anything)               replies ``(scripted) You said: "..." (message N of this conversation)``
what did I say first     quotes the first user message of the request
how many messages        counts the user messages of the request
what is my name          the name of the latest earlier ``my name is X`` or ``I am X``
``[tool COMMAND]``       calls Hermes' terminal tool with COMMAND, and quotes the result when it comes back
``[call NAME {JSON}]``   the same for any tool, with any arguments
``[slow N]``             streams N further pieces, ``SLOW_PIECE_S`` seconds apart
``[reason]``             streams reasoning deltas before it replies
``[surrogate]``          replies with an unpaired surrogate, as some models do
``[empty]``              sends an empty reply
``[stall]``              streams the beginning of a reply, then hangs
``[hang]``               never answers, until the client leaves or the server closes
``[error CODE]``         answers with that HTTP status
``[error CODE after N]`` the same, and asks the client to wait for N seconds (``Retry-After``)
======================== ==============================================================================================

They can be combined: tools come first, one per request and in order; the rest applies to the reply after the last
tool's result. Replies are computed from the messages of the request, so they prove what was in context.

``python -m hermes_pool.testing.scripted_model [--port N]`` runs the server alone and prints its URL.
"""

import argparse
import json
import re
import select
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

__all__ = ["CONTEXT_TOKENS", "MODEL_ID", "SLOW_PIECE_S", "ScriptedModel", "reply_to", "write_hermes_home"]

MODEL_ID: Final = "scripted"
CONTEXT_TOKENS: Final = 131_072
"""The context window that the server reports. Hermes refuses models with less than 64K."""
SLOW_PIECE_S: Final = 0.05
"""Seconds between the pieces of ``[slow N]``."""

_PREFIX = "(scripted) "
_QUOTE_CHARS = 2000
_TOOL = re.compile(r"\[tool (?P<command>[^\]]+)\]|\[call (?P<name>\w+) (?P<arguments>\{.*?\})\]", re.DOTALL)
_SLOW = re.compile(r"\[slow (\d+)\]")
_ERROR = re.compile(r"\[error (\d{3})(?: after (\d+))?\]")
_NAME = re.compile(r"\b(?:my name is|i am|i'm)\s+([^\W\d_][\w-]*)", re.IGNORECASE)


class ScriptedModel:
    """The server. It runs inside ``with``, or from ``start`` to ``close``, which is prompt even if requests hang.

    ``port`` 0 lets the system choose a free port.
    """

    def __init__(self, port: int = 0) -> None:
        self._arrived = threading.Condition()
        self._requests: list[dict[str, Any]] = []
        # Becomes readable with ``close`` and is never drained, so that hanging requests can wait for it.
        self._closing, self._close = socket.socketpair()
        self._server = _Server(("127.0.0.1", port), self)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), name="scripted-model")

    @property
    def url(self) -> str:
        """The base URL for clients, such as ``http://127.0.0.1:40123/v1``."""
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    @property
    def requests(self) -> list[dict[str, Any]]:
        """A copy of the bodies of all chat requests so far, oldest first."""
        with self._arrived:
            return list(self._requests)

    def wait_for_request(self, number: int, timeout_s: float = 10.0) -> dict[str, Any]:
        """Wait for the chat request with this number (1 is the first), and return its body.

        Raises ``TimeoutError`` if it has not arrived within ``timeout_s`` seconds.
        """
        with self._arrived:
            if not self._arrived.wait_for(lambda: len(self._requests) >= number, timeout_s):
                raise TimeoutError(f"only {len(self._requests)} of {number} requests arrived within {timeout_s} s")
            return self._requests[number - 1]

    def start(self) -> Self:
        """Start serving, in a thread."""
        self._thread.start()
        return self

    def close(self) -> None:
        """Stop serving, and disconnect all waiting clients."""
        self._close.close()
        if self._thread.ident is not None:
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()
        self._closing.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _received(self, body: dict[str, Any]) -> None:
        with self._arrived:
            self._requests.append(body)
            self._arrived.notify_all()

    def _wait_for_end(self, client: socket.socket) -> None:
        """Wait until the client leaves or the server closes."""
        select.select([client, self._closing], [], [])


class _Server(ThreadingHTTPServer):
    def __init__(self, address: tuple[str, int], model: ScriptedModel) -> None:
        super().__init__(address, _Handler)
        self.model = model

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect: tests kill theirs."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version = "scripted-model (hermes-pool; not a language model)"
    sys_version = ""

    def do_GET(self) -> None:
        """Describe the one model, with the field from which clients read a context length."""
        entry = {"id": MODEL_ID, "object": "model", "owned_by": "hermes-pool", "context_length": CONTEXT_TOKENS}
        if self.path.rstrip("/").endswith("/v1/models"):
            self._json(200, {"object": "list", "data": [entry]})
        elif self.path.rstrip("/").endswith(f"/v1/models/{MODEL_ID}"):
            self._json(200, entry)
        else:
            self._json(404, _error(404))

    def do_POST(self) -> None:
        """Answer a chat request."""
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        if not self.path.endswith("/chat/completions"):
            self._json(404, _error(404))
            return
        self.server.model._received(body)  # noqa: SLF001 - two parts of one server
        messages = body.get("messages") or []
        text = _last_user_text(messages)
        call = _next_call(messages)
        error = _ERROR.search(text)
        if call is None and error is not None:
            self._json(int(error[1]), _error(int(error[1])), retry_after=error[2])
        elif call is None and "[hang]" in text:
            self.server.model._wait_for_end(self.connection)  # noqa: SLF001
            self.close_connection = True
        elif body.get("stream"):
            self._stream(messages, text, call)
        else:
            content = {"tool_calls": [call]} if call else {"content": reply_to(messages)}
            message = {"role": "assistant", "content": None, **content}
            choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if call else "stop"}
            self._json(200, {**_envelope("chat.completion"), "choices": [choice], "usage": _usage(messages)})

    def _stream(self, messages: Sequence[dict[str, Any]], text: str, call: dict[str, Any] | None) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        for delta in _deltas(messages, text, call):
            self._event([{"index": 0, "delta": delta, "finish_reason": None}])
        if call is None and "[stall]" in text:
            self.server.model._wait_for_end(self.connection)  # noqa: SLF001
            return
        self._event([{"index": 0, "delta": {}, "finish_reason": "tool_calls" if call else "stop"}])
        self._event([], usage=_usage(messages))
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> None:
        chunk = {**_envelope("chat.completion.chunk"), "choices": choices, **more}
        self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")

    def _json(self, status: int, value: dict[str, Any], *, retry_after: str | None = None) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        if retry_after is not None:
            self.send_header("Retry-After", retry_after)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Log nothing."""


def reply_to(messages: Sequence[dict[str, Any]]) -> str:
    """Return the reply to these chat messages, by the table in the module's docstring but without the delays."""
    said = [_text(message) for message in messages if message.get("role") == "user"]
    last = said[-1] if said else ""
    results = _results(messages)
    asked = last.lower()
    if "[empty]" in last:
        return ""
    if results:
        reply = f"The tool answered: {_quoted(_text(results[-1]))}"
    elif "[surrogate]" in last:
        reply = "Half a pair: \udc97."
    elif "what did i say first" in asked:
        reply = f'You said first: "{_quoted(said[0])}"'
    elif "how many messages" in asked:
        reply = f"You have sent {len(said)} messages."
    elif "what is my name" in asked or "what's my name" in asked:
        names = [found[1] for text in said[:-1] for found in _NAME.finditer(text)]
        reply = f"Your name is {names[-1]}." if names else "You have not told me your name."
    else:
        reply = f'You said: "{_quoted(last)}" (message {len(said)} of this conversation)'
    return _PREFIX + reply


def _deltas(messages: Sequence[dict[str, Any]], text: str, call: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    if call is not None:
        yield {"role": "assistant", "tool_calls": [{"index": 0, **call}]}
        return
    if "[reason]" in text:
        yield {"reasoning_content": _PREFIX + "Let me look "}
        yield {"reasoning_content": "at the script."}
    reply = reply_to(messages)
    if "[stall]" in text:
        yield {"content": _PREFIX + "This reply is never finished"}
        return
    # Word by word, as a model streams. Joined, they are the reply.
    for word in re.findall(r"\S+\s*", reply):
        yield {"content": word}
    slow = _SLOW.search(text)
    for number in range(1, int(slow[1]) + 1 if slow else 1):
        time.sleep(SLOW_PIECE_S)
        yield {"content": f" piece-{number}"}


def _text(message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(part.get("text") or "" for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def _quoted(text: str) -> str:
    return text if len(text) <= _QUOTE_CHARS else text[: _QUOTE_CHARS - 3] + "..."


def _last_user_text(messages: Sequence[dict[str, Any]]) -> str:
    return next((_text(message) for message in reversed(messages) if message.get("role") == "user"), "")


def _results(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the tool results after the last user message."""
    results: list[dict[str, Any]] = []
    for message in messages:
        if message.get("role") == "user":
            results = []
        elif message.get("role") == "tool":
            results.append(message)
    return results


def _next_call(messages: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the next tool call of the last user message that has no result yet."""
    wanted = list(_TOOL.finditer(_last_user_text(messages)))
    done = len(_results(messages))
    if done >= len(wanted):
        return None
    match = wanted[done]
    name = match["name"] or "terminal"
    arguments = match["arguments"] or json.dumps({"command": match["command"]})
    call_id = f"call_{sum(message.get('role') == 'tool' for message in messages) + 1}"
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _envelope(kind: str) -> dict[str, Any]:
    return {"id": "chatcmpl-scripted", "object": kind, "created": int(time.time()), "model": MODEL_ID}


def _usage(messages: Sequence[dict[str, Any]]) -> dict[str, int]:
    asked, answered = len(json.dumps(messages)) // 4, len(reply_to(messages)) // 4 + 1
    return {"prompt_tokens": asked, "completion_tokens": answered, "total_tokens": asked + answered}


def _error(status: int) -> dict[str, Any]:
    return {"error": {"message": f"{_PREFIX}error {status}", "type": "scripted_error", "code": str(status)}}


def write_hermes_home(home: Path, url: str) -> Path:
    """Turn ``home`` into a ``HERMES_HOME`` whose model is the scripted one at ``url``, and return ``home``.

    Hermes then needs no provider and asks no questions, and does not retry failed requests.
    """
    home.mkdir(parents=True, exist_ok=True)
    config = f"""\
# The model is scripted (hermes_pool.testing.scripted_model): its replies follow fixed rules.
model:
  default: {MODEL_ID}
  provider: custom
  base_url: {json.dumps(url)}
  api_key: scripted
  context_length: {CONTEXT_TOKENS}
agent:
  api_max_retries: 1
"""
    (home / "config.yaml").write_text(config, encoding="utf-8")
    return home


def main(argv: Sequence[str] | None = None) -> None:
    """Print the URL, and serve until interrupted."""
    parser = argparse.ArgumentParser(description="A scripted stand-in for a language model, on loopback.")
    parser.add_argument("--port", type=int, default=0, help="port on 127.0.0.1; default: a free one")
    with ScriptedModel(parser.parse_args(argv).port) as model:
        sys.stdout.write(f"{model.url}\n")
        sys.stdout.flush()
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            return


if __name__ == "__main__":
    main()
