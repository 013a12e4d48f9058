import pytest

from _bench.stats import Summary, figure, percentile, ratio, with_range


def test_a_summary_is_the_median_with_its_range() -> None:
    assert Summary.of([3.0, 1.0, 10.0]) == Summary(3.0, 1.0, 10.0, 3)
    with pytest.raises(ValueError, match="no values"):
        Summary.of([])


def test_ratios_are_of_the_same_round_and_leave_out_what_has_no_partner() -> None:
    # Everything was twice as slow in the second round: the ratio does not notice.
    assert ratio([1.0, 2.0, 9.0], [10.0, 20.0]) == Summary(0.1, 0.1, 0.1, 2)
    assert ratio([1.0, 2.0], [0.0, 4.0]).median == 0.5


def test_percentiles_stay_within_the_values() -> None:
    values = [float(number) for number in range(100)]
    assert percentile(values, 0.99) == 99.0
    assert percentile(values, 1.0) == 99.0
    assert percentile([5.0], 0.5) == 5.0


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (12345.6, "12,346"), (42.123, "42.1"), (4.2123, "4.21"), (0.0421, "0.042"), (0.00421, "0.0042")],
)
def test_numbers_are_written_with_about_three_digits(value: float, text: str) -> None:
    assert figure(value) == text


def test_a_single_value_has_no_range() -> None:
    assert with_range(Summary.of([1.5])) == "1.50"
    assert with_range(Summary.of([1.0, 2.0, 3.0])) == "2.00 (1.00 - 3.00)"
