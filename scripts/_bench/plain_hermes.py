"""Hermes without this project: ``AIAgent`` with its default settings; the caller carries the history.

``plain_hermes.py URL MODEL TURNS...`` runs as many turns as the last number says. After each number of turns it prints
what it has used, as one line of JSON, and waits for a line on stdin.
"""

import json
import os
import sys
import time

started = time.perf_counter()
URL, MODEL, *MARKS = sys.argv[1:]
os.environ["HERMES_DISABLE_LAZY_INSTALLS"] = "1"
# Hermes prints to stdout itself, so reports get a descriptor of their own.
report = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

from run_agent import AIAgent  # noqa: E402 - after the environment, which Hermes reads at import

agent = AIAgent(model=MODEL, provider="custom", base_url=URL, api_key="scripted", quiet_mode=True)
history: list[dict[str, object]] = []
turns = 0
for mark in MARKS:
    while turns < int(mark):
        turns += 1
        result = agent.run_conversation(f"Message number {turns}.", conversation_history=history)
        history = result["messages"]
        assert f"(message {turns} of this conversation)" in result["final_response"], result["final_response"]
    times = os.times()
    used = {"turns": turns, "cpu_s": times.user + times.system, "took_s": time.perf_counter() - started}
    report.write(json.dumps(used) + "\n")
    sys.stdin.readline()
os._exit(0)
