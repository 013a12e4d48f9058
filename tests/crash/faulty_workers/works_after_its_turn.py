import subprocess
import threading
import time
from pathlib import Path

from hermes_pool_worker.agent import Outcome
from hermes_pool_worker.echo import EchoAgent

UNTIL = 'while [ ! -e "$0" ]; do sleep 0.02; done'


class Agent(EchoAgent):
    """``job FILE`` and ``shell FILE`` go on until there is such a file; ``end FILE`` makes it within a turn."""

    def open(self, request):
        self.threads = {}
        if request.options.get("server"):
            subprocess.Popen(["sleep", "1000"])
        return super().open(request)

    def turn(self, text, turn):
        word, _, file = text.partition(" ")
        if word == "job":
            turn.background_started(f"id-{file}", f"job {file}")
            self.threads[file] = threading.Thread(target=self.work, args=(turn, file), daemon=True)
            self.threads[file].start()
        elif word == "jobs":
            for number in range(int(file)):
                turn.background_started(f"id-{number}", f"job {number}")
        elif word == "shell":
            return Outcome(str(subprocess.Popen(["sh", "-c", UNTIL, file], start_new_session=True).pid))
        elif word == "end":
            Path(file).touch()
            self.threads[file].join()
        return super().turn(text, turn)

    def work(self, turn, file):
        while not Path(file).exists():
            time.sleep(0.01)
        turn.background_finished(f"id-{file}", f"{file} is there")
