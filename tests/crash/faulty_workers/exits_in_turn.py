import sys

from hermes_pool_worker.agent import Outcome, RunningTurn
from hermes_pool_worker.echo import EchoAgent


class Agent(EchoAgent):
    def turn(self, text: str, turn: RunningTurn) -> Outcome:
        if text == "exit":
            sys.exit(5)
        if text == "interrupt":
            raise KeyboardInterrupt
        return super().turn(text, turn)
