import os
import signal

from hermes_pool_worker import sender, wire, zygote
from hermes_pool_worker.echo import EchoAgent


def send(plain, own, message, *more):
    for when in ("before", "inside", "after"):
        orders = [f"{when} {type(message).__name__}{times}" for times in ("", " again", " and again")]
        told = next(filter(os.path.exists, orders), None)
        if when == "after":
            plain(own, message, *more)
        elif when == "inside" and told:
            os.write(own._descriptor, wire.encode(message)[: len(wire.encode(message)) // 2])
        if told:
            os.unlink(told)
            os.kill(os.getpid(), signal.SIGKILL)


for owner, name in ((sender.FrameSender, "send"), (sender.FrameSender, "send_piece"), (zygote, "_send")):
    setattr(owner, name, lambda *given, plain=getattr(owner, name): send(plain, *given))  # noqa: B008 - bound here


class Agent(EchoAgent):
    def turn(self, text, turn):
        if text == "use a tool":
            turn.tool_started("call-1", "hammer", "nail")
            print(turn.turn_id, turn.attempt, file=open("effects", "a"))  # noqa: SIM115 - closed with its last use
            turn.tool_finished("call-1", "hammer")
        turn.text("so ")
        return super().turn(text, turn)
