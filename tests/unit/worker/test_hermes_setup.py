"""What of Hermes' setup needs no Hermes: the options and how they override its configuration."""

from typing import Any

import pytest

from hermes_pool_worker.agent import MissingDependencyError
from hermes_pool_worker.hermes_setup import HermesOptions, merged


def test_options_left_out_override_nothing() -> None:
    assert HermesOptions.of({}).overlay() == {"model": {}}


@pytest.mark.parametrize(
    ("options", "model"),
    [
        ({"model": "m", "context_length": 1000}, {"default": "m", "context_length": 1000}),
        ({"api_key": "k"}, {"api_key": "k"}),
        ({"provider": "p"}, {"provider": "p", "base_url": "", "api_key": ""}),
        ({"base_url": "http://x"}, {"provider": "custom", "base_url": "http://x", "api_key": ""}),
        (
            {"base_url": "http://x", "api_key": "k", "provider": "p"},
            {"provider": "p", "base_url": "http://x", "api_key": "k"},
        ),
    ],
    ids=repr,
)
def test_a_provider_comes_with_its_own_url_and_key(options: dict[str, Any], model: dict[str, Any]) -> None:
    assert HermesOptions.of(options).overlay() == {"model": model}


def test_the_users_own_overrides_go_last() -> None:
    options = {"approvals": "off", "cwd": "/folder", "config": {"approvals": {"mode": "manual"}, "memory": {"x": 1}}}
    assert HermesOptions.of(options).overlay() == {
        "model": {},
        "approvals": {"mode": "manual"},
        "terminal": {"cwd": "/folder"},
        "memory": {"x": 1},
    }
    assert HermesOptions.of({"approvals": "ask"}).overlay()["approvals"] == {"mode": "manual"}


@pytest.mark.parametrize("wrong", [{"modle": "x"}, {"model": 7}, {"approvals": "never"}, {"config": []}], ids=repr)
def test_wrong_options_are_named_with_the_right_ones(wrong: dict[str, Any]) -> None:
    with pytest.raises(MissingDependencyError) as caught:
        HermesOptions.of(wrong)
    assert next(iter(wrong)) in str(caught.value)
    assert "context_length" in str(caught.value)
    assert "\n" not in str(caught.value), "the supervisor takes the last line for the remedy"


def test_merging_goes_into_every_level_and_changes_neither_side() -> None:
    base = {"a": {"b": {"c": 1, "d": 2}, "e": 3}, "f": 4}
    over = {"a": {"b": {"c": 10}, "e": {"g": 5}}, "f": {"h": 6}, "i": 7}
    assert merged(base, over) == {"a": {"b": {"c": 10, "d": 2}, "e": {"g": 5}}, "f": {"h": 6}, "i": 7}
    assert base == {"a": {"b": {"c": 1, "d": 2}, "e": 3}, "f": 4}
    assert over == {"a": {"b": {"c": 10}, "e": {"g": 5}}, "f": {"h": 6}, "i": 7}
