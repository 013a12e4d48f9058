"""The clocks of a turn: its total time, and its time without a sign of progress.

Silence while a tool runs, while a question waits for its answer, or while the consumer does not read, is nobody's
fault: the clock of progress stands still then.
"""

import asyncio
from collections.abc import Callable

from hermes_pool.conversation.turn import Turn
from hermes_pool.settings import Timeouts


class TurnDeadlines:
    """Watches the turns of one session, one after the other, with one timer.

    The timer is not set anew for every frame, nor for every turn: when it rings, it looks how late it really is.
    """

    def __init__(self, timeouts: Timeouts, on_limit: Callable[[Turn, str, float], None]) -> None:
        self._timeouts = timeouts
        self._on_limit = on_limit
        self._loop = asyncio.get_running_loop()
        self._turn: Turn | None = None
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, turn: Turn) -> None:
        """Watch a turn from now on, instead of the one before."""
        self._turn = turn
        if self._timer is None:
            self._ring_at(turn)

    def rest(self) -> None:
        """Watch no turn for now. The timer goes on: a further turn may need it soon."""
        self._turn = None

    def stop(self) -> None:
        """Watch nothing."""
        self._turn = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _ring_at(self, turn: Turn) -> None:
        at = min(turn.began_at + self._timeouts.turn_s, turn.heard_at + self._timeouts.progress_s)
        self._timer = self._loop.call_at(at, self._ring)

    def _ring(self) -> None:
        self._timer = None
        turn, now = self._turn, self._loop.time()
        if turn is None or turn.outcome is not None:
            self._turn = None
            return
        if turn.lags or turn.tools_open or any(until > now for until in turn.questions_open.values()):
            turn.heard_at = now
        if now >= turn.began_at + self._timeouts.turn_s:
            self._on_limit(turn, "timeouts.turn_s", self._timeouts.turn_s)
        elif now >= turn.heard_at + self._timeouts.progress_s:
            self._on_limit(turn, "timeouts.progress_s", self._timeouts.progress_s)
        else:
            self._ring_at(turn)
