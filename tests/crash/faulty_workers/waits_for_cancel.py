import os
from pathlib import Path

from hermes_pool_worker.agent import Open, Opened, Outcome, RunningTurn
from hermes_pool_worker.echo import EchoAgent


class Agent(EchoAgent):
    def open(self, request: Open) -> Opened:
        with Path("starts").open("a") as starts:
            print(os.getpid(), file=starts)
        return super().open(request)

    def turn(self, text: str, turn: RunningTurn) -> Outcome:
        waits = text == "wait" or (text == "wait once" and turn.attempt == 1)
        turn.status("waits" if waits else "goes on")
        if waits:
            turn.cancelled.wait()
            return Outcome("", "interrupted")
        return super().turn(text, turn)
