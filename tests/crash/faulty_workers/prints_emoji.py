import sys

from hermes_pool_worker.agent import Outcome, RunningTurn
from hermes_pool_worker.echo import EchoAgent


class Agent(EchoAgent):
    def turn(self, text: str, turn: RunningTurn) -> Outcome:
        for stream in ("stdout", "stderr", "__stdout__", "__stderr__"):
            print(f"\U0001f600 \u6f22 on {stream}", file=getattr(sys, stream), flush=True)
        return super().turn(text, turn)
