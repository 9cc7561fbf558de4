"""The answer: which settings to train with on this machine, and the command that uses them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any

from pydantic import BaseModel

from mfubench.analysis.effects import processes
from mfubench.analysis.findings import Findings
from mfubench.analysis.measures import Measures, Stability
from mfubench.analysis.statistics import Difference, difference
from mfubench.analysis.study import base_name
from mfubench.analysis.units import format_percent, tells_nothing
from mfubench.config import ModelConfig, RunConfig
from mfubench.presets import load_model, preset_names
from mfubench.words import number_of

STAGES_OUTSIDE = ("smoke", "training")  # a gate, and a run with evaluations and checkpoints in between
NEAR_FASTEST = 0.10  # only settings this close to the fastest are called stable or lean

# Of a run by hand: what makes the speed. How long it runs, saves and evaluates is the user's to say.
COMMAND_KEYS = (
    *("seq_len", "micro_batch_size", "gradient_accumulation_steps", "world_size", "nnodes", "parallelism"),
    *("dtype", "tf32", "fp8", "attention", "loss", "compile", "compile_mode", "compile_backend", "cuda_graphs"),
    *("activation_checkpointing", "kernels", "communication", "loader"),
)


@dataclass(frozen=True)
class Candidate:
    """One case with its repeats."""

    case: str
    runs: tuple[Measures, ...]  # that ended well
    failures: int  # repeats that did not
    tokens_per_s: float  # over all GPUs, geometric mean of the processes' medians
    against_fastest: Difference | None  # of the rate over all GPUs; None for the fastest itself

    @property
    def config(self) -> RunConfig:
        return self.runs[0].log.config

    @property
    def peak_memory_gib(self) -> float | None:
        peaks = [run.peak_memory_gib for run in self.runs if run.peak_memory_gib is not None]
        return max(peaks, default=None)

    @property
    def stability(self) -> Stability | None:
        """Of the least stable of its runs."""
        found = [run.stability for run in self.runs if run.stability is not None]
        return max(found, key=lambda stability: (stability.outliers / stability.steps, stability.spread), default=None)

    @property
    def is_as_fast(self) -> bool:
        """Not told apart from the fastest."""
        return self.against_fastest is None or not self.against_fastest.is_difference

    @property
    def is_too_noisy(self) -> bool:
        """Nothing can be told of it against the fastest."""
        change = self.against_fastest
        return change is not None and not change.is_difference and tells_nothing(change.interval)

    @property
    def is_near(self) -> bool:
        """Known to be about as fast as the fastest, whichever of the two is faster."""
        change = self.against_fastest
        return change is not None and -NEAR_FASTEST <= change.interval.low <= change.interval.high <= NEAR_FASTEST

    @property
    def impossible_mfu(self) -> float | None:
        """MFU (palm) above 100 % of the peak; None of a possible one.

        By the palm convention a long context may honestly have more than a datasheet's peak: causal kernels skip half
        of its attention.
        """
        run = self.runs[0]
        if run.peak is None or "palm" not in run.mfu:
            return None
        judged = run.mfu["palm" if run.peak.measured else "causal"]
        return run.mfu["palm"].median if judged.median > 1 else None


@dataclass(frozen=True)
class Answer:
    """For one model on this machine; candidates by rate, the fastest first."""

    model: str
    candidates: tuple[Candidate, ...]
    fastest: Candidate
    most_stable: Candidate | None  # of those near the fastest; None where these are one setting, with nothing beside it
    least_memory: Candidate | None

    @property
    def as_fast(self) -> list[Candidate]:
        return [candidate for candidate in self.candidates[1:] if candidate.is_as_fast]

    @property
    def doubt(self) -> str | None:
        """Why no setting can be named the fastest, as words about the one with the highest rate; None where one can.

        Settings that are known to be about as fast as one another leave no doubt: any of them will do.
        """
        others = self.candidates[1:]
        noisy = sum(candidate.is_too_noisy for candidate in others)
        reasons = []
        if len(self.as_fast) == len(others) and not all(candidate.is_near for candidate in others):
            reasons.append(f"is not told apart from {self.words_of_others(noisy)}")
        elif noisy > len(others) / 2:
            reasons.append(f"is too noisy to be compared with {noisy} of {len(others)} other settings")
        if (mfu := self.fastest.impossible_mfu) is not None:
            peak = self.fastest.runs[0].peak
            limit = "above the matmul measured here" if peak and peak.measured else "which no run can reach"
            reasons.append(f"has an MFU of {format_percent(mfu)}, {limit}")
        return " and ".join(reasons) or None

    def words_of_others(self, noisy: int) -> str:
        count = len(self.candidates) - 1
        words = f"any of the {count} other settings" if count > 1 else "the only other setting"
        return f"{words} ({noisy} of {number_of(count, 'comparison')} too noisy to tell)" if noisy else words


def answers(found: Findings) -> list[Answer]:
    """One answer for each model that was measured beyond its smoke test."""
    models = dict.fromkeys(judged.log.config.model.name for judged in found.good.values())
    return [answer for model in models if (answer := answer_for(found, model)) is not None]


def answer_for(found: Findings, model: str) -> Answer | None:
    cases = dict.fromkeys(
        base_name(name)
        for name, judged in found.good.items()
        if judged.log.config.model.name == model and judged.log.config.stage not in STAGES_OUTSIDE
    )
    groups = {case: processes(found.good, case) for case in cases}
    if not groups:
        return None
    order = sorted(groups, key=lambda case: total_rate(groups[case]), reverse=True)
    candidates = tuple(candidate_of(found, case, groups[case], groups[order[0]]) for case in order)
    fastest = candidates[0]
    near = [item for item in candidates if item.tokens_per_s >= (1 - NEAR_FASTEST) * fastest.tokens_per_s]
    lean = [item for item in near if item.peak_memory_gib is not None]
    return Answer(
        model=model,
        candidates=candidates,
        fastest=fastest,
        most_stable=min(near, key=unsteadiness) if len({command_for(item.config) for item in near}) > 1 else None,
        least_memory=min(lean, key=lambda item: item.peak_memory_gib or 0.0, default=None),
    )


def candidate_of(found: Findings, case: str, runs: list[Measures], fastest: list[Measures]) -> Candidate:
    failures = sum(base_name(name) == case and log.status != "ok" for name, log in found.study.runs.items())
    failures += sum(base_name(name) == case for name in found.study.failures)
    against = None if runs is fastest else difference(total_rates(runs), total_rates(fastest), found.spread)
    return Candidate(case, tuple(runs), failures, total_rate(runs), against)


def total_rates(runs: list[Measures]) -> list[list[float]]:
    """tokens/s over all GPUs of each step, for each process."""
    return [[rate * run.log.config.world_size for rate in run.rates] for run in runs]


def total_rate(runs: list[Measures]) -> float:
    return geometric_mean(run.tokens_per_s for run in runs if run.tokens_per_s is not None)


def unsteadiness(candidate: Candidate) -> tuple[float, float, float]:
    """Failures first, then the share of outlying steps, then the spread of the rest."""
    stability = candidate.stability
    if stability is None:
        return (candidate.failures, 1.0, 1.0)
    return (candidate.failures, stability.outliers / stability.steps, stability.spread)


def command_for(config: RunConfig) -> str:
    """`mfubench train MODEL key=value …` with every setting of the run that is not its default."""
    values = config.model_dump(mode="json")
    preset, changes = model_changes(config.model)
    words = [f"mfubench train {preset} --data resources/datasets/{config.dataset}", f"max_iters={config.max_iters}"]
    words += [f"model.{key}={as_yaml(value)}" for key, value in changes.items()]
    for key in COMMAND_KEYS:
        default = RunConfig.model_fields[key].get_default()
        if isinstance(default, BaseModel):
            defaults = default.model_dump(mode="json")
            changed = {name: value for name, value in values[key].items() if value != defaults[name]}
            words += [f"{key}.{name}={as_yaml(value)}" for name, value in changed.items()]
        elif values[key] != default:
            words.append(f"{key}={as_yaml(values[key])}")
    return " ".join(words)


def model_changes(model: ModelConfig) -> tuple[str, dict[str, Any]]:
    """The preset that a model is made from most shortly, the one of its name where there is one, and what differs."""
    names = preset_names()
    values = model.model_dump(mode="json")

    def differing(preset: str) -> dict[str, Any]:
        there = load_model(preset).model_dump(mode="json")
        return {key: value for key, value in values.items() if value != there[key]}

    nearest = model.name if model.name in names else min(names, key=lambda preset: len(differing(preset)))
    return nearest, differing(nearest)


def as_yaml(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
