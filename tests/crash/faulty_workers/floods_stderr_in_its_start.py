import sys

from hermes_pool_worker.agent import Open, Opened
from hermes_pool_worker.echo import EchoAgent


class Agent(EchoAgent):
    def open(self, request: Open) -> Opened:
        print("x" * 79 + "\n" + "y" * 79, file=sys.stderr)
        for _ in range(300):
            print("z" * 1023, file=sys.stderr)
        sys.stderr.flush()
        return super().open(request)
