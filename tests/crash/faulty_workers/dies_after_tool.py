import os
import signal
from pathlib import Path

from hermes_pool_worker.agent import Outcome, RunningTurn
from hermes_pool_worker.echo import EchoAgent


class Agent(EchoAgent):
    def turn(self, text: str, turn: RunningTurn) -> Outcome:
        if text == "send the mail":
            turn.tool_started("call-1", "mail", "to: ada")
            with Path("effects").open("a") as effects:
                print(turn.turn_id, turn.attempt, file=effects)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().turn(text, turn)
