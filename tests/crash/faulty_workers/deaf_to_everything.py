import os
import signal
import threading

from hermes_pool_worker import stdio
from hermes_pool_worker.agent import Outcome, RunningTurn
from hermes_pool_worker.echo import EchoAgent


class Agent(EchoAgent):
    def __init__(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        stdio.leave = lambda *_: None  # type: ignore[assignment] # the fault: it does not
        super().__init__()

    def turn(self, text: str, turn: RunningTurn) -> Outcome:
        os.write(2, b"deaf\n")
        return super().turn(text, turn)

    def close(self) -> None:
        threading.Event().wait()
