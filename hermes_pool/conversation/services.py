"""What all sessions of a pool share."""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hermes_pool.conversation.active_turn import QuestionPolicy
from hermes_pool.conversation.saver import Saver
from hermes_pool.crash_report import DeathReport
from hermes_pool.process.factory import WorkerFactory
from hermes_pool.scheduling.admission import Admission
from hermes_pool.settings import PoolSettings, SessionKey
from hermes_pool.system.sampler import Sampler
from hermes_pool_worker import wire

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
    on_question: QuestionPolicy | None
    """The host's policy for questions."""
    reports: deque[DeathReport]
    """The latest unexpected deaths."""
