from typing import Any

import msgspec
import pytest

from hermes_pool_worker import checks, wire
from hermes_pool_worker.agent import Outcome


@pytest.mark.parametrize("value", [None, 7, b"bytes", ["text"], object()])
def test_what_is_not_text_is_refused_by_its_type(value: object) -> None:
    for check in (checks.text, checks.name):
        with pytest.raises(TypeError, match=type(value).__name__):
            check(value)


def test_names_are_cut_and_text_is_not() -> None:
    long = "x" * (wire.NAME_CHARS_MAX + 1)
    assert checks.name(long) == long[:-1]
    assert checks.text(long) == long


@pytest.mark.parametrize(
    "outcome",
    [
        Outcome("reply"),
        Outcome("reply", session_id="s", committed="1"),
        Outcome("reply", "partial", notice="why"),
        Outcome("", "interrupted"),
        Outcome("reply", usage={"input_tokens": 7}),
    ],
    ids=repr,
)
def test_a_good_outcome_passes_as_it_is(outcome: Outcome) -> None:
    assert checks.outcome(outcome) == outcome


WRONG: list[dict[str, Any]] = [
    {"text": None},
    {"text": b"reply"},
    {"kind": "perhaps"},
    {"session_id": 7},
    {"committed": 7},
    {"usage": {"input_tokens": "many"}},
    {"notice": 7},
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_an_outcome_with_a_wrong_field_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        checks.outcome(Outcome(**{"text": "reply", **wrong}))


@pytest.mark.parametrize("value", [None, "reply", {"text": "reply"}], ids=repr)
def test_what_is_no_outcome_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match=type(value).__name__):
        checks.outcome(value)
