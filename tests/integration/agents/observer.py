"""An agent that tells about its own process; its module can be preloaded in several bad ways."""

import json
import os
import random
import sys
import threading
from pathlib import Path
from typing import Any

from hermes_pool_worker.agent import Open, Opened, Outcome, RunningTurn

preloaded_by = None
remembered: list[str] = []


def preload(options: dict[str, Any]) -> list[str]:
    global preloaded_by
    preloaded_by = os.getpid()
    os.environ["SET_BY_PRELOAD"] = "yes"
    match options.get("preload"):
        case "thread":
            threading.Thread(target=threading.Event().wait, daemon=True).start()
        case "raise":
            raise RuntimeError("not today")
        case "exit":
            os._exit(3)
    return [options["watched"]] if "watched" in options else []


class Agent:
    def prepare(self, options: dict[str, Any]) -> list[str]:
        self.prepared = True
        return [options["watched"]] if "watched" in options else []

    def open(self, request: Open) -> Opened:
        self.prepared = getattr(self, "prepared", False)
        return Opened(request.session_id or f"observer-{request.conversation_id}")

    def turn(self, text: str, turn: RunningTurn) -> Outcome:
        remembered.append(text)
        reply: object
        match text:
            case "env":
                reply = dict(os.environ)
            case "process":
                reply = {
                    "pid": os.getpid(), "ppid": os.getppid(), "sid": os.getsid(0), "cwd": os.getcwd(),
                    "preloaded_by": preloaded_by, "prepared": self.prepared, "random": random.random(),
                    "threads": threading.active_count(), "path": sys.path, "argv": sys.argv,
                }  # fmt: skip
            case "fds":
                reply = {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _open(fd)}
            case "remembered":
                reply = remembered
            case "import":
                import wsgiref.simple_server  # noqa: F401 - anything that is not loaded anyway

                reply = "done"
            case "die":
                os.kill(os.getpid(), 9)
            case _:
                reply = text
        return Outcome(json.dumps(reply))

    def interrupt(self) -> None: ...
    def close(self) -> None: ...


def _open(fd: str) -> bool:
    return Path(f"/proc/self/fd/{fd}").is_symlink() and os.path.lexists(f"/proc/self/fd/{fd}")
