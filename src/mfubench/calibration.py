"""Learn from measured runs what the step model gets wrong: one correction factor a term, and an honest error bar.

A measured step is taken as sum over terms of factor x modelled seconds. The factors have a prior (config/
prediction.yaml) and are fitted by regularised least squares of the relative error, so that a term no run tells
anything about stays at its prior. The error bar is what the fit gets wrong about runs it has not seen: each run left
out in turn, and where several models were measured each model left out in turn, whichever is worse.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mfubench.card_rates import Beliefs, Rates, card_rates, load_beliefs
from mfubench.ceilings import Ceilings
from mfubench.config import ConfigError, RunConfig
from mfubench.hardware import find_gpu, is_on
from mfubench.memory import MemoryFit, estimate_memory
from mfubench.run_log import RunLog, read_run_log
from mfubench.step_model import step_terms

HALF_WIDTH = 1.96  # standard deviations in the half-width of a 95 % interval
SMALLEST_FACTOR = 0.2


@dataclass(frozen=True)
class Observation:
    """One measured run: what the model says a step takes, term by term, and what it took."""

    name: str
    gpu: str  # key of the hardware row
    config: RunConfig  # as it ran, not as it was asked for
    rates: Rates
    terms: dict[str, float]  # seconds
    step_s: float
    peak_reserved_gib: float | None


@dataclass(frozen=True)
class Calibration:
    """Correction factors by term, with their uncertainty; without runs the prior itself."""

    factors: dict[str, float]
    covariance: dict[tuple[str, str], float]
    runs: tuple[str, ...]
    gpus: frozenset[str]  # keys of the hardware rows it was learnt on
    left_out_runs: float | None  # root mean square relative error of runs left out one at a time
    left_out_models: float | None  # the same, all runs of a model left out at a time
    memory: MemoryFit

    def factor(self, term: str) -> float:
        return self.factors.get(term, prior(load_beliefs(), term)[0])

    def step_seconds(self, terms: dict[str, float]) -> float:
        return sum(self.factor(term) * seconds for term, seconds in terms.items())

    def error_fraction(self, terms: dict[str, float], gpu_key: str) -> float:
        """Half-width of the 95 % interval of the step time, as a fraction of it."""
        beliefs = load_beliefs()
        variance = beliefs.model_deviation**2
        total = self.step_seconds(terms)
        for one, first in terms.items():
            for other, second in terms.items():
                spread = self.covariance.get((one, other))
                if spread is None:
                    spread = prior(beliefs, one)[1] ** 2 if one == other else 0.0
                variance += spread * first * second / total**2
        seen = max(self.left_out_runs or 0.0, self.left_out_models or 0.0)
        variance = max(variance, seen**2)
        if self.gpus and gpu_key not in self.gpus:
            variance += beliefs.transfer_deviation**2
        return HALF_WIDTH * math.sqrt(variance)


def prior(beliefs: Beliefs, term: str) -> tuple[float, float]:
    """Mean and standard deviation of a term's factor; attention.cudnn is an attention term."""
    belief = beliefs.terms[term.partition(".")[0]]
    return belief.mean, belief.deviation


def uncalibrated() -> Calibration:
    """Datasheet fractions and priors alone."""
    return Calibration({}, {}, (), frozenset(), None, None, MemoryFit())


# --- observations ----------------------------------------------------------------------------------------------------


def read_runs(folders: Sequence[Path]) -> list[RunLog]:
    """Every run JSON below some folders, in the order of their paths. Raises ConfigError where there is none.

    Other JSON files (tables, machine.json, ceilings.json) lie beside them: a run JSON is one with a schema_version and
    a config.
    """
    logs = []
    for folder in folders:
        if not folder.exists():
            raise ConfigError(f"{folder}: no such folder; give one that holds run JSONs")
        paths = [folder] if folder.is_file() else sorted(folder.rglob("*.json"))
        logs += [read_run_log(path) for path in paths if looks_like_run(path)]
    if not logs:
        raise ConfigError(f"{', '.join(map(str, folders))}: holds no run JSON; give a folder with results of a study")
    return logs


def looks_like_run(path: Path) -> bool:
    text = path.read_text(encoding="utf-8", errors="replace")
    return all(key in text for key in ('"schema_version"', '"rank_step_times_s"', '"config"'))


def as_run(log: RunLog) -> RunConfig:
    """The configuration with every setting that fell back replaced by what ran."""
    used = log.used
    changes: dict[str, object] = {
        key: used[key].used for key in ("attention", "compile", "loss", "dtype") if key in used
    }
    changes |= {key: is_on(used[key]) for key in ("cuda_graphs", "tf32", "fp8") if key in used}
    if "parallelism" in used:
        changes["parallelism"] = used["parallelism"].used
    return log.config.model_copy(update=changes)


def observe(logs: Sequence[RunLog], ceilings: Sequence[Ceilings] = ()) -> list[Observation]:
    """The runs that measured steps on GPUs; others (CPU, out of memory, skipped) say nothing about the step's time."""
    observations = []
    for log in logs:
        steps = [step.step_time_s for step in log.measured_steps()]
        if log.status != "ok" or not steps or not log.environment.gpus:
            continue
        config = as_run(log)
        gpu = log.environment.gpus[0].name
        rates = card_rates(gpu, config, ceilings)
        peaks = [memory.peak_reserved_gib for memory in log.memory if memory.peak_reserved_gib is not None]
        observations.append(
            Observation(
                name=log.name,
                gpu=find_gpu(gpu).key,
                config=config,
                rates=rates,
                terms=step_terms(config, rates),
                step_s=float(np.median(steps)),
                peak_reserved_gib=max(peaks, default=None),
            )
        )
    return observations


# --- fit -------------------------------------------------------------------------------------------------------------


def calibrate(observations: Sequence[Observation]) -> Calibration:
    """Fit the factors, and measure by leaving out how far off they are for what was not seen."""
    if not observations:
        return uncalibrated()
    factors, covariance = fit_factors(observations)
    models = sorted({one.config.model.name for one in observations})
    return Calibration(
        factors=factors,
        covariance=covariance,
        runs=tuple(one.name for one in observations),
        gpus=frozenset(one.gpu for one in observations),
        left_out_runs=left_out_error([[one] for one in observations]),
        left_out_models=left_out_error(
            [[one for one in observations if one.config.model.name == model] for model in models]
        ),
        memory=fit_memory(observations),
    )


def fit_factors(observations: Sequence[Observation]) -> tuple[dict[str, float], dict[tuple[str, str], float]]:
    """Maximum a posteriori factors and their covariance.

    Relative residuals (1 - sum of factor x share of the measured step) with deviation `model_deviation`, and a normal
    prior on each factor: one linear system. Factors below SMALLEST_FACTOR, which only noise can give, are cut there.
    """
    beliefs = load_beliefs()
    names = sorted({term for one in observations for term in one.terms})
    design = np.array([[one.terms.get(name, 0.0) / one.step_s for name in names] for one in observations])
    means, deviations = np.array([prior(beliefs, name) for name in names]).T
    precision = design.T @ design / beliefs.model_deviation**2 + np.diag(deviations**-2.0)
    covariance = np.linalg.inv(precision)
    target = design.T @ np.ones(len(observations)) / beliefs.model_deviation**2 + means / deviations**2
    factors = np.maximum(covariance @ target, SMALLEST_FACTOR)
    return (
        {name: float(factor) for name, factor in zip(names, factors, strict=True)},
        {(a, b): float(covariance[i, j]) for i, a in enumerate(names) for j, b in enumerate(names)},
    )


def predicted_seconds(observation: Observation, factors: dict[str, float]) -> float:
    beliefs = load_beliefs()
    return sum(factors.get(term, prior(beliefs, term)[0]) * seconds for term, seconds in observation.terms.items())


def left_out_error(groups: Sequence[Sequence[Observation]]) -> float | None:
    """Root mean square relative error of the step time over groups left out in turn; None with one group."""
    if len(groups) < 2:
        return None
    errors = []
    for position, group in enumerate(groups):
        others = [one for place, rest in enumerate(groups) if place != position for one in rest]
        factors, _ = fit_factors(others)
        errors += [predicted_seconds(one, factors) / one.step_s - 1 for one in group]
    return float(np.sqrt(np.mean(np.square(errors))))


def fit_memory(observations: Sequence[Observation]) -> MemoryFit:
    """Activation factor and reserve from measured peaks: two unknowns with priors, as for the factors of time.

    measured reserved = states + logits + factor x activations + reserve; priors 1 +- 0.15 and 1.5 +- 1 GiB.
    """
    start = MemoryFit()
    rows = []
    for one in observations:
        if one.peak_reserved_gib is not None:
            estimate = estimate_memory(one.config)
            known = estimate.allocated_gib - estimate.activations
            rows.append((estimate.activations, 1.0, one.peak_reserved_gib - known, one.peak_reserved_gib))
    if not rows:
        return start
    activations, ones, target, peaks = np.array(rows).T
    scale = 0.02 * peaks
    design = np.stack([activations / scale, ones / scale], axis=1)
    means, deviations = np.array([1.0, start.reserve_gib]), np.array([0.15, 1.0])
    precision = design.T @ design + np.diag(deviations**-2.0)
    factor, reserve = np.linalg.solve(precision, design.T @ (target / scale) + means / deviations**2)
    residuals = (target - factor * activations - reserve) / peaks
    return MemoryFit(
        activation_factor=float(factor),
        reserve_gib=float(reserve),
        context_gib=start.context_gib,
        error_fraction=max(0.02, HALF_WIDTH * float(np.sqrt(np.mean(residuals**2)))),
        source=f"calibrated on the peaks of {len(rows)} runs",
    )
