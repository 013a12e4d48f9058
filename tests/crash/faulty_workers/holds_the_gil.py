import ctypes
import signal

from hermes_pool_worker.agent import Outcome, RunningTurn
from hermes_pool_worker.echo import EchoAgent


class Agent(EchoAgent):
    def turn(self, text: str, turn: RunningTurn) -> Outcome:
        if text == "hold":
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            turn.text("holding")
            ctypes.PyDLL(None).sleep(300)
        return Outcome(text)
