import gc
import os
import threading

from hermes_pool_worker import wire
from hermes_pool_worker.agent import Outcome
from hermes_pool_worker.echo import EchoAgent
from hermes_pool_worker.serve import FrameSender

FRAMES = {
    "large deltas": lambda of: wire.TextDelta(*of, "x" * 1_000_000),
    "small deltas": lambda of: wire.TextDelta(*of, "x"),
    "tools": lambda of: wire.ToolStarted(*of, "call", "t" * 50_000, ""),
    "tool calls": lambda of: wire.ToolStarted(*of, os.urandom(25_000).hex(), "t", ""),
    "questions": lambda of: wire.Question(*of, os.urandom(25_000).hex(), "clarify", "", [], 1e9),
    "sessions": lambda of: wire.SessionMoved(*of, os.urandom(25_000).hex()),
    "imports": lambda of: wire.Imported([os.urandom(25_000).hex()]),
    "pongs": lambda of: wire.Pong(1),
    "strangers": lambda of: wire.TextDelta("nobody", 1, "x"),
}


class Agent(EchoAgent):
    def turn(self, text, turn):
        kind, _, megabytes = text.partition(": ")
        if kind.removeprefix("idle ") not in FRAMES:
            return super().turn(text, turn)

        def flood():
            (sender,) = [each for each in gc.get_objects() if type(each) is FrameSender]
            make, left = FRAMES[kind.removeprefix("idle ")], int(megabytes) * 1_000_000
            while left > 0:
                data = b"".join(wire.encode(make((turn.turn_id, turn.attempt))) for _ in range(2000 if "s" == "" else 20))
                left -= len(data)
                os.write(sender._descriptor, data)

        if kind.startswith("idle "):
            threading.Thread(target=flood).start()
        else:
            flood()
        return Outcome("flooded")
