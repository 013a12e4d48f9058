import os
from pathlib import Path

with Path("starts").open("a") as starts:
    print(os.getpid(), file=starts)
print("Welcome to this shell!", flush=True)
os.read(0, 1)
