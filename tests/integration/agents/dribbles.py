import gc
import os
import time

from hermes_pool_worker import wire
from hermes_pool_worker.agent import Outcome, RunningTurn
from hermes_pool_worker.echo import EchoAgent
from hermes_pool_worker.sender import FrameSender


class Agent(EchoAgent):
    """Writes a piece of its reply to "dribble ..." byte by byte."""

    def turn(self, text: str, turn: RunningTurn) -> Outcome:
        if not text.startswith("dribble"):
            return super().turn(text, turn)
        (sender,) = [each for each in gc.get_objects() if type(each) is FrameSender]
        for byte in wire.encode(wire.TextDelta(turn.turn_id, turn.attempt, text)):
            os.write(sender._descriptor, bytes([byte]))
            time.sleep(0.0005)  # the pace of it
        return Outcome(text, "interrupted" if turn.cancelled.is_set() else "completed")
