import gc
import os

from hermes_pool_worker.agent import Outcome, RunningTurn
from hermes_pool_worker.echo import EchoAgent
from hermes_pool_worker.loop import Worker


class Agent(EchoAgent):
    def turn(self, text: str, turn: RunningTurn) -> Outcome:
        if text == "close":
            (worker,) = [each for each in gc.get_objects() if type(each) is Worker]
            worker._reading.acquire()
            os.close(worker._wire_in)
            return Outcome("closed")
        return super().turn(text, turn)
