import os
import signal
from pathlib import Path

from hermes_pool_worker.agent import AgentError, Outcome, RunningTurn
from hermes_pool_worker.echo import EchoAgent


class Agent(EchoAgent):
    def turn(self, text: str, turn: RunningTurn) -> Outcome:
        if text == "send the mail":
            if Path("effects").exists() and turn.turn_id in Path("effects").read_text():
                raise AgentError("done_already", f"attempt {turn.attempt} refused")
            Path("effects").write_text(f"{turn.turn_id} {turn.attempt}\n")
            os.kill(os.getpid(), signal.SIGKILL)
        return super().turn(text, turn)
