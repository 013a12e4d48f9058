"""What happens to a pool in one simulated life, as plain data: its settings, and the steps that are taken one by one.

One generator serves both the property test and the soak run: it asks ``choose`` for each decision. The first option
is always the plainest one, so that a failing history shrinks to what matters.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, TypeVar

T = TypeVar("T")

CONVERSATIONS = 3


class Choose(Protocol):
    """Makes one decision: by chance, by hypothesis, or by a replayed example."""

    def __call__(self, options: Sequence[T], /) -> T: ...


# --- what workers and callers do --------------------------------------------------------------------------------------

Op: TypeAlias = Literal[
    "text", "tool", "tool_end", "ask", "ask_long", "moves", "job", "job_end", "process", "stray", "old_attempt",
    "commit", "dies", "fails", "partial", "breath", "pause", "hang",
]  # fmt: skip
"""A step of a worker through a turn. ``breath`` and ``pause`` take time, ``hang`` never ends; after the last one the
turn is done."""

Fate: TypeAlias = Literal[
    "ready", "dies_before_hello", "dies_before_opened", "dies_as_it_opens", "dies_once_open", "hangs_before_hello",
    "hangs_before_opened", "unusable", "no_capacity",
]  # fmt: skip
"""How the start of a worker goes."""

OnCancel: TypeAlias = Literal["obeys", "obeys_late", "deaf", "dies", "finishes", "fails"]
OnClose: TypeAlias = Literal["leaves", "leaves_late", "needs_term", "needs_kill"]

Manner: TypeAlias = Literal["sends", "streams", "streams_slowly", "answers", "only_replies", "leaves", "cancels"]
"""How a caller talks: ``send``, or ``turn`` and what it does with the events."""

StoreMode: TypeAlias = Literal["works", "slow", "fails", "unwritable"]


@dataclass(frozen=True)
class Birth:
    """How one worker is started, and its manners."""

    fate: Fate = "ready"
    takes_s: float = 0.0
    on_cancel: OnCancel = "obeys"
    on_close: OnClose = "leaves"


# --- steps ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Say:
    """A caller comes with a message. ``scripts`` say what its first, second, ... worker does with it."""

    conversation: int
    scripts: tuple[tuple[Op, ...], ...] = ((),)
    manner: Manner = "sends"
    again: bool = False
    """Whether it is the text that this conversation heard last."""
    heir: Birth = Birth()
    """How the worker is born that takes over when one has died of it."""


@dataclass(frozen=True)
class Pass:
    """Time goes by; 0 is one round of the event loop."""

    seconds: float


@dataclass(frozen=True)
class NextBirth:
    """The next worker to be started, of whatever conversation, is born like this."""

    birth: Birth


@dataclass(frozen=True)
class ToWorker:
    """Something befalls the worker of a conversation, in whatever state it is."""

    conversation: int
    what: Literal["crashes", "is_killed", "exits", "freezes", "sends_stray", "finishes_job"]


@dataclass(frozen=True)
class ToCaller:
    """Something befalls a caller, the latest ones first."""

    back: int
    what: Literal["turn_is_cancelled", "task_is_cancelled"]


@dataclass(frozen=True)
class Operate:
    """Somebody operates on one conversation; the last four are what the pool's own watch does."""

    conversation: int
    what: Literal["stop", "reset", "release", "recycle", "kill_for", "replace_stuck", "ask"]


@dataclass(frozen=True)
class OperatePool:
    """Somebody operates on the pool as a whole."""

    what: Literal["pause", "resume", "drain", "drain_now", "reset", "shrink", "grow", "close"]


@dataclass(frozen=True)
class SetStore:
    """From now on the database is like this."""

    mode: StoreMode


Step: TypeAlias = Say | Pass | NextBirth | ToWorker | ToCaller | Operate | OperatePool | SetStore


@dataclass(frozen=True)
class Rules:
    """The settings that differ from history to history."""

    workers_max: int = 2
    busy: Literal["wait", "reject"] = "wait"
    replay: Literal["until_tool", "always", "never"] = "until_tool"
    restarts_max: int = 1
    quarantine_after: int = 2
    restarts_in_window_max: int = 5
    turns_waiting_max: int = 8
    admissions_waiting_max: int = 8
    events_waiting_max: int = 16
    background_timeout_s: float = 2.0
    start_failures_max: int = 3
    latency_s: float = 0.0
    """Of frames and of news of an exit; 0 is one round of the event loop."""


@dataclass(frozen=True)
class History:
    """One life of a pool."""

    rules: Rules
    steps: tuple[Step, ...]


# --- the generator ----------------------------------------------------------------------------------------------------

_OPS: tuple[Op, ...] = (
    "text", "text", "breath", "breath", "tool", "tool_end", "dies", "pause", "commit", "ask", "job", "job_end", "moves",
    "process", "stray", "old_attempt", "partial", "fails", "hang",
)  # fmt: skip
_TALES: tuple[tuple[Op, ...], ...] = (
    (), ("text", "dies"), ("hang",), ("tool", "breath", "tool_end"), ("tool", "dies"),
    ("tool", "tool_end", "breath", "dies"), ("commit", "dies"), ("breath", "dies"), ("ask",), ("ask_long", "breath"),
    ("ask_long", "dies"), ("job", "breath"),
    ("process",), ("text", "text", "text"), ("text", "pause", "text"), ("moves", "commit", "dies"), ("ask", "hang"),
)  # fmt: skip
"""What happens most, or is most delicate."""
_FATES: tuple[Fate, ...] = (
    "ready", "ready", "ready", "dies_once_open", "dies_before_hello", "dies_before_opened", "dies_as_it_opens",
    "dies_once_open", "hangs_before_hello", "hangs_before_opened", "unusable", "no_capacity",
)  # fmt: skip
_TIMES = (0.0, 0.0, 0.0, 0.01, 0.03, 0.05, 0.05, 0.1, 0.3, 0.5, 1.0, 3.0, 5.0)
_LENGTHS = (0, 1, 1, 2, 2, 3, 4, 6)
_CONVERSATIONS = tuple(range(CONVERSATIONS))
_KINDS = (
    "say", "say", "say", "say", "pass", "pass", "pass", "pass", "worker", "worker", "birth", "caller", "caller",
    "conversation", "conversation", "pool", "pool", "store",
)  # fmt: skip


def rules_from(choose: Choose) -> Rules:
    """Return settings."""
    return Rules(
        workers_max=choose((2, 1, 3)),
        busy=choose(("wait", "wait", "wait", "reject")),
        replay=choose(("until_tool", "until_tool", "always", "never")),
        restarts_max=choose((1, 1, 0, 2)),
        quarantine_after=choose((2, 0, 1)),
        restarts_in_window_max=choose((5, 1, 2)),
        turns_waiting_max=choose((8, 8, 1)),
        admissions_waiting_max=choose((8, 8, 1)),
        events_waiting_max=choose((16, 2)),
        background_timeout_s=choose((2.0, 0.0)),
        start_failures_max=choose((3, 1)),
        latency_s=choose((0.0, 0.01)),
    )


def step_from(choose: Choose) -> Step:
    """Return one step."""
    match choose(_KINDS):
        case "say":
            return Say(
                choose(_CONVERSATIONS),
                tuple(_script_from(choose) for _ in range(choose((1, 1, 2)))),
                choose(("sends", "sends", "streams", "streams_slowly", "answers", "only_replies", "leaves", "cancels")),
                choose((False, False, False, True)),
                _birth_from(choose),
            )
        case "pass":
            return Pass(choose(_TIMES))
        case "worker":
            befalls = ("crashes", "crashes", "is_killed", "exits", "freezes", "sends_stray", "finishes_job")
            return ToWorker(choose(_CONVERSATIONS), choose(befalls))  # type: ignore[arg-type] # one of its literals
        case "birth":
            return NextBirth(_birth_from(choose))
        case "caller":
            return ToCaller(choose((0, 1, 2)), choose(("turn_is_cancelled", "task_is_cancelled")))
        case "conversation":
            acts = ("stop", "recycle", "recycle", "stop", "reset", "release", "kill_for", "replace_stuck", "ask")
            return Operate(choose(_CONVERSATIONS), choose(acts))  # type: ignore[arg-type] # one of its literals
        case "pool":
            return OperatePool(
                choose(("pause", "resume", "pause", "resume", "drain", "drain_now", "reset", "shrink", "grow", "close"))
            )
        case _:
            return SetStore(choose(("works", "slow", "fails", "unwritable")))


def _birth_from(choose: Choose) -> Birth:
    if choose((True, True, False)):
        return Birth()
    return Birth(
        choose(_FATES),
        choose((0.0, 0.05, 0.3)),
        choose(("obeys", "obeys_late", "deaf", "dies", "finishes", "fails")),
        choose(("leaves", "leaves_late", "needs_term", "needs_kill")),
    )


def _script_from(choose: Choose) -> tuple[Op, ...]:
    if choose((True, False)):
        return choose(_TALES)
    return tuple(choose(_OPS) for _ in range(choose(_LENGTHS)))


def random_history(seed: int, steps_max: int = 40) -> History:
    """Return the history of a seed: always the same."""
    chance = random.Random(seed)
    return History(
        rules_from(chance.choice), tuple(step_from(chance.choice) for _ in range(chance.randint(2, steps_max)))
    )
