import os
import signal

from hermes_pool_worker.agent import Outcome, RunningTurn
from hermes_pool_worker.echo import EchoAgent

FLOODS = {
    "lines": (b"l" * 79 + b"\n") * 65536,
    "one line": b"o" * (5 * 1024 * 1024),
    "not utf-8": b"\xff\xfe\x80\xc3(" * (1024 * 1024),
}


class Agent(EchoAgent):
    def turn(self, text: str, turn: RunningTurn) -> Outcome:
        kind, _, end = text.partition("/")
        flood = memoryview(FLOODS[kind])
        while flood:
            flood = flood[os.write(2, flood) :]
        if end == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().turn(text, turn)
