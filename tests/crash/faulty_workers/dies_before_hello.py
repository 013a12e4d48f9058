import os
import signal
import sys

if os.path.exists("before Hello"):
    os.unlink("before Hello")
    os.kill(os.getpid(), signal.SIGKILL)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
