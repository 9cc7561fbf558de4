"""Numbers as people read them."""

import pytest

from mfubench.analysis.statistics import Difference, Interval
from mfubench.analysis.units import TOO_NOISY, format_difference, format_interval, format_rate


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        (-0.012, 0.034, "−1.2 … +3.4 %"),
        (-0.4, 1.3, "−40.0 … +130.0 %"),
        (-0.9, 25.0, TOO_NOISY),
        (-1.0, 2941.35, TOO_NOISY),
    ],
)
def test_an_interval_that_says_nothing_is_not_spelled_out(low, high, text):
    assert format_interval(Interval(low, high)) == text


def test_digits_of_a_rate():
    rates = {0.5: "0.5", 87.34: "87.3", 1_236: "1,240", 73_449: "73,400", 123_456: "123,500", 1_234_567: "1,234,600"}
    assert {rate: format_rate(rate) for rate in rates} == rates


def test_a_difference_in_words():
    def difference(change: float, low: float, high: float) -> Difference:
        return Difference(change, Interval(low, high), "repeats", 2, 2)

    assert format_difference(difference(0.05, 0.04, 0.06)) == "+5.0 %\n(+4.0 … +6.0 %)"
    assert format_difference(difference(0.01, -0.01, 0.03)) == "no difference\n(−1.0 … +3.0 %)"
    assert format_difference(difference(0.5, -0.9, 9.0)) == "too noisy to tell"
