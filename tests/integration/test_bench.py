from typing import Any

import pytest

from _bench.cli import in_fresh_process


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
    assert found["lacking"].startswith(("cannot be made", "not installed"))
