"""An agent whose tools double-fork, and that exits as told."""

import os
import signal

from hermes_pool_worker.agent import Open, Opened, Outcome, RunningTurn


class Agent:
    def open(self, request: Open) -> Opened:
        return Opened(request.session_id or "forker")

    def turn(self, text: str, turn: RunningTurn) -> Outcome:
        word, _, argument = text.partition(" ")
        match word:
            case "double-fork":
                for _ in range(int(argument)):
                    if (child := os.fork()) == 0:
                        if os.fork() == 0:
                            os._exit(0)
                        os._exit(0)
                    os.waitpid(child, 0)
            case "exit":
                os._exit(int(argument))
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
        return Outcome(text)

    def interrupt(self) -> None: ...
    def close(self) -> None: ...
