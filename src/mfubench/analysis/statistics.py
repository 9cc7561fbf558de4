"""How well is a number known? Quartiles, the interval of a median, and the difference of two arms.

Two kinds of noise are kept apart. Within one process, steps follow one another and are autocorrelated, so the interval
of their median comes from a block bootstrap. Between processes, allocation, clocks and placement differ, and no number
of steps shows that: only repeats of whole processes do. On a machine with few repeats or none, the spread known from
other cards is assumed, so that what a mere rerun could show counts as no difference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

RESAMPLES = 2000
SEED = 20_240_607  # of the bootstrap: the same logs give the same tables
CONFIDENCE = 0.95

# Two-sided 95 % points of Student's t by degrees of freedom (any table, such as NIST's handbook, 1.3.6.7.2).
STUDENT_T_95 = (
    (1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (5, 2.571), (6, 2.447), (7, 2.365), (8, 2.306), (9, 2.262),
    (10, 2.228), (12, 2.179), (15, 2.131), (20, 2.086), (30, 2.042), (60, 2.000), (120, 1.980),
)  # fmt: skip

Basis = Literal["repeats", "not repeated"]


@dataclass(frozen=True)
class Quartiles:
    """Median and quartiles of n values, in their unit."""

    median: float
    q1: float
    q3: float
    n: int

    def scaled(self, factor: float) -> Quartiles:
        """The quartiles of the values times a positive factor."""
        return Quartiles(self.median * factor, self.q1 * factor, self.q3 * factor, self.n)


@dataclass(frozen=True)
class Interval:
    """A 95 % interval."""

    low: float
    high: float

    def scaled(self, factor: float) -> Interval:
        return Interval(self.low * factor, self.high * factor)

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True)
class ProcessSpread:
    """Standard deviation of the logarithm of a process's median rate, pooled over all cases that were repeated."""

    log_deviation: float
    degrees_of_freedom: int
    cases: int
    processes: int


# Of an H100 and H200s: 26 settings of mfubench and its peers that ran two or three times within minutes, a minute each
# (benchmarks/results/*.json), pooled as `process_spread` does.
CARD_SPREAD = ProcessSpread(log_deviation=0.0019, degrees_of_freedom=32, cases=26, processes=58)
BELIEVED_FROM = 6  # degrees of freedom: two repeats that agree by chance make no machine steadier than those cards


@dataclass(frozen=True)
class Difference:
    """Arm over control, as a relative change: 0.05 is 5 % more."""

    change: float
    interval: Interval
    basis: Basis
    arm_processes: int
    control_processes: int

    @property
    def is_difference(self) -> bool:
        return not self.interval.holds(0.0)


def quartiles(values: Sequence[float]) -> Quartiles | None:
    """Median and quartiles, or None of nothing."""
    if not len(values):
        return None
    q1, median, q3 = np.percentile(np.asarray(values, dtype=float), [25, 50, 75])
    return Quartiles(float(median), float(q1), float(q3), len(values))


def block_length(values: Sequence[float]) -> int:
    """Length of the bootstrap's blocks for a series.

    For an AR(1) series the best length for overlapping blocks is (sqrt(6) r / (1 - r^2))^(2/3) n^(1/3), r the lag-1
    autocorrelation (Politis and White 2004, doi 10.1081/ETR-120028836, eq. 6 with an AR(1) spectrum). r is taken
    over ranks, so that a single hiccup does not decide it.
    """
    series = np.asarray(values, dtype=float)
    n = len(series)
    if n < 4 or np.ptp(series) == 0:
        return 1
    ranks = np.argsort(np.argsort(series, kind="stable")).astype(float)
    ranks -= ranks.mean()
    correlation = float(np.dot(ranks[1:], ranks[:-1]) / np.dot(ranks, ranks))
    correlation = min(max(correlation, 0.0), 0.95)
    length = (math.sqrt(6) * correlation / (1 - correlation**2)) ** (2 / 3) * n ** (1 / 3)
    return int(min(max(round(length), 1), max(n // 3, 1)))


def bootstrap_medians(values: Sequence[float], resamples: int = RESAMPLES, seed: int = SEED) -> np.ndarray:
    """Medians of a series resampled in circular blocks: shape (resamples,)."""
    series = np.asarray(values, dtype=float)
    n, length = len(series), block_length(values)
    random = np.random.default_rng(seed)
    starts = random.integers(0, n, size=(resamples, math.ceil(n / length)))
    positions = (starts[:, :, None] + np.arange(length)) % n  # (resamples, blocks, length)
    resampled: np.ndarray = np.median(series[positions.reshape(resamples, -1)[:, :n]], axis=1)
    return resampled


def median_interval(values: Sequence[float]) -> Interval | None:
    """95 % interval of the median of autocorrelated values; None of fewer than five, which say nothing of it."""
    if len(values) < 5:
        return None
    low, high = np.percentile(bootstrap_medians(values), [100 * (1 - CONFIDENCE) / 2, 100 * (1 + CONFIDENCE) / 2])
    return Interval(float(low), float(high))


def student_t(degrees_of_freedom: int) -> float:
    """Two-sided 95 % point; between two rows of the table the smaller number of degrees holds."""
    return [point for degrees, point in STUDENT_T_95 if degrees <= degrees_of_freedom][-1]


def process_spread(groups: Sequence[Sequence[float]]) -> ProcessSpread | None:
    """Spread between processes, from groups of rates of identical runs; None where nothing was repeated."""
    repeated = [np.log(np.asarray(group, dtype=float)) for group in groups if len(group) > 1]
    if not repeated:
        return None
    degrees = sum(len(group) - 1 for group in repeated)
    squares = sum(float(((group - group.mean()) ** 2).sum()) for group in repeated)
    return ProcessSpread(math.sqrt(squares / degrees), degrees, len(repeated), sum(len(group) for group in repeated))


def process_half_width(spread: ProcessSpread | None, *processes: int) -> float:
    """Half of the 95 % interval of a mean of that many processes' log rates, or of the ratio of two such means, as far
    as processes differ.

    spread: what this machine's own repeats show; CARD_SPREAD is the least that counts before they are BELIEVED_FROM.
    """
    known = [spread] if spread is not None else []
    if spread is None or spread.degrees_of_freedom < BELIEVED_FROM:
        known.append(CARD_SPREAD)
    widest = max(student_t(one.degrees_of_freedom) * one.log_deviation for one in known)
    return widest * math.sqrt(sum(1 / count for count in processes))


def joined_half_width(of_steps: float, of_processes: float, spread: ProcessSpread | None) -> float:
    """Half of the interval of a log rate that both noises allow, from the half that each allows alone.

    The medians of a machine's own repeats hold the noise of their steps already. What is assumed from other cards does
    not hold this machine's, and independent noises add by their squares.
    """
    believed = spread is not None and spread.degrees_of_freedom >= BELIEVED_FROM
    return max(of_steps, of_processes) if believed else math.hypot(of_steps, of_processes)


def difference(
    arm: Sequence[Sequence[float]], control: Sequence[Sequence[float]], spread: ProcessSpread | None
) -> Difference | None:
    """How much faster the arm's runs are than the control's.

    arm, control: for each whole process, the rates of its measured steps (tokens/s). spread: between processes, on
    this machine, where anything was repeated; the basis says whether. The interval is Student's on the mean of the
    logarithm of the processes' medians, joined with what the steps themselves allow (`joined_half_width`). None where
    an arm has fewer than five steps.
    """
    if not arm or not control or min(len(run) for run in [*arm, *control]) < 5:
        return None
    arm_logs = [math.log(float(np.median(run))) for run in arm]
    control_logs = [math.log(float(np.median(run))) for run in control]
    log_ratio = float(np.mean(arm_logs) - np.mean(control_logs))

    # every process its own seed, or equal series would be resampled alike and their noise cancel
    arm_noise = np.mean([np.log(bootstrap_medians(run, seed=SEED + i)) for i, run in enumerate(arm)], axis=0)
    control_noise = np.mean(
        [np.log(bootstrap_medians(run, seed=SEED - 1 - i)) for i, run in enumerate(control)], axis=0
    )
    low, high = np.percentile(arm_noise - control_noise, [100 * (1 - CONFIDENCE) / 2, 100 * (1 + CONFIDENCE) / 2])
    half = process_half_width(spread, len(arm), len(control))
    below, above = (joined_half_width(max(0.0, side), half, spread) for side in (log_ratio - low, high - log_ratio))
    interval = Interval(math.expm1(log_ratio - below), math.expm1(log_ratio + above))
    basis: Basis = "not repeated" if spread is None else "repeats"
    return Difference(math.expm1(log_ratio), interval, basis, len(arm), len(control))
