"""What is measured: the metrics with their subjects, figures and targets."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

SUBJECTS: Mapping[str, str] = {
    "raw": "floors:Raw",
    "aio": "floors:Aio",
    "ours, spawn": "ours:Pool",
    "ours, zygote": "ours:Zygote",
    "ours, turn": "ours:TurnFace",
    "ours, events": "ours:Events",
    "ours, spare": "ours:Spare",
    "futures, fork": "peers:FuturesFork",
    "futures, spawn": "peers:FuturesSpawn",
    "loky": "peers:Loky",
    "pebble": "peers:Pebble",
    "anyio": "peers:Anyio",
    "ACP SDK": "peers:Acp",
    "MCP SDK": "peers:Mcp",
    "Jupyter": "peers:Jupyter",
}
"""The class of each subject, as ``module:name``."""

POOLS = ("futures, fork", "futures, spawn", "loky", "pebble", "anyio")
CHANNELS = ("ACP SDK", "MCP SDK", "Jupyter")
HEAVY = frozenset(CHANNELS)
"""Subjects that need a second per start. They are measured in fewer rounds."""
PEERS = frozenset({*POOLS, *CHANNELS})
OURS = ("ours, zygote", "ours, spawn")
"""A target applies to the first of these that was measured."""
HERMES_OURS = ("hermes zygote", "hermes spawn")


@dataclass(frozen=True, kw_only=True)
class Target:
    """A limit for one figure of a subject: relative to another subject, or absolute."""

    figure: str
    limit: float
    least: bool = False
    """Whether the limit is a minimum instead of a maximum."""
    subjects: tuple[str, ...] = OURS
    base: str | None = None
    """The subject whose figure counts as 1.0; ``None`` if the limit is absolute."""
    aim: float | None = None
    """A better value than the limit, to strive for."""

    def met(self, value: float) -> bool:
        """Return whether this value is within the limit."""
        return value >= self.limit if self.least else value <= self.limit


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One metric, which becomes one table."""

    title: str
    subjects: tuple[str, ...]
    figures: tuple[str, ...]
    targets: tuple[Target, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    quick: Mapping[str, Any] = field(default_factory=dict)
    """Options that replace those with ``--quick``."""
    heavy_if_quick: bool = True
    """Whether heavy subjects are measured with ``--quick``."""
    note: str = ""
    limit_s: float = 240.0
    """Time limit for one subject, in seconds."""
    rounds: Mapping[Literal["heavy", "all"], int] = field(default_factory=lambda: {"heavy": 2, "all": 99})
    """Most rounds, for heavy subjects and for all."""


METRICS: Mapping[str, Metric] = {
    "M1": Metric(
        title="Warm turn: median time in us, whole tree pinned to one CPU",
        subjects=("raw", "aio", "ours, spawn", "ours, zygote", "ours, turn", "ours, events", *POOLS, *CHANNELS),
        figures=("100 B", "10 KB", "1 MB", "p99"),
        targets=(
            Target(figure="100 B", limit=1.0, aim=0.65, base="aio"),
            Target(figure="100 B", limit=1.15, subjects=("ours, events",), base="ours, turn"),
            Target(figure="10 KB", limit=3.0, base="raw"),
            Target(figure="1 MB", limit=1.3, base="raw"),
        ),
        options={"turns": 3000, "seconds": 2.0},
        quick={"turns": 500, "seconds": 0.5},
        note="p99 is of the 100 B turns.",
    ),
    "M2": Metric(
        title="Fifty sessions, all in flight, 100 B",
        subjects=("aio", "ours, spawn", "ours, zygote", *POOLS, *CHANNELS),
        heavy_if_quick=False,
        figures=("turns/s", "slowest/fastest"),
        targets=(
            Target(figure="turns/s", limit=1.3, least=True, base="aio"),
            Target(figure="slowest/fastest", limit=0.85, least=True),
        ),
        options={"sessions": 50, "seconds": 5.0},
        quick={"sessions": 50, "seconds": 1.0},
        note="Process pools: here one pool of fifty workers, any of which may answer; elsewhere one pool per session.",
    ),
    "M3": Metric(
        title="New session to first answer, ms",
        subjects=("aio", "ours, spawn", "ours, zygote", "ours, spare", *POOLS, *CHANNELS),
        figures=("ms",),
        targets=(
            Target(figure="ms", limit=0.08, subjects=("ours, zygote",), base="ours, spawn"),
            Target(figure="ms", limit=0.02, subjects=("ours, spare",), base="ours, spawn"),
        ),
        options={"samples": 12},
        quick={"samples": 4},
    ),
    "M4": Metric(
        title="Fifty new sessions at once",
        subjects=("aio", "ours, spawn", "ours, zygote", *POOLS, *CHANNELS),
        heavy_if_quick=False,
        figures=("wall ms", "stall ms"),
        targets=(
            Target(figure="wall ms", limit=0.1, subjects=("ours, zygote",), base="ours, spawn"),
            Target(figure="stall ms", limit=10.0),
        ),
        options={"sessions": 50},
        note="stall: the longest time for which the host's event loop was blocked.",
    ),
    "M5": Metric(
        title="Memory of a further echo session, MB, including its share of the host",
        subjects=("aio", "ours, spawn", "ours, zygote", *POOLS, *CHANNELS),
        heavy_if_quick=False,
        figures=("PSS MB", "USS MB", "zygote USS MB"),
        targets=(Target(figure="PSS MB", limit=0.25, subjects=("ours, zygote",), base="ours, spawn"),),
        options={"sessions": 20},
        quick={"sessions": 10},
        rounds={"heavy": 1, "all": 3},
        note="(tree with 20 sessions - tree with one) / 19, after one turn each (quick: 10). Zygote: own column.",
    ),
    "M6": Metric(
        title="Worker killed in a turn, ms from the kill",
        subjects=("aio", "ours, spawn", "ours, zygote", *POOLS, *CHANNELS),
        figures=("seen ms", "answers again ms"),
        targets=(
            Target(figure="seen ms", limit=1.2, base="aio"),
            Target(figure="answers again ms", limit=0.1, subjects=("ours, zygote",), base="ours, spawn"),
        ),
        options={"samples": 10},
        quick={"samples": 3},
        note="seen: the caller has its error. Ours replaces no worker.",
    ),
    "M7": Metric(
        title="An idle host with idle sessions",
        subjects=("aio", "ours, spawn", "ours, zygote"),
        figures=(
            "CPU % (50)",
            "CPU % (200)",
            "threads (50)",
            "threads (200)",
            "wake-ups/s (50)",
            "wake-ups/s (200)",
            "wake-ups/s per session",
            "workers' wake-ups/s (200)",
        ),
        targets=(
            Target(figure="CPU % (200)", limit=0.05),
            Target(figure="threads (200)", limit=1),
            Target(figure="wake-ups/s per session", limit=0.005),
        ),
        options={"seconds": 10.0},
        quick={"seconds": 3.0},
        rounds={"heavy": 1, "all": 2},
        note="Wake-ups are voluntary context switches.",
    ),
    "M8": Metric(
        title="An answer in 10,000 pieces of 40 B",
        subjects=("raw", "aio", "ours, spawn", "ours, zygote", "ours, turn", "ours, events", "ACP SDK", "MCP SDK"),
        figures=("deltas/s", "first delta us"),
        targets=(
            Target(figure="deltas/s", limit=1.0, least=True, base="aio"),
            Target(figure="deltas/s", limit=0.87, least=True, subjects=("ours, events",), base="ours, turn"),
            Target(figure="first delta us", limit=1.15, subjects=("ours, events",), base="ours, turn"),
            Target(figure="first delta us", limit=2.0, base="raw"),
        ),
        options={"count": 10_000, "samples": 200},
        quick={"count": 10_000, "samples": 50},
        note="First delta: the whole tree pinned to one CPU. Rate: not pinned.",
    ),
    "H1": Metric(
        title="Real Hermes: new conversation to first reply, s",
        subjects=("hermes alone", "hermes spawn", "hermes zygote", "hermes spare"),
        figures=("s",),
        targets=(
            Target(figure="s", limit=0.2, subjects=("hermes zygote",), base="hermes spawn"),
            Target(figure="s", limit=0.1, subjects=("hermes spare",), base="hermes spawn"),
        ),
        options={"samples": 4},
        quick={"samples": 2},
        rounds={"heavy": 1, "all": 3},
    ),
    "H2": Metric(
        title="Real Hermes: dormant conversation to first reply in context, s",
        subjects=("hermes spawn", "hermes zygote", "hermes spare"),
        figures=("s",),
        targets=(Target(figure="s", limit=0.2, subjects=("hermes zygote",), base="hermes spawn"),),
        options={"samples": 4},
        quick={"samples": 2},
        rounds={"heavy": 1, "all": 3},
    ),
    "H3": Metric(
        title="Real Hermes: eight new conversations at once, s until all have a reply",
        subjects=("hermes alone", "hermes spawn", "hermes zygote"),
        figures=("s",),
        targets=(Target(figure="s", limit=0.2, subjects=("hermes zygote",), base="hermes spawn"),),
        rounds={"heavy": 1, "all": 3},
    ),
    "H4": Metric(
        title="Real Hermes: private memory of a worker, MB",
        subjects=("hermes alone", "hermes spawn", "hermes zygote"),
        figures=("USS MB, 1 turn", "USS MB, many turns"),
        targets=(
            Target(figure="USS MB, 1 turn", limit=0.4, subjects=("hermes zygote",), base="hermes spawn"),
            Target(figure="USS MB, many turns", limit=0.4, subjects=("hermes zygote",), base="hermes spawn"),
        ),
        options={"turns": 30, "workers": 3},
        quick={"turns": 10, "workers": 2},
        rounds={"heavy": 1, "all": 2},
        note="many turns: 30, with --quick 10. As for all real Hermes metrics, the state folder has been used before.",
    ),
    "H5": Metric(
        title="Real Hermes: CPU time of a warm turn in its process, ms",
        subjects=("hermes alone", "hermes spawn", "hermes zygote"),
        figures=("CPU ms per turn",),
        targets=(Target(figure="CPU ms per turn", limit=0.5, subjects=HERMES_OURS, base="hermes alone"),),
        options={"turns": 20},
        quick={"turns": 8},
        rounds={"heavy": 1, "all": 3},
        note="hermes alone: AIAgent with default settings in a plain script that carries the history.",
    ),
}
