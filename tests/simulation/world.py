"""What really happens in a simulated pool, as its workers and callers see it, and the complaints about it.

A ``World`` complains at once where a fact may not be; what can only be told when a caller has its answer, ``judging``
tells. It knows nothing of the pool's inside: not a word here need change when the pool is rebuilt.
"""

import asyncio
import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hermes_pool import HermesPoolError, Reply, Turn
from hermes_pool.storage.record import SessionRecord
from hermes_pool_worker import wire
from tests.simulation.histories import Birth, Rules, Say, StoreMode

if TYPE_CHECKING:
    from tests.simulation.fakes import FakeConnection

TURN_TIMEOUT_S = 4.0
PROGRESS_TIMEOUT_S = 1.5
START_TIMEOUT_S = 1.0
WAIT_TIMEOUT_S = 3.0
CLOSE_GRACE_S = 0.3
TERM_GRACE_S = 0.2
IDLE_TIMEOUT_S = 3.0
ROOM_S = 2.0
"""Within this an idle worker has gone whose room is needed, a second try included."""
CHECK_FROZEN_AFTER_S = 0.5
"""An idle worker that is stopped by a signal is noticed after this long."""
OBEYS_S = CLOSE_GRACE_S + TERM_GRACE_S + 0.3
"""How long the end of a turn, or of a worker, may take once it is decided."""
LOOK_S = 0.001
"""What a look into the process table takes, which a thread does in real life."""
BREATH_S = 0.01
PAUSE_S = 0.3
QUESTION_S = 0.4
LONG_QUESTION_S = 3.0
EXITS_S = 0.01
"""How long a worker takes that leaves when it is asked to."""
SLOW = ("streams_slowly", "answers")
"""The manners of callers that read so slowly that their worker may have to wait."""


def now() -> float:
    return asyncio.get_running_loop().time()


@dataclass(eq=False)
class Call:
    """One message of one caller, as the caller sees it."""

    number: int
    conversation: str
    text: str
    say: Say
    began_at: float
    task: "asyncio.Task[None] | None" = None
    turn: Turn | None = None
    turn_id: str | None = None
    events: list[wire.TurnEvent] = field(default_factory=list)
    events_at: list[float] = field(default_factory=list)
    """When each of them reached the caller."""
    answers: list[tuple[str, float]] = field(default_factory=list)
    """The questions that were answered, and when."""
    read_to_the_end: bool = False
    outcome: Reply | BaseException | None = None
    ended_at: float | None = None
    sends: bool = True
    """Whether it uses ``send``, and not ``turn``."""
    rivals: bool = False
    """Whether the conversation had anything to do when it came."""
    must_be_refused: bool = False
    """Whether it stood in line when the pool was closed."""
    touched: bool = False
    """Whether somebody ended it early: its caller, or whoever stopped the conversation."""

    @property
    def is_open(self) -> bool:
        return self.ended_at is None


@dataclass(eq=False)
class HandOver:
    """One attempt of one turn, as its worker sees it."""

    call: Call
    connection: "FakeConnection"
    turn: wire.Turn
    at: float
    sent: list[wire.TurnEvent] = field(default_factory=list)
    heard_at: list[float] = field(default_factory=list)
    """When each of them reached the pool."""
    asked_until: dict[str, float] = field(default_factory=dict)
    """Until when its worker waits for the answer to each question."""
    answered: set[str] = field(default_factory=set)
    """The questions to which its worker has got an answer."""
    tools: list[str] = field(default_factory=list)
    done: wire.TurnDone | None = None
    done_at: float | None = None
    failed: bool = False
    died: bool = False
    told: bool = False
    """Whether the pool has heard how it ended, from its worker."""
    told_at: float = 0.0
    quiet_since: float = 0.0
    """When it last showed progress, or had an excuse."""
    tools_open: int = 0
    question_until: float = 0.0


class World:
    """The truth, and the complaints. ``conversation`` is an id throughout."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.complaints: list[str] = []
        self.story: list[str] = []
        self.births: deque[Birth] = deque()
        self.is_mended = False
        """Whether all that was broken on purpose works again."""
        self.resumed_at = [0.0]
        self.closed_at = math.inf
        self.changed_at = 0.0
        """When the pool, or the database, was last made different."""
        self.store_mode: StoreMode = "works"
        self.records: dict[str, SessionRecord] = {}
        """What is stored, by conversation."""
        self.refused_for_good: set[str] = set()
        """Conversations that could not be stored at the last try, and never will be."""
        self.connections: list[FakeConnection] = []
        self.live: set[FakeConnection] = set()
        self.histories: dict[str, list[tuple[str, str]]] = {}
        """What the agent keeps on its disk: the turns of each session, by their ids and texts."""
        self.calls: list[Call] = []
        self.hand_overs: list[HandOver] = []
        self.of_turn: dict[str, list[HandOver]] = defaultdict(list)
        self.times_heard: Counter[str] = Counter()
        self.known: dict[str, tuple[str, str | None]] = {}
        """Session id and mark that the pool was told last, by conversation."""
        self.last_call: dict[str, int] = {}
        self.starting: Counter[str] = Counter()
        """Starts that go on."""
        self.stopped_turns: set[str] = set()
        self.stopping: Counter[str] = Counter()
        """Conversations that somebody has asked to stop, for as long as that takes."""
        self.limits = {rules.workers_max}
        self.wear_out: Callable[[str], None] = lambda _: None
        """Has the pool let the worker of a conversation go."""
        self.happened: set[str] = set()
        # How often a conversation's workers have died unasked or failed to start since it last worked: a lower and an
        # upper bound, for whether an interrupted turn counts as one that worked is seen by its caller only.
        self.strikes_least: Counter[str] = Counter()
        self.strikes_most: Counter[str] = Counter()
        self.killed_least: Counter[str] = Counter()
        self.killed_most: Counter[str] = Counter()
        self.unwanted_deaths: Counter[str] = Counter()

    @staticmethod
    def now() -> float:
        return now()

    def tell(self, what: str) -> None:
        self.story.append(f"{now() - 1000:8.3f} {what}")

    def complain(self, what: str) -> None:
        self.tell(f"WRONG: {what}")
        self.complaints.append(what)

    def check(self, fact: object, what: str) -> None:
        if not fact:
            self.complain(what)

    # --- facts that are judged as they happen ---

    def launched(self, connection: "FakeConnection") -> None:
        conversation = connection.conversation
        twins = [each for each in self.live if each.conversation == conversation]
        self.check(not twins, f"{connection} is launched while {twins} live")
        self.check(len(self.live) < max(self.limits), f"{connection} is one more than {max(self.limits)} workers")
        self.live.add(connection)

    def asked_to_open(self, connection: "FakeConnection", request: wire.Open) -> None:
        conversation = connection.conversation
        if request.unfinished is not None and not request.given_up:
            before = [each for each in self.connections if each.conversation == conversation and each is not connection]
            if before[-1].ready and before[-1].died_at is not None:
                waited_s = connection.started_at - before[-1].died_at
                self.check(waited_s <= 0.05, f"{connection} takes over after {waited_s:g} s: was its slot not kept?")
        self.check(request.conversation_id == conversation, f"{connection} was opened for {request.conversation_id}")
        known = self.known.get(conversation)
        asked = (request.session_id, request.committed)
        if known is not None:
            self.check(asked == known, f"{connection} was asked for {asked}, and {known} was told last")

    def handed_over(self, connection: "FakeConnection", turn: wire.Turn) -> HandOver | None:
        rules, before = self.rules, self.of_turn[turn.turn_id]
        call = before[0].call if before else self._call_of(turn)
        if call is None:
            self.complain(f"{turn} is nobody's message")
            return None
        what = f"attempt {turn.attempt} of {call.text} ({turn.turn_id})"
        self.check(
            connection.ready and not connection.wanted, f"{what} went to {connection}, which is not there for it"
        )
        self.check(call.conversation == connection.conversation, f"{what} went to {connection}")
        self.check(call.text == turn.text, f"{what} is {turn.text!r}")
        self.check(turn.attempt == len(before) + 1, f"{what} is hand-over {len(before) + 1}")
        self.check(len(before) <= rules.restarts_max, f"{what} went to one worker too many")
        if before:
            self.check(rules.replay != "never", f"{what} is a replay")
            tools = [tool for each in before for tool in each.tools]
            self.check(rules.replay == "always" or not tools, f"{what} is a replay after {tools}")
            self.check(not before[-1].connection.alive, f"{what}, and the worker of the one before lives")
            self.check(turn.turn_id not in self.stopped_turns, f"{what} was stopped before")
        else:
            self.check(call.is_open, f"{what} was begun when its caller had gone")
            last = self.last_call.get(call.conversation, -1)
            self.check(call.number > last, f"{what} comes after number {last}, which came later")
            self.last_call[call.conversation] = call.number
            self._check_wait(call, what)
            self._check_worn(connection, ROOM_S if connection.jobs_ended_at else 0.0)
            limit = rules.quarantine_after
            if limit:
                self.check(self.killed_least[call.text] < limit, f"{what} has killed too many")
        self._check_history(connection, turn, what)
        frozen_s = now() - connection.rests_since if connection.is_frozen() and connection.frozen_at < now() else 0.0
        self.check(frozen_s < CHECK_FROZEN_AFTER_S + 0.02, f"{what} went to {connection}, which is frozen")
        hand_over = HandOver(call, connection, turn, now(), quiet_since=now())
        before.append(hand_over)
        self.hand_overs.append(hand_over)
        call.turn_id = turn.turn_id
        return hand_over

    def _check_worn(self, connection: "FakeConnection", within_s: float) -> None:
        """A worker that shall be let go, has gone: right after its turn, and soon after its work in the background."""
        asked = connection.recycle_asked_in_turn or connection.recycle_asked_at_work
        if (
            not asked
            or connection.works_on
            or self.changed_at >= connection.ready_at - 0.05
            or self.store_mode != "works"
        ):
            return
        overdue_s = now() - max(connection.rests_since, connection.jobs_ended_at)
        self.check(overdue_s <= within_s, f"{connection} is worn out, and stays for {overdue_s:g} s")

    def _check_wait(self, call: Call, what: str) -> None:
        """Nobody stands in line for longer than is allowed."""
        for before in self.hand_overs:
            if before.call.conversation == call.conversation and before.call is not call and before.told:
                in_line_s = before.told_at - call.began_at
                self.check(in_line_s <= WAIT_TIMEOUT_S + 0.001, f"{what} was in line for {in_line_s:g} s")

    def got_room(self, conversation: str) -> None:
        """A worker is started: if it had to wait for that, then not because of one that idles."""
        calls = [each for each in self.calls if each.conversation == conversation and each.is_open]
        if not calls or calls[0].rivals or calls[0].touched or self.store_mode != "works":
            return
        if now() - max(calls[0].began_at, self.changed_at) > ROOM_S:
            idle = [each for each in self.live if each.conversation != conversation and self._idles(each)]
            self.check(not idle, f"{calls[0].text} had to wait for room, and {idle} idled")

    def _idles(self, connection: "FakeConnection") -> bool:
        if connection.host_has is not None or connection.works_on or not connection.ready or connection.wanted:
            return False
        calls = [each for each in self.calls if each.conversation == connection.conversation]
        used_at = max((each.ended_at if each.ended_at is not None else now() for each in calls), default=0.0)
        return max(used_at, connection.rests_since) < now() - ROOM_S

    def _check_history(self, connection: "FakeConnection", turn: wire.Turn, what: str) -> None:
        """A turn that failed must be out of the history before the next one; one that is in it is not run again."""
        for turn_id, text in self.histories.get(connection.session_id, ()):
            self.check(turn_id != turn.turn_id, f"{what} is in the history already")
            hand_overs = self.of_turn[turn_id]
            failed = hand_overs and isinstance(hand_overs[0].call.outcome, HermesPoolError)
            if failed and not any(each.told for each in hand_overs):
                self.complain(f"{what} comes, and {text} is in the history, which has failed")

    def heard_of(self, hand_over: HandOver, message: wire.TurnMessage) -> None:
        """The pool has just heard something of a turn."""
        self.progressed(hand_over)
        if hand_over.done_at is not None and hand_over.call.say.manner not in SLOW:
            late_s = now() - hand_over.done_at
            self.check(late_s <= 0.05, f"{hand_over.call.text} was done, and the pool read that {late_s:g} s later")
        if isinstance(message, wire.TurnEvent):
            hand_over.heard_at.append(now())
        match message:
            case wire.ToolStarted():
                hand_over.tools_open += 1
            case wire.ToolFinished():
                hand_over.tools_open = max(0, hand_over.tools_open - 1)
            case wire.Question():
                hand_over.question_until = now() + message.timeout_s
            case wire.TurnDone():
                hand_over.told, hand_over.told_at = True, now()
                self.worked(hand_over.call.conversation, hand_over.call.text, surely=message.outcome != "interrupted")
            case wire.TurnFailed():
                hand_over.told, hand_over.told_at = True, now()

    def progressed(self, hand_over: HandOver) -> None:
        """A turn shows progress, or ends: it must not have been silent for longer than is allowed."""
        silent_s = now() - max(hand_over.quiet_since, min(now(), hand_over.question_until))
        if hand_over.call.say.manner not in SLOW and not hand_over.tools_open:
            limit_s = PROGRESS_TIMEOUT_S + OBEYS_S
            self.check(silent_s <= limit_s, f"{hand_over.call.text} was silent for {silent_s:g} s")
        hand_over.quiet_since = now()

    def _call_of(self, turn: wire.Turn) -> Call | None:
        for call in reversed(self.calls):
            if turn.turn_id == (call.turn.turn_id if call.turn is not None else call.turn_id):
                return call
        ours = [call for call in self.calls if call.sends and call.turn_id is None and call.text == turn.text]
        return ours[-1] if ours else None

    def worked(self, conversation: str, text: str, *, surely: bool) -> None:
        self.strikes_least[conversation] = self.killed_least[text] = 0
        if surely:
            self.strikes_most[conversation] = self.killed_most[text] = 0

    def strike(self, conversation: str) -> None:
        self.strikes_least[conversation] += 1
        self.strikes_most[conversation] += 1
        if self.strikes_most[conversation] > self.rules.restarts_in_window_max:
            self.happened.add(f"{conversation} backs off")

    def told_of_death(self, connection: "FakeConnection") -> None:
        """The pool is about to hear of a death."""
        hand_over = connection.host_has
        if connection.wanted or not connection.ready:
            return
        self.unwanted_deaths[connection.conversation] += 1
        self.strike(connection.conversation)
        if hand_over is None and connection.opened is not None and connection.opened.recovered is not None:
            self.strikes_least[connection.conversation] = (
                0  # its reply may only now be passed on, and refill the budget
            )
        if hand_over is not None:
            self.progressed(hand_over)
            hand_over.died = True
            text = hand_over.call.text
            self.killed_most[text] += 1
            young = now() - hand_over.call.began_at < PROGRESS_TIMEOUT_S
            self.killed_least[text] += young and not hand_over.call.touched and hand_over.call.is_open

    def asked_to_close(self, connection: "FakeConnection") -> None:
        """A worker is stopped: one that idles must be in the store before, unless somebody has said "now"."""
        conversation = connection.conversation
        if connection.host_has is not None or self.stopping[conversation]:
            return
        self._check_worn(connection, ROOM_S)
        if connection.works_on:
            rested_s = now() - connection.rests_since
            self.check(rested_s >= self.rules.background_timeout_s, f"{connection} goes and works in the background")
        others = [each for each in self.calls if each.conversation != conversation and self._wants_room(each)]
        room_is_needed = others or len(self.limits) > 1
        if conversation in self.refused_for_good:
            self.check(room_is_needed, f"{connection} goes unsaved, and nobody needs its room")
            return
        if not (room_is_needed or connection.recycle_asked):
            idle_s = now() - connection.rests_since
            self.check(idle_s >= IDLE_TIMEOUT_S, f"{connection} goes after {idle_s:g} s, and nobody wants that")
        record = self.records.get(conversation)
        stored = None if record is None else (record.session_id, record.committed, record.status)
        wanted = (*self.known[conversation], "dormant")
        self.check(stored == wanted, f"{connection} goes, and {stored} is stored in place of {wanted}")

    def _wants_room(self, call: Call) -> bool:
        return call.ended_at is None or call.ended_at >= now() - 1.0
