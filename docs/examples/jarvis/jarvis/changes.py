"""Tells the streams of a conversation that its stored messages have changed."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Mapping
from typing import Any


class Changes:
    """Who watches which conversation."""

    def __init__(self) -> None:
        self._watchers: defaultdict[str, set[asyncio.Event]] = defaultdict(set)

    def tell(self, conversation_id: str) -> None:
        """Tell all streams of a conversation."""
        for changed in self._watchers.get(conversation_id, ()):
            changed.set()

    async def watch(self, conversation_id: str) -> AsyncGenerator[Mapping[str, Any], None]:
        """Yield an event for each change, or for several at once."""
        changed = asyncio.Event()
        self._watchers[conversation_id].add(changed)
        try:
            while True:
                await changed.wait()
                changed.clear()
                yield {"type": "messages_changed"}
        finally:
            self._watchers[conversation_id].discard(changed)
            if not self._watchers[conversation_id]:
                del self._watchers[conversation_id]
