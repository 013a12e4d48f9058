import os
from typing import Any

from hermes_pool_worker import agent, echo, sender, wire, zygote


def send(plain: Any, own: Any, message: wire.Message, *more: Any) -> None:
    for when in ("before", "inside", "after"):
        order = f"{when} {type(message).__name__}"
        told = next(filter(os.path.exists, (order, f"{order} again", f"{order} and again")), None)
        if when == "after":
            plain(own, message, *more)
        elif when == "inside" and told:
            os.write(own._descriptor, wire.encode(message)[: len(wire.encode(message)) // 2])
        if told:
            os.unlink(told)
            os.kill(os.getpid(), 9)


for owner, name in ((sender.FrameSender, "send"), (sender.FrameSender, "send_piece"), (zygote, "_send")):
    setattr(owner, name, lambda *given, plain=getattr(owner, name): send(plain, *given))  # noqa: B008 - bound here


class Agent(echo.EchoAgent):
    def turn(self, text: str, turn: agent.RunningTurn) -> agent.Outcome:
        if text == "use a tool":
            turn.tool_started("call-1", "hammer", "nail")
            print(turn.turn_id, turn.attempt, file=open("effects", "a"))  # noqa: SIM115 - closed with its last use
            turn.tool_finished("call-1", "hammer")
        turn.text("so ")
        return super().turn(text, turn)
