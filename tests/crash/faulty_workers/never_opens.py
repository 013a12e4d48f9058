import os
import threading
from pathlib import Path

from hermes_pool_worker.agent import Open, Opened
from hermes_pool_worker.echo import EchoAgent


class Agent(EchoAgent):
    def open(self, request: Open) -> Opened:
        with Path("starts").open("a") as starts:
            print(os.getpid(), file=starts)
        threading.Event().wait(request.options.get("seconds"))
        return super().open(request)
