import os
import threading
from pathlib import Path
from typing import Any

from hermes_pool_worker import wire
from hermes_pool_worker.agent import Outcome
from hermes_pool_worker.echo import EchoAgent


class Agent(EchoAgent):
    def turn(self, text: str, turn: Any) -> Outcome:
        if not text.startswith("flood"):
            return super().turn(text, turn)
        word, where, times = text.split("/")
        sender, send, data = turn._sender, turn._sender.send, Path("flood").read_bytes()
        descriptor = 2 if where == "stderr" else sender._descriptor
        flooding = threading.Thread(target=lambda: [os.write(descriptor, data) for _ in range(int(times))], daemon=True)

        def send_and_flood(reply: wire.FromWorker) -> None:  # its turn is over before it begins
            sender.send = send
            send(reply)
            flooding.start()

        if word == "flood on":
            sender.send = send_and_flood
        else:
            flooding.run()
        return Outcome("flooded")
