"""The time limits of a turn: its total time, and its time without progress.

Silence is expected while a tool runs, while a question waits for its answer, and while the caller does not read: then
the progress clock stands still.
"""

import asyncio
from collections.abc import Callable
from enum import StrEnum

from hermes_pool.conversation.active_turn import ActiveTurn
from hermes_pool.lifecycle import TurnState
from hermes_pool.settings import Timeouts


class Limit(StrEnum):
    """A time limit; the value is the setting that defines it."""

    TURN = "timeouts.turn_s"
    PROGRESS = "timeouts.progress_s"


class TurnDeadlines:
    """Watches the turns of one session, one after the other, with one timer.

    The timer is not reset for every frame or turn: when it fires, it checks whether a limit has really been reached.
    ``on_limit`` is called with the turn, the limit and its length in seconds.
    """

    def __init__(self, timeouts: Timeouts, on_limit: Callable[[ActiveTurn, Limit, float], None]) -> None:
        self._turn_s = timeouts.turn_s
        self._progress_s = timeouts.progress_s
        self._on_limit = on_limit
        self._loop = asyncio.get_running_loop()
        self.turn: ActiveTurn | None = None
        """The watched turn. The timer stays set without one: the next turn may need it soon."""
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, turn: ActiveTurn) -> None:
        """Watch this turn from now on."""
        self.turn = turn
        if self._timer is None:
            self._set_timer(turn)

    def stop(self) -> None:
        """Stop watching."""
        self.turn = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set_timer(self, turn: ActiveTurn) -> None:
        at = min(turn.began_at + self._turn_s, turn.heard_at + self._progress_s)
        self._timer = self._loop.call_at(at, self._fire)

    def _fire(self) -> None:
        self._timer = None
        turn, now = self.turn, self._loop.time()
        if turn is None or turn.state is TurnState.SETTLED:
            self.turn = None
            return
        if turn.lags or turn.tools_open or any(asked.until > now for asked in turn.questions.values()):
            turn.heard_at = now
        if now >= turn.began_at + self._turn_s:
            self._on_limit(turn, Limit.TURN, self._turn_s)
        elif now >= turn.heard_at + self._progress_s:
            self._on_limit(turn, Limit.PROGRESS, self._progress_s)
        else:
            self._set_timer(turn)
