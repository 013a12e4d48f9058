import traceback

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_pool import (
    MessageQuarantinedError,
    RestartPolicy,
)
from hermes_pool.policy.quarantine import QUARANTINE_KEPT, Quarantine
from hermes_pool.snapshot import KillerSnapshot
from tests.support import refused

RESTARTS = RestartPolicy(quarantine_after=2)


def test_a_message_that_has_killed_twice_is_refused_and_any_other_is_not() -> None:
    quarantine = Quarantine(RESTARTS, lambda: 0.0, conversation_id="c")
    quarantine.note_death("kill")
    assert refused(quarantine.check, "kill") is None
    quarantine.note_death("kill")
    error = refused(quarantine.check, "kill")
    assert type(error) is MessageQuarantinedError
    assert (error.deaths, error.retryable, error.conversation_id) == (2, False, "c")
    assert "2 workers" in str(error)
    assert f"release it (fingerprint {error.fingerprint})" in str(error)
    for other in ("", "kilL", "kill ", "KILL", "llik"):
        assert refused(quarantine.check, other) is None
    assert quarantine.snapshot() == (KillerSnapshot(fingerprint=error.fingerprint, deaths=2, quarantined=True),)


@pytest.mark.parametrize("way", ["completed", "release", "reset"])
def test_a_quarantined_message_is_let_in_again_as_if_it_had_never_killed(way: str) -> None:
    quarantine = Quarantine(RESTARTS, lambda: 0.0)
    for _ in range(2):
        quarantine.note_death("kill")
    fingerprint = refused(quarantine.check, "kill").fingerprint
    match way:
        case "completed":
            quarantine.note_completed("kill")
        case "release":
            assert quarantine.release(fingerprint)
            assert not quarantine.release(fingerprint)
        case "reset":
            quarantine.reset()
    assert quarantine.snapshot() == ()
    quarantine.note_death("kill")
    assert refused(quarantine.check, "kill") is None


def test_the_completed_turn_of_another_message_clears_nothing() -> None:
    quarantine = Quarantine(RESTARTS, lambda: 0.0)
    for _ in range(2):
        quarantine.note_death("kill")
    quarantine.note_completed("fine")
    quarantine.note_completed("llik")
    assert refused(quarantine.check, "kill") is not None


def test_a_text_that_cannot_be_encoded_is_a_message_as_any_other() -> None:
    quarantine = Quarantine(RESTARTS, lambda: 0.0)
    for _ in range(2):
        quarantine.note_death("half \ud83d")
    assert refused(quarantine.check, "half \ud83d") is not None
    assert refused(quarantine.check, "half \ud83e") is None


def test_nothing_of_the_text_is_kept_or_told() -> None:
    quarantine = Quarantine(RESTARTS, lambda: 0.0)
    secret = "open sesame"
    for _ in range(2):
        quarantine.note_death(secret)
    with pytest.raises(MessageQuarantinedError) as caught:
        quarantine.check(secret)
    told = "".join(traceback.format_exception_only(caught.value)) + repr(vars(caught.value))
    assert "sesame" not in told + repr(quarantine.snapshot()) + repr(vars(quarantine))


def test_the_latest_killers_are_remembered_and_the_oldest_is_forgotten() -> None:
    quarantine = Quarantine(RESTARTS, lambda: 0.0)
    for _ in range(2):
        quarantine.note_death("first")
    for number in range(QUARANTINE_KEPT - 1):
        quarantine.note_death(f"other {number}")
    quarantine.note_death("first")  # now it is the latest
    for number in range(QUARANTINE_KEPT - 1):
        quarantine.note_death(f"another {number}")
    assert refused(quarantine.check, "first").deaths == 3
    quarantine.note_death("one more")
    assert refused(quarantine.check, "first") is None
    assert len(quarantine.snapshot()) == QUARANTINE_KEPT


@pytest.mark.parametrize(("after", "refused_at"), [(0, None), (1, 1), (3, 3)])
def test_how_many_deaths_it_takes_is_a_setting(after: int, refused_at: int | None) -> None:
    quarantine = Quarantine(RestartPolicy(quarantine_after=after), lambda: 0.0)
    for number in range(1, 6):
        quarantine.note_death("kill")
        if refused_at is None or number < refused_at:
            assert refused(quarantine.check, "kill") is None
        else:
            assert refused(quarantine.check, "kill").deaths == number


@given(
    st.lists(st.tuples(st.sampled_from(["death", "completed"]), st.sampled_from(["a", "b", "aa", ""])), max_size=40)
)  # fmt: skip
def test_a_quarantine_knows_of_each_message_its_deaths_since_it_was_last_completed(
    happenings: list[tuple[str, str]],
) -> None:
    quarantine = Quarantine(RESTARTS, lambda: 0.0)
    deaths: dict[str, int] = {}
    for what, text in happenings:
        if what == "death":
            quarantine.note_death(text)
            deaths[text] = deaths.get(text, 0) + 1
        else:
            quarantine.note_completed(text)
            deaths.pop(text, None)
        for each in ("a", "b", "aa", ""):
            error = refused(quarantine.check, each)
            assert (error.deaths if error else None) == (deaths[each] if deaths.get(each, 0) >= 2 else None)
        assert len(quarantine.snapshot()) == len(deaths)


def test_a_refused_message_is_let_in_again_after_a_while_and_for_longer_if_it_kills_again() -> None:
    now = 0.0
    quarantine = Quarantine(RestartPolicy(quarantine_after=2, quarantine_s=60), lambda: now, conversation_id="c")
    for _ in range(2):
        quarantine.note_death("yes")
    assert refused(quarantine.check, "yes").retry_after_s == 60
    assert quarantine.snapshot()[0].quarantined
    now = 59.0
    assert refused(quarantine.check, "yes").retry_after_s == 1
    now = 60.0
    assert refused(quarantine.check, "yes") is None
    assert not quarantine.snapshot()[0].quarantined
    quarantine.note_death("yes")
    assert refused(quarantine.check, "yes").retry_after_s == 120
    for _ in range(20):
        quarantine.note_death("yes")
    assert refused(quarantine.check, "yes").retry_after_s == 3600
    now += 3600
    assert refused(quarantine.check, "yes") is None
    quarantine.note_completed("yes")
    quarantine.note_death("yes")
    assert refused(quarantine.check, "yes") is None
