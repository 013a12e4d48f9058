import os
import signal
from pathlib import Path

with Path("starts").open("a") as starts:
    print(os.getpid(), file=starts)
while True:
    signal.pause()
