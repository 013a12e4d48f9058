import gc
import os
import threading

from hermes_pool_worker.agent import Outcome
from hermes_pool_worker.echo import EchoAgent
from hermes_pool_worker.loop import Worker


class Agent(EchoAgent):
    def turn(self, text, turn):
        if text == "close":
            (worker,) = [each for each in gc.get_objects() if type(each) is Worker]
            worker._read = threading.Event().wait  # in whichever thread
            os.close(worker._wire_in)
            return Outcome("closed")
        return super().turn(text, turn)
