from collections.abc import Iterable
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from hermes_pool.scheduling.fair_queue import FairQueue


class Someone(NamedTuple):
    user: str
    name: str


def a_queue(*names: str) -> tuple[FairQueue[Someone], list[Someone]]:
    queue: FairQueue[Someone] = FairQueue()
    waiting: list[Someone] = []
    for name in names:
        user, _, own = name.rpartition("/")
        waiting.append(Someone(user, own))
        queue.add(waiting[-1])
    return queue, waiting


def named(waiting: Iterable[Someone]) -> list[str]:
    return [each.name for each in waiting]


def test_users_take_turns_and_each_user_is_served_in_order() -> None:
    queue, _ = a_queue("ada/1", "ada/2", "ada/3", "bob/4", "5", "bob/6")
    assert named(queue) == ["1", "4", "5", "2", "6", "3"]
    assert named([queue.pop() for _ in range(len(queue))]) == ["1", "4", "5", "2", "6", "3"]
    assert not queue


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 9)), max_size=40), st.data())
def test_the_order_that_is_told_is_the_order_of_service(names: list[tuple[str, int]], data: st.DataObject) -> None:
    queue, waiters = a_queue(*(f"{user}/{number}" for user, number in names))
    for waiter in data.draw(st.lists(st.sampled_from(waiters), max_size=10)) if waiters else []:
        queue.discard(waiter)
    told = list(queue)
    assert [queue.position(waiter) for waiter in told] == list(range(1, len(told) + 1))
    assert len(queue) == len(told)
    assert [queue.pop() for _ in told] == told
