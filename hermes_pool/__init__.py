"""One long-lived Hermes Agent worker process per conversation, supervised from asyncio. Start at ``manager``.

Names are imported when they are first used: whoever only looks (``hermes-pool ps``) need not wait for SQLAlchemy.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hermes_pool.conversation.reply import Reply
    from hermes_pool.conversation.turn import Turn
    from hermes_pool.crash_report import DeathReport
    from hermes_pool.errors import (
        AgentFailedError,
        ConversationBusyError,
        HermesPoolError,
        InvalidKeyError,
        InvalidMessageError,
        MessageQuarantinedError,
        MessageTooLargeError,
        NoCapacityError,
        PoolClosedError,
        PoolDrainingError,
        PoolFullError,
        PoolPausedError,
        PoolUnavailableError,
        PoolUnusableError,
        RestartBackoffError,
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
    from hermes_pool.manager import HermesSessionManager
    from hermes_pool.process.death import Stopped
    from hermes_pool.scheduling.pool_state import Drained
    from hermes_pool.settings import (
        MemoryLimits,
        PoolSettings,
        QueueLimits,
        RestartPolicy,
        SessionKey,
        StartPolicy,
        Timeouts,
    )
    from hermes_pool.snapshot import PoolSnapshot, SessionSnapshot
    from hermes_pool.storage.store import Conversation, ConversationStore
    from hermes_pool_worker.wire import (
        BackgroundFinished,
        Question,
        ReasoningDelta,
        SessionMoved,
        Status,
        TextDelta,
        ToolFinished,
        ToolStarted,
    )

_HOME = {
    "AgentFailedError": "hermes_pool.errors",
    "BackgroundFinished": "hermes_pool_worker.wire",
    "Conversation": "hermes_pool.storage.store",
    "ConversationBusyError": "hermes_pool.errors",
    "ConversationStore": "hermes_pool.storage.store",
    "DeathReport": "hermes_pool.crash_report",
    "Drained": "hermes_pool.scheduling.pool_state",
    "HermesPoolError": "hermes_pool.errors",
    "HermesSessionManager": "hermes_pool.manager",
    "InvalidKeyError": "hermes_pool.errors",
    "InvalidMessageError": "hermes_pool.errors",
    "MemoryLimits": "hermes_pool.settings",
    "MessageQuarantinedError": "hermes_pool.errors",
    "MessageTooLargeError": "hermes_pool.errors",
    "NoCapacityError": "hermes_pool.errors",
    "PoolClosedError": "hermes_pool.errors",
    "PoolDrainingError": "hermes_pool.errors",
    "PoolFullError": "hermes_pool.errors",
    "PoolPausedError": "hermes_pool.errors",
    "PoolSettings": "hermes_pool.settings",
    "PoolSnapshot": "hermes_pool.snapshot",
    "PoolUnavailableError": "hermes_pool.errors",
    "PoolUnusableError": "hermes_pool.errors",
    "Question": "hermes_pool_worker.wire",
    "QueueLimits": "hermes_pool.settings",
    "ReasoningDelta": "hermes_pool_worker.wire",
    "Reply": "hermes_pool.conversation.reply",
    "RestartBackoffError": "hermes_pool.errors",
    "RestartPolicy": "hermes_pool.settings",
    "SessionKey": "hermes_pool.settings",
    "SessionMoved": "hermes_pool_worker.wire",
    "SessionSnapshot": "hermes_pool.snapshot",
    "SettingsError": "hermes_pool.errors",
    "StartPolicy": "hermes_pool.settings",
    "StateNotWritableError": "hermes_pool.errors",
    "Status": "hermes_pool_worker.wire",
    "Stopped": "hermes_pool.process.death",
    "StoreError": "hermes_pool.errors",
    "TextDelta": "hermes_pool_worker.wire",
    "Timeouts": "hermes_pool.settings",
    "ToolFinished": "hermes_pool_worker.wire",
    "ToolStarted": "hermes_pool_worker.wire",
    "Turn": "hermes_pool.conversation.turn",
    "TurnCancelledError": "hermes_pool.errors",
    "TurnError": "hermes_pool.errors",
    "TurnInterruptedError": "hermes_pool.errors",
    "TurnTimeoutError": "hermes_pool.errors",
    "WorkerCrashedError": "hermes_pool.errors",
    "WorkerStartError": "hermes_pool.errors",
    "WorkerStartTimeoutError": "hermes_pool.errors",
    "WorkerUnusableError": "hermes_pool.errors",
}
"""The module of each public name."""

__all__ = [
    "AgentFailedError",
    "BackgroundFinished",
    "Conversation",
    "ConversationBusyError",
    "ConversationStore",
    "DeathReport",
    "Drained",
    "HermesPoolError",
    "HermesSessionManager",
    "InvalidKeyError",
    "InvalidMessageError",
    "MemoryLimits",
    "MessageQuarantinedError",
    "MessageTooLargeError",
    "NoCapacityError",
    "PoolClosedError",
    "PoolDrainingError",
    "PoolFullError",
    "PoolPausedError",
    "PoolSettings",
    "PoolSnapshot",
    "PoolUnavailableError",
    "PoolUnusableError",
    "Question",
    "QueueLimits",
    "ReasoningDelta",
    "Reply",
    "RestartBackoffError",
    "RestartPolicy",
    "SessionKey",
    "SessionMoved",
    "SessionSnapshot",
    "SettingsError",
    "StartPolicy",
    "StateNotWritableError",
    "Status",
    "Stopped",
    "StoreError",
    "TextDelta",
    "Timeouts",
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


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
