import io

from rich.console import Console

from _bench import report
from _bench.metrics import Metric, Target
from _bench.report import Found
from _bench.stats import Summary

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
