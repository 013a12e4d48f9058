"""The history of one session in Hermes' database: marks, whose rows are whose, and taking a turn back or sealing it.

Hermes writes the user's row before it asks the model, and then each step as it happens. So a turn that failed, or
during which the process was killed, leaves rows without an answer, and Hermes would merge their text into the next
prompt.

Whose rows are whose is never guessed from what they say: Hermes itself inserts user rows into a running turn, a user
may write the same words, and another program may write to the session. It is known from their place. When a turn of
ours begins and when it ends, the place is noted in Hermes' own database (``state_meta``), so that the next worker knows
it too.

Within a process it is known from the ids as well: Hermes writes through the database object that it was given, and
``History`` notes the ids of the rows as they are written. So rows that another program writes in the middle of a turn
of ours stay when the turn is removed.

Everything here uses the public methods of Hermes' ``SessionDB``, but for the removal of rows between which another
program has written. Nothing is deleted: a turn that is removed from the history stays on disk as inactive rows, as
after Hermes' own ``/rewind``.
"""

import contextlib
import hashlib
import json
import sqlite3
from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from hermes_pool_worker import wire
from hermes_pool_worker.wire import scrub

NOTHING_YET = "0."
"""The mark of a session that has no messages yet."""
UNFINISHED_TOOL = "[interrupted: this tool did not report its result. It may have acted.]"
"""The result that a tool call without one is given, so that a provider accepts the history."""
META_PREFIX = "hermes-pool:turn:"
NAME_PREFIX = "hermes-pool:conversation:"

_REASONING = (
    "reasoning", "reasoning_content", "reasoning_details", "codex_reasoning_items", "codex_message_items",
)  # fmt: skip

Row = dict[str, Any]


class TurnNote(msgspec.Struct, frozen=True):
    """What is noted in Hermes' database about the last turn of ours in a session."""

    turn_id: str
    began: str
    """The mark of the history when it began."""
    digest: str
    """Of the user's text: after a compaction, the place alone does not find its row."""
    ended: str | None = None
    """The mark when it had ended; ``None``: the worker died in it."""


class History:
    """The messages of one session in Hermes' database. ``session_id`` may change while the session lives."""

    def __init__(self, database: Any, session_id: str) -> None:
        self._database = database
        self.session_id = session_id
        self._written: dict[int, None] = {}
        """The ids of the rows that this process has written since ``forget_written``, in order."""
        self.shared = False
        """Whether another program had written among the rows that ``own`` returned last."""

    def watch(self) -> None:
        """Begin to note the ids of the rows that this process writes."""
        append = self._database.append_message

        def noted(*arguments: Any, **named: Any) -> Any:
            row_id = append(*arguments, **named)
            self._written[row_id] = None
            return row_id

        self._database.append_message = noted

    def forget_written(self) -> None:
        """Forget which rows were written: another turn begins."""
        self._written.clear()

    def own(self, note: "TurnNote") -> list[Row]:
        """Return the rows of the turn of this process that is noted. What other programs wrote is not among them."""
        rows = self.beyond(note.began, note.digest)
        own = [row for row in rows if row["id"] in self._written]
        if self._written and next(iter(self._written)) not in {row["id"] for row in rows}:
            own = rows  # a compaction has written them anew
        self.shared = len(own) < len(rows)
        return own

    def take_back_own(self, mark: str) -> None:
        """Remove what this process has written after the mark."""
        self.take_back([row for row in self.beyond(mark) if row["id"] in self._written])

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
        return mark_of(self.rows())

    def knows(self, mark: str | None) -> bool:
        """Whether the marked row is in the history, or was there until a compaction summarized it."""
        rows = self.rows()
        return mark is None or place_of(rows, mark) is not None or _goes_on(rows, mark)

    def rows(self) -> list[Row]:
        """Return all rows."""
        rows: list[Row] = self._database.get_messages(self.session_id)
        return rows

    # --- the turns of ours ---

    def note_began(self, turn_id: str, text: str, began: str) -> None:
        """Note that a turn of ours begins at this mark."""
        self._note(TurnNote(turn_id, began, text_digest(text)))

    def note_ended(self, note: TurnNote, ended: str) -> None:
        """Note that it has ended: what comes after this mark is not part of it."""
        self._note(msgspec.structs.replace(note, ended=ended))

    def _note(self, note: TurnNote) -> None:
        # A history that cannot be written is told where the turn's own rows are missing.
        with contextlib.suppress(sqlite3.Error):
            self._database.set_meta(META_PREFIX + self.session_id, msgspec.json.encode(note).decode())

    def note_name(self, name: str) -> None:
        """Note that this is the session of the conversation of this name."""
        with contextlib.suppress(sqlite3.Error):
            self._database.set_meta(NAME_PREFIX + name, self.session_id)

    def noted(self, *session_ids: str) -> TurnNote | None:
        """Return the note about the last turn of ours under the first of these session ids that has one."""
        for session_id in session_ids:
            with contextlib.suppress(sqlite3.Error, msgspec.ValidationError, msgspec.DecodeError):
                if stored := self._database.get_meta(META_PREFIX + session_id):
                    return msgspec.json.decode(stored, type=TurnNote)
        return None

    def beyond(self, mark: str | None, digest: str | None = None) -> list[Row]:
        """Return the rows after the mark; all rows if there is no mark.

        If a compaction summarized the marked row, return those from the last user row whose text has this ``digest``.
        """
        rows = self.rows()
        place = 0 if mark is None else place_of(rows, mark)
        if place is not None:
            return rows[place:]
        if mark is None or not _goes_on(rows, mark):
            return []
        for at in range(len(rows) - 1, -1, -1):
            if rows[at]["role"] == "user" and digest in (None, text_digest(text_of(rows[at]))):
                return rows[at:]
        return []

    def take_back(self, rows: Sequence[Row]) -> None:
        """Remove these rows. Those before the first user's row stay, and so does what is not among these rows."""
        first = next((at for at, row in enumerate(rows) if row["role"] == "user"), None)
        if first is None:
            return
        ids = {row["id"] for row in rows[first:]}
        if all(row["id"] in ids for row in self.rows() if row["id"] >= min(ids)):
            self._database.rewind_to_message(self.session_id, min(ids))
            return
        remove = "UPDATE messages SET active = 0 WHERE id = ?"
        parameters = [(row_id,) for row_id in ids]
        self._database._execute_write(lambda database: database.executemany(remove, parameters).rowcount)  # noqa: SLF001

    def seal(self, rows: Sequence[Row], text: str) -> None:
        """End a turn with this answer, so that it is well paired and Hermes does not merge the next prompt into it."""
        for call_id, name in open_calls(rows):
            self._database.append_message(
                self.session_id, "tool", UNFINISHED_TOOL, tool_name=name, tool_call_id=call_id
            )
        self._database.append_message(self.session_id, "assistant", text, finish_reason="stop")

    def write(self, messages: Sequence[dict[str, Any]]) -> None:
        """Append messages as Hermes has them in memory. Raises what the database raises."""
        for message in messages:
            self._database.append_message(
                self.session_id,
                message["role"],
                message.get("content"),
                tool_name=message.get("tool_name") or message.get("name"),
                tool_calls=message.get("tool_calls"),
                tool_call_id=message.get("tool_call_id"),
                finish_reason=message.get("finish_reason"),
                **{name: message[name] for name in _REASONING if message.get(name) is not None},
            )


def named_session(database: Any, name: str) -> str | None:
    """Return the id of the session that was noted for the conversation of this name."""
    with contextlib.suppress(sqlite3.Error):
        session_id: str | None = database.get_meta(NAME_PREFIX + name)
        return session_id
    return None


# --- rows -------------------------------------------------------------------------------------------------------------


def mark_of(rows: Sequence[Row]) -> str:
    """Return the mark after the last of these rows."""
    return f"{rows[-1]['id']}.{_digest(rows[-1])}" if rows else NOTHING_YET


def tool_names(rows: Sequence[Row]) -> list[str]:
    """Return the names of the tools that were called in these rows, in order."""
    return [str((call.get("function") or {}).get("name") or "") for row in rows for call in _calls(row)]


def may_have_acted(rows: Sequence[Row], safe_tools: Collection[str]) -> list[str]:
    """Return the names of the tools in these rows that are not safe."""
    return [name for name in tool_names(rows) if name not in safe_tools]


def open_calls(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Return the id and name of each tool call that has no result."""
    answered = {row.get("tool_call_id") for row in rows if row["role"] == "tool"}
    return [
        (str(call.get("id")), str((call.get("function") or {}).get("name") or ""))
        for row in rows
        for call in _calls(row)
        if call.get("id") not in answered
    ]


def sealed(messages: Sequence[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """Return the messages of a turn, ended with this answer and well paired, as ``History.seal`` writes it."""
    results = [
        {"role": "tool", "content": UNFINISHED_TOOL, "tool_name": name, "tool_call_id": call_id}
        for call_id, name in open_calls(messages)
    ]
    return [*messages, *results, {"role": "assistant", "content": text, "finish_reason": "stop"}]


def unsaid(rows: Sequence[Row], said: str) -> str:
    """Return what a person has seen of the reply and these rows do not hold."""
    for row in rows:
        if row["role"] == "assistant" and (text := text_of(row).strip()):
            said = said.strip().removeprefix(text)
    return said.strip()


def last_words(rows: Sequence[Row]) -> list[Row]:
    """Return the rows after the last tool call and its results."""
    begin = max((at + 1 for at, row in enumerate(rows) if row["role"] == "tool" or _calls(row)), default=0)
    return list(rows[begin:])


def is_finished(rows: Sequence[Row]) -> bool:
    """Whether these rows of a turn end with an answer."""
    if not rows:
        return False
    last = rows[-1]
    return last["role"] == "assistant" and not _calls(last) and bool(text_of(last).strip())


def reply_of(rows: Sequence[Row]) -> str:
    """Return the last text of the assistant, or ``""``."""
    return next((text_of(row) for row in reversed(rows) if row["role"] == "assistant" and text_of(row)), "")


def text_digest(text: str) -> str:
    """Return a digest of a user's text, in the form in which Hermes keeps it."""
    kept: str = scrub(text)
    return hashlib.sha256(kept.strip().encode("utf-8", "surrogatepass")).hexdigest()[:24]


def text_of(row: Row) -> str:
    """Return the text of a row."""
    content = row.get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def place_of(rows: Sequence[Row], mark: str) -> int | None:
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


def past_turns(rows: Sequence[Row], after: str | None, limit: int) -> list[wire.PastTurn]:
    """Return the turns in these rows after the mark, the oldest first. ``ValueError`` if the mark is not there.

    A turn is a user's row and what follows it until an answer is complete: what Hermes inserts on the way there belongs
    to the turn.
    """
    place = 0 if after is None else place_of(rows, after)
    if place is None:
        raise ValueError(f"the history has no mark {after}")
    turns: list[wire.PastTurn] = []
    begin = None
    for at in range(place, len(rows)):
        if rows[at]["role"] == "user" and begin is None:
            begin = at
        ends = at + 1 == len(rows) or rows[at + 1]["role"] == "user"
        if begin is None or not ends or not is_finished(rows[begin : at + 1]):
            continue
        turn = rows[begin : at + 1]
        turns.append(
            wire.PastTurn(
                mark_of(turn),
                text_of(turn[0]).strip(),
                reply_of(turn),
                tool_names(turn)[:1000],
                turn[0].get("timestamp"),
            )
        )
        begin = None
        if len(turns) >= limit:
            break
    return turns


def _calls(row: Row) -> list[dict[str, Any]]:
    calls = row.get("tool_calls")
    if isinstance(calls, str):
        with contextlib.suppress(ValueError):
            calls = json.loads(calls)
    return [call for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []


def _goes_on(rows: Sequence[Row], mark: str) -> bool:
    """Whether anything was written after the mark, whose own row is gone."""
    return bool(rows) and int(rows[-1]["id"]) > _row_id(mark)


def _row_id(mark: str) -> int:
    number = mark.partition(".")[0]
    return int(number) if number.isdecimal() else 0


def _digest(row: Row) -> str:
    said = json.dumps([row["role"], row.get("content"), row.get("tool_calls"), row.get("tool_call_id")], default=str)
    return hashlib.sha256(said.encode("utf-8", "surrogatepass")).hexdigest()[:24]
