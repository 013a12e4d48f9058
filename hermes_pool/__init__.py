"""One long-lived Hermes Agent worker process per conversation, supervised from asyncio. Start at ``manager``.

The public names are those that are imported here under their own name. What is light is imported at once. The rest is
imported when it is first asked for, since ``hermes-pool ps`` needs neither asyncio nor SQLAlchemy, and would otherwise
take twice as long.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING
from typing import Any as _Any

from hermes_pool.account import ToolUse as ToolUse
from hermes_pool.account import TurnAccount as TurnAccount
from hermes_pool.crash_report import DeathReport as DeathReport
from hermes_pool.errors import AgentFailedError as AgentFailedError
from hermes_pool.errors import ConversationBusyError as ConversationBusyError
from hermes_pool.errors import ConversationElsewhereError as ConversationElsewhereError
from hermes_pool.errors import HermesPoolError as HermesPoolError
from hermes_pool.errors import InvalidKeyError as InvalidKeyError
from hermes_pool.errors import InvalidMessageError as InvalidMessageError
from hermes_pool.errors import InvalidUseError as InvalidUseError
from hermes_pool.errors import MessageQuarantinedError as MessageQuarantinedError
from hermes_pool.errors import MessageTooLargeError as MessageTooLargeError
from hermes_pool.errors import NoCapacityError as NoCapacityError
from hermes_pool.errors import OwnerStoppedError as OwnerStoppedError
from hermes_pool.errors import PoolClosedError as PoolClosedError
from hermes_pool.errors import PoolDrainingError as PoolDrainingError
from hermes_pool.errors import PoolFullError as PoolFullError
from hermes_pool.errors import PoolPausedError as PoolPausedError
from hermes_pool.errors import PoolUnavailableError as PoolUnavailableError
from hermes_pool.errors import PoolUnusableError as PoolUnusableError
from hermes_pool.errors import RestartBackoffError as RestartBackoffError
from hermes_pool.errors import SettingsError as SettingsError
from hermes_pool.errors import StateDirError as StateDirError
from hermes_pool.errors import StateNotWritableError as StateNotWritableError
from hermes_pool.errors import StoreError as StoreError
from hermes_pool.errors import TurnCancelledError as TurnCancelledError
from hermes_pool.errors import TurnError as TurnError
from hermes_pool.errors import TurnIdConflictError as TurnIdConflictError
from hermes_pool.errors import TurnInterruptedError as TurnInterruptedError
from hermes_pool.errors import TurnTimeoutError as TurnTimeoutError
from hermes_pool.errors import WorkerCrashedError as WorkerCrashedError
from hermes_pool.errors import WorkerDiedError as WorkerDiedError
from hermes_pool.errors import WorkerStartError as WorkerStartError
from hermes_pool.errors import WorkerStartTimeoutError as WorkerStartTimeoutError
from hermes_pool.errors import WorkerUnusableError as WorkerUnusableError
from hermes_pool.lifecycle import TurnState as TurnState
from hermes_pool.scheduling.pool_state import Drained as Drained
from hermes_pool.scheduling.pool_state import PoolState as PoolState
from hermes_pool.settings import MemoryLimits as MemoryLimits
from hermes_pool.settings import PoolSettings as PoolSettings
from hermes_pool.settings import QueueLimits as QueueLimits
from hermes_pool.settings import RestartPolicy as RestartPolicy
from hermes_pool.settings import SessionKey as SessionKey
from hermes_pool.settings import StartPolicy as StartPolicy
from hermes_pool.settings import Timeouts as Timeouts
from hermes_pool.snapshot import BreakerSnapshot as BreakerSnapshot
from hermes_pool.snapshot import BreakerState as BreakerState
from hermes_pool.snapshot import PoolSnapshot as PoolSnapshot
from hermes_pool.snapshot import SessionSnapshot as SessionSnapshot
from hermes_pool.storage.record import SessionRecord as SessionRecord
from hermes_pool_worker.wire import BackgroundFinished as BackgroundFinished
from hermes_pool_worker.wire import PastTurn as PastTurn
from hermes_pool_worker.wire import Question as Question
from hermes_pool_worker.wire import ReasoningDelta as ReasoningDelta
from hermes_pool_worker.wire import SessionMoved as SessionMoved
from hermes_pool_worker.wire import Status as Status
from hermes_pool_worker.wire import TextDelta as TextDelta
from hermes_pool_worker.wire import ToolFinished as ToolFinished
from hermes_pool_worker.wire import ToolStarted as ToolStarted
from hermes_pool_worker.wire import TurnEvent as TurnEvent

if TYPE_CHECKING:
    from hermes_pool.conversation.events import ConversationEvent as ConversationEvent
    from hermes_pool.conversation.events import EventsMissed as EventsMissed
    from hermes_pool.conversation.events import OpenQuestion as OpenQuestion
    from hermes_pool.conversation.events import QuestionAnswered as QuestionAnswered
    from hermes_pool.conversation.events import TurnEnded as TurnEnded
    from hermes_pool.conversation.events import TurnSnapshot as TurnSnapshot
    from hermes_pool.conversation.events import TurnStarted as TurnStarted
    from hermes_pool.conversation.events import TurnSteered as TurnSteered
    from hermes_pool.conversation.reply import Reply as Reply
    from hermes_pool.conversation.turn import Turn as Turn
    from hermes_pool.manager import HermesSessionManager as HermesSessionManager
    from hermes_pool.process.death import Stopped as Stopped
    from hermes_pool.process.launcher import Exit as Exit
    from hermes_pool.storage.own_tables import RecordedTurn as RecordedTurn
    from hermes_pool.storage.store import Conversation as Conversation
    from hermes_pool.storage.store import ConversationStore as ConversationStore
    from hermes_pool.storage.store import FoundSession as FoundSession
else:  # the same names once more, and where to find them; a test compares the two
    _LATER = {
        "Conversation": "hermes_pool.storage.store",
        "ConversationEvent": "hermes_pool.conversation.events",
        "ConversationStore": "hermes_pool.storage.store",
        "EventsMissed": "hermes_pool.conversation.events",
        "Exit": "hermes_pool.process.launcher",
        "FoundSession": "hermes_pool.storage.store",
        "HermesSessionManager": "hermes_pool.manager",
        "OpenQuestion": "hermes_pool.conversation.events",
        "QuestionAnswered": "hermes_pool.conversation.events",
        "RecordedTurn": "hermes_pool.storage.own_tables",
        "Reply": "hermes_pool.conversation.reply",
        "Stopped": "hermes_pool.process.death",
        "Turn": "hermes_pool.conversation.turn",
        "TurnEnded": "hermes_pool.conversation.events",
        "TurnSnapshot": "hermes_pool.conversation.events",
        "TurnStarted": "hermes_pool.conversation.events",
        "TurnSteered": "hermes_pool.conversation.events",
    }

    __all__ = sorted(  # noqa: PLE0605 - a list, and made once
        {name for name, value in globals().items() if name[0] != "_" and not hasattr(value, "__spec__")}
        - {"TYPE_CHECKING"}
        | set(_LATER)
    )

    def __getattr__(name: str) -> _Any:
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(_import_module(_LATER[name]), name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *_LATER})
