"""Saves changed metadata in the background, never on the path of a turn."""

import asyncio

from hermes_pool.conversation.metadata import SessionMetadata

SAVE_EVERY_S = 1.0
"""How often the metadata of a busy session is saved, in seconds."""
SAVE_URGENT_AFTER_S = 0.02
"""How soon a new session id is saved, in seconds. The delay lets the caller have the reply first."""


class Saver:
    """Saves the metadata of all sessions of a pool."""

    def __init__(self) -> None:
        self._due: dict[SessionMetadata, float] = {}  # on the loop's clock
        self._wanted = asyncio.Event()
        self._closed = False

    def close(self) -> None:
        """Begin no more saves. One that is under way goes on."""
        self._closed = True
        self._due.clear()

    def soon(self, metadata: SessionMetadata, *, urgent: bool) -> None:
        """Schedule a save: almost at once if it is ``urgent`` or the session id is new, otherwise within a second."""
        if self._closed:
            return
        now = asyncio.get_running_loop().time()
        can_wait = metadata.identity_is_stored and not urgent
        if metadata in self._due and (can_wait or self._due[metadata] <= now + SAVE_URGENT_AFTER_S):
            return
        self._due[metadata] = now + (SAVE_EVERY_S if can_wait else SAVE_URGENT_AFTER_S)
        self._wanted.set()

    async def run(self) -> None:
        """Save what is due, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            now = loop.time()
            due = [metadata for metadata, at in self._due.items() if at <= now]
            for metadata in due:
                del self._due[metadata]
            if due:
                await asyncio.gather(*(metadata.save() for metadata in due))
                continue
            next_at = min(self._due.values(), default=None)
            self._wanted.clear()
            try:
                async with asyncio.timeout_at(next_at):
                    await self._wanted.wait()
            except TimeoutError:
                continue
