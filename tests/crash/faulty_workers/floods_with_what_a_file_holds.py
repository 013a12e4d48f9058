import gc
import os
import threading
from pathlib import Path

from hermes_pool_worker.agent import Outcome
from hermes_pool_worker.echo import EchoAgent
from hermes_pool_worker.serve import FrameSender


def flood(descriptor, times):
    for _ in range(times):
        os.write(descriptor, Path("flood").read_bytes())


class Agent(EchoAgent):
    def turn(self, text, turn):
        if not text.startswith("flood"):
            return super().turn(text, turn)
        word, where, times = text.split("/")
        (sender,) = [each for each in gc.get_objects() if type(each) is FrameSender]
        descriptor = 2 if where == "stderr" else sender._descriptor
        flooding = threading.Thread(target=flood, args=(descriptor, int(times)), daemon=True)
        flooding.start() if word == "flood on" else flooding.run()
        return Outcome("flooded")
