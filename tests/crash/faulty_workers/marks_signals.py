import signal
from pathlib import Path

from hermes_pool_worker.agent import Outcome, RunningTurn
from hermes_pool_worker.echo import EchoAgent


def mark(what: str) -> None:
    with Path("marks").open("a") as marks:
        print(what, file=marks)


class Agent(EchoAgent):
    def turn(self, text: str, turn: RunningTurn) -> Outcome:
        if text == "wait":
            for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGCONT):
                signal.signal(number, lambda number, _: mark(signal.Signals(number).name))
            turn.status("waits")
            turn.cancelled.wait()
            mark("cancelled")
            return Outcome("", "interrupted")
        return super().turn(text, turn)

    def close(self) -> None:
        mark("closed")
