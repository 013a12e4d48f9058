"""An agent that takes its orders from the message, waits for files and leaves marks: no test has to sleep."""

import os
import subprocess
import threading
import time
from pathlib import Path

from hermes_pool_worker.agent import AgentError, Open, Opened, Outcome, RunningTurn


class Agent:
    """Orders: ``word argument``. The state lives in files below the option ``folder``."""

    def open(self, request: Open) -> Opened:
        self.folder = Path(request.options["folder"])
        self.interrupted = threading.Event()
        self.session_id = request.session_id or f"obedient-{request.conversation_id}"
        self.mark("opened", f"{os.getpid()} {request.session_id} {request.unfinished is not None}")
        if request.options.get("slow_start"):
            self.wait_for(self.folder / "may_start")
        kept = request.unfinished is not None and bool(request.options.get("kept"))
        return Opened(
            self.session_id, resumed=request.session_id is not None, committed=request.committed, kept=kept,
            acted=["hammer"] if kept else [],
        )  # fmt: skip

    def turn(self, text: str, turn: RunningTurn) -> Outcome:
        self.interrupted.clear()
        self.mark("begun", text)
        word, _, argument = text.partition(" ")
        reply = text
        match word:
            case "wait":  # for a file, silently
                if not self.wait_for(self.folder / argument):
                    self.mark("ended", text)
                    return Outcome("partly", "interrupted")
            case "stream":
                for number in range(int(argument)):
                    turn.text(f"{number} ")
            case "stream_and_wait":
                turn.text("begun ")
                if not self.wait_for(self.folder / argument):
                    self.mark("ended", text)
                    return Outcome("begun ", "interrupted")
            case "tool_then_wait":
                turn.tool_started("c1", "hammer", argument)
                if not self.wait_for(self.folder / argument):
                    return Outcome("", "interrupted")
                turn.tool_finished("c1", "hammer", result="done", duration_s=0.1)
            case "die":
                os.kill(os.getpid(), 9)
            case "die_once":
                flag = self.folder / f"died_{argument}"
                if not flag.exists():
                    flag.touch()
                    os.kill(os.getpid(), 9)
            case "fail":
                raise AgentError("server_error", argument)
            case "ask":
                reply = f"answer: {turn.ask('clarify', argument, ('yes', 'no'), timeout_s=10)}"
            case "partial":
                return Outcome("half", "partial", notice="the budget is spent")
            case "daemon":  # a tool that escapes into a session of its own
                child = subprocess.Popen(["sleep", "300"], start_new_session=True)
                reply = str(child.pid)
        self.mark("ended", text)
        return Outcome(reply, committed=text[:1000], usage={"input_tokens": len(text)})

    def wait_for(self, path: Path) -> bool:
        while not path.exists():
            if self.interrupted.wait(0.005):
                return False
        return True

    def mark(self, kind: str, text: str) -> None:
        with (self.folder / "marks").open("a") as file:
            file.write(f"{time.monotonic()} {kind} {text}\n")

    def interrupt(self) -> None:
        self.interrupted.set()

    def close(self) -> None:
        self.mark("closed", "")
