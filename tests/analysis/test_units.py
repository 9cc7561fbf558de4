"""Numbers as people read them."""

import pytest

from mfubench.analysis.statistics import Difference, Interval
from mfubench.analysis.units import (
    TOO_NOISY,
    format_bytes,
    format_count,
    format_difference,
    format_digits,
    format_hours,
    format_interval,
    format_milliseconds,
    format_rate,
    format_seconds,
    format_signed_percent,
    format_tflops,
    told_of,
)


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


def test_no_number_has_an_exponent():
    numbers = {0.0: "0", 0.000042: "0.000042", 0.5: "0.5", 87.34: "87.3", 999.7: "1,000", -1_259.6: "-1,260"}
    assert {number: format_digits(number) for number in numbers} == numbers
    assert format_digits(213.4, 2) == "210" and format_digits(12_345.6, 4) == "12,350"


def test_a_number_that_is_rounded_up_to_the_next_unit_is_in_that_unit():
    assert format_rate(999.7) == "1,000" and format_rate(9_996) == "10,000"
    assert format_count(999_700) == "1M" and format_bytes(999_700_000) == "1 GB" and format_seconds(0.9996) == "1 s"
    assert format_milliseconds(0.00000042) == "0.00042 ms" and format_hours(999.7 * 24) == "1,000 days"
    assert format_tflops(12_345.6) == "12,350 TFLOP/s" and format_signed_percent(23.49, 0) == "+2,349 %"


def test_what_is_rounded_to_0_has_no_sign():
    assert {format_signed_percent(fraction) for fraction in (-0.0004, 0.0, 0.0004)} == {"0.0 %"}
    assert format_signed_percent(-0.004, 0) == "0 %" and format_signed_percent(-0.0006) == "−0.1 %"


def test_a_difference_in_words():
    def difference(change: float, low: float, high: float) -> Difference:
        return Difference(change, Interval(low, high), "repeats", 2, 2)

    assert format_difference(difference(0.05, 0.04, 0.06), "faster") == "+5.0 %\n(+4.0 … +6.0 %)"
    assert format_difference(difference(0.01, -0.01, 0.03), "no difference") == "no difference\n(−1.0 … +3.0 %)"
    assert format_difference(difference(0.1, -0.1, 0.4), "not told apart") == "not told apart\n(−10.0 … +40.0 %)"
    assert format_difference(difference(0.5, -0.9, 9.0), "too noisy") == "too noisy to tell"


@pytest.mark.parametrize(
    ("low", "high", "expected", "told"),
    [
        (0.01, 0.30, None, "faster"),
        (-0.30, -0.01, (-0.3, -0.2), "slower"),
        (-0.01, 0.03, None, "no difference"),
        (-0.05, 0.05, (0.2, 0.2), "no difference"),
        (-0.01, 0.03, (0.03, 0.05), "not told apart"),  # it holds what was expected, too
        (-0.03, 0.01, (-0.05, -0.02), "not told apart"),
        (-0.01, 0.03, (0.0, 0.05), "no difference"),  # nothing was expected among others
        (-0.02, 0.06, None, "not told apart"),
        (-0.169, 0.98, (0.2, 0.2), "not told apart"),
        (-0.9, 9.0, (0.2, 0.2), "too noisy"),
    ],
)
def test_no_difference_is_said_only_where_it_is_known(low, high, expected, told):
    assert told_of(Difference((low + high) / 2, Interval(low, high), "repeats", 2, 2), expected) == told
