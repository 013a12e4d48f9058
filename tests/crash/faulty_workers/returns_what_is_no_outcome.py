from typing import Any

from hermes_pool_worker.agent import Outcome, RunningTurn
from hermes_pool_worker.echo import EchoAgent

WRONG: dict[str, Any] = {
    "nothing": None,
    "a number as text": Outcome(7),  # type: ignore[arg-type] # the fault
    "an unknown kind": Outcome("x", "finished"),  # type: ignore[arg-type] # the fault
    "a fraction in usage": Outcome("x", usage={"cost": 0.25}),  # type: ignore[dict-item] # the fault
    "what cannot be encoded": Outcome("x", usage={"cost": object()}),  # type: ignore[dict-item] # the fault
}


class Agent(EchoAgent):
    def turn(self, text: str, turn: RunningTurn) -> Outcome:
        if text == "a number as delta":
            turn.text(7)  # type: ignore[arg-type] # the fault
        outcome: Outcome = WRONG[text] if text in WRONG else super().turn(text, turn)
        return outcome
