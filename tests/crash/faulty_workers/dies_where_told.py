import os
import signal

from hermes_pool_worker import serve, wire, zygote
from hermes_pool_worker.echo import EchoAgent


def dying(plain):
    def send(own, message, *more):
        for when, act in (("before", None), ("inside", half), ("after", plain)):
            orders = [f"{when} {type(message).__name__}{times}" for times in ("", " again", " and again")]
            told = next(filter(os.path.exists, orders), None)
            if act is plain or (told and act):
                act(own, message, *more)
            if told:
                os.unlink(told)
                os.kill(os.getpid(), signal.SIGKILL)

    return send


def half(own, message):
    frame = wire.encode(message)
    os.write(own._descriptor, frame[: len(frame) // 2])


serve.FrameSender.send = dying(serve.FrameSender.send)
serve.FrameSender.send_piece = dying(serve.FrameSender.send_piece)
zygote._send = dying(zygote._send)


class Agent(EchoAgent):
    def turn(self, text, turn):
        if text == "use a tool":
            turn.tool_started("call-1", "hammer", "nail")
            with open("effects", "a") as effects:
                print(turn.turn_id, turn.attempt, file=effects)
            turn.tool_finished("call-1", "hammer")
        turn.text("so ")
        return super().turn(text, turn)
