"""Runs the benchmark: round by round, every subject of every metric in a fresh process, one at a time."""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from _bench import report
from _bench.metrics import HEAVY, METRICS, PEERS, Metric
from _bench.report import Found
from _bench.subject import RESULT

INTERRUPTED = 130
FILE_COLUMNS = 140


def in_fresh_process(metric: str, subject: str, options: dict[str, Any], limit_s: float) -> dict[str, Any]:
    """Measure in a new process. Return its ``values``, or as ``lacking`` why there are none."""
    command = [sys.executable, str(Path(__file__).parent), "--subject", metric, subject, json.dumps(options)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        start_new_session=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=limit_s)
    except BaseException as error:
        # Kill its children too. It was not reaped yet, so the process group still is its own.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if isinstance(error, subprocess.TimeoutExpired):
            return {"lacking": f"failed: did not finish within {limit_s:.0f} s"}
        raise
    lines = [line for line in out.splitlines() if line.startswith(RESULT)]
    if lines:
        found: dict[str, Any] = json.loads(lines[-1].removeprefix(RESULT))
        return found
    last = next((line.strip() for line in reversed(err.splitlines()) if line.strip()), "nothing on stderr")
    return {"lacking": f"failed: {last[:160]}"}


class Run:
    """One run of the benchmark."""

    def __init__(self, *, quick: bool, peers: bool, rounds: int, console: Console) -> None:
        self.quick = quick
        self.peers = peers
        self.rounds = rounds
        self.console = console
        self.failed: list[str] = []
        self._works: dict[str, str] = {}

    def metric(self, name: str, metric: Metric) -> dict[str, Found]:
        """Measure all subjects of a metric, taking turns."""
        options = {**metric.options, **(metric.quick if self.quick else {})}
        results = {subject: Found() for subject in metric.subjects if self.peers or subject not in PEERS}
        for subject, found in results.items():
            found.lacking = self._lacking(metric, subject)
        for number in range(self.rounds):
            for subject, found in results.items():
                most = metric.rounds["heavy" if subject in HEAVY else "all"]
                if found.lacking or number >= most:
                    continue
                self._say(f"{name}, round {number + 1}: {subject}")
                result = in_fresh_process(name, subject, options, metric.limit_s)
                found.add(result.get("values", {}))
                found.lacking = result.get("lacking", "")
                if found.lacking.startswith("failed"):
                    self.failed.append(f"{name}, {subject}: {found.lacking}")
        self._say("")
        return results

    def _lacking(self, metric: Metric, subject: str) -> str:
        """Return why a subject cannot be measured; empty if it can. The attempt warms its caches."""
        if self.quick and subject in HEAVY and not metric.heavy_if_quick:
            return "left out with --quick, because it takes minutes"
        if subject.startswith("hermes "):
            return ""
        if subject not in self._works:
            self._say(f"trying {subject}")
            self._works[subject] = in_fresh_process("probe", subject, {}, 60.0).get("lacking", "")
            if self._works[subject].startswith("failed"):
                self.failed.append(f"{subject}: {self._works[subject]}")
        return self._works[subject]

    def _say(self, text: str) -> None:
        if sys.stderr.isatty():
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()


def main(arguments: Sequence[str]) -> int:
    """Return 0 if everything could be measured, 1 if something failed. A missed target is not a failure."""
    chosen = parser().parse_args(arguments)
    names = [name.upper() for name in chosen.metrics] or list(METRICS)
    width = None if sys.stdout.isatty() else FILE_COLUMNS
    console = Console(highlight=False, emoji=False, markup=False, width=width)
    rounds = chosen.rounds or (1 if chosen.quick else 5)
    run = Run(quick=chosen.quick, peers=chosen.peers, rounds=rounds, console=console)
    # SIGTERM cleans up like Ctrl-C.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    about, began = report.machine(), time.monotonic()
    console.print(Text("hermes-pool: benchmark", style="bold"))
    console.print(report.describe(about))
    console.print(
        f"Median (lowest - highest); at most {rounds} round{'' if rounds == 1 else 's'}. "
        "Subjects take turns, each in a fresh process. "
        "Ratios compare values of the same round."
    )
    verdicts, written = [], {}
    try:
        for name in names:
            results = run.metric(name, METRICS[name])
            report.show(console, name, METRICS[name], results)
            verdicts += report.judge(METRICS[name], results)
            written[name] = report.as_json(METRICS[name], results)
            if chosen.json:
                whole = {"machine": about, "quick": chosen.quick, "rounds": rounds, "metrics": written}
                chosen.json.write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")
    except KeyboardInterrupt:
        console.print("interrupted")
        return INTERRUPTED
    took = time.monotonic() - began
    console.print()
    console.print(Text(f"{report.tally(verdicts)}; {took:.0f} s", style="bold"))
    for line in run.failed:
        console.print(Text(line, style="red"))
    return 1 if run.failed else 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    what = "\n".join(f"  {name}  {metric.title}" for name, metric in METRICS.items())
    parser = argparse.ArgumentParser(
        prog="scripts/bench",
        description="Measure hermes-pool against its floors (the bare minimum) and its peers (other libraries).",
        epilog=f"metrics:\n{what}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("metrics", nargs="*", metavar="METRIC", type=_metric, help="metrics to measure (default: all)")
    parser.add_argument(
        "--quick", action="store_true", help="one round with fewer samples: a quick look, not a measurement"
    )
    parser.add_argument("--rounds", type=_rounds, help="number of rounds (default: 5, with --quick 1)")
    parser.add_argument(
        "--peers",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="measure other libraries too (default: yes)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")
    return parser


def _metric(text: str) -> str:
    if text.upper() not in METRICS:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(METRICS)}")
    return text.upper()


def _rounds(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of rounds")
    return int(text)
