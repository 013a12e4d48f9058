import os
import sys
from pathlib import Path

with Path("starts").open("a") as starts:
    print(os.getpid(), file=starts)
print("the licence has run out", file=sys.stderr)
sys.exit(3)
