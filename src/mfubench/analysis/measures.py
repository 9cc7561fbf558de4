"""What one run says: rates, MFU by every convention, memory, loss, stability. All from its log and the card's peak."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mfubench.analysis.statistics import Interval, Quartiles, median_interval, quartiles
from mfubench.flops import CONVENTIONS, FlopTerms, executed_flops_per_token, flops_per_token
from mfubench.hardware import NoPeak, Peak, arithmetic_of_run, peak_for_run, rank_share, used_of
from mfubench.memory_search import memory_gib, peak_memory_gib
from mfubench.run_log import RunLog, Step

if TYPE_CHECKING:
    from mfubench.ceilings import Ceilings

LOSS_STEPS = 20  # last steps whose median is the final loss; of a short run its last quarter
FINAL_LOSS = (
    f"the median of the last {LOSS_STEPS} steps, in a run of less than {4 * LOSS_STEPS} of its last quarter"  # in words
)
OUTLIER_SHARE = 0.02  # a step counts as an outlier only when it is 2 % slower than the median, too


@dataclass(frozen=True)
class Stability:
    """How even the steps of a run are."""

    spread: float  # (q3 - q1) / median of the step times
    outliers: int  # steps far above the rest (`is_outlier`)
    steps: int
    slowest: float  # slowest step over the median
    rank_skew: float | None  # slowest rank's median step time over the fastest's, minus 1


@dataclass(frozen=True)
class Measures:
    """Everything a table or figure shows of a run that was measured. Rates are per GPU, or per process on a CPU."""

    log: RunLog
    rates: tuple[float, ...]  # tokens/s/GPU of each measured step
    tokens_per_s_per_gpu: Quartiles | None
    rate_interval: Interval | None  # 95 %, of the median
    total_rate: float | None  # all measured tokens over all measured time, tokens/s/GPU
    step_time_s: Quartiles | None
    data_share: float | None  # of the step time: the host's for batches, during which a GPU computes
    peak: Peak | None
    peak_problem: str | None  # why there is no peak, and so no MFU
    mfu: dict[str, Quartiles]  # palm, matmul, causal, hfu and mamfu, as far as known; fractions
    peak_memory_gib: float | None  # fullest rank: reserved on its card, resident set on a CPU
    peak_allocated_gib: float | None  # fullest rank, CUDA only: what tensors took at once
    capacity_gib: float | None
    final_loss: float | None
    stability: Stability | None

    @property
    def tokens_per_s(self) -> float | None:
        """Median over all GPUs."""
        if self.tokens_per_s_per_gpu is None:
            return None
        return self.tokens_per_s_per_gpu.median * self.log.config.world_size

    @property
    def headline_mfu(self) -> float | None:
        return self.mfu["palm"].median if "palm" in self.mfu else None


def measure(log: RunLog, ceilings: Ceilings | None) -> Measures:
    """Judge one run. A card without a known peak costs the MFU, not the rest."""
    steps = log.measured_steps()
    rates = step_rates(steps, log.config.world_size)
    rate = quartiles(rates)
    seconds = sum(step.step_time_s for step in steps)
    tokens = sum(step.tokens for step in steps)
    # without a rate there is nothing to divide, and a run that ended early may not say what it computed in
    peak, peak_problem = peak_of(log, ceilings) if rate is not None else (None, None)
    matmul_tflops = matmul_ceiling(log, ceilings) if rate is not None else None
    return Measures(
        log=log,
        rates=rates,
        tokens_per_s_per_gpu=rate,
        rate_interval=median_interval(rates),
        total_rate=tokens / seconds / log.config.world_size if seconds else None,
        step_time_s=quartiles([step.step_time_s for step in steps]),
        data_share=sum(step.data_time_s for step in steps) / seconds if seconds else None,
        peak=peak,
        peak_problem=peak_problem,
        mfu=mfu_by_convention(log, rate, peak, matmul_tflops),
        peak_memory_gib=peak_memory_gib(log),
        peak_allocated_gib=max((m.peak_allocated_gib for m in log.memory if m.peak_allocated_gib), default=None),
        capacity_gib=memory_gib(log) if log.memory else None,
        final_loss=final_loss(log.steps),
        stability=stability_of(log),
    )


def step_rates(steps: Sequence[Step], world_size: int) -> tuple[float, ...]:
    """tokens/s/GPU of each step."""
    return tuple(step.tokens / step.step_time_s / world_size for step in steps if step.step_time_s > 0)


def terms_of(log: RunLog) -> FlopTerms | None:
    return FlopTerms(**log.flop_terms.model_dump()) if log.flop_terms else None


def mfu_factor(log: RunLog, convention: str, peak_tflops: float) -> float | None:
    """MFU per token/s/GPU: FLOPs of a token by the convention over the peak."""
    terms = terms_of(log)
    if terms is None:
        return None
    if convention == "hfu":
        flops = executed_flops_per_token(terms, log.config, used_of(log, "weight_gradient"))
    else:
        flops = flops_per_token(terms, convention)  # type: ignore[arg-type]
    return flops / (peak_tflops * 1e12)


def mfu_by_convention(
    log: RunLog, rate: Quartiles | None, peak: Peak | None, matmul_tflops: float | None
) -> dict[str, Quartiles]:
    """Quartiles of every ratio that can be known: `mamfu` needs the measured matmul rate, the others the peak."""
    if rate is None or log.flop_terms is None:
        return {}
    factors: dict[str, float | None] = {}
    if peak is not None:
        factors = {convention: mfu_factor(log, convention, peak.tflops) for convention in (*CONVENTIONS, "hfu")}
    if matmul_tflops is not None:
        factors["mamfu"] = mfu_factor(log, "causal", matmul_tflops)
    return {convention: rate.scaled(factor) for convention, factor in factors.items() if factor is not None}


def peak_of(log: RunLog, ceilings: Ceilings | None) -> tuple[Peak | None, str | None]:
    """The peak of a run's card in its arithmetic, or why there is none."""
    try:
        return peak_for_run(log, ceilings), None
    except NoPeak as error:
        return None, str(error)


def matmul_ceiling(log: RunLog, ceilings: Ceilings | None) -> float | None:
    """Matmul rate measured on this very machine in this run's arithmetic, TFLOP/s of a rank; None where it was not."""
    if ceilings is None or ceilings.device != log.environment.device:
        return None
    rate = ceilings.large_matmul_tflops(arithmetic_of_run(log))
    return rate * rank_share(log, ceilings) if rate is not None else None


def final_loss(steps: Sequence[Step]) -> float | None:
    """Median training loss of the last steps; None where there are none or the last is not finite."""
    losses = [step.loss for step in steps[-max(1, min(LOSS_STEPS, len(steps) // 4)) :]]
    if not losses or losses[-1] is None:
        return None
    return float(np.median([loss for loss in losses if loss is not None]))


def is_outlier(step_time_s: float, times: Quartiles) -> bool:
    """Whether a step is far above the rest, whose times these are: beyond q3 + 3 (q3 - q1) and 2 % above the median."""
    return step_time_s > max(times.q3 + 3 * (times.q3 - times.q1), times.median * (1 + OUTLIER_SHARE))


def stability_of(log: RunLog) -> Stability | None:
    """Evenness of the measured steps, by rank 0's clock, and of the ranks among themselves."""
    positions = [i for i, step in enumerate(log.steps) if step.phase == "measured"]
    times = quartiles([log.steps[i].step_time_s for i in positions])
    if times is None:
        return None
    seconds = [log.steps[i].step_time_s for i in positions]
    ranks = [
        float(np.median([rank[i] for i in positions])) for rank in log.rank_step_times_s if len(rank) == len(log.steps)
    ]
    return Stability(
        spread=(times.q3 - times.q1) / times.median,
        outliers=sum(is_outlier(second, times) for second in seconds),
        steps=len(seconds),
        slowest=max(seconds) / times.median,
        rank_skew=max(ranks) / min(ranks) - 1 if len(ranks) > 1 and min(ranks) > 0 else None,
    )
