from hermes_pool_worker.agent import Outcome, RunningTurn
from hermes_pool_worker.echo import EchoAgent


class Agent(EchoAgent):
    def turn(self, text: str, turn: RunningTurn) -> Outcome:
        size, _, deltas = text.partition(" in deltas of ")
        if deltas:
            for _ in range(int(size) // int(deltas)):
                turn.text("x" * int(deltas))
        return Outcome("x" * int(size))
