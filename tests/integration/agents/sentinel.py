"""An echo agent that notices another live worker of its conversation: ``overlaps`` in its folder names each case."""

import fcntl
import hashlib
import json
import os
from pathlib import Path
from typing import IO

from hermes_pool_worker.agent import Open, Opened, Outcome, RunningTurn
from hermes_pool_worker.echo import EchoAgent


class Agent(EchoAgent):
    def open(self, request: Open) -> Opened:
        folder = Path(request.options["folder"])
        name = hashlib.sha256(request.conversation_id.encode()).hexdigest()
        self.alive: IO[str] = folder.joinpath(name).open("a")
        try:
            fcntl.flock(self.alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            with folder.joinpath("overlaps").open("a") as file:
                file.write(f"{request.conversation_id} {os.getpid()}\n")
        self.ran = folder / "ran"
        return super().open(request)

    def turn(self, text: str, turn: RunningTurn) -> Outcome:
        outcome = super().turn(text, turn)
        with self.ran.open("a") as file:
            file.write(json.dumps([text, os.getpid()]) + "\n")
        return outcome
