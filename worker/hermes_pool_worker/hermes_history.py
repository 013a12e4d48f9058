"""The history of one session in Hermes' database, seen as turns: marks, unfinished turns, and removing a turn.

Hermes writes the user's row before it asks the model, and then each step as it happens. So a turn that failed, or
during which the process was killed, leaves rows without an answer, and Hermes would merge their text into the next
prompt.

Everything here uses the public methods of Hermes' ``SessionDB``. Nothing is deleted: a turn that is removed from the
history stays on disk as inactive rows, as after Hermes' own ``/rewind``.
"""

import hashlib
import itertools
import json
from collections.abc import Sequence
from typing import Any

from hermes_pool_worker.wire import scrub

EMPTY_REPLY = "(empty)"
"""What Hermes writes as the reply of a model that keeps answering with empty text."""
_INJECTED = ("[System: ", "You've reached the maximum number of tool-calling iterations")
"""How the user rows start that Hermes itself inserts into a running turn. They do not begin a turn."""
NOTHING_YET = "0."
"""The mark of a session that has no messages yet."""

Row = dict[str, Any]


class HistoryTurn:
    """One user message and all that it caused: consecutive active rows of a session, the user's row first."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows

    @property
    def text(self) -> str:
        """What the user wrote."""
        return _text(self.rows[0]).strip()

    @property
    def reply(self) -> str:
        """The last text of the assistant, or ``""``."""
        return next((_text(row) for row in reversed(self.rows) if row["role"] == "assistant" and _text(row)), "")

    @property
    def acted(self) -> bool:
        """Whether a tool was called and may have had an effect."""
        return any(row.get("tool_calls") or row["role"] == "tool" for row in self.rows)

    @property
    def finished(self) -> bool:
        """Whether the turn ends with an answer."""
        last = self.rows[-1]
        return last["role"] == "assistant" and not last.get("tool_calls") and _text(last) not in ("", EMPTY_REPLY)


class History:
    """The messages of one session in Hermes' database. ``session_id`` may change while the session lives."""

    def __init__(self, database: Any, session_id: str) -> None:
        self._database = database
        self.session_id = session_id

    def load(self) -> list[dict[str, Any]]:
        """Return the history in the form that Hermes takes for the next turn, with broken tool calls repaired."""
        from agent.replay_cleanup import sanitize_replay_history  # noqa: PLC0415 - Hermes is imported late

        history: list[dict[str, Any]] = self._database.get_messages_as_conversation(
            self.session_id, repair_alternation=True
        )
        return list(sanitize_replay_history(history))

    def mark(self) -> str:
        """Return the mark of the end of the history: the id of the last row, and a digest of its content.

        The digest finds the row after a compaction, when the id no longer does: Hermes archives all rows and writes the
        ones that it keeps again, under the same session id or under another one.
        """
        rows = self._rows()
        return f"{rows[-1]['id']}.{_digest(rows[-1])}" if rows else NOTHING_YET

    def knows(self, mark: str | None) -> bool:
        """Whether the marked row is in the history, or was there until a compaction summarized it."""
        rows = self._rows()
        return mark is None or _place(rows, mark) is not None or _goes_on(rows, mark)

    def beyond(self, mark: str | None) -> list[HistoryTurn]:
        """Return the turns after the mark, oldest first; all turns if there is no mark.

        If a compaction summarized the marked row, return the last turn: only a later turn can have caused that.
        """
        rows = self._rows()
        place = 0 if mark is None else _place(rows, mark)
        if place is None:
            return _turns(rows)[-1:] if mark is not None and _goes_on(rows, mark) else []
        return _turns(rows[place:])

    def rewind(self, turn: HistoryTurn) -> None:
        """Remove this turn and all later ones from the history."""
        self._database.rewind_to_message(self.session_id, turn.rows[0]["id"])

    def seal(self, text: str) -> None:
        """End the last turn with this answer, so that Hermes does not merge the next prompt into it."""
        self._database.append_message(self.session_id, "assistant", text, finish_reason="stop")

    def _rows(self) -> list[Row]:
        rows: list[Row] = self._database.get_messages(self.session_id)
        return rows


def same_text(turn: HistoryTurn, text: str) -> bool:
    """Whether ``text`` is what the user wrote in this turn, in the form in which Hermes keeps it."""
    kept: str = scrub(text)
    return turn.text == kept.strip()


def _turns(rows: Sequence[Row]) -> list[HistoryTurn]:
    begins = [at for at, row in enumerate(rows) if row["role"] == "user" and not _text(row).startswith(_INJECTED)]
    return [HistoryTurn(rows[begin:end]) for begin, end in itertools.pairwise([*begins, len(rows)])]


def _place(rows: Sequence[Row], mark: str) -> int | None:
    """Return the index of the first row after the mark, or ``None`` if the marked row is not there."""
    if mark == NOTHING_YET:
        return 0
    row_id, digest = _row_id(mark), mark.partition(".")[2]
    for at in range(len(rows) - 1, -1, -1):
        if rows[at]["id"] == row_id:
            return at + 1
    for at in range(len(rows) - 1, -1, -1):
        if rows[at]["id"] > row_id and _digest(rows[at]) == digest:
            return at + 1
    return None


def _goes_on(rows: Sequence[Row], mark: str) -> bool:
    """Whether anything was written after the mark, whose own row is gone."""
    return bool(rows) and int(rows[-1]["id"]) > _row_id(mark)


def _row_id(mark: str) -> int:
    number = mark.partition(".")[0]
    return int(number) if number.isdecimal() else 0


def _digest(row: Row) -> str:
    said = json.dumps([row["role"], row.get("content"), row.get("tool_calls"), row.get("tool_call_id")], default=str)
    return hashlib.sha256(said.encode("utf-8", "surrogatepass")).hexdigest()[:24]


def _text(row: Row) -> str:
    content = row.get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""
