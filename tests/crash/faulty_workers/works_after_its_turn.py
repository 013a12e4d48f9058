import threading
from pathlib import Path

import leaves_a_shell_running

from hermes_pool_worker.agent import Open, Opened, Outcome, RunningTurn


class Agent(leaves_a_shell_running.Agent):
    # "job FILE" and "shell FILE" go on until there is such a file; "end FILE" makes it within a turn.

    def open(self, request: Open) -> Opened:
        self.threads: dict[str, threading.Thread] = {}
        return super().open(request)

    def turn(self, text: str, turn: RunningTurn) -> Outcome:
        word, _, file = text.partition(" ")
        if word == "job":
            turn.background_started(f"id-{file}", f"job {file}")
            self.threads[file] = threading.Thread(target=self.work, args=(turn, file), daemon=True)
            self.threads[file].start()
        elif word == "jobs":
            for number in range(int(file)):
                turn.background_started(f"id-{number}", f"job {number}")
        elif word == "end":
            Path(file).touch()
            self.threads[file].join()
        return super().turn(text, turn)

    def work(self, turn: RunningTurn, file: str) -> None:
        while not Path(file).exists():
            threading.Event().wait(0.01)
        turn.background_finished(f"id-{file}", f"{file} is there")
