"""What was said before, between the host and a session: earlier messages on the way in, turns on the way out."""

import asyncio
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from hermes_pool.conversation.services import History, OnTurn
from hermes_pool.errors import StoreError
from hermes_pool.settings import SessionKey
from hermes_pool_worker import wire

EARLIER_CHARS_MAX = 4 * 1024 * 1024
"""How much of an earlier conversation an agent is given, in characters: the latest messages."""


async def earlier_messages(history: History, key: SessionKey) -> list[wire.Said]:
    """Ask the host what was said in a conversation. ``StoreError`` if that fails: a blank session would harm it."""
    try:
        found = history(key)
        messages: Iterable[Any] = await found if inspect.isawaitable(found) else found
        said = [each for each in map(_said, messages) if each is not None]
    except Exception as error:
        raise StoreError(
            f"what was said before could not be read (history= raised {type(error).__name__}: {error})",
            conversation_id=key.conversation_id,
        ) from error
    left = EARLIER_CHARS_MAX
    for at in range(len(said) - 1, -1, -1):
        left -= len(said[at].text)
        if left < 0:
            return said[at + 1 :]
    return said


def _said(message: Any) -> wire.Said | None:
    """Return a message of the host's; ``None`` for one of another role, or without text."""
    if isinstance(message, Mapping):
        role, content = message["role"], message["content"]
    else:
        role, content = message.role, message.content
    if role not in ("user", "assistant") or not content:
        return None
    if not isinstance(content, str):
        raise TypeError(f"content must be a str, not {type(content).__name__}")
    return wire.Said(role, content)


class TurnTeller:
    """Tells the host the turns of one session, one after the other, in order. What the host raises is logged."""

    def __init__(self, key: SessionKey, on_turn: OnTurn, log: Any) -> None:
        self._key = key
        self._on_turn = on_turn
        self._log = log
        self._one_at_a_time = asyncio.Lock()
        self.told: str | None = None
        """The mark of the last turn that was told, or before which none is to be told."""

    async def tell(self, turns: list[wire.PastTurn]) -> None:
        """Tell these turns."""
        async with self._one_at_a_time:
            for turn in turns:
                try:
                    answer = self._on_turn(self._key, turn)
                    if inspect.isawaitable(answer):
                        await answer
                except Exception as error:  # noqa: BLE001 - an error of the host must not harm the conversation
                    self._log.error("on_turn_failed", mark=turn.committed, error=repr(error), exc_info=error)
