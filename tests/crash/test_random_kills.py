"""Workers killed at random under load; ``scripts/storm`` is the same for as long as one likes."""

import sys
from pathlib import Path
from typing import Any

import pytest

from hermes_pool import Timeouts

SCRIPTS = str(Path(__file__).parents[2] / "scripts")
sys.path.insert(0, SCRIPTS)
try:
    from _storm import Launcher, Storm
finally:
    sys.path.remove(SCRIPTS)

pytestmark = pytest.mark.timeout(60)
QUICK: dict[str, Any] = {"timeouts": Timeouts(close_grace_s=1.0, term_grace_s=0.5)}
TYPED = {
    "reply", "reply after 1 restart", "TurnInterruptedError", "WorkerCrashedError", "WorkerStartError",
}  # fmt: skip
REFUSED = {"RestartBackoffError", "MessageQuarantinedError", "PoolUnavailableError"}


@pytest.mark.parametrize(("launcher", "kills"), [("zygote", 60), ("spawn", 25)])
async def test_random_kills_hurt_nobody_but_those_who_are_struck_and_them_as_little_as_can_be(
    tmp_path: Path, nothing_left: None, launcher: Launcher, kills: int
) -> None:
    tally = await Storm(tmp_path, kills=kills, seed=20, launcher=launcher).run()
    print("\n".join(tally.lines()))
    assert tally.faults == []
    assert sum(tally.kills.values()) == kills
    assert set(tally.outcomes) <= TYPED
    assert tally.outcomes["reply after 1 restart"] > kills / 4
    assert len(tally.struck_s) > kills / 4
    assert len(tally.calm_s) > kills


async def test_random_kills_of_few_conversations_make_their_breakers_refuse_and_nobody_else_s(
    tmp_path: Path, nothing_left: None
) -> None:
    storm = Storm(tmp_path, kills=30, seed=21, launcher="zygote", struck=2, pause_s=0.01, settings=QUICK)
    tally = await storm.run()
    print("\n".join(tally.lines()))
    assert tally.faults == []
    assert set(tally.outcomes) <= TYPED | REFUSED
