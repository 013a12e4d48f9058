import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

if sys.platform != "linux":
    pytest.skip("it exists on Linux only", allow_module_level=True)

from hermes_pool_worker.zygote import Heritage

NAMES = st.sampled_from("ABCDE")
ENVIRONMENTS = st.dictionaries(NAMES, st.sampled_from(["1", "2"]))


@given(ENVIRONMENTS, st.dictionaries(NAMES, st.sampled_from(["1", "2"]) | st.none()), ENVIRONMENTS)
def test_a_worker_gets_its_own_environment_and_what_the_imports_changed(
    zygote: dict[str, str], changed: dict[str, str | None], wanted: dict[str, str]
) -> None:
    heritage = Heritage(zygote, changed, frozenset(), None)
    environment: dict[str, str | None] = dict(zygote)
    changes = heritage.to_change(wanted)
    for name, value in changes.items():
        if value is None:
            del environment[name]  # which fails if it was not there
        else:
            environment[name] = value
    assert environment == {name: value for name, value in {**wanted, **changed}.items() if value is not None}
    for name, value in changes.items():
        assert zygote.get(name) != value, "each change in a fork costs memory"
