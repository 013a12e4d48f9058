import subprocess

from hermes_pool_worker.agent import Outcome, RunningTurn
from hermes_pool_worker.echo import EchoAgent


class Agent(EchoAgent):
    def turn(self, text: str, turn: RunningTurn) -> Outcome:
        if text == "start a tool":
            tool = subprocess.Popen(["sleep", "1000"], start_new_session=True)
            return Outcome(str(tool.pid))
        return super().turn(text, turn)
