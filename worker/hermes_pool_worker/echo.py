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
        self._texts: list[str] = []
        self._file: Path | None = None

    def open(self, request: Open) -> Opened:
        """Begin a session, or read the file of the one that is asked for."""
        notice = None
        self._session_id = request.session_id or f"echo-{uuid.uuid4().hex[:16]}"
        if request.data_dir is not None and request.options.get("durable", True):
            folder = Path(request.data_dir)
            folder.mkdir(parents=True, exist_ok=True)
            self._file = folder / f"{self._session_id}.jsonl"
            if self._file.exists():
                self._read(self._file)
            elif request.session_id:
                notice = f"the session {request.session_id} is not known here; it begins anew, without its context"
        return Opened(
            self._session_id,
            resumed=bool(self._texts),
            committed=self._mark(),
            recovered=self._settle(request),
            notice=notice,
        )

    def _read(self, file: Path) -> None:
        whole, _, torn = file.read_bytes().rpartition(b"\n")
        self._texts = [msgspec.json.decode(line, type=str) for line in whole.splitlines()]
        if torn:  # its writer was killed in the middle of a line
            self._write(file)

    def _settle(self, request: Open) -> str | None:
        """Return the reply of the unfinished turn, if it is in the history after all."""
        beyond = len(self._texts) - int(request.committed or 0)
        if request.unfinished is not None and beyond > 0 and self._texts[-1] == request.unfinished.text:
            return self._reply_to_last()
        return None

    def turn(self, text: str, turn: RunningTurn) -> Outcome:
        """Say it again."""
        self._texts.append(text)
        reply = self._reply_to_last()
        turn.text(reply)
        if self._file is not None:
            try:
                with self._file.open("ab") as file:
                    file.write(_encode(text) + b"\n")
            except OSError as error:
                self._texts.pop()
                raise AgentError("history", f"the history could not be written: {error}") from error
        return Outcome(reply, committed=self._mark())

    def _reply_to_last(self) -> str:
        match self._texts[-1]:
            case "/first":
                return self._texts[0]
            case "/count":
                return str(len(self._texts))
            case text:
                return text

    def _mark(self) -> str:
        return str(len(self._texts))

    def _write(self, file: Path) -> None:
        file.write_bytes(b"".join(_encode(text) + b"\n" for text in self._texts))

    def interrupt(self) -> None:
        """Nothing to do: a turn is over before it could be interrupted."""

    def close(self) -> None:
        """Nothing to do: each turn was written as it ended."""
