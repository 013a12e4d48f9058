import gc
import os
import signal

from hermes_pool_worker import wire
from hermes_pool_worker.agent import Open, Opened, Outcome, RunningTurn
from hermes_pool_worker.echo import EchoAgent
from hermes_pool_worker.sender import FrameSender


class Agent(EchoAgent):
    def open(self, request: Open) -> Opened:
        if request.unfinished is not None and request.unfinished.text.endswith("before"):
            (sender,) = [each for each in gc.get_objects() if type(each) is FrameSender]
            of = request.unfinished.turn_id, request.unfinished.attempt
            sender.send(wire.TextDelta(*of, "too early"))
            sender.send(wire.TurnDone(*of, "too early", "elsewhere"))
        return super().open(request)

    def turn(self, text: str, turn: RunningTurn) -> Outcome:
        if text.startswith("die") and turn.attempt == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().turn(text, turn)
