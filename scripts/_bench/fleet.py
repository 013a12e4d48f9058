"""What all subjects have in common: long-lived echo workers, one for each conversation, that answer messages."""

import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import psutil

WAIT = "/wait"
"""The message to which a worker answers never: it waits inside the turn."""
DELTAS = "/deltas"
"""``/deltas COUNT BYTES``: the answer comes in COUNT pieces of BYTES bytes."""
STARTED = "."
"""What a worker that was told to wait says first, where it can."""


class NotSupportedError(Exception):
    """The subject cannot do what the metric asks for; the text is shown in its row."""


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What a metric needs of a subject."""

    sessions: int = 1
    """How many sessions there will be at most."""
    pooled: bool = False
    """Whether any worker may answer any message: process pools then are one pool of ``sessions`` workers, which is how
    they are meant; otherwise each session is a pool of one, the only way for them to keep a session."""
    at_once: bool = False
    """Whether all sessions begin in the same moment: then even who gives out any idle worker has to make as many."""
    faulty: bool = False
    """Whether ``WAIT`` and ``DELTAS`` are needed."""


class Fleet:
    """One subject. Entered once; sessions are made when they are first talked to."""

    readies_itself = False
    """Whether the first session of all also readies the subject for those to come (its database, its zygote)."""

    def __init__(self, situation: Situation) -> None:
        self.situation = situation

    async def __aenter__(self) -> Self:
        """Get ready to start sessions."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End all sessions."""

    async def send(self, key: str, text: str) -> str:
        """Answer a message of the session ``key``."""
        raise NotImplementedError

    async def pid(self, key: str) -> int:
        """Return the process of the session ``key``."""
        raise NotSupportedError("has no process of its own that could be killed")

    async def helpers(self) -> set[int]:
        """Return the processes that serve all sessions together, apart from the host."""
        return set()

    async def revive(self, key: str) -> None:
        """Make the session usable after its process has died; nothing to do where the subject does it by itself."""

    def stream(self, key: str, text: str) -> AsyncIterator[int]:
        """Answer in pieces: yield the size of each as it comes."""
        raise NotSupportedError("does not stream")


def tree() -> set[int]:
    """Return this process and all below it."""
    return {os.getpid(), *(process.pid for process in psutil.Process().children(recursive=True))}
