"""Numbers as people read them: unit, significant digits, ranges."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

from mfubench.analysis.statistics import Difference, Interval, Quartiles

GB_PER_GIB = 2**30 / 1e9
NOISE_FACTOR = 4.0  # upper end of an interval over its lower: wider ones are not spelled out
TOO_NOISY = "too noisy to tell"
NO_DIFFERENCE = 0.05  # an interval around 0 that goes further to either side may hide a difference that matters

Told = Literal["faster", "slower", "no difference", "not told apart", "too noisy"]
NOTHING_TOLD = ("not told apart", "too noisy")


def round_digits(value: float, digits: int = 3) -> float:
    """The value to so many significant digits: 999.7 to three is 1000."""
    return float(f"{value:.{digits - 1}e}")


def format_digits(value: float, digits: int = 3) -> str:
    """So many significant digits, never an exponent: 1,260, 87.3, 0.5 or 0.00042."""
    rounded = round_digits(value, digits)
    if not math.isfinite(rounded) or rounded == 0:
        return f"{rounded:g}"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(rounded))))
    text = f"{rounded:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if decimals else text


def format_rate(tokens_per_s: float) -> str:
    """87.3, 1,240 or 73,400, three digits; above them whole hundreds, 532,800."""
    if tokens_per_s < 1000:
        return format_digits(tokens_per_s)
    return f"{round(tokens_per_s, -1 if tokens_per_s < 10_000 else -2):,.0f}"


def rate_unit(device: str) -> str:
    """The unit of a rank's rate: on a CPU a rank is a process."""
    return "tokens/s/process" if device == "cpu" else "tokens/s/GPU"


def format_percent(fraction: float | None, digits: int = 1) -> str:
    return "–" if fraction is None else f"{100 * fraction:,.{digits}f} %"


def format_signed_percent(fraction: float, digits: int = 1) -> str:
    """+3.2 %, −0.4 % with a true minus sign; what is rounded to 0 has none."""
    percent = round(100 * fraction, digits)
    return f"{percent:+,.{digits}f} %".replace("-", "−") if percent else f"{0:.{digits}f} %"


def is_noise(low: float, high: float) -> bool:
    """Whether an interval of a ratio is so wide that its ends say nothing but that."""
    return low <= 0 or high / low > NOISE_FACTOR


def tells_nothing(interval: Interval) -> bool:
    """Whether the interval of a relative change is noise."""
    return is_noise(1 + interval.low, 1 + interval.high)


def told_of(measured: Difference, expected: tuple[float, float] | None = None) -> Told:
    """What a measured difference is called; expected: the change that was, from … to.

    Where its interval holds 0 it is "no difference" only if that is known: the interval goes no further than
    NO_DIFFERENCE to either side, and does not hold what was expected instead. Else the two were "not told apart".
    """
    interval = measured.interval
    if measured.is_difference:
        return "faster" if measured.change > 0 else "slower"
    if tells_nothing(interval):
        return "too noisy"
    holds_expected = False
    if expected is not None and not expected[0] <= 0 <= expected[1]:
        holds_expected = interval.low <= expected[1] and expected[0] <= interval.high
    if holds_expected or max(-interval.low, interval.high) > NO_DIFFERENCE:
        return "not told apart"
    return "no difference"


def format_told(verdict: str) -> str:
    """Of an interval that holds 0, in words."""
    return TOO_NOISY if verdict == "too noisy" else verdict


def format_interval(interval: Interval | None, digits: int = 1) -> str:
    """The interval of a relative change."""
    if interval is None:
        return ""
    if tells_nothing(interval):
        return TOO_NOISY
    return f"{format_signed_percent(interval.low, digits)[:-2]} … {format_signed_percent(interval.high, digits)}"


def format_difference(measured: Difference, verdict: str) -> str:
    """For a figure: the change, or that there is none, and its interval below; one line where all is noise."""
    if tells_nothing(measured.interval):
        return TOO_NOISY
    change = format_signed_percent(measured.change) if measured.is_difference else format_told(verdict)
    return f"{change}\n({format_interval(measured.interval)})"


def format_gib(gib: float | None) -> str:
    if gib is None:
        return "–"
    return f"{gib:,.1f} GiB" if gib >= 10 else f"{gib:.2f} GiB"


def format_quartiles(values: Quartiles | None, show: Callable[[float], str]) -> str:
    return "–" if values is None else f"{show(values.median)} ({show(values.q1)} – {show(values.q3)})"


def format_seconds(seconds: float) -> str:
    if round_digits(seconds) < 1:
        return f"{format_digits(1000 * seconds)} ms"
    return f"{format_digits(seconds)} s" if seconds < 120 else format_hours(seconds / 3600)


def format_milliseconds(seconds: float) -> str:
    """5,676 ms, 49.8 ms, 0.21 ms."""
    milliseconds = 1000 * seconds
    return f"{milliseconds:,.0f} ms" if milliseconds >= 100 else f"{format_digits(milliseconds)} ms"


def format_bytes(size: float) -> str:
    """603 GB, 1.27 MB."""
    size = round_digits(size)
    for unit, letter in ((1e9, "GB"), (1e6, "MB")):
        if size >= unit:
            return f"{format_digits(size / unit)} {letter}"
    return f"{format_digits(size / 1e3)} kB"


def format_tflops(tflops: float) -> str:
    """721.4 TFLOP/s, 18.7 GFLOP/s."""
    unit, scale = unit_of_tflops(tflops)
    return f"{format_digits(scale * tflops, 4 if scale == 1 else 3)} {unit}"


def unit_of_tflops(tflops: float) -> tuple[str, float]:
    """The unit in which such a rate reads best, and how many of it a TFLOP/s is."""
    return ("TFLOP/s", 1.0) if tflops >= 0.1 else ("GFLOP/s", 1000.0)


def format_hours(hours: float) -> str:
    """Minutes, hours, days or years, whichever reads best."""
    if hours < 2:
        return f"{format_digits(60 * hours)} min"
    if hours < 72:
        return f"{format_digits(hours)} h"
    days = hours / 24
    return f"{format_digits(days)} days" if days < 1000 else f"{format_digits(days / 365.25)} years"


def format_count(number: float) -> str:
    """1.29B, 85B, 24.7M."""
    number = round_digits(number)
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{format_digits(number / size)}{letter}"
    return format_digits(number)


def format_range(values: tuple[float, float], show: Callable[[float], str], unit: str) -> str:
    """45–55 %, or 50 % where both ends are the same."""
    low, high = (show(value).replace("-", "−") for value in values)
    joined = low if low == high else f"{low} to {high}" if low.startswith(("+", "−")) else f"{low}–{high}"
    return f"{joined} {unit}".strip()


def format_share(fraction: tuple[float, float]) -> str:
    return format_range(fraction, lambda value: format_digits(100 * value), "%")


def format_quantity(quantity: str, values: tuple[float, float]) -> str:
    """A range of an expectation in its unit."""
    if quantity == "mfu":
        return f"{format_share(values)} MFU"
    if quantity == "tokens_per_s":
        return format_range(values, lambda value: f"{value:,.0f}", "tokens/s")
    if quantity == "memory_gb":
        return format_range(values, lambda value: format_digits(value, 4), "GB")
    if quantity == "hours":
        return (
            f"{format_hours(values[0])} to {format_hours(values[1])}"
            if values[0] < values[1]
            else format_hours(values[0])
        )
    if quantity == "parameters":
        return format_range(values, lambda value: f"{value:,.0f}", "parameters")
    return format_range(values, lambda value: format_digits(value, 4), "")


def format_measured(quantity: str, value: float) -> str:
    """A measured value of the same quantity, with the digits that a measurement has."""
    if quantity == "mfu":
        return f"{100 * value:.1f} % MFU"
    if quantity == "tokens_per_s":
        return f"{format_rate(value)} tokens/s"
    if quantity == "memory_gb":
        return f"{value:.1f} GB"
    return format_quantity(quantity, (value, value))
