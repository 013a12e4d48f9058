import os
import signal
import threading

from hermes_pool_worker import stdio
from hermes_pool_worker.echo import EchoAgent


class Agent(EchoAgent):
    def __init__(self):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        stdio.leave = lambda *_: None
        super().__init__()

    def turn(self, text, turn):
        os.write(2, b"deaf\n")
        return super().turn(text, turn)

    def close(self):
        threading.Event().wait()
