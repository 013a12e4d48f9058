import subprocess

from hermes_pool_worker.agent import Open, Opened, Outcome, RunningTurn
from hermes_pool_worker.echo import EchoAgent

UNTIL = 'while [ ! -e "$0" ]; do sleep 0.02; done'


class Agent(EchoAgent):
    """``shell FILE`` goes on until there is such a file; a server, where it is told to have one, for ever."""

    def open(self, request: Open) -> Opened:
        if request.options.get("server"):
            subprocess.Popen(["sleep", "1000"])
        return super().open(request)

    def turn(self, text: str, turn: RunningTurn) -> Outcome:
        word, _, file = text.partition(" ")
        if word == "shell":
            return Outcome(str(subprocess.Popen(["sh", "-c", UNTIL, file], start_new_session=True).pid))
        return super().turn(text, turn)
