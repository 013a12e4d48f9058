import os
import signal
import sys
from pathlib import Path

from hermes_pool_worker.agent import Outcome, RunningTurn
from hermes_pool_worker.echo import EchoAgent


class Agent(EchoAgent):
    def turn(self, text: str, turn: RunningTurn) -> Outcome:
        if text.startswith("die by "):
            with Path("attempts").open("a") as attempts:
                print(turn.turn_id, turn.attempt, file=attempts)
            print(f"last words of attempt {turn.attempt}", file=sys.stderr)
            os.kill(os.getpid(), signal.Signals[text.removeprefix("die by ")])
        return super().turn(text, turn)
