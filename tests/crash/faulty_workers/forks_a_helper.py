import os
import signal

from hermes_pool_worker.agent import Outcome, RunningTurn
from hermes_pool_worker.echo import EchoAgent


class Agent(EchoAgent):
    def turn(self, text: str, turn: RunningTurn) -> Outcome:
        if text == "fork":
            helper = os.fork()
            if helper == 0:
                while True:
                    signal.pause()
            return Outcome(str(helper))
        return super().turn(text, turn)
