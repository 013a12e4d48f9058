import pytest

from hermes_pool.system import processes
from hermes_pool.system.processes import IdentityCheck


@pytest.mark.parametrize("pid", [0, -1, -(2**40), 2**22 + 5])
def test_what_is_no_pid_is_gone(pid: int) -> None:
    assert processes.identify(pid, 1.0) is IdentityCheck.GONE
    assert processes.inspect_tree(pid, 1.0).health == "dead"


def test_nothing_looked_at_is_nothing_seen() -> None:
    assert processes.inspect_trees([]) == []
