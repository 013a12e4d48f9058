import os
import signal
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_pool_worker import procfs

if sys.platform != "linux":
    pytest.skip("it exists on Linux only", allow_module_level=True)

from hermes_pool_worker import process_tree
from hermes_pool_worker.process_tree import Process, below


def process(parent: int, state: str = "S") -> Process:
    fields = [b"0"] * (procfs.BEGAN + 1)
    fields[procfs.STATE] = state.encode()
    fields[procfs.PARENT] = str(parent).encode()
    return Process(fields)


def table(parents: dict[int, int]) -> dict[int, Process]:
    return {pid: process(parent) for pid, parent in parents.items()}


TREE = {2: 1, 3: 1, 20: 2, 21: 2, 200: 20, 201: 20, 30: 3}


@pytest.mark.parametrize(
    ("roots", "found"),
    [
        ({1}, {2, 3, 20, 21, 200, 201, 30}),
        ({2}, {20, 21, 200, 201}),
        ({20, 3}, {200, 201, 30}),
        ({2, 20}, {21, 200, 201}),
        ({201}, set()),
        ({99}, set()),
        (set(), set()),
    ],
)
def test_descendants_are_all_that_is_below_and_no_root(roots: set[int], found: set[int]) -> None:
    assert set(below(table(TREE), roots)) == found


def test_what_is_below_a_zombie_is_found() -> None:
    tree = {**table(TREE), 20: process(2, "Z")}
    assert {200, 201} < set(below(tree, {2}))


@given(st.dictionaries(st.integers(1, 20), st.integers(0, 20)), st.sets(st.integers(1, 20)))
def test_a_table_that_was_read_while_pids_changed_hands_ends_the_search_too(
    parents: dict[int, int], roots: set[int]
) -> None:
    found = set(below(table(parents), roots))
    assert not found & roots
    for pid in found:
        assert parents[pid] in found | roots


def test_this_process_is_in_the_table() -> None:
    own = process_tree._table()[os.getpid()]
    assert (own.parent, own.group, own.session) == (os.getppid(), os.getpgrp(), os.getsid(0))
    assert own.state in (b"R", b"S")


def test_a_process_is_signalled_only_if_it_still_is_the_same_one() -> None:
    got: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: got.append(number))
    try:
        began = process_tree._table()[os.getpid()].began
        process_tree._signal(os.getpid(), began + 1, signal.SIGUSR1)
        assert got == []
        process_tree._signal(os.getpid(), began, signal.SIGUSR1)
        assert got == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_the_dead_and_pid_1_are_never_ended() -> None:
    processes = {1: process(0), 5: process(1), 6: process(1, "Z"), 7: process(1, "X")}
    assert set(process_tree._living(processes)) == {5}
