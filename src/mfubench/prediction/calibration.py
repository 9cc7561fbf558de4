"""Learn from measured runs what the step model gets wrong: one correction factor a term, and an honest error bar.

A measured step is taken as sum over terms of factor x modelled seconds. The factors have a prior (config/
prediction.yaml) and are fitted by regularised least squares of the relative error, so that a term no run tells
anything about stays at its prior. The error bar is what the fit gets wrong about runs it has not seen: each run left
out in turn with its repeats, and where several models were measured each model left out in turn, whichever is worse.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mfubench.ceilings import Ceilings
from mfubench.config import RunConfig
from mfubench.prediction import measured_runs
from mfubench.prediction.card_rates import Beliefs, load_beliefs
from mfubench.prediction.measured_runs import MemoryObservation, Observation
from mfubench.prediction.memory import MemoryFit, estimate_memory

HALF_WIDTH = 1.96  # standard deviations in the half-width of a 95 % interval
SMALLEST_FACTOR = 0.2


@dataclass(frozen=True)
class Calibration:
    """Correction factors by term, with their uncertainty; without runs the prior itself."""

    factors: dict[str, float]
    covariance: dict[tuple[str, str], float]
    runs: tuple[str, ...]
    gpus: frozenset[str]  # keys of the hardware rows it was learnt on
    left_out_runs: float | None  # root mean square relative error of runs left out one at a time, with their repeats
    left_out_models: float | None  # the same, all runs of a model left out at a time
    memory: MemoryFit = field(default_factory=MemoryFit)
    seen: frozenset[str] = frozenset()  # what the runs were, as `traits` says it
    ceilings: tuple[Ceilings, ...] = ()  # that the modelled seconds of the runs were counted with

    def factor(self, term: str) -> float:
        return self.factors.get(term, prior(load_beliefs(), term)[0])

    def step_seconds(self, terms: dict[str, float]) -> float:
        return sum(self.factor(term) * seconds for term, seconds in terms.items())

    def unseen(self, config: RunConfig) -> list[str]:
        """What a run is that none of the measured ones was. Other models count while none was left out to see."""
        if not self.runs:
            return []
        known = self.seen if self.left_out_models is None else self.seen | {config.model.name}
        return [trait for trait in traits(config) if trait not in known]

    def error_fraction(self, terms: dict[str, float], gpu_key: str, config: RunConfig) -> float:
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
        variance += len(self.unseen(config)) * beliefs.unseen_deviation**2
        return HALF_WIDTH * math.sqrt(variance)


def traits(config: RunConfig) -> list[str]:
    """What may make a correction learnt on other runs hold less well."""
    kinds = [config.model.name]
    if config.world_size > 1:
        kinds += ["several cards", config.parallelism]
    if config.nnodes > 1:
        kinds.append("several nodes")
    return kinds


def prior(beliefs: Beliefs, term: str) -> tuple[float, float]:
    """Mean and standard deviation of a term's factor; attention.cudnn, which has no entry, is an attention term."""
    belief = beliefs.terms.get(term) or beliefs.terms[term.partition(".")[0]]
    return belief.mean, belief.deviation


def uncalibrated() -> Calibration:
    """Datasheet fractions and priors alone."""
    return Calibration({}, {}, (), frozenset(), None, None)


# --- fit -------------------------------------------------------------------------------------------------------------


def calibrate_on(folders: Sequence[Path], ceilings: Sequence[Ceilings] = ()) -> Calibration:
    """Calibrate on the results of studies: run JSONs, memory searches and ceilings below some folders."""
    logs = measured_runs.read_runs(folders)
    ceilings = [*measured_runs.read_all_ceilings(folders), *ceilings]
    peaks = measured_runs.observe_memory(logs) + measured_runs.read_memory_searches(folders)[0]
    return calibrate(measured_runs.observe(logs, ceilings), peaks, ceilings)


@functools.cache
def shipped_calibration() -> Calibration:
    """Calibrated on the measured studies that ship with the project; uncalibrated where there are none."""
    folders = [measured_runs.REFERENCE]
    if not measured_runs.REFERENCE.is_dir() or not measured_runs.hold_runs(folders):
        return uncalibrated()
    return calibrate_on(folders)


def calibrate(
    observations: Sequence[Observation],
    peaks: Sequence[MemoryObservation] = (),
    ceilings: Sequence[Ceilings] = (),
) -> Calibration:
    """Fit the factors, and measure by leaving out how far off they are for what was not seen."""
    if not observations:
        return uncalibrated()
    factors, covariance = fit_factors(observations)
    models = sorted({one.config.model.name for one in observations})
    by_model = [[one for one in observations if one.config.model.name == model] for model in models]
    return Calibration(
        factors=factors,
        covariance=covariance,
        runs=tuple(one.name for one in observations),
        gpus=frozenset(one.gpu for one in observations),
        left_out_runs=left_out_error(group_repeats(observations)),
        left_out_models=left_out_error(by_model),
        memory=fit_memory(peaks),
        seen=frozenset(trait for one in observations for trait in traits(one.config)),
        ceilings=tuple(ceilings),
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


def group_repeats(observations: Sequence[Observation]) -> list[list[Observation]]:
    """The runs, those together that the model cannot tell apart."""
    groups: list[list[Observation]] = []
    for one in observations:
        found = next((group for group in groups if one.repeats(group[0])), None)
        if found is None:
            groups.append([one])
        else:
            found.append(one)
    return groups


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


def fit_memory(peaks: Sequence[MemoryObservation]) -> MemoryFit:
    """Activation factor and reserve from measured peaks: of what was reserved and, where recorded, of tensors."""
    start = MemoryFit()
    if not peaks:
        return start
    factor, reserve, residuals = fit_peaks(peaks, [one.peak_reserved_gib for one in peaks], start.reserve_gib)
    tensor_factor, workspace = factor, reserve
    if tensors := [one for one in peaks if one.peak_allocated_gib is not None]:
        allocated = [one.peak_allocated_gib or 0.0 for one in tensors]
        tensor_factor, workspace, _ = fit_peaks(tensors, allocated, start.workspace_gib)
    return MemoryFit(
        activation_factor=factor,
        reserve_gib=reserve,
        context_gib=start.context_gib,
        error_fraction=max(0.02, HALF_WIDTH * float(np.sqrt(np.mean(np.square(residuals))))),
        source=f"calibrated on the peaks of {len(peaks)} runs and trials",
        tensor_activation_factor=tensor_factor,
        workspace_gib=workspace,
    )


def fit_peaks(
    peaks: Sequence[MemoryObservation], measured_gib: Sequence[float], rest_gib: float
) -> tuple[float, float, np.ndarray]:
    """(factor, rest, relative residuals): measured = states + logits + factor x activations + rest.

    Two unknowns with priors, as for the factors of time: 1 +- 0.15 and `rest_gib` +- 1 GiB, residuals of 2 %.
    """
    estimates = [estimate_memory(one.config, one.capacity_gib) for one in peaks]
    measured = np.array(measured_gib)
    activations = np.array([estimate.activations for estimate in estimates])
    target = measured - np.array([estimate.allocated_gib - estimate.activations for estimate in estimates])
    scale = 0.02 * measured
    design = np.stack([activations / scale, 1 / scale], axis=1)
    means, deviations = np.array([1.0, rest_gib]), np.array([0.15, 1.0])
    precision = design.T @ design + np.diag(deviations**-2.0)
    factor, rest = np.linalg.solve(precision, design.T @ (target / scale) + means / deviations**2)
    return float(factor), float(rest), (target - factor * activations - rest) / measured
