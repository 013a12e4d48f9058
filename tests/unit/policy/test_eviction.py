"""Which idle worker goes first."""

import pytest

from hermes_pool.policy.eviction import Idle, gain

MB = 1024 * 1024


@pytest.mark.parametrize(
    ("first_to_go", "stays"),
    [
        (Idle(100), Idle(99)),
        (Idle(60, start_s=0.3, memory_bytes=200 * MB), Idle(100, start_s=0.3, memory_bytes=100 * MB)),
        (Idle(60, start_s=2.0), Idle(100, start_s=8.0)),
        (Idle(1000, start_s=8.0), Idle(100, start_s=2.0)),
        # What is measured within the noise decides nothing.
        (Idle(0.02, start_s=0.9, memory_bytes=3 * MB), Idle(0.01, start_s=0.01, memory_bytes=60 * MB)),
        (Idle(0.02, start_s=0.9, memory_bytes=3 * MB), Idle(0.01)),
    ],
)
def test_a_worker_goes_first_if_it_is_long_idle_big_or_quick_to_restart(first_to_go: Idle, stays: Idle) -> None:
    assert gain(first_to_go) > gain(stays)
