import pytest

from hermes_pool.lifecycle import ALIVE, TRANSITIONS, Event, ImpossibleTransitionError, State, after


def test_every_state_has_a_row_and_every_event_is_used() -> None:
    assert set(TRANSITIONS) == set(State)
    assert {event for row in TRANSITIONS.values() for event in row} == set(Event)


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("event", Event)
def test_a_cell_is_a_transition_or_says_that_it_is_a_bug(state: State, event: Event) -> None:
    if event in TRANSITIONS[state]:
        assert after(state, event) is TRANSITIONS[state][event]
    else:
        with pytest.raises(ImpossibleTransitionError, match=f"{event} cannot happen .* {state}.*bug"):
            after(state, event)


def test_a_state_without_a_process_is_entered_by_a_death_or_where_there_never_was_one() -> None:
    for state, row in TRANSITIONS.items():
        for event, then in row.items():
            if state in ALIVE and then not in ALIVE:
                assert event in (Event.DIED, Event.START_FAILED)


def test_there_is_a_way_out_of_every_state_to_an_idle_worker() -> None:
    for start in State:
        reached = {start}
        while more := {then for state in reached for then in TRANSITIONS[state].values()} - reached:
            reached |= more
        assert State.IDLE in reached
