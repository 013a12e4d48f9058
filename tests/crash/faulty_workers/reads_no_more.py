import gc
import threading

from hermes_pool_worker.agent import Outcome
from hermes_pool_worker.echo import EchoAgent
from hermes_pool_worker.loop import Worker


class Agent(EchoAgent):
    def turn(self, text, turn):
        if text.startswith("read no more"):
            (worker,) = [each for each in gc.get_objects() if type(each) is Worker]
            worker._read = threading.Event().wait  # in whichever thread
            if text.endswith("and ask"):
                turn.ask("clarify", "What?", timeout_s=1000)
            return Outcome("deaf from here on")
        return super().turn(text, turn)
