"""One long-lived Hermes Agent worker process per conversation, supervised from asyncio. Start at ``manager``."""

from hermes_pool.errors import (
    AgentFailedError,
    ConversationBusyError,
    HermesPoolError,
    InvalidKeyError,
    MessageTooLargeError,
    PoolClosedError,
    PoolFullError,
    SettingsError,
    StateNotWritableError,
    StoreError,
    TurnCancelledError,
    TurnError,
    TurnInterruptedError,
    TurnTimeoutError,
    WorkerCrashedError,
    WorkerStartError,
    WorkerStartTimeoutError,
    WorkerUnusableError,
)
from hermes_pool.link import Stopped
from hermes_pool.manager import HermesSessionManager
from hermes_pool.settings import PoolSettings, SessionKey
from hermes_pool.snapshot import SessionSnapshot
from hermes_pool.store import Conversation, ConversationStore
from hermes_pool.turn import Reply, Turn
from hermes_pool_worker.wire import (
    Question,
    ReasoningDelta,
    SessionMoved,
    Status,
    TextDelta,
    ToolFinished,
    ToolStarted,
)

__all__ = [
    "AgentFailedError",
    "Conversation",
    "ConversationBusyError",
    "ConversationStore",
    "HermesPoolError",
    "HermesSessionManager",
    "InvalidKeyError",
    "MessageTooLargeError",
    "PoolClosedError",
    "PoolFullError",
    "PoolSettings",
    "Question",
    "ReasoningDelta",
    "Reply",
    "SessionKey",
    "SessionMoved",
    "SessionSnapshot",
    "SettingsError",
    "StateNotWritableError",
    "Status",
    "Stopped",
    "StoreError",
    "TextDelta",
    "ToolFinished",
    "ToolStarted",
    "Turn",
    "TurnCancelledError",
    "TurnError",
    "TurnInterruptedError",
    "TurnTimeoutError",
    "WorkerCrashedError",
    "WorkerStartError",
    "WorkerStartTimeoutError",
    "WorkerUnusableError",
]
