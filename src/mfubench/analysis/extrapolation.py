"""From a measured rate to a whole training: iterations, hours, energy, money."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, geometric_mean

from mfubench.analysis.answer import Answer, Candidate
from mfubench.analysis.expectations import Target
from mfubench.analysis.findings import Findings
from mfubench.analysis.measures import Measures
from mfubench.analysis.statistics import Interval, joined_half_width, process_half_width

TOKENS_PER_PARAMETER = 20  # compute-optimal rule of thumb (Hoffmann et al. 2022, arXiv 2203.15556, table 3)


@dataclass(frozen=True)
class Extrapolation:
    """One case trained on so many tokens. The interval is that of the rate; evaluations and checkpoints come on top."""

    case: str
    target: Target
    world_size: int
    iterations: float
    hours: float
    hours_interval: Interval
    gpu_hours: float
    energy_kwh: float | None  # of the GPUs, by their median power while they trained
    money: float | None  # GPU-hours times the study's price


def extrapolate(found: Findings, answer: Answer) -> list[Extrapolation]:
    """Every target for the answer's fastest case, by its total tokens over total time."""
    fastest = answer.fastest
    return [extrapolate_case(found, fastest, target) for target in targets_of(found, fastest.runs[0])]


def targets_of(found: Findings, judged: Measures) -> list[Target]:
    """The targets of the model's expectations, or the usual ones."""
    if found.expectations is not None and found.expectations.model == judged.log.config.model.name:
        return list(found.expectations.targets)
    targets = [
        Target(tokens=6_000_000_000, label="one pass over a text of 6B tokens"),
        Target(tokens=85_000_000_000, label="85B tokens"),
    ]
    if judged.log.parameters is not None:
        tokens = TOKENS_PER_PARAMETER * judged.log.parameters.total
        label = f"compute-optimal by rule of thumb: {TOKENS_PER_PARAMETER} tokens a parameter"
        targets.append(Target(tokens=tokens, label=label))
    return targets


def extrapolate_case(found: Findings, candidate: Candidate, target: Target) -> Extrapolation:
    """By the geometric mean of the processes that ran the case, as its rate is stated."""
    config, device = candidate.config, candidate.runs[0].log.environment.device
    rate = geometric_mean(run.total_rate for run in candidate.runs if run.total_rate is not None)
    hours = target.tokens / (rate * config.world_size) / 3600
    gpu_hours = hours * config.world_size
    powers_w = [power_w for run in candidate.runs if (power_w := power_of_a_gpu_w(run)) is not None]
    price = found.study.declared.price_per_gpu_hour
    uncertainty = relative_uncertainty(found, candidate.runs)
    return Extrapolation(
        case=candidate.case,
        target=target,
        world_size=config.world_size,
        iterations=target.tokens / config.tokens_per_step,
        hours=hours,
        hours_interval=Interval(hours * math.exp(-uncertainty), hours * math.exp(uncertainty)),
        gpu_hours=gpu_hours,
        energy_kwh=fmean(powers_w) * gpu_hours / 1000 if powers_w else None,
        money=price * gpu_hours if price is not None and device == "cuda" else None,
    )


def relative_uncertainty(found: Findings, runs: Sequence[Measures]) -> float:
    """Half-width of the 95 % interval of the logarithm of the runs' mean rate, by their steps and by processes."""
    intervals = [run.rate_interval for run in runs if run.rate_interval is not None]
    of_steps = math.hypot(*(math.log(one.high / one.low) / 2 for one in intervals)) / max(1, len(intervals))
    return joined_half_width(of_steps, process_half_width(found.spread, len(runs)), found.spread)


def power_of_a_gpu_w(judged: Measures) -> float | None:
    """Mean over the GPUs of the median power while steps ran, W; None where nobody sampled it."""
    telemetry = judged.log.telemetry
    spreads = [card.get("power_w") for card in telemetry.get("gpus", [])] if telemetry is not None else []
    medians = [spread["median"] for spread in spreads if spread is not None]
    return sum(medians) / len(medians) if medians else None
