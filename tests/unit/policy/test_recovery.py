from itertools import product

import pytest

from hermes_pool.policy.recovery import (
    Decision,
    Replacement,
    Replay,
    TurnFacts,
    after_death,
    after_failed_start,
    after_replacement,
)

FAILURES = {Decision.INTERRUPT, Decision.CRASH}


def turn(
    *,
    deaths: int = 1,
    tools_started: bool = False,
    end_wanted: bool = False,
    replay: Replay = "until_tool",
    replacements_max: int = 1,
) -> TurnFacts:
    return TurnFacts(
        deaths=deaths,
        tools_started=tools_started,
        end_wanted=end_wanted,
        replay=replay,
        replacements_max=replacements_max,
    )


REPLAYS: tuple[Replay, ...] = ("until_tool", "always", "never")
ALL = [
    turn(deaths=deaths, tools_started=tools, end_wanted=end, replay=replay, replacements_max=most)
    for deaths, tools, end, replay, most in product((1, 2, 3), (False, True), (False, True), REPLAYS, (0, 1, 2))
]


def test_a_death_is_followed_by_another_worker_while_the_budget_of_the_turn_lasts() -> None:
    assert after_death(turn(deaths=1)) is Decision.REPLACE
    assert after_death(turn(deaths=2)) is Decision.CRASH
    assert after_death(turn(deaths=2, tools_started=True)) is Decision.INTERRUPT
    assert after_death(turn(deaths=1, replacements_max=0)) is Decision.CRASH
    assert after_death(turn(deaths=2, replacements_max=2)) is Decision.REPLACE


@pytest.mark.parametrize("facts", ALL)
def test_a_turn_that_was_to_end_ends_so_whatever_else_has_happened(facts: TurnFacts) -> None:
    decisions = {
        after_death(facts),
        after_replacement(facts, Replacement()),
        after_replacement(facts, Replacement(alive=False)),
        after_failed_start(facts, backing_off=False),
        after_failed_start(facts, backing_off=True),
    }
    assert (Decision.END in decisions) == facts.end_wanted
    assert not facts.end_wanted or decisions == {Decision.END}


@pytest.mark.parametrize("facts", ALL)
def test_a_finished_reply_is_delivered_even_where_the_end_was_wanted(facts: TurnFacts) -> None:
    for alive in (False, True):
        assert after_replacement(facts, Replacement(alive=alive, recovered=True)) is Decision.DELIVER


@pytest.mark.parametrize(
    ("replay", "tools_started", "decision"),
    [
        ("until_tool", False, Decision.REPLAY),
        ("until_tool", True, Decision.INTERRUPT),
        ("always", False, Decision.REPLAY),
        ("always", True, Decision.REPLAY),
        ("never", False, Decision.CRASH),
        ("never", True, Decision.INTERRUPT),
    ],
)
def test_a_turn_runs_again_only_as_far_as_its_policy_goes(
    replay: Replay, tools_started: bool, decision: Decision
) -> None:
    facts = turn(replay=replay, tools_started=tools_started)
    assert after_replacement(facts, Replacement()) is decision


@pytest.mark.parametrize("facts", ALL)
def test_a_tool_that_may_have_acted_is_never_repeated_unless_the_host_allows_it(facts: TurnFacts) -> None:
    decision = after_replacement(facts, Replacement())
    if decision is Decision.REPLAY and facts.tools_started:
        assert facts.replay == "always"
    if decision is Decision.CRASH:
        assert not facts.tools_started or facts.replay == "always"


def test_a_new_worker_that_is_gone_already_runs_nothing() -> None:
    for facts in ALL:
        assert after_replacement(facts, Replacement(alive=False)) in FAILURES | {Decision.END}


def test_why_nobody_could_take_over_is_told_where_nothing_worse_has_happened() -> None:
    assert after_failed_start(turn(), backing_off=False) is Decision.REFUSE
    assert after_failed_start(turn(), backing_off=True) is Decision.CRASH
    assert after_failed_start(turn(tools_started=True), backing_off=False) is Decision.INTERRUPT
    assert after_failed_start(turn(tools_started=True, replay="always"), backing_off=False) is Decision.CRASH
