"""Predict a run on cards that are not at hand: step time, tokens/s, MFU and memory, each with an error bar."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from mfubench.ceilings import Ceilings
from mfubench.config import ConfigError, ModelConfig, RunConfig, parse
from mfubench.flops import CONVENTIONS, flop_terms, flops_per_token, mfu
from mfubench.hardware import find_gpu
from mfubench.prediction.calibration import Calibration, fit_factors, predicted_seconds, uncalibrated
from mfubench.prediction.card_rates import Rates, card_rates
from mfubench.prediction.measured_runs import Observation
from mfubench.prediction.memory import MemoryEstimate, estimate_memory, largest_micro_batch
from mfubench.prediction.resolved_settings import resolve_settings
from mfubench.prediction.step_model import step_terms
from mfubench.tune.search import GAIN, LARGEST_MICRO_BATCH

ERROR_BAR = "half-width of the 95 % interval"


@dataclass(frozen=True)
class Prediction:
    """What a run will do on a card. Fractions of error are half-widths of 95 % intervals."""

    gpu: str
    config: RunConfig  # with `auto` replaced by what it is taken to mean
    step_time_s: float
    error_fraction: float  # of step time, tokens/s and MFU
    tokens_per_s: float  # all cards
    tokens_per_s_per_gpu: float
    mfu: dict[str, float]  # by convention, of the dense peak
    peak_tflops: float
    terms_s: dict[str, float]  # corrected seconds a step by term; their sum is step_time_s
    memory: MemoryEstimate
    least_memory_gib: (
        float  # tensors, workspaces and CUDA's own: what must fit once the allocator gives its blocks back
    )
    memory_error_fraction: float
    memory_capacity_gib: float
    largest_micro_batch_size: int  # that may fit: by tensors alone, without the count's error
    calibrated: bool
    basis: str  # a sentence: what the numbers stand on
    network_gb_s: float | None  # that was taken, between nodes, a card; None on one node
    micro_batch_basis: str = "given"  # in words, how the micro-batch was chosen

    @property
    def fits(self) -> bool:
        """Its tensors do; what the allocator would rather hold besides may not."""
        return self.config.micro_batch_size <= self.largest_micro_batch_size

    @property
    def fits_surely(self) -> bool:
        """With the error of the memory model to spare."""
        return self.memory.total_gib * (1 + self.memory_error_fraction) <= self.memory_capacity_gib

    def to_dict(self) -> dict[str, Any]:
        """Plain data, units in the keys."""
        return {
            "gpu": self.gpu,
            "network_gb_s": self.network_gb_s,
            "config": self.config.model_dump(mode="json"),
            "step_time_s": self.step_time_s,
            "error_fraction": self.error_fraction,
            "error_bar": ERROR_BAR,
            "tokens_per_s": self.tokens_per_s,
            "tokens_per_s_per_gpu": self.tokens_per_s_per_gpu,
            "mfu": self.mfu,
            "peak_tflops": self.peak_tflops,
            "terms_s": self.terms_s,
            "memory_gib": {**asdict(self.memory), "total": self.memory.total_gib, "least": self.least_memory_gib},
            "memory_error_fraction": self.memory_error_fraction,
            "memory_capacity_gib": self.memory_capacity_gib,
            "fits": self.fits,
            "fits_surely": self.fits_surely,
            "largest_micro_batch_size": self.largest_micro_batch_size,
            "micro_batch_basis": self.micro_batch_basis,
            "calibrated": self.calibrated,
            "basis": self.basis,
        }


def plan_run(model: ModelConfig, gpus: int, **settings: Any) -> RunConfig:
    """The RunConfig of a run that exists only on paper: bf16, compiled, ddp over `gpus`, `settings` on top."""
    fields: dict[str, Any] = {
        "name": "predict/run",
        "model": model.model_dump(mode="json"),
        "dataset": "none",
        "max_iters": 1,
        "seq_len": 2048,
        "micro_batch_size": 8,
        "world_size": gpus,
        "parallelism": "none" if gpus == 1 else "ddp",
        "compile": "model",
        "device": "cuda",
    }
    return parse(RunConfig, {**fields, **settings}, "predict")


def predict(
    config: RunConfig,
    gpu: str,
    *,
    calibration: Calibration | None = None,
    ceilings: Sequence[Ceilings] = (),
    network_gb_s: float | None = None,
) -> Prediction:
    """Predict one run on `gpu` (a name of config/hardware.yaml), uncalibrated where no calibration is given.

    Raises ConfigError for a card without a row and for arithmetic that it does not have.
    """
    calibration = calibration or uncalibrated()
    rates = card_rates(gpu, config, [*calibration.ceilings, *ceilings], network_gb_s)
    config = resolve_settings(config, rates)
    modelled = step_terms(config, rates)
    terms = {term: calibration.factor(term) * seconds for term, seconds in modelled.items()}
    step_s = sum(terms.values())
    per_gpu = config.tokens_per_step / config.world_size / step_s
    flops = flop_terms(config.model, config.seq_len)
    key = find_gpu(gpu).key
    return Prediction(
        gpu=rates.gpu,
        config=config,
        step_time_s=step_s,
        error_fraction=calibration.error_fraction(modelled, key, config),
        tokens_per_s=per_gpu * config.world_size,
        tokens_per_s_per_gpu=per_gpu,
        mfu={name: mfu(per_gpu, flops_per_token(flops, name), rates.peak_tflops) for name in CONVENTIONS},
        peak_tflops=rates.peak_tflops,
        terms_s=terms,
        memory=estimate_memory(config, rates.memory_gib, fit=calibration.memory),
        least_memory_gib=estimate_memory(config, rates.memory_gib, fit=calibration.memory.at_the_limit).total_gib,
        memory_error_fraction=calibration.memory.error_fraction,
        memory_capacity_gib=rates.memory_gib,
        largest_micro_batch_size=largest_micro_batch(config, rates.memory_gib, calibration.memory),
        calibrated=bool(calibration.runs),
        basis=explain_basis(calibration, key, rates, calibration.unseen(config)),
        network_gb_s=rates.network_gb_s if config.nnodes > 1 else None,
    )


def predict_fastest(config: RunConfig, gpu: str, **given: Any) -> Prediction:
    """`predict`, with the micro-batch that is fastest per token of those that surely fit, instead of the config's.

    Surely: by the count of memory with its error on top. Of micro-batches within 1 % of the fastest it is the smallest:
    the time is not known better, and memory and batch are worth something. None is larger than `mfubench tune` tries.
    Where not even micro-batch 1 surely fits, but may, it is 1, and `micro_batch_basis` says so.

    given: keywords of `predict`. Raises ConfigError where micro-batch 1 does not fit, and what `predict` raises.
    """

    def with_micro_batch(size: int) -> Prediction:
        return predict(config.model_copy(update={"micro_batch_size": size}), gpu, **given)

    smallest = with_micro_batch(1)
    if not smallest.fits:
        raise ConfigError(
            f"{config.model.name} does not fit on {smallest.gpu}: {smallest.least_memory_gib:.1f} GiB at least, of "
            f"{smallest.memory_capacity_gib:.0f}, with micro-batch 1. Try --parallelism zero1 or fsdp on more GPUs, or "
            "--activation-checkpointing full"
        )
    largest = min(smallest.largest_micro_batch_size, LARGEST_MICRO_BATCH)
    sure = [one for one in map(with_micro_batch, range(1, largest + 1)) if one.fits_surely]
    if not sure:
        return replace(smallest, micro_batch_basis="the smallest, since none surely fits")
    fastest = max(sure, key=lambda one: one.tokens_per_s)
    chosen = next(one for one in sure if one.tokens_per_s * (1 + GAIN) >= fastest.tokens_per_s)
    how = "the fastest per token"
    if chosen is not fastest:
        how = f"the smallest within {100 * GAIN:g} % of {how} ({fastest.config.micro_batch_size})"
    return replace(chosen, micro_batch_basis=f"{how}; 1 to {sure[-1].config.micro_batch_size} surely fit")


def explain_basis(calibration: Calibration, gpu_key: str, card: Rates, unseen: Sequence[str]) -> str:
    """One or two sentences for people: what a prediction stands on."""
    rates = "fractions of the datasheet"
    if card.measured:
        rates = f"measured ceilings ({', '.join(card.measured)})"
    elif card.related:
        rates = f"fractions of the datasheet as measured on {card.related}, the same chip"
    if not calibration.runs:
        return f"UNCALIBRATED: no measured run corrects it; rates are {rates}."
    left_out = ", ".join(
        f"{100 * error:.1f} % over {what} left out"
        for what, error in (("runs", calibration.left_out_runs), ("models", calibration.left_out_models))
        if error is not None
    )
    learnt = f"Calibrated on {len(calibration.runs)} runs on {', '.join(sorted(calibration.gpus))}"
    away = "" if gpu_key in calibration.gpus else f"; {gpu_key} is another card, so the error bar is wider"
    if unseen:
        away += f"; not among them: {', '.join(unseen)}"
    return f"{learnt} (error {left_out or 'not known from one run'}){away}; rates are {rates}."


@dataclass(frozen=True)
class Check:
    """One measured run beside its prediction from runs that did not include it."""

    observation: Observation
    fitted: bool  # whether the run was among those fitted
    predicted_step_s: float

    @property
    def error_fraction(self) -> float:
        """Of tokens/s: predicted over measured, minus one."""
        return self.observation.step_s / self.predicted_step_s - 1


def check_predictions(
    observations: Sequence[Observation], fit_model: str | None = None, fit_gpus: int | None = None
) -> list[Check]:
    """Predict every run from the runs of one model and number of GPUs; without either, from all but its repeats."""

    def is_fitted(one: Observation) -> bool:
        return fit_model in (None, one.config.model.name) and fit_gpus in (None, one.config.world_size)

    leave_one_out = fit_model is None and fit_gpus is None
    basis = [one for one in observations if is_fitted(one)]
    checks = []
    for one in observations:
        others = [other for other in observations if not one.repeats(other)] if leave_one_out else basis
        factors = fit_factors(others)[0] if others else {}
        checks.append(Check(one, is_fitted(one) and not leave_one_out, predicted_seconds(one, factors)))
    return checks


def format_checks(checks: Sequence[Check], left_out: Sequence[Check]) -> str:
    """The table of predicted against measured, as Markdown; `left_out`: the same runs, each from all the others."""
    lines = [
        "| run | card | model | GPUs | parallelism | micro-batch x accumulation | attention | measured tokens/s/GPU "
        "| predicted | error | fitted | error when left out |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for check, alone in zip(checks, left_out, strict=True):
        one = check.observation
        config = one.config
        tokens = config.tokens_per_step / config.world_size
        lines.append(
            f"| {one.name} | {one.gpu} | {config.model.name} | {config.world_size} | {config.parallelism} "
            f"| {config.micro_batch_size} x {config.gradient_accumulation_steps} | {config.attention} "
            f"| {tokens / one.step_s:,.0f} | {tokens / check.predicted_step_s:,.0f} "
            f"| {100 * check.error_fraction:+.1f} % | {'yes' if check.fitted else 'no'} "
            f"| {100 * alone.error_fraction:+.1f} % |"
        )
    return "\n".join(lines) + "\n"
