from hermes_pool_worker.agent import Outcome, RunningTurn
from hermes_pool_worker.echo import EchoAgent


class Agent(EchoAgent):
    def turn(self, text: str, turn: RunningTurn) -> Outcome:
        if text != "talk":
            return super().turn(text, turn)
        while not turn.cancelled.wait(0.05):
            turn.text("and ")
        return Outcome("", "interrupted")
