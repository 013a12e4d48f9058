import pytest

from hermes_pool.cli import chat


@pytest.mark.parametrize(
    ("line", "free", "chosen"),
    [("2", False, "deny"), ("ONCE", False, "once"), ("3", False, None), ("", False, None), ("maybe", True, "maybe"),
     ("", True, None), ("\u00b2", False, None)],
)  # fmt: skip
def test_a_choice_is_made_by_number_or_word(line: str, free: bool, chosen: str | None) -> None:
    assert chat.parse_choice(line, ["once", "deny"], free=free) == chosen
