import gc
import os
from pathlib import Path

from hermes_pool_worker.agent import Open, Opened, Outcome, RunningTurn
from hermes_pool_worker.echo import EchoAgent
from hermes_pool_worker.sender import FrameSender


def write(file: str) -> None:
    (sender,) = [each for each in gc.get_objects() if type(each) is FrameSender]
    os.write(sender._descriptor, Path(file).read_bytes())


class Agent(EchoAgent):
    def open(self, request: Open) -> Opened:
        if Path("in open").exists():
            write("in open")
        return super().open(request)

    def turn(self, text: str, turn: RunningTurn) -> Outcome:
        if not text.startswith("in turn"):
            return super().turn(text, turn)
        write(text.removesuffix(" and wait"))
        return Outcome("waited", "interrupted" if turn.cancelled.wait(60 * text.endswith("wait")) else "completed")
