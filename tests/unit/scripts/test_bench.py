import io
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

SCRIPTS = str(Path(__file__).parents[3] / "scripts")
sys.path.insert(0, SCRIPTS)
try:
    from _bench import report
    from _bench.cli import in_fresh_process
    from _bench.metrics import HEAVY, METRICS, PEERS, SUBJECTS, Metric, Target
    from _bench.report import Found
    from _bench.stats import Summary, figure, percentile, ratio, with_range
finally:
    sys.path.remove(SCRIPTS)


def test_a_summary_is_the_median_with_its_range() -> None:
    assert Summary.of([3.0, 1.0, 10.0]) == Summary(3.0, 1.0, 10.0, 3)
    with pytest.raises(ValueError, match="nothing"):
        Summary.of([])


def test_ratios_are_of_the_same_round_and_leave_out_what_has_no_partner() -> None:
    # Everything was twice as slow in the second round: the ratio does not notice.
    assert ratio([1.0, 2.0, 9.0], [10.0, 20.0]) == Summary(0.1, 0.1, 0.1, 2)
    assert ratio([1.0, 2.0], [0.0, 4.0]).median == 0.5


def test_percentiles_stay_within_the_values() -> None:
    values = [float(number) for number in range(100)]
    assert percentile(values, 0.99) == 99.0
    assert percentile(values, 1.0) == 99.0
    assert percentile([5.0], 0.5) == 5.0


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (12345.6, "12,346"), (42.123, "42.1"), (4.2123, "4.21"), (0.0421, "0.042"), (0.00421, "0.0042")],
)
def test_numbers_are_written_with_about_three_digits(value: float, text: str) -> None:
    assert figure(value) == text


def test_a_single_value_has_no_range() -> None:
    assert with_range(Summary.of([1.5])) == "1.50"
    assert with_range(Summary.of([1.0, 2.0, 3.0])) == "2.00 (1.00 - 3.00)"


METRIC = Metric(
    title="An example",
    subjects=("aio", "ours, zygote", "ours, spawn"),
    figures=("us",),
    targets=(
        Target(figure="us", limit=1.0, base="aio"),
        Target(figure="us", limit=100.0, least=True),
        Target(figure="us", limit=1.0, subjects=("ours, zygote",), base="aio"),
    ),
)
RESULTS = {
    "aio": Found({"us": [40.0, 50.0]}),
    "ours, zygote": Found(lacking="not supported"),
    "ours, spawn": Found({"us": [20.0, 25.0]}),
}


def test_targets_are_judged_on_the_first_subject_that_was_measured_or_left_open() -> None:
    verdicts = report.judge(METRIC, RESULTS)
    assert [(verdict.subject, verdict.met) for verdict in verdicts] == [
        ("ours, spawn", True),
        ("ours, spawn", False),
        ("ours, zygote", None),
    ]
    assert verdicts[0].value == Summary(0.5, 0.5, 0.5, 2)
    assert report.tally(verdicts) == "1 of 3 targets met, 1 missed, 1 not measured"


def test_a_table_shows_also_what_could_not_be_measured() -> None:
    screen = io.StringIO()
    report.show(Console(file=screen, width=120), "M0", METRIC, RESULTS)
    shown = screen.getvalue()
    assert "not supported" in shown
    assert "45.0 (40.0 - 50.0)" in shown
    assert "MISSED" in shown
    assert report.as_json(METRIC, RESULTS)["subjects"]["aio"]["figures"]["us"]["median"] == 45.0


def test_the_table_of_metrics_speaks_of_subjects_and_figures_that_exist() -> None:
    for metric in METRICS.values():
        assert all(subject in SUBJECTS or subject.startswith("hermes ") for subject in metric.subjects)
        for target in metric.targets:
            assert target.figure in metric.figures
            assert {*target.subjects, target.base} - {None} <= set(metric.subjects)
    assert HEAVY <= PEERS <= set(SUBJECTS)


@pytest.mark.parametrize(
    ("metric", "subject", "options", "figures"),
    [
        ("M1", "aio", {"turns": 3, "seconds": 0.5}, {"100 B", "10 KB", "1 MB", "p99"}),
        ("M1", "ours, spawn", {"turns": 3, "seconds": 0.5}, {"100 B", "10 KB", "1 MB", "p99"}),
        ("M6", "ours, spawn", {"samples": 1}, {"seen ms", "answers again ms"}),
    ],
)
def test_a_subject_is_measured_in_a_process_of_its_own(
    metric: str, subject: str, options: dict[str, Any], figures: set[str]
) -> None:
    found = in_fresh_process(metric, subject, options, 30.0)
    assert set(found.get("values", found)) == figures
    assert all(value > 0 for value in found["values"].values())


def test_a_subject_that_is_missing_or_fails_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    found = in_fresh_process("M1", "ours, nowhere", {}, 30.0)
    assert found["lacking"].startswith("failed: KeyError")
    found = in_fresh_process("M3", "anyio", {"samples": 1}, 30.0)
    assert found["lacking"].startswith(("cannot be told", "not installed"))
