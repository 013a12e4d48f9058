"""What is known of one session beyond its worker, and how it gets into the store and back.

The worker comes and goes; this is what a conversation is resumed with. It changes with each turn and is stored beside
the turns: soon after a change, and always before an idle worker is stopped.
"""

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from time import time
from typing import TYPE_CHECKING, Any, Literal

from hermes_pool.errors import StateNotWritableError, StoreError
from hermes_pool.settings import SessionKey
from hermes_pool.storage.record import SessionRecord

if TYPE_CHECKING:  # SQLAlchemy takes longer to import than all else together
    from hermes_pool.storage.store import ConversationStore

Status = Literal["healthy", "dormant", "failed"]


class SessionMetadata:
    """The books of one session. ``changed`` is called when there is something new to store."""

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
        """The agent's own name of the session."""
        self.committed: str | None = None
        """The agent's mark of the history, after the last turn that ended with a reply."""
        self.status: Status = "dormant"
        self.worker: tuple[int, float] | None = None
        """The identity of its worker: pid, and create time in seconds since the epoch."""
        self.incarnation = 0
        """The how-manieth worker it has, or had last."""
        self.restart_count = 0
        self.turns = 0
        self.last_error: str | None = None
        self.last_used_at: float | None = None
        """End of the last turn, in seconds since the epoch."""
        self.unsaved = False
        """Whether something has changed since it was stored."""
        self.save_error: StoreError | None = None
        """Why it could not be stored the last time; ``None`` when it could."""
        self._saved_session_id: str | None = None
        self._key = key
        self._store = store
        self._agent = agent
        self._host = host
        self._log = log
        self._changed = changed
        self._saving = asyncio.Lock()

    @property
    def identity_is_stored(self) -> bool:
        """Whether the store knows this session: a host that dies now loses nothing but the last second's figures."""
        return self._saved_session_id == self.session_id

    @property
    def last_used(self) -> str | None:
        """End of the last turn, ISO 8601 in UTC."""
        if self.last_used_at is None:
            return None
        return datetime.fromtimestamp(self.last_used_at, UTC).isoformat(timespec="milliseconds")

    def record(self, status: Status | None = None) -> SessionRecord:
        """Return what is stored; ``status`` tells of a change that is about to be made."""
        status = status or self.status
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
            last_error=self.last_error,
        )

    def used(self) -> None:
        """Take note of a turn's end. On the path of every turn: who is to be stored soon is not asked for again."""
        self.last_used_at = time()
        if not self.unsaved or self.save_error is not None or not self.identity_is_stored:
            self.save_soon()

    def save_soon(self) -> None:
        """Have it stored."""
        self.unsaved = True
        self._changed()

    async def save(self, status: Status | None = None) -> bool:
        """Store it now; say whether that worked. A failure is logged, and shown until it is mended."""
        if self.session_id is None:
            return True  # nothing to come back to
        async with self._saving:  # one after the other, so that an older record never overwrites a newer one
            record = self.record(status)
            self.unsaved = False
            try:
                await self._store.save(self._key, record)
            except StoreError as error:
                self.unsaved = True
                if str(error) != str(self.save_error):  # told once, though it is tried again and again
                    self._log.warning("save_failed", error=str(error))
                self.save_error = error
                return False
            self.save_error = None
            self._saved_session_id = record.session_id
            return True

    @property
    def never_storable(self) -> bool:
        """Whether the last failure is one that no further try mends: its row cannot take what is ours."""
        return isinstance(self.save_error, StateNotWritableError)

    async def recall(self) -> None:
        """Read what is stored, unless what is known here is newer. Raises ``StoreError`` where nobody can tell."""
        if self.session_id is not None and self.unsaved:
            return
        try:
            stored = await self._store.load(self._key)
        except StateNotWritableError as error:
            # Its row cannot hold a session of ours; it is left as it is, and the conversation goes on without.
            self.last_error = str(error)
            self._log.warning("state_unreadable", error=str(error))
            return
        if stored is not None and stored.session_id is not None:
            self.session_id, self.committed = stored.session_id, stored.committed
            self.restart_count = max(self.restart_count, stored.restart_count)
            self.turns = max(self.turns, stored.turns)
