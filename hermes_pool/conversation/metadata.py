"""What is known about a session independently of its worker, and how it is saved and loaded.

Workers come and go; this is what resumes the conversation. It changes with each turn and is saved in the background:
soon after a change, and always before an idle worker is stopped.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from time import time
from typing import TYPE_CHECKING, Any, Literal

from hermes_pool.errors import HermesPoolError, StateNotWritableError, StoreError
from hermes_pool.policy.liveness import ProcessIdentity
from hermes_pool.settings import SessionKey
from hermes_pool.storage.record import SessionRecord
from hermes_pool_worker import wire

if TYPE_CHECKING:  # SQLAlchemy takes longer to import than everything else together
    from hermes_pool.storage.store import ConversationStore, FoundSession

Status = Literal["healthy", "dormant", "failed"]
_UNWRITTEN = "the history could not be written: "


@dataclass(frozen=True, slots=True)
class LeftTurn:
    """A turn that has no worker any more, and of which the history may have a part."""

    turn: wire.Turn
    given_up: bool = False
    """Whether it has been reported as ended, so that its reply is no longer wanted."""
    keep: bool = False
    """Once it is given up: whether it is to stay in the history, up to where it was seen."""
    said: str = ""
    """What was seen of its reply."""
    why: str = "the worker died"
    """Why it ended, in words that the model may be told."""


class SessionMetadata:
    """The metadata of one session. ``changed`` is called when there is something to save."""

    def __init__(
        self,
        key: SessionKey,
        store: "ConversationStore",
        *,
        agent: str,
        host: str,
        log: Any,
        changed: Callable[[], None],
    ) -> None:
        self.session_id: str | None = None
        """The agent's own id of the session."""
        self.committed: str | None = None
        """The agent's mark in its history after the last turn that ended with a reply."""
        self.worker: ProcessIdentity | None = None
        """The identity of the worker; ``None`` while no worker is ready."""
        self.incarnation = 0
        """The number of the current or last worker, counted from 1 in this supervisor."""
        self.restart_count = 0
        """How many dead workers have been replaced."""
        self.turns = 0
        """How many turns have ended with a reply."""
        self.last_error: str | None = None
        self.left: LeftTurn | None = None
        """The turn that the next worker may find unfinished in the history, since the last worker died in it."""
        self.found: FoundSession | None = None
        """What was stored when the conversation was claimed, until it is recalled."""
        self.unwritten: str | None = None
        """Why the last completed turn is in the worker's memory only; ``None`` if the history has it."""
        self.notice: str | None = None
        """What the next reply has to tell about what was stored."""
        self.open_turn_id: str | None = None
        """A turn with an id of the host's in which an earlier host ended: the next worker tells what became of it."""
        self.unsaved = False
        """Whether anything has changed since the last save."""
        self.save_error: StoreError | None = None
        """Why the last save failed; ``None`` if it succeeded."""
        self._status: Status = "dormant"
        self._last_used_at: float | None = None  # seconds since the epoch
        self._saved_session_id: str | None = None
        self._key = key
        self._store = store
        self._agent = agent
        self._host = host
        self._log = log
        self._changed = changed
        self._saving = asyncio.Lock()

    # --- what has happened ---

    def start_begun(self) -> None:
        """Count a worker that is being started."""
        self.incarnation += 1

    def start_failed(self, error: Exception) -> None:
        """Record why there is no worker."""
        self._status = "failed"
        self.last_error = str(error)
        self.save_soon()

    def opened(self, opened: wire.Opened, worker: ProcessIdentity, *, replaces: bool) -> None:
        """Record that a worker is ready; ``replaces``: in place of one that died unexpectedly."""
        if replaces:
            self.restart_count += 1
        self.session_id, self.committed = opened.session_id, opened.committed
        self.left = None
        self._status, self.worker = "healthy", worker
        self.save_soon()

    def died(self, error: str | None, unfinished: wire.Turn | None) -> None:
        """Record that the worker died: ``error`` if that was unexpected, ``unfinished`` if it had a turn."""
        self._status, self.worker = "dormant", None
        self.last_error = error or self.last_error
        self.unwritten = None  # it went with the worker
        if unfinished is not None:
            self.left = LeftTurn(unfinished)

    def replacements_spent(self) -> None:
        """Record that a turn has lost more workers than may be replaced for it."""
        self._status = "failed"

    def turn_left(self, left: "LeftTurn | None") -> None:
        """Record that a turn ended without a worker; ``None``: it was completed."""
        self.left = left

    def history_written(self, error: str | None) -> None:
        """Record whether the history has the last completed turn; ``error`` says why it has not."""
        if error is None and self.unwritten is not None and self.last_error == _UNWRITTEN + self.unwritten:
            self.last_error = None
        self.unwritten = error
        if error is not None:
            self.last_error = _UNWRITTEN + error
            self.save_soon()

    def moved(self, session_id: str) -> None:
        """Record that the agent continues under another session id."""
        self.session_id = session_id
        self.save_soon()

    def turn_done(self, done: wire.TurnDone) -> None:
        """Record where the history stands after a turn that ended with a reply."""
        self.session_id, self.committed = done.session_id, done.committed

    def turn_failed(self, failed: wire.TurnFailed) -> None:
        """Record where the history stands after a turn that the agent could not answer."""
        self.session_id = failed.session_id or self.session_id
        self.committed = failed.committed or self.committed

    def turn_settled(self, error: HermesPoolError | None) -> None:
        """Record the end of a turn. This is on the path of every turn, so a save that is due is not requested again."""
        if error is not None:
            self.last_error = str(error)
        self._last_used_at = time()
        if not self.unsaved or self.save_error is not None or self._saved_session_id != self.session_id:
            self.save_soon()

    # --- the record ---

    @property
    def identity_is_stored(self) -> bool:
        """Whether the session id is stored: a host that dies now loses only the figures of the last second."""
        return self._saved_session_id == self.session_id

    @property
    def last_used(self) -> str | None:
        """When the last turn ended, ISO 8601 in UTC."""
        if self._last_used_at is None:
            return None
        return datetime.fromtimestamp(self._last_used_at, UTC).isoformat(timespec="milliseconds")

    def record(self, status: Status | None = None, error: str | None = None) -> SessionRecord:
        """Return the record to store; ``status`` and ``error`` are those of a change that is about to be made."""
        status = status or self._status
        pid, create_time = self.worker if self.worker is not None and status == "healthy" else (None, None)
        return SessionRecord(
            session_id=self.session_id,
            last_used_at=self.last_used,
            restart_count=self.restart_count,
            status=status,
            committed=self.committed,
            incarnation=self.incarnation,
            turns=self.turns,
            pid=pid,
            create_time=create_time,
            host=self._host,
            agent=self._agent,
            last_error=error or self.last_error,
        )

    def save_soon(self) -> None:
        """Schedule a save."""
        self.unsaved = True
        self._changed()

    async def save(self, status: Status | None = None, *, error: str | None = None) -> bool:
        """Save now; return whether that succeeded. A failure is logged, and shown until a later save succeeds."""
        if self.session_id is None:
            return True  # there is nothing to resume
        async with self._saving:  # one at a time, so that an older record never overwrites a newer one
            record = self.record(status, error)
            self.unsaved = False
            try:
                await self._store.save(self._key, record)
            except StoreError as failure:
                self.unsaved = True
                if str(failure) != str(self.save_error):  # logged once, although saving is retried
                    self._log.warning("save_failed", error=str(failure))
                self.save_error = failure
                return False
            self.save_error = None
            self._saved_session_id = record.session_id
            return True

    async def finish(self) -> None:
        """Save what is unsaved, and wait for a save that is under way: nothing is written once this has returned."""
        if self.unsaved:
            await self.save()
        async with self._saving:
            pass

    @property
    def never_storable(self) -> bool:
        """Whether the last save failed for good: the conversation's row cannot hold the metadata."""
        return isinstance(self.save_error, StateNotWritableError)

    async def recall(self) -> None:
        """Load the stored record, unless the metadata here is newer. Raises ``StoreError`` if that fails."""
        if self.session_id is not None and (self.unsaved or self._saving.locked()):
            return
        try:
            found, self.found = self.found, None
            if found is None:
                found = await self._store.find(self._key)
            elif found.refusal is not None:
                raise found.refusal
        except StateNotWritableError as error:
            # Its row cannot hold the metadata: it is left as it is, and the conversation goes on without.
            self.last_error = str(error)
            self._log.warning("state_unreadable", error=str(error))
            return
        stored = found.record
        if found.notice is not None and self.session_id is None:
            self.notice = found.notice
            self._log.warning("state_lost", notice=found.notice)
        if self.left is None and (left := found.open_turn) is not None and left.text is not None:
            self.left = LeftTurn(wire.Turn(left.turn_id, 1, left.text))
            self.open_turn_id = left.turn_id
        if stored is not None and stored.session_id is not None:
            self.session_id, self.committed = stored.session_id, stored.committed
            self.restart_count = max(self.restart_count, stored.restart_count)
            self.turns = max(self.turns, stored.turns)
