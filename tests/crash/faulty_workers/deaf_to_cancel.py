import threading

from hermes_pool_worker.agent import Outcome, RunningTurn
from hermes_pool_worker.echo import EchoAgent


class Agent(EchoAgent):
    def turn(self, text: str, turn: RunningTurn) -> Outcome:
        if text == "do not listen":
            turn.status("deaf")
            threading.Event().wait()
        return super().turn(text, turn)
