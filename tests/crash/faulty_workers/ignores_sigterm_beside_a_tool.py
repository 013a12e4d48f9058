import signal
import subprocess
import time

from hermes_pool_worker.agent import Outcome, RunningTurn
from hermes_pool_worker.echo import EchoAgent


class Agent(EchoAgent):
    def turn(self, text: str, turn: RunningTurn) -> Outcome:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        tool = subprocess.Popen(["sleep", "1000"])
        return Outcome(str(tool.pid))

    def close(self) -> None:
        time.sleep(1000)
