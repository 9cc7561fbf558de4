"""When a measurement has seen enough: warm-up found in the step times themselves, then a confidence interval."""

from __future__ import annotations

import numpy as np

RESAMPLES = 1000


def warmup_length(times: np.ndarray) -> int:
    """Steps to leave out at the start, at most half: MSER (White, "An effective truncation heuristic", 1997).

    The truncation whose remainder has the smallest standard error of the mean.
    """
    if len(times) < 4:
        return 0
    candidates = range(len(times) // 2 + 1)
    errors = [times[start:].var() / (len(times) - start) for start in candidates]
    return int(np.argmin(errors))


def bootstrap_interval(times: np.ndarray, seed: int = 0) -> tuple[float, float]:
    """95 % interval of the median of autocorrelated times, by a circular block bootstrap (Politis and Romano, 1992)."""
    count = len(times)
    length = max(1, round(count ** (1 / 3)))
    generator = np.random.default_rng(seed)
    starts = generator.integers(0, count, (RESAMPLES, -(-count // length)))
    positions = (starts[:, :, None] + np.arange(length)).reshape(RESAMPLES, -1)[:, :count] % count
    low, high = np.quantile(np.median(times[positions], axis=1), (0.025, 0.975))
    return float(low), float(high)


def enough(times: list[float], min_steps: int, tolerance: float) -> tuple[int, str] | None:
    """Warm-up steps and a sentence once the median of `times` is known to +- `tolerance`; None while it is not."""
    series = np.asarray(times)
    warmup = warmup_length(series)
    measured = series[warmup:]
    if len(measured) < min_steps:
        return None
    low, high = bootstrap_interval(measured)
    median = float(np.median(measured))
    half_width = (high - low) / 2 / median
    if half_width > tolerance:
        return None
    return warmup, (
        f"after {len(measured)} measured steps the median step time {median:.6f} s is known to +-{half_width:.2%} "
        f"(95 %, block bootstrap; asked for +-{tolerance:.2%})"
    )
