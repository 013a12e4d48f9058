"""Figures out of repeated measurements: medians, ranges, ratios of what was measured side by side."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Summary:
    """The median of some values with their range."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Summary":
        """Return the summary of these values; ``ValueError`` for none."""
        if not values:
            raise ValueError("there is nothing to summarise")
        return cls(statistics.median(values), min(values), max(values), len(values))


def ratio(subject: Sequence[float], base: Sequence[float]) -> Summary:
    """Return how many times ``base`` the subject is.

    Values of one round belong together: what slowed one down, slowed the other down as well. So each round gives one
    ratio; rounds that only one of the two has are left out.
    """
    return Summary.of([ours / theirs for ours, theirs in zip(subject, base, strict=False) if theirs])


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which ``share`` (0 to 1) of the values lie."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def figure(value: float) -> str:
    """Write a number with about three digits that mean something."""
    size = abs(value)
    if size == 0:
        return "0"
    if size >= 100:
        return f"{value:,.0f}"
    if size >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if size >= 1 else f"{value:.3f}" if size >= 0.01 else f"{value:.2g}"


def with_range(summary: Summary) -> str:
    """Write a median and its range."""
    if summary.count == 1 or summary.low == summary.high:
        return figure(summary.median)
    return f"{figure(summary.median)} ({figure(summary.low)} - {figure(summary.high)})"
