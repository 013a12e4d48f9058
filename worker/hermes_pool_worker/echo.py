"""An agent without a model: it repeats what it is told, and remembers it. For tests, benchmarks and a first try."""

import uuid
from pathlib import Path

import msgspec

from hermes_pool_worker.agent import AgentError, Open, Opened, Outcome, RunningTurn
from hermes_pool_worker.wire import PastTurn

_encode = msgspec.json.encode


class EchoAgent:
    """Replies with the message itself. ``/first`` quotes the first message, ``/count`` tells how many there were.

    Each session has a file with its turns, one JSON string a line, so a session outlives its worker. The option
    ``durable=False`` keeps the turns in memory only.
    """

    def __init__(self) -> None:
        self._session_id = ""
        self._first: str | None = None
        self._count = 0
        self._file: Path | None = None
        self._texts: list[str] = []
        """What the user said; only where there is no file."""

    def open(self, request: Open) -> Opened:
        """Begin a session, or read the file of the one to resume."""
        notice = recovered = None
        self._session_id = request.session_id or f"echo-{uuid.uuid4().hex[:16]}"
        if request.data_dir is not None and request.options.get("durable", True):
            folder = Path(request.data_dir)
            folder.mkdir(parents=True, exist_ok=True)
            self._file = folder / f"{self._session_id}.jsonl"
            if self._file.exists():
                recovered = self._settle(self._file, self._read(self._file), request)
            elif request.session_id and request.committed != "0":  # with "0" it had no turns, so nothing is lost
                notice = f"the session {request.session_id} is not known here; it starts again without its context"
        if request.session_id is None:
            for said in request.earlier:
                if said.role == "user":
                    self._first = said.text if self._first is None else self._first
                    self._count += 1
                    self._write(said.text)
        return Opened(
            self._session_id,
            resumed=self._count > 0,
            committed=str(self._count),
            recovered=recovered,
            notice=notice,
        )

    def _read(self, file: Path) -> str | None:
        """Load the turns in the file; return the text of the last one."""
        whole, _, torn = file.read_bytes().rpartition(b"\n")
        lines = whole.splitlines()
        self._count = len(lines)
        if torn:  # a worker was killed in the middle of writing a line
            file.write_bytes(b"".join(line + b"\n" for line in lines))
        if not lines:
            return None
        self._first = msgspec.json.decode(lines[0], type=str)
        return msgspec.json.decode(lines[-1], type=str)

    def _settle(self, file: Path, last: str | None, request: Open) -> str | None:
        """Return the reply of the unfinished turn if the history has it after all; remove a turn that was given up."""
        known = int(request.committed or 0)
        if request.unfinished is None or self._count <= known or last != request.unfinished.text:
            return None
        if not request.given_up:
            return self._reply_to(last)
        if request.keep and request.said:
            return None  # somebody has seen it
        file.write_bytes(b"".join(line + b"\n" for line in file.read_bytes().splitlines()[:known]))
        self._count, self._first = known, self._first if known else None
        return None

    def turn(self, text: str, turn: RunningTurn) -> Outcome:
        """Repeat the text."""
        if self._first is None:
            self._first = text
        self._count += 1
        reply = self._reply_to(text)
        turn.text(reply)
        try:
            self._write(text)
        except OSError as error:
            self._count -= 1
            if not self._count:
                self._first = None
            raise AgentError("history", f"the history could not be written: {error}") from error
        return Outcome(reply, committed=str(self._count))

    def _write(self, text: str) -> None:
        if self._file is None:
            self._texts.append(text)
            return
        with self._file.open("ab") as file:
            file.write(_encode(text) + b"\n")

    def turns(self, after: str | None, limit: int) -> list[PastTurn]:
        """Return the turns after a mark, which is their number."""
        texts = self._texts
        if self._file is not None and self._file.exists():
            texts = [msgspec.json.decode(line, type=str) for line in self._file.read_bytes().splitlines()]
        begin = int(after or 0)
        if begin > len(texts):
            raise ValueError(f"there are only {len(texts)} turns")
        return [
            PastTurn(str(number), text, text) for number, text in enumerate(texts[begin : begin + limit], begin + 1)
        ]

    def _reply_to(self, text: str) -> str:
        if text == "/first":
            return self._first or ""
        return str(self._count) if text == "/count" else text

    def interrupt(self) -> None:
        """Do nothing: a turn is over before anyone could interrupt it."""

    def close(self) -> None:
        """Do nothing: each turn was written when it ended."""
