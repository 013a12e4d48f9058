import os
import subprocess
import sys

from hermes_pool_worker.agent import Outcome, RunningTurn
from hermes_pool_worker.echo import EchoAgent

DEAF = "import signal, time; [signal.signal(n, signal.SIG_IGN) for n in (1, 2, 3, 15)]; time.sleep(1000)"


# Each turn leaves a tool that hides in the ways named, tells its pid, and goes on for ever if it is told to.
class Agent(EchoAgent):
    def turn(self, text: str, turn: RunningTurn) -> Outcome:
        if not text.startswith("tool "):
            return super().turn(text, turn)
        hides = text.split()[1:]
        env: dict[str, str] | None = {} if "cleared" in hides else None
        command = [sys.executable, "-I", "-S", "-c", DEAF] if "deaf" in hides else ["sleep", "1000"]
        ends = os.pipe()
        if (first := os.fork()) == 0:
            tool = subprocess.Popen(command, start_new_session="setsid" in hides, env=env)
            os.write(ends[1], str(tool.pid).encode())
            os._exit(0) if "daemon" in hides else tool.wait()
        pid = os.read(ends[0], 32).decode()
        if "daemon" in hides:
            os.waitpid(first, 0)
        if "stay" in hides:
            turn.text(pid)
            turn.cancelled.wait()
        return Outcome(pid)
