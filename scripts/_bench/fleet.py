"""What all subjects have in common: long-lived echo workers, one per conversation, that answer messages."""

import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import psutil

WAIT = "/wait"
"""A message that a worker never answers: it waits inside the turn."""
DELTAS = "/deltas"
"""``/deltas COUNT BYTES``: the answer is streamed in COUNT pieces of BYTES bytes."""
STARTED = "."
"""What a worker sends, where it can, before it waits."""


class NotSupportedError(Exception):
    """The subject cannot do what the metric needs. The text is shown in its row."""


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What a metric needs of a subject."""

    sessions: int = 1
    """The most sessions that there will be."""
    pooled: bool = False
    """Whether any worker may answer any message. Process pools are then one pool of ``sessions`` workers, as they are
    meant to be used. Otherwise each session is a pool of one: their only way to keep a session."""
    at_once: bool = False
    """Whether all sessions begin at the same moment. A pool that reuses idle workers then has to start as many."""
    faulty: bool = False
    """Whether ``WAIT`` and ``DELTAS`` are needed."""


class Fleet:
    """One subject. It is entered once, and a session begins with its first message."""

    first_session_warms = False
    """Whether the first session also prepares the subject for later ones (its database, its zygote)."""

    def __init__(self, situation: Situation) -> None:
        self.situation = situation

    async def __aenter__(self) -> Self:
        """Prepare to start sessions."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End all sessions."""

    async def send(self, key: str, text: str) -> str:
        """Send a message to the session ``key``, and return the answer."""
        raise NotImplementedError

    async def pid(self, key: str) -> int:
        """Return the pid of the session ``key``."""
        raise NotSupportedError("has no process of its own to kill")

    async def helpers(self) -> set[int]:
        """Return the pids of processes that serve all sessions together, without the host."""
        return set()

    async def revive(self, key: str) -> None:
        """Make the session usable after its process died. Does nothing where the subject does so by itself."""

    def stream(self, key: str, text: str) -> AsyncIterator[int]:
        """Send a message, and yield the size of each piece of the answer as it arrives."""
        raise NotSupportedError("does not stream")


def tree() -> set[int]:
    """Return the pids of this process and all its descendants."""
    return {os.getpid(), *(process.pid for process in psutil.Process().children(recursive=True))}
