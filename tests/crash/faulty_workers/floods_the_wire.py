import gc
import os
import threading

from hermes_pool_worker import wire
from hermes_pool_worker.agent import Outcome
from hermes_pool_worker.echo import EchoAgent
from hermes_pool_worker.serve import FrameSender


class Agent(EchoAgent):
    def turn(self, text, turn):
        if not text.startswith(("flood", "go on to flood")):
            return super().turn(text, turn)
        kind, megabytes = text.split("/")[1:]
        (sender,) = [each for each in gc.get_objects() if type(each) is FrameSender]

        def flood():
            for _ in range(int(megabytes)):
                os.write(sender._descriptor, frames(kind, turn))

        flood() if text.startswith("flood") else threading.Thread(target=flood).start()
        return Outcome("flooded")


def frames(kind, turn):
    of, word = (turn.turn_id, turn.attempt), os.urandom(25_000).hex()
    frame, many = {
        "large deltas": (lambda: wire.TextDelta(*of, "x" * 1_000_000), 1),
        "small deltas": (lambda: wire.TextDelta(*of, "x"), 20_000),
        "tools": (lambda: wire.ToolStarted(*of, word, word, ""), 10),
        "questions": (lambda: wire.Question(*of, word, "clarify", "", [], 1.0), 20),
        "sessions": (lambda: wire.SessionMoved(*of, word), 20),
        "imports": (lambda: wire.Imported([word]), 20),
        "frames of nobody's turn": (lambda: wire.TextDelta("nobody", 1, "x"), 20_000),
        "unasked answers": (lambda: wire.Pong(7), 50_000),
    }[kind]
    return b"".join(wire.encode(frame()) for _ in range(many))
