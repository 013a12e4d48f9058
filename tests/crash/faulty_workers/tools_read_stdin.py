import json
import subprocess
import time

from hermes_pool_worker.agent import Outcome, RunningTurn
from hermes_pool_worker.echo import EchoAgent


class Agent(EchoAgent):
    def turn(self, text: str, turn: RunningTurn) -> Outcome:
        turn.status("tools begin")
        seconds = []
        for command in (["head", "-c", "200"], ["sh", "-c", "cat >/dev/null"], ["sh", "-c", "echo noise"]):
            began = time.monotonic()
            subprocess.run(command, timeout=2, check=True)
            seconds.append(time.monotonic() - began)
        cancelled = turn.cancelled.wait(10)
        return Outcome(json.dumps({"seconds": seconds, "cancelled": cancelled}), "interrupted")
