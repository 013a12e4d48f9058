from hermes_pool_worker.agent import Outcome, RunningTurn
from hermes_pool_worker.echo import EchoAgent

WRONG = {
    "nothing": None,
    "a number as text": Outcome(7),
    "an unknown kind": Outcome("x", "finished"),
    "a fraction in usage": Outcome("x", usage={"cost": 0.25}),
    "what cannot be encoded": Outcome("x", usage={"cost": object()}),
}


class Agent(EchoAgent):
    def turn(self, text: str, turn: RunningTurn) -> Outcome:
        if text == "a number as delta":
            turn.text(7)
        return WRONG[text] if text in WRONG else super().turn(text, turn)
