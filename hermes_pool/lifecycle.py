"""The states of a session's worker, and every transition between them.

Two rules. Everything about transitions is in this table and nowhere else; and events are facts in the past tense:
killing is an action, dying is an event, so a state that means "no process" is entered only when an exit was seen, or
when there never was a process. An empty cell is a bug of ours, and says so.

    STOPPED --START_BEGUN--> STARTING --OPENED--> IDLE --TURN_BEGUN--> BUSY --TURN_ENDED--> IDLE
"""

from enum import StrEnum


class State(StrEnum):
    """What a session's worker is doing."""

    STOPPED = "stopped"
    """No process. The session, if it has one, is resumed by the next message."""
    STARTING = "starting"
    """A process is being started, or is not ready yet."""
    IDLE = "idle"
    """Ready, and no turn runs."""
    BUSY = "busy"
    """A turn runs."""
    STOPPING = "stopping"
    """The process has been asked to go, or is being killed."""
    FAILED = "failed"
    """No process: it could not be started. The next message tries again."""

    __hash__ = str.__hash__  # the enumeration's own is Python code, and is asked twice in each turn


class Event(StrEnum):
    """What has happened."""

    START_BEGUN = "start_begun"
    START_FAILED = "start_failed"
    OPENED = "opened"
    TURN_BEGUN = "turn_begun"
    TURN_ENDED = "turn_ended"
    STOP_BEGUN = "stop_begun"
    DIED = "died"

    __hash__ = str.__hash__  # as above


TRANSITIONS: dict[State, dict[Event, State]] = {
    State.STOPPED: {
        Event.START_BEGUN: State.STARTING,
    },
    State.FAILED: {
        Event.START_BEGUN: State.STARTING,
    },
    State.STARTING: {
        Event.OPENED: State.IDLE,
        Event.START_FAILED: State.FAILED,
        Event.STOP_BEGUN: State.STOPPING,
    },
    State.IDLE: {
        Event.TURN_BEGUN: State.BUSY,
        Event.STOP_BEGUN: State.STOPPING,
        Event.DIED: State.STOPPED,
    },
    State.BUSY: {
        Event.TURN_ENDED: State.IDLE,
        Event.STOP_BEGUN: State.STOPPING,
        Event.DIED: State.STOPPED,
    },
    State.STOPPING: {
        # The turn's last frame may still come while its worker is on the way out.
        Event.TURN_ENDED: State.STOPPING,
        Event.DIED: State.STOPPED,
    },
}

ALIVE = frozenset({State.STARTING, State.IDLE, State.BUSY, State.STOPPING})
"""The states in which there is, or may be, a process."""


class ImpossibleTransitionError(AssertionError):
    """An event that cannot happen in this state was fed to the table: a bug in hermes-pool."""


def after(state: State, event: Event) -> State:
    """Return the state that follows; ``ImpossibleTransitionError`` for an empty cell, with nothing changed."""
    try:
        return TRANSITIONS[state][event]
    except KeyError:
        raise ImpossibleTransitionError(
            f"{event} cannot happen to a session that is {state}: this is a bug in hermes-pool, please report it"
        ) from None
