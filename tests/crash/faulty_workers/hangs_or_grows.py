import ctypes
import resource
import time

from hermes_pool_worker.agent import Outcome, RunningTurn
from hermes_pool_worker.echo import EchoAgent


class Agent(EchoAgent):
    def turn(self, text: str, turn: RunningTurn) -> Outcome:
        match text.split():
            case ["deadlock"]:  # in C, and no signal interrupts it
                mutex = ctypes.create_string_buffer(64)
                for _ in range(2):
                    ctypes.PyDLL(None).pthread_mutex_lock(mutex)
            case ["sleep", seconds]:  # holds the interpreter's lock, and uses no CPU
                ctypes.PyDLL(None).sleep(int(seconds))
            case ["compute", numbers]:  # holds it as well, and works
                sum(range(int(numbers)))
            case ["grow", mib, *more]:
                self.kept = bytearray(b"x" * (int(mib) << 20))
                time.sleep(60 if more else 0)
            case ["files"]:
                return Outcome(str(resource.getrlimit(resource.RLIMIT_NOFILE)))
            case ["ask"]:
                return Outcome(repr(turn.ask("approval", "rm -rf x", ["once", "deny"], 60)))
        return super().turn(text, turn)
