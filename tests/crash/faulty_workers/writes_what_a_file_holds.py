import gc
import os
from pathlib import Path

from hermes_pool_worker.agent import Outcome
from hermes_pool_worker.echo import EchoAgent
from hermes_pool_worker.serve import FrameSender


def write(file):
    (sender,) = [each for each in gc.get_objects() if type(each) is FrameSender]
    os.write(sender._descriptor, Path(file).read_bytes())


class Agent(EchoAgent):
    def open(self, request):
        if os.path.exists("in-open"):
            write("in-open")
        return super().open(request)

    def turn(self, text, turn):
        if text.startswith("in-turn"):
            write(text)
            if text == "in-turn-and-hang":
                turn.cancelled.wait()
            return Outcome("still there")
        return super().turn(text, turn)
