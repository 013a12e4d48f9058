from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any

import pytest

from hermes_pool.lifecycle import (
    ALIVE,
    TURN,
    WORKER,
    ImpossibleTransitionError,
    TurnChange,
    TurnState,
    WorkerChange,
    WorkerState,
)

TABLES: list[tuple[Mapping[Any, Mapping[Any, Any]], type[StrEnum], type[StrEnum]]] = [
    (WORKER, WorkerState, WorkerChange),
    (TURN, TurnState, TurnChange),
]


def cells() -> Iterator[Any]:
    for table, states, events in TABLES:
        for state in states:
            for event in events:
                yield pytest.param(table, state, event, id=f"{states.__name__}-{state}-{event}")


def reachable(table: Mapping[Any, Mapping[Any, Any]], state: StrEnum) -> set[StrEnum]:
    """The states that may follow, and the state itself."""
    found = {state}
    while more := {then for each in found for then in table[each].values()} - found:
        found |= more
    return found


@pytest.mark.parametrize(("table", "states", "events"), TABLES)
def test_every_state_has_a_row_and_every_event_is_used(
    table: Mapping[Any, Mapping[Any, Any]], states: type[StrEnum], events: type[StrEnum]
) -> None:
    assert set(table) == set(states)
    assert {event for row in table.values() for event in row} == set(events)


@pytest.mark.parametrize(("table", "state", "event"), list(cells()))
def test_a_cell_is_a_transition_or_says_that_it_is_a_bug(
    table: Mapping[Any, Mapping[Any, Any]], state: StrEnum, event: StrEnum
) -> None:
    if event in table[state]:
        assert table[state][event] in table
    else:
        with pytest.raises(ImpossibleTransitionError, match=f"{event} cannot happen .* {state}.*bug"):
            table[state][event]


def test_only_a_death_or_a_failed_start_leads_to_a_state_without_a_process() -> None:
    for state in ALIVE:
        for event, then in WORKER[state].items():
            if then not in ALIVE:
                assert event in (WorkerChange.DIED, WorkerChange.START_FAILED)


def test_every_state_of_a_worker_can_be_reached_and_left_for_a_new_start() -> None:
    assert reachable(WORKER, WorkerState.STOPPED) == set(WorkerState)
    for state in WorkerState:
        assert {WorkerState.STARTING, WorkerState.IDLE} <= reachable(WORKER, state)


def test_every_state_of_a_turn_can_be_reached_and_ends_settled_for_good() -> None:
    assert reachable(TURN, TurnState.QUEUED) == set(TurnState)
    assert not TURN[TurnState.SETTLED]
    for state in set(TurnState) - {TurnState.SETTLED}:
        assert TURN[state][TurnChange.SETTLED] is TurnState.SETTLED


def test_a_turn_is_handed_over_only_where_no_worker_has_it() -> None:
    assert {state for state in TurnState if TurnChange.HANDED_OVER in TURN[state]} == {
        TurnState.STARTING,
        TurnState.RECOVERING,
    }
