"""Who has a conversation, and which turns wait for it, first come first served.

It is handed on directly: who gives it up gives it to the first that waits, so that nobody can get in between.
"""

import asyncio
from collections import deque

from hermes_pool.conversation.active_turn import ActiveTurn


class Line:
    """A lock of one event loop, which shows who waits."""

    def __init__(self) -> None:
        self._held = False
        self._waiters: deque[tuple[object, asyncio.Future[None]]] = deque()

    @property
    def is_held(self) -> bool:
        """Whether somebody has the conversation."""
        return self._held

    @property
    def turns(self) -> list[ActiveTurn]:
        """The turns that wait, the first one first."""
        return [turn for turn, turned in self._waiters if isinstance(turn, ActiveTurn) and not turned.done()]

    def __len__(self) -> int:
        """Return how many turns wait."""
        return len(self._waiters)

    def take(self) -> bool:
        """Take the conversation if it is free; return whether it was."""
        if self._held:
            return False
        self._held = True
        return True

    def join(self, who: object) -> "asyncio.Future[None]":
        """Wait behind all that wait already: the conversation is held once the future is done. See ``leave``.

        ``who`` is a turn, or anything else that needs the conversation for itself for a moment.
        """
        turned: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((who, turned))
        return turned

    def leave(self, who: object) -> None:
        """Stop waiting. If the conversation has just been handed to this one, it goes on to the next."""
        for entry in self._waiters:
            if entry[0] is who:
                self._waiters.remove(entry)
                if not entry[1].cancel():
                    self.release()
                return

    def arrived(self, who: object) -> None:
        """Take note that this one, to which the conversation was handed, goes on."""
        self._waiters.remove(next(entry for entry in self._waiters if entry[0] is who))

    def release(self) -> None:
        """Give the conversation up, or on to the first turn that waits."""
        for _, turned in self._waiters:
            if not turned.done():
                turned.set_result(None)
                return
        self._held = False
