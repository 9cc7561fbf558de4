from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from mfubench.analysis.statistics import (
    BELIEVED_FROM,
    CARD_SPREAD,
    ProcessSpread,
    block_length,
    difference,
    joined_half_width,
    median_interval,
    process_spread,
    quartiles,
    student_t,
)

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def autoregressive(n: int, correlation: float, seed: int, deviation: float = 1.0) -> np.ndarray:
    random = np.random.default_rng(seed)
    series = np.empty(n)
    value = random.normal() * deviation / math.sqrt(1 - correlation**2)
    for i in range(n):
        value = correlation * value + random.normal() * deviation
        series[i] = value
    return series


def test_quartiles():
    found = quartiles([4.0, 1.0, 3.0, 2.0, 5.0])
    assert found is not None
    assert (found.q1, found.median, found.q3, found.n) == (2.0, 3.0, 4.0, 5)
    assert found.scaled(2.0).q3 == 8.0
    assert quartiles([]) is None


def test_blocks_grow_with_autocorrelation():
    independent = block_length(autoregressive(400, 0.0, seed=1))
    persistent = block_length(autoregressive(400, 0.8, seed=1))
    assert independent <= 3
    assert persistent >= 10


def test_blocks_of_constant_and_short_series():
    assert block_length([1.0] * 50) == 1
    assert block_length([1.0, 2.0, 3.0]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("correlation", [0.0, 0.6])
def test_interval_of_the_median_covers_the_truth(correlation: float):
    covered = 0
    for seed in range(150):
        interval = median_interval(10 + autoregressive(120, correlation, seed))
        assert interval is not None
        covered += interval.holds(10.0)
    assert 0.86 <= covered / 150 <= 0.995  # 95 % nominally; bootstraps of short dependent series fall a little short


@pytest.mark.slow
def test_ignoring_the_autocorrelation_would_not_cover(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("mfubench.analysis.statistics.block_length", lambda values: 1)
    covered = sum(
        median_interval(10 + autoregressive(120, 0.6, seed)).holds(10.0)  # type: ignore[union-attr]
        for seed in range(150)
    )
    assert covered / 150 < 0.82


def test_too_few_steps_say_nothing():
    assert median_interval([1.0, 2.0, 3.0, 4.0]) is None
    assert difference([[1.0, 2.0]], [[1.0] * 10], None) is None
    assert difference([], [[1.0] * 10], None) is None


def test_student_t_takes_the_row_below():
    assert student_t(1) == 12.706
    assert student_t(11) == 2.228
    assert student_t(1000) == 1.980


def test_process_spread_pools_groups():
    spread = process_spread([[math.exp(0.01), math.exp(-0.01)], [5.0], [math.exp(0.02), math.exp(-0.02), 1.0]])
    assert spread is not None
    assert spread.degrees_of_freedom == 3
    assert spread.log_deviation == pytest.approx(math.sqrt((2e-4 + 8e-4) / 3))
    assert (spread.cases, spread.processes) == (2, 5)
    assert process_spread([[1.0], [2.0]]) is None


def test_a_clear_difference_is_one():
    arm = [1.1 * (1000 + autoregressive(60, 0.3, 1))]
    control = [1000 + autoregressive(60, 0.3, 2)]
    found = difference(arm, control, None)
    assert found is not None and found.is_difference
    assert found.change == pytest.approx(0.1, abs=0.002)
    assert found.basis == "not repeated"


def apart(by: float) -> tuple[list[list[float]], list[list[float]]]:
    """Two processes with steps of 0.05 %, one faster by a fraction."""
    return [1000 * (1 + by) + autoregressive(60, 0.0, 1, 0.5)], [1000 + autoregressive(60, 0.0, 2, 0.5)]


def test_processes_that_differ_more_than_their_steps_show_no_difference():
    arm, control = apart(0.01)
    spread = ProcessSpread(log_deviation=0.005, degrees_of_freedom=4, cases=2, processes=6)
    alone, judged = difference(arm, control, None), difference(arm, control, spread)
    assert alone is not None and judged is not None
    assert alone.is_difference
    assert not judged.is_difference and judged.basis == "repeats"
    half = 2.776 * 0.005 * math.sqrt(2)
    assert math.log1p(judged.interval.high) == pytest.approx(math.log1p(judged.change) + half, rel=0.01)


@pytest.mark.parametrize(("degrees", "is_difference"), [(None, False), (1, False), (5, False), (6, True), (30, True)])
def test_few_repeats_that_agree_make_no_machine_steadier_than_others(degrees: int | None, is_difference: bool):
    """0.3 % between two single processes, which repeats that differ by 0.01 % tell apart once there are enough."""
    spread = ProcessSpread(1e-4, degrees, 1, degrees + 1) if degrees is not None else None
    found = difference(*apart(0.003), spread)
    assert found is not None and found.is_difference is is_difference
    if not is_difference:
        half = 2.042 * CARD_SPREAD.log_deviation * math.sqrt(2)
        assert math.log1p(found.interval.high) == pytest.approx(math.log1p(found.change) + half, rel=0.01)


def test_noise_of_steps_and_an_assumed_spread_add_up():
    """Two processes of one setting, their steps about as noisy as processes differ: 95 % of intervals hold 0."""
    held, pairs = 0, 300
    for seed in range(pairs):
        random = np.random.default_rng(seed)
        levels = random.normal(0, CARD_SPREAD.log_deviation, 2)
        arm, control = (np.exp(level + random.normal(0, 0.0087, 20)) for level in levels)
        found = difference([arm], [control], None)
        assert found is not None
        held += found.interval.holds(0.0)
    assert held / pairs > 0.93  # 0.89 by the wider of the two alone


def test_own_repeats_hold_the_noise_of_their_steps():
    assert joined_half_width(0.003, 0.004, None) == pytest.approx(0.005)
    few, enough = (ProcessSpread(0.002, degrees, 1, degrees + 1) for degrees in (BELIEVED_FROM - 1, BELIEVED_FROM))
    assert joined_half_width(0.003, 0.004, few) == pytest.approx(0.005)
    assert joined_half_width(0.003, 0.004, enough) == 0.004


def test_what_is_known_of_cards_is_what_the_benchmarks_repeated():
    groups = [
        row["tokens_per_s_per_gpu"]["by_repeat"]
        for kind in ("peers", "scaling")
        for file in RESULTS.glob(f"{kind}-*.json")
        for row in json.loads(file.read_text())
        if row["status"] == "ok"
    ]
    found = process_spread(groups)
    assert found is not None and found.degrees_of_freedom >= CARD_SPREAD.degrees_of_freedom
    assert found.log_deviation == pytest.approx(CARD_SPREAD.log_deviation, rel=0.1)


def test_repeats_narrow_the_interval():
    spread = ProcessSpread(0.005, 4, 2, 6)
    single = difference([[1000.0] * 20], [[1000.0] * 20], spread)
    repeated = difference([[1000.0] * 20] * 3, [[1000.0] * 20] * 3, spread)
    assert single is not None and repeated is not None
    assert repeated.interval.high < single.interval.high
    assert (repeated.arm_processes, repeated.control_processes) == (3, 3)


def test_interval_is_never_narrower_than_the_steps_allow():
    noisy = 1000 + autoregressive(30, 0.5, 3, 50.0)
    spread = ProcessSpread(1e-6, 4, 2, 6)
    found = difference([noisy], [noisy[::-1]], spread)
    assert found is not None
    assert found.interval.high - found.interval.low > 0.02
