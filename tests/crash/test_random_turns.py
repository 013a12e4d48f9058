"""Turns that are cancelled, fail, time out, lose their worker, are sent twice: callers are told the truth about each.

``scripts/storm --turns`` is the same for as long as one likes.
"""

import sys
from pathlib import Path

import pytest

from tests.integration.hermes_program import NEEDS_HERMES

SCRIPTS = str(Path(__file__).parents[2] / "scripts")
sys.path.insert(0, SCRIPTS)
try:
    from _turns import TurnStorm
finally:
    sys.path.remove(SCRIPTS)


@pytest.mark.parametrize(
    ("launcher", "faults", "seed"),
    [
        ("zygote", 40, 1),
        pytest.param("spawn", 40, 2, marks=pytest.mark.slow),
        pytest.param("zygote", 2000, 3, marks=[pytest.mark.slow, pytest.mark.timeout(1200)]),
        pytest.param("spawn", 2000, 4, marks=[pytest.mark.slow, pytest.mark.timeout(1200)]),
    ],
)
async def test_what_is_told_of_turns_is_what_happened(
    tmp_path: Path, nothing_left: None, launcher: str, faults: int, seed: int
) -> None:
    tally = await TurnStorm(tmp_path, faults=faults, seed=seed, launcher=launcher).run()
    print("\n".join(tally.lines()))
    assert tally.violations == []
    assert sum(tally.faults.values()) >= faults


@pytest.mark.parametrize(
    ("faults", "seed"), [(8, 5), pytest.param(200, 6, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])]
)
@pytest.mark.skipif(NEEDS_HERMES[0].args[0], reason=NEEDS_HERMES[0].kwargs["reason"])
async def test_what_the_real_hermes_is_told_of_turns_is_what_happened(
    tmp_path: Path, nothing_left: None, faults: int, seed: int
) -> None:
    tally = await TurnStorm(tmp_path, faults=faults, seed=seed, hermes=True, conversations=3).run()
    print("\n".join(tally.lines()))
    assert tally.violations == []
    assert sum(tally.faults.values()) >= faults
