import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_pool_worker import contract

NAMES = st.from_regex(r"RLIMIT_[A-Z]{1,12}", fullmatch=True)


@given(st.dictionaries(NAMES, st.integers(-1, 2**63)))
def test_limits_come_back_as_they_were_written(limits: dict[str, int]) -> None:
    assert contract.rlimits_from(contract.rlimits_text(limits)) == limits


@pytest.mark.parametrize("text", ["RLIMIT_NOFILE", "RLIMIT_NOFILE=", "RLIMIT_NOFILE=x", "=x"])
def test_any_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        contract.rlimits_from(text)


@pytest.mark.parametrize("member", [1, 12, contract.ZYGOTE, contract.GUARDIAN])
def test_a_marker_shows_its_pool_and_no_other_one(member: object) -> None:
    marker = contract.marker("abc", member)
    assert marker.startswith(contract.marker_start("abc"))
    for other in ("ab", "abcd", "bc", "abc-1"):
        assert not marker.startswith(contract.marker_start(other))


def test_every_process_of_a_pool_has_a_marker_of_its_own() -> None:
    members = [1, 2, 12, contract.ZYGOTE, contract.GUARDIAN]
    assert len({contract.marker("abc", member) for member in members}) == len(members)


def test_exit_codes_tell_the_endings_apart() -> None:
    codes = [contract.EXIT_OK, contract.EXIT_USAGE, contract.EXIT_SOFTWARE, contract.EXIT_UNUSABLE]
    assert codes == [0, 64, 70, 78], "people and service managers know these numbers"
