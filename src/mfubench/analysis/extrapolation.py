"""From a measured rate to a whole training: iterations, hours, energy, money."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mfubench.analysis.answer import Answer
from mfubench.analysis.expectations import Target
from mfubench.analysis.findings import Findings
from mfubench.analysis.measures import Measures
from mfubench.analysis.statistics import Interval, process_half_width

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
    energy_kwh: float | None  # of the GPUs, by their mean power while they trained
    money: float | None  # GPU-hours times the study's price


def extrapolate(found: Findings, answer: Answer) -> list[Extrapolation]:
    """Every target for the answer's fastest case, by its total tokens over total time."""
    fastest = answer.fastest.runs[0]
    return [extrapolate_run(found, answer.fastest.case, fastest, target) for target in targets_of(found, fastest)]


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


def extrapolate_run(found: Findings, case: str, judged: Measures, target: Target) -> Extrapolation:
    world_size = judged.log.config.world_size
    assert judged.total_rate is not None
    hours = target.tokens / (judged.total_rate * world_size) / 3600
    gpu_hours = hours * world_size
    power_w = mean_power_w(judged)
    price = found.study.declared.price_per_gpu_hour
    uncertainty = relative_uncertainty(found, judged)
    return Extrapolation(
        case=case,
        target=target,
        world_size=world_size,
        iterations=target.tokens / judged.log.config.tokens_per_step,
        hours=hours,
        hours_interval=Interval(hours * math.exp(-uncertainty), hours * math.exp(uncertainty)),
        gpu_hours=gpu_hours,
        energy_kwh=power_w * gpu_hours / 1000 if power_w is not None else None,
        money=price * gpu_hours if price is not None and judged.log.environment.device == "cuda" else None,
    )


def relative_uncertainty(found: Findings, judged: Measures) -> float:
    """Half-width of the 95 % interval of the rate's logarithm: of its steps, or of processes where that is more."""
    halves = [process_half_width(found.spread, 1)]
    if judged.rate_interval is not None and judged.tokens_per_s_per_gpu is not None:
        halves.append(math.log(judged.rate_interval.high / judged.rate_interval.low) / 2)
    return max(halves)


def mean_power_w(judged: Measures) -> float | None:
    """Mean over the GPUs of the median power while steps ran, W; None where nobody sampled it."""
    cards = (judged.log.telemetry or {}).get("gpus") or []
    medians = [card["power_w"]["median"] for card in cards if card.get("power_w")]
    return sum(medians) / len(medians) if medians else None
