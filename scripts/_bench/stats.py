"""Statistics of repeated measurements: medians, ranges, and ratios of values from the same round."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Summary:
    """The median of some values, and their range."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Summary":
        """Return the summary of these values. Raises ``ValueError`` if there are none."""
        if not values:
            raise ValueError("there are no values to summarise")
        return cls(statistics.median(values), min(values), max(values), len(values))


def ratio(subject: Sequence[float], base: Sequence[float]) -> Summary:
    """Return the subject as a multiple of ``base``.

    Values of one round belong together: whatever slowed one down also slowed the other. So each round gives one ratio.
    Rounds that only one of the two has are left out.
    """
    return Summary.of([ours / theirs for ours, theirs in zip(subject, base, strict=False) if theirs])


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which ``share`` (0 to 1) of the values lie."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def figure(value: float) -> str:
    """Return a number as text, with about three significant digits."""
    size = abs(value)
    if size == 0:
        return "0"
    if size >= 100:
        return f"{value:,.0f}"
    if size >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if size >= 1 else f"{value:.3f}" if size >= 0.01 else f"{value:.2g}"


def with_range(summary: Summary) -> str:
    """Return a median and its range as text."""
    if summary.count == 1 or summary.low == summary.high:
        return figure(summary.median)
    return f"{figure(summary.median)} ({figure(summary.low)} - {figure(summary.high)})"
