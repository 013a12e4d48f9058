"""What all sessions of a pool share."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from hermes_pool.conversation.active_turn import QuestionPolicy
from hermes_pool.conversation.saver import Saver
from hermes_pool.crash_report import DeathReport
from hermes_pool.process.factory import WorkerFactory
from hermes_pool.scheduling.admission import Admission
from hermes_pool.settings import PoolSettings, SessionKey
from hermes_pool.system.sampler import Sampler
from hermes_pool_worker import wire

History: TypeAlias = Callable[[SessionKey], Iterable[Any] | Awaitable[Iterable[Any]]]
"""Returns the messages of a conversation, the oldest first: mappings, or objects, with ``role`` and ``content``."""
OnTurn: TypeAlias = Callable[[SessionKey, wire.PastTurn], Awaitable[None] | None]
"""Is told a turn that is in the history."""

if TYPE_CHECKING:  # SQLAlchemy takes longer to import than everything else together
    from hermes_pool.storage.store import ConversationStore


@dataclass(frozen=True, kw_only=True)
class SessionServices:
    """The services of the pool that its sessions use."""

    settings: PoolSettings
    factory: WorkerFactory
    store: "ConversationStore"
    host: str
    """The name of this machine."""
    log: Any
    admission: Admission
    sampler: Sampler
    saver: Saver
    in_background: Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]]
    turn_ids: Iterator[str]
    on_background: Callable[[SessionKey, wire.BackgroundFinished], None] | None
    """The host's callback for background work that has ended."""
    history: History | None
    """What was said in a conversation before the pool came to it, from the host."""
    on_turn: OnTurn | None
    """The host's callback for turns that are in the history."""
    on_question: QuestionPolicy | None
    """The host's policy for questions."""
    reports: deque[DeathReport]
    """The latest unexpected deaths."""
