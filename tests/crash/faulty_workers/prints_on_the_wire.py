import ctypes
import os
import sys
import warnings
from threading import Timer

from hermes_pool_worker.agent import Outcome, RunningTurn
from hermes_pool_worker.echo import EchoAgent


def make_noise(when: str) -> None:
    print(f"{when} by print")
    print(f"{when} by __stdout__", file=sys.__stdout__)
    os.write(1, f"{when} by os.write\n".encode())
    ctypes.CDLL(None).dprintf(1, f"{when} by C\n".encode())
    os.system(f"echo {when} by child")
    warnings.warn_explicit(f"{when} by warning", UserWarning, when, 1)


class Agent(EchoAgent):
    def turn(self, text: str, turn: RunningTurn) -> Outcome:
        make_noise("mid-turn")
        Timer(0.05, make_noise, ["after-reply"]).start()
        return super().turn(text, turn)


make_noise("at-import")
