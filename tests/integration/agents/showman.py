"""An agent that does what the message says, step by step, for pages and streams to show: no test has to sleep.

The steps are separated by ``;``: ``say WORDS``, ``stream N`` (so many words), ``think WORDS``, ``tool NAME ARGUMENTS``,
``wait NAME`` (for a file of that name in the folder of the option ``folder``), ``status WORDS``, ``approve COMMAND``,
``clarify QUESTION``, ``fail WORDS``, and ``steered`` (says what was said meanwhile).
"""

import json
import threading
from pathlib import Path

from hermes_pool_worker.agent import AgentError, Open, Opened, Outcome, RunningTurn
from hermes_pool_worker.wire import PastTurn


class Agent:
    def open(self, request: Open) -> Opened:
        self.folder = Path(request.options["folder"])
        self.interrupted = threading.Event()
        self.heard: list[str] = []
        self.history = self.folder / f"history-{request.conversation_id}"
        session_id = request.session_id or f"show-{request.conversation_id}"
        return Opened(session_id, resumed=request.session_id is not None, committed=request.committed)

    def turn(self, text: str, turn: RunningTurn) -> Outcome:
        self.interrupted.clear()
        self.heard.clear()
        with (self.folder / "asked").open("a") as asked:
            asked.write(f"{text}\n")
        said: list[str] = []

        def say(words: str) -> None:
            said.append(words)
            turn.text(words)

        for number, step in enumerate(each.strip() for each in text.split(";")):
            word, _, rest = step.partition(" ")
            match word:
                case "say":
                    say(f"{rest}\n\n")
                case "stream":
                    for count in range(int(rest)):
                        say(f"word-{count} ")
                case "think":
                    for piece in rest.split():
                        turn.reasoning(f"{piece} ")
                case "tool":
                    name, _, arguments = rest.partition(" ")
                    turn.tool_started(f"call-{number}", name, arguments)
                    turn.tool_finished(f"call-{number}", name, result=f"result of {arguments}", duration_s=0.2)
                case "start":
                    turn.tool_started(f"call-{number}", "hammer", rest)
                case "status":
                    turn.status(rest)
                case "approve":
                    say(f"Approval: {turn.ask('approval', rest, ['once', 'session', 'deny'], 30)}.\n\n")
                case "clarify":
                    say(f"Choice: {turn.ask('clarify', rest, ['Tea', 'Coffee'], 30)}.\n\n")
                case "fail":
                    raise AgentError("server_error", rest)
                case "steered":
                    say(f"Heard: {', '.join(self.heard)}.\n\n")
                case "wait" if not self.wait_for(self.folder / rest):
                    return Outcome("".join(said), "interrupted")
                case "die" if not (self.folder / rest).exists():
                    (self.folder / rest).touch()
                    raise SystemExit(3)
        past = [*self.past(), (text, "".join(said))]
        self.history.write_text(json.dumps(past))
        return Outcome("".join(said), committed=str(len(past)))

    def past(self) -> list[tuple[str, str]]:
        return [(asked, said) for asked, said in json.loads(self.history.read_text())] if self.history.exists() else []

    def turns(self, after: str | None, limit: int) -> list[PastTurn]:
        found = [PastTurn(str(number), *each) for number, each in enumerate(self.past(), 1)]
        return found[int(after or 0) :][:limit]

    def steer(self, text: str) -> bool:
        self.heard.append(text)
        return True

    def wait_for(self, path: Path) -> bool:
        while not path.exists():
            if self.interrupted.wait(0.005):
                return False
        return True

    def interrupt(self) -> None:
        self.interrupted.set()

    def close(self) -> None: ...
