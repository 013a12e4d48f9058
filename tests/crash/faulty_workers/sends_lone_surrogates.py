import os
from pathlib import Path

from hermes_pool_worker.agent import AgentError, Outcome, RunningTurn
from hermes_pool_worker.echo import EchoAgent


class Agent(EchoAgent):
    def turn(self, text: str, turn: RunningTurn) -> Outcome:
        bad = "half \udc97 of \ud83d an emoji"
        if text == "in the error":
            raise AgentError("bad_text", bad)
        if text == "out of an exception":
            raise ValueError(bad)
        if text == "in the reply":
            print(bad)
            Path(os.fsdecode(b"name-\xff")).touch()
            turn.tool_started("call-1", "ls", next(name for name in os.listdir() if name.startswith("name-")))
            turn.text(bad)
            return Outcome(bad, notice=bad)
        return super().turn(text, turn)
