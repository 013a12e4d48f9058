"""An agent without a model: it says what it is told, and remembers it. For tests, benchmarks and a first try."""

import uuid
from pathlib import Path

import msgspec

from hermes_pool_worker.agent import AgentError, Open, Opened, Outcome, RunningTurn

_encode = msgspec.json.encode


class EchoAgent:
    """Replies with the message itself; ``/first`` quotes the first one, ``/count`` says how many there were.

    The turns are kept in a file per session, one JSON text a line, so that a session outlives its worker. The option
    ``durable=False`` keeps them in memory only.
    """

    def __init__(self) -> None:
        self._session_id = ""
        self._first: str | None = None
        self._count = 0
        self._file: Path | None = None

    def open(self, request: Open) -> Opened:
        """Begin a session, or read the file of the one that is asked for."""
        notice = recovered = None
        self._session_id = request.session_id or f"echo-{uuid.uuid4().hex[:16]}"
        if request.data_dir is not None and request.options.get("durable", True):
            folder = Path(request.data_dir)
            folder.mkdir(parents=True, exist_ok=True)
            self._file = folder / f"{self._session_id}.jsonl"
            if self._file.exists():
                recovered = self._settle(self._file, self._read(self._file), request)
            elif request.session_id and request.committed != "0":  # else it has had no turn yet, so nothing is lost
                notice = f"the session {request.session_id} is not known here; it begins anew, without its context"
        return Opened(
            self._session_id,
            resumed=self._count > 0,
            committed=str(self._count),
            recovered=recovered,
            notice=notice,
        )

    def _read(self, file: Path) -> str | None:
        """Take up what is in the file; return its last text."""
        whole, _, torn = file.read_bytes().rpartition(b"\n")
        lines = whole.splitlines()
        self._count = len(lines)
        if torn:  # its writer was killed in the middle of a line
            file.write_bytes(b"".join(line + b"\n" for line in lines))
        if not lines:
            return None
        self._first = msgspec.json.decode(lines[0], type=str)
        return msgspec.json.decode(lines[-1], type=str)

    def _settle(self, file: Path, last: str | None, request: Open) -> str | None:
        """Return the reply of the unfinished turn, if it is in the history after all; take out one given up."""
        known = int(request.committed or 0)
        if request.unfinished is None or self._count <= known or last != request.unfinished.text:
            return None
        if not request.given_up:
            return self._reply_to(last)
        file.write_bytes(b"".join(line + b"\n" for line in file.read_bytes().splitlines()[:known]))
        self._count, self._first = known, self._first if known else None
        return None

    def turn(self, text: str, turn: RunningTurn) -> Outcome:
        """Say it again."""
        if self._first is None:
            self._first = text
        self._count += 1
        reply = self._reply_to(text)
        turn.text(reply)
        if self._file is not None:
            try:
                with self._file.open("ab") as file:
                    file.write(_encode(text) + b"\n")
            except OSError as error:
                self._count -= 1
                if not self._count:
                    self._first = None
                raise AgentError("history", f"the history could not be written: {error}") from error
        return Outcome(reply, committed=str(self._count))

    def _reply_to(self, text: str) -> str:
        if text == "/first":
            return self._first or ""
        return str(self._count) if text == "/count" else text

    def interrupt(self) -> None:
        """Nothing to do: a turn is over before it could be interrupted."""

    def close(self) -> None:
        """Nothing to do: each turn was written as it ended."""
