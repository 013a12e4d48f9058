import os
import signal
from pathlib import Path

with Path("starts").open("a") as starts:
    print(os.getpid(), file=starts)
os.kill(os.getpid(), signal.SIGSEGV)
