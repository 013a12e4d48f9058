import os
from pathlib import Path

from hermes_pool_worker import wire

with Path("starts").open("a") as starts:
    print(os.getpid(), file=starts)
os.write(1, wire.encode(wire.Hello(wire.PROTOCOL + 1, os.getpid(), "raw", {})))
os.read(0, 1)
