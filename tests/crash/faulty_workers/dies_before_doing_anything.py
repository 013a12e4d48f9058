import os
import signal
from pathlib import Path

from hermes_pool_worker.agent import Outcome, RunningTurn
from hermes_pool_worker.echo import EchoAgent


class Agent(EchoAgent):
    def turn(self, text: str, turn: RunningTurn) -> Outcome:
        with Path("attempts").open("a") as attempts:
            print(turn.turn_id, turn.attempt, file=attempts)
        if turn.attempt == 1 and text.startswith("die"):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().turn(text, turn)
