"""Numbers as people read them."""

import pytest

from mfubench.analysis.statistics import Interval
from mfubench.analysis.units import TOO_NOISY, format_interval


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
