"""The agent of the pool's workers where an echo is not enough: it waits to be killed, or answers in pieces."""

from hermes_pool_worker.agent import Open, Opened, Outcome, RunningTurn

WAIT, DELTAS, STARTED = "/wait", "/deltas", "."


class BenchAgent:
    """Answers like the worker of the floors."""

    def open(self, request: Open) -> Opened:
        """Begin a session. There is nothing to resume."""
        return Opened(request.session_id or "bench")

    def turn(self, text: str, turn: RunningTurn) -> Outcome:
        """Echo, wait, or answer in pieces."""
        if text == WAIT:
            turn.text(STARTED)
            turn.cancelled.wait()
            return Outcome("", "interrupted")
        if text.startswith(DELTAS):
            _, count, size = text.split()
            piece = "x" * int(size)
            for _ in range(int(count)):
                turn.text(piece)
            return Outcome("")
        return Outcome(text)

    def interrupt(self) -> None:
        """Do nothing: a waiting turn sees its flag."""

    def close(self) -> None:
        """Do nothing: there is nothing to close."""
