from hermes_pool.scheduling.pool_state import MAY_BECOME, PoolState


def test_every_condition_is_in_the_table_and_only_closed_is_for_ever() -> None:
    assert set(MAY_BECOME) == set(PoolState)
    assert [state for state in PoolState if not MAY_BECOME[state]] == [PoolState.CLOSED]
    assert all(PoolState.CLOSED in MAY_BECOME[state] for state in PoolState if state is not PoolState.CLOSED)
