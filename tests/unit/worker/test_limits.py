import os
import sys

import pytest

from hermes_pool_worker import limits
from hermes_pool_worker.contract import RLIMITS_VARIABLE

if sys.platform == "win32":
    pytest.skip("it has no such limits", allow_module_level=True)

import resource

# What changes the limits of a process for good is tested in processes of its own: see test_limits_and_stacks.


@pytest.mark.parametrize("name", ["RLIMIT_NONSENSE", "NOFILE", "getrlimit", "RLIM_INFINITY"])
def test_a_limit_that_does_not_exist_is_named(name: str) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with pytest.raises(ValueError, match=name):
        limits.apply_rlimits({name: 7})
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before


def test_no_limits_are_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.delenv(RLIMITS_VARIABLE, raising=False)
    limits.set_rlimits()
    monkeypatch.setenv(RLIMITS_VARIABLE, "")
    limits.set_rlimits()
    assert RLIMITS_VARIABLE not in os.environ
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before
