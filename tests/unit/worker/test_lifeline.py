import os
import sys
from collections.abc import Iterator

import pytest

from hermes_pool_worker.contract import LIFELINE_VARIABLE

if sys.platform != "linux":
    pytest.skip("it exists on Linux only", allow_module_level=True)

from hermes_pool_worker import lifeline

# That it kills is tested with processes: see test_owner.


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def test_an_inherited_lifeline_is_kept_from_children_and_not_mentioned_again(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    os.set_inheritable(pipe[0], True)
    monkeypatch.setenv(LIFELINE_VARIABLE, str(pipe[0]))
    assert lifeline.inherited() == pipe[0]
    assert not os.get_inheritable(pipe[0])
    assert lifeline.inherited() is None
    assert LIFELINE_VARIABLE not in os.environ


@pytest.mark.parametrize("value", ["", "-1", "x", "1.5", "999999"])
def test_what_is_no_descriptor_is_no_lifeline(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIFELINE_VARIABLE, value)
    assert lifeline.inherited() is None
    assert LIFELINE_VARIABLE not in os.environ


def test_an_armed_lifeline_is_a_descriptor_of_its_own_and_can_be_disarmed(pipe: tuple[int, int]) -> None:
    own = lifeline.arm(pipe[0])
    assert own is not None
    assert own not in pipe
    assert not os.get_inheritable(own)
    assert os.fstat(own).st_ino == os.fstat(pipe[0]).st_ino
    lifeline.disarm(own)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(own)
    lifeline.disarm(own)
    lifeline.disarm(None)


def test_a_descriptor_that_is_closed_cannot_be_armed() -> None:
    assert lifeline.arm(999999) is None
