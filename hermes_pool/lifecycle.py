"""The states of a worker and of a turn, and every transition between them.

Two rules. All transitions are in these two tables, and nowhere else. And events are facts in the past tense: killing is
an action, dying is an event. So a state without a process is entered only after an exit was seen, or if there never was
a process. To reach an empty cell is a bug in this library, and raises ``ImpossibleTransitionError``.

    worker   STOPPED --START_BEGUN--> STARTING --OPENED--> IDLE --TURN_BEGUN--> BUSY --TURN_ENDED--> IDLE
    turn     QUEUED --BEGUN--> STARTING --HANDED_OVER--> RUNNING --SETTLED--> SETTLED
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Generic, NoReturn, TypeVar

S = TypeVar("S", bound=StrEnum)
E = TypeVar("E", bound=StrEnum)


class ImpossibleTransitionError(AssertionError):
    """An event happened that is impossible in this state: a bug in hermes-pool."""


class Row(dict[E, S], Generic[E, S]):
    """The next state for each event that is possible in one state."""

    def __init__(self, what: str, state: S, cells: Mapping[E, S]) -> None:
        super().__init__(cells)
        self._what = what
        self._state = state

    def __missing__(self, event: E) -> NoReturn:
        """Refuse an event that is impossible in this state."""
        raise ImpossibleTransitionError(
            f"{event.value} cannot happen to a {self._what} that is {self._state.value}: "
            "this is a bug in hermes-pool, please report it"
        )


def _table(what: str, cells: Mapping[S, Mapping[E, S]]) -> dict[S, Row[E, S]]:
    return {state: Row(what, state, row) for state, row in cells.items()}


# --- the worker -------------------------------------------------------------------------------------------------------


class WorkerState(StrEnum):
    """What a session's worker is doing."""

    STOPPED = "stopped"
    """No process. The next message starts one and resumes the session, if there is one."""
    STARTING = "starting"
    """A process is being started, or is not ready yet."""
    IDLE = "idle"
    """Ready, with no turn."""
    BUSY = "busy"
    """It runs a turn."""
    STOPPING = "stopping"
    """The process has been asked to go, or is being killed."""
    FAILED = "failed"
    """No process, since it could not be started. The next message tries again."""

    __hash__ = str.__hash__  # Enum's own is Python code, and every turn needs it


class WorkerChange(StrEnum):
    """What has happened to a worker."""

    START_BEGUN = "start_begun"
    START_FAILED = "start_failed"
    OPENED = "opened"
    TURN_BEGUN = "turn_begun"
    TURN_ENDED = "turn_ended"
    STOP_BEGUN = "stop_begun"
    DIED = "died"

    __hash__ = str.__hash__


WORKER: dict[WorkerState, Row[WorkerChange, WorkerState]] = _table(
    "worker",
    {
        WorkerState.STOPPED: {
            WorkerChange.START_BEGUN: WorkerState.STARTING,
        },
        WorkerState.FAILED: {
            WorkerChange.START_BEGUN: WorkerState.STARTING,
        },
        WorkerState.STARTING: {
            WorkerChange.OPENED: WorkerState.IDLE,
            WorkerChange.START_FAILED: WorkerState.FAILED,
            WorkerChange.STOP_BEGUN: WorkerState.STOPPING,
        },
        WorkerState.IDLE: {
            WorkerChange.TURN_BEGUN: WorkerState.BUSY,
            WorkerChange.STOP_BEGUN: WorkerState.STOPPING,
            WorkerChange.DIED: WorkerState.STOPPED,
        },
        WorkerState.BUSY: {
            WorkerChange.TURN_ENDED: WorkerState.IDLE,
            WorkerChange.STOP_BEGUN: WorkerState.STOPPING,
            WorkerChange.DIED: WorkerState.STOPPED,
        },
        WorkerState.STOPPING: {
            # The turn's last frame may still arrive while its worker is being stopped.
            WorkerChange.TURN_ENDED: WorkerState.STOPPING,
            WorkerChange.DIED: WorkerState.STOPPED,
        },
    },
)
"""The next state of a worker, by state and event."""

ALIVE = frozenset({WorkerState.STARTING, WorkerState.IDLE, WorkerState.BUSY, WorkerState.STOPPING})
"""The states in which there is, or may be, a process."""


# --- the turn ---------------------------------------------------------------------------------------------------------


class TurnState(StrEnum):
    """Where a turn stands."""

    QUEUED = "queued"
    """It waits for the turns before it."""
    STARTING = "starting"
    """It holds the conversation, and waits for an idle worker."""
    RUNNING = "running"
    """A worker has it."""
    CANCELLING = "cancelling"
    """A worker has it, and was asked to end it."""
    RECOVERING = "recovering"
    """Its worker died. Another one is being started, to deliver its reply, run it again or remove it."""
    SETTLED = "settled"
    """It has ended for good, with a reply or an error."""

    __hash__ = str.__hash__


class TurnChange(StrEnum):
    """What has happened to a turn."""

    BEGUN = "begun"
    """It has acquired the conversation."""
    HANDED_OVER = "handed_over"
    """A worker was given the turn."""
    END_WANTED = "end_wanted"
    """It was cancelled or stopped, or reached a time limit. The turn's ``ending`` has the reason."""
    WORKER_DIED = "worker_died"
    SETTLED = "settled"

    __hash__ = str.__hash__


TURN: dict[TurnState, Row[TurnChange, TurnState]] = _table(
    "turn",
    {
        # Before a worker has it, there is no worker to ask for its end: it settles when its time comes.
        TurnState.QUEUED: {
            TurnChange.BEGUN: TurnState.STARTING,
            TurnChange.END_WANTED: TurnState.QUEUED,
            TurnChange.SETTLED: TurnState.SETTLED,
        },
        TurnState.STARTING: {
            TurnChange.HANDED_OVER: TurnState.RUNNING,
            TurnChange.END_WANTED: TurnState.STARTING,
            TurnChange.SETTLED: TurnState.SETTLED,
        },
        TurnState.RUNNING: {
            TurnChange.END_WANTED: TurnState.CANCELLING,
            TurnChange.WORKER_DIED: TurnState.RECOVERING,
            TurnChange.SETTLED: TurnState.SETTLED,
        },
        # A worker that dies while its turn is being cancelled ends that turn: there is nothing to recover.
        TurnState.CANCELLING: {
            TurnChange.SETTLED: TurnState.SETTLED,
        },
        # One recovery at a time: it notices by itself that the new worker died, or that the end is wanted.
        TurnState.RECOVERING: {
            TurnChange.HANDED_OVER: TurnState.RUNNING,
            TurnChange.END_WANTED: TurnState.RECOVERING,
            TurnChange.WORKER_DIED: TurnState.RECOVERING,
            TurnChange.SETTLED: TurnState.SETTLED,
        },
        TurnState.SETTLED: {},
    },
)
"""The next state of a turn, by state and event."""
