import sys

from hermes_pool_worker.echo import EchoAgent


class Agent(EchoAgent):
    def turn(self, text, turn):
        if text == "exit":
            sys.exit(5)
        if text == "interrupt":
            raise KeyboardInterrupt
        return super().turn(text, turn)
