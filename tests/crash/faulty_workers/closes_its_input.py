import gc
import os

from hermes_pool_worker.agent import Open, Opened, Outcome, RunningTurn
from hermes_pool_worker.echo import EchoAgent
from hermes_pool_worker.loop import Worker


class Agent(EchoAgent):
    def open(self, request: Open) -> Opened:
        (self.worker,) = [each for each in gc.get_objects() if type(each) is Worker]  # not in a turn: it takes a while
        return super().open(request)

    def turn(self, text: str, turn: RunningTurn) -> Outcome:
        if text == "close":
            self.worker._reading.acquire()  # before the second thread takes it over
            os.close(self.worker._wire_in)
            return Outcome("closed")
        return super().turn(text, turn)
