import gc
import weakref
from collections.abc import Iterator

import pytest

from hermes_pool_worker import memory


class Node:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def by_hand() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("by_hand")
def test_garbage_that_refers_to_itself_is_collected() -> None:
    alive = weakref.ref(Node())
    assert alive() is not None
    memory.give_back()
    assert alive() is None
