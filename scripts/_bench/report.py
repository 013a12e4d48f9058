"""The results: kept, compared with the targets, printed, and returned as JSON."""

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from _bench.metrics import PEERS, Metric, Target
from _bench.stats import Summary, ratio, with_range


@dataclass
class Found:
    """The results of one subject in one metric."""

    values: dict[str, list[float]] = field(default_factory=dict)
    """The values of each figure, one per round."""
    lacking: str = ""
    """Why values are missing; empty if none are."""

    def add(self, values: Mapping[str, float]) -> None:
        """Add the values of one round."""
        for name, value in values.items():
            self.values.setdefault(name, []).append(value)


@dataclass(frozen=True)
class Verdict:
    """A target and its result. ``value`` is a ratio if the target has a base, and ``None`` if not measured."""

    target: Target
    subject: str
    value: Summary | None

    @property
    def met(self) -> bool | None:
        """Whether the target is met; ``None`` if not measured."""
        return None if self.value is None else self.target.met(self.value.median)


Results = Mapping[str, Found]


def judge(metric: Metric, results: Results) -> list[Verdict]:
    """Compare the results with the targets."""
    verdicts = []
    for target in metric.targets:
        subject = next((name for name in target.subjects if _values(results, name, target)), target.subjects[0])
        ours = _values(results, subject, target)
        base = _values(results, target.base, target) if target.base else []
        if target.base is None:
            value = Summary.of(ours) if ours else None
        else:
            value = ratio(ours, base) if ours and base and any(base) else None
        verdicts.append(Verdict(target, subject, value))
    return verdicts


def _values(results: Results, subject: str, target: Target) -> list[float]:
    found = results.get(subject)
    return found.values.get(target.figure, []) if found else []


# --- on the screen ----------------------------------------------------------------------------------------------------


def show(console: Console, name: str, metric: Metric, results: Results) -> None:
    """Print the table of a metric, and its targets."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("")
    for heading in metric.figures:
        table.add_column(heading, justify="right")
    table.add_column("rounds", justify="right")
    for subject, found in results.items():
        style = "dim" if subject in PEERS else "bold" if subject.startswith(("ours", "hermes ")) else ""
        if not found.values:
            lacking = Text(_keyword(found.lacking), style="yellow")
            table.add_row(Text(subject, style=style), lacking, *[""] * len(metric.figures))
            continue
        cells = [with_range(Summary.of(found.values[each])) if each in found.values else "-" for each in metric.figures]
        rounds = max(len(values) for values in found.values.values())
        table.add_row(Text(subject, style=style), *cells, f"{rounds}{' !' if found.lacking else ''}")
    console.print()
    console.print(Text(f"{name}  {metric.title}", style="bold"))
    console.print(table)
    for subject, found in results.items():
        if found.lacking and (found.values or found.lacking != _keyword(found.lacking)):
            console.print(Text(f"  ! {subject}: {found.lacking}", style="yellow"))
    if metric.note:
        console.print(Text(f"  {metric.note}", style="dim"))
    for verdict in judge(metric, results):
        console.print(_line(verdict))


def _keyword(lacking: str) -> str:
    """Return the keyword that the table shows in place of figures. The full reason is printed below it."""
    return next((word for word in ("not installed", "not supported", "failed", "left out") if word in lacking), "no")


def _line(verdict: Verdict) -> Text:
    target = verdict.target
    mark, style = {True: ("met", "green"), False: ("MISSED", "bold red"), None: ("open", "yellow")}[verdict.met]
    value = "not measured"
    if verdict.value is not None:
        value = with_range(verdict.value)
        value = f"{value} x {target.base}" if target.base else value
    wanted = f"{'>=' if target.least else '<='} {target.limit:g}{' x' if target.base else ''}"
    wanted += f", aim {target.aim:g}" if target.aim is not None else ""
    return Text(f"  {mark:7}", style=style).append(
        f"{verdict.subject}, {target.figure}: {value}   (target {wanted})", style="default"
    )


def machine() -> dict[str, Any]:
    """Describe the machine, as far as it matters to the figures."""
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    except OSError:
        pass
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {
        "cpu": model,
        "cores": cores,
        "kernel": f"{platform.system()} {platform.release()}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "load": load,
    }


def describe(about: Mapping[str, Any]) -> str:
    """Return the machine as one line of text."""
    load = "" if about["load"] is None else f", load {about['load']:.1f} at the start"
    return f"{about['cpu']}, {about['cores']} cores, {about['kernel']}, {about['python']}{load}"


# --- in a file --------------------------------------------------------------------------------------------------------


def as_json(metric: Metric, results: Results) -> dict[str, Any]:
    """Return a metric and its results in built-in types, for JSON."""
    return {
        "title": metric.title,
        "subjects": {
            subject: {
                "figures": {name: _plain(Summary.of(values), values) for name, values in found.values.items()},
                **({"lacking": found.lacking} if found.lacking else {}),
            }
            for subject, found in results.items()
        },
        "targets": [
            {
                "subject": verdict.subject,
                "figure": verdict.target.figure,
                "base": verdict.target.base,
                "limit": verdict.target.limit,
                "least": verdict.target.least,
                "value": verdict.value.median if verdict.value else None,
                "met": verdict.met,
            }
            for verdict in judge(metric, results)
        ],
    }


def _plain(summary: Summary, values: Sequence[float]) -> dict[str, Any]:
    return {"median": summary.median, "low": summary.low, "high": summary.high, "values": list(values)}


def tally(verdicts: Sequence[Verdict]) -> str:
    """Return how many targets were met, as text."""
    met = sum(verdict.met is True for verdict in verdicts)
    missed = sum(verdict.met is False for verdict in verdicts)
    text = f"{met} of {len(verdicts)} targets met, {missed} missed"
    unmeasured = len(verdicts) - met - missed
    return f"{text}, {unmeasured} not measured" if unmeasured else text
