"""The tables of docs/prediction.md: predictions beside first readings, reported runs and the founding expectations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mfubench.analysis.expectations import Expectation, Expectations, load_expectations
from mfubench.config import KernelsConfig
from mfubench.flops import flop_terms, flops_per_token, mfu
from mfubench.hardware import find_gpu, peak_for
from mfubench.prediction import measured_runs
from mfubench.prediction.calibration import fit_factors, fit_memory, predicted_seconds, shipped_calibration
from mfubench.prediction.memory import estimate_memory, largest_micro_batch
from mfubench.prediction.predict import Prediction, check_predictions, format_checks, plan_run, predict
from mfubench.presets import load_model

H100, H200, B200, A6000 = "NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA B200", "NVIDIA RTX A6000"
SCALING_GPUS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Reading:
    """A measured rate that is no run of this project."""

    what: str
    gpu: str
    gpus: int
    model: str
    tokens_per_s_per_gpu: float
    settings: dict[str, Any]
    overrides: dict[str, Any] = field(default_factory=dict)


def batch(micro_batch_size: int, accumulation: int, **more: Any) -> dict[str, Any]:
    return {"micro_batch_size": micro_batch_size, "gradient_accumulation_steps": accumulation, **more}


# One H100, torch 2.11, 65,536 tokens a step (131,072 at micro-batch 16), single runs of 6 to 15 steps.
READINGS = (
    Reading("prototype of this step", H100, 1, "llama2-1.36b", 67_900, batch(8, 4, attention="cudnn")),
    Reading("prototype of this step", H100, 1, "llama2-1.36b", 70_050, batch(16, 4, attention="cudnn")),
    Reading("torchtitan 0.2.2", H100, 1, "llama3-1.5b", 57_100, batch(4, 8, attention="sdpa")),
    Reading("torchtitan 0.2.2", H100, 1, "qwen3-1.8b", 48_300, batch(4, 8, attention="sdpa")),
    Reading("torchtitan 0.2.2", H100, 1, "llama3-2.2b", 33_000, batch(2, 16, attention="sdpa")),
    Reading("nanoGPT", H100, 1, "gpt2-1.36b", 62_850, batch(8, 4, attention="sdpa")),
)

# The founding system's own logs (torch 2.7, FlashAttention-2, compiled, weights and optimizer in bf16), its one-rank
# tokens/s read as what they are. Its Qwen3 ran without grouped queries and with a narrower MLP.
REPORTED = (
    Reading("scaling report", B200, 2, "llama2-1.36b", 106_979, batch(24, 4, attention="fa2")),
    Reading("scaling report", B200, 8, "llama2-1.36b", 106_809, batch(24, 64, attention="fa2")),
    Reading(
        "log of LLaMA-2",
        "NVIDIA RTX A6000",
        2,
        "llama2-1.36b",
        10_646,
        batch(5, 8, attention="fa2", parallelism="zero1"),
    ),
    Reading(
        "log of Qwen3",
        "NVIDIA A100-SXM4-80GB",
        2,
        "qwen3-1.8b",
        18_756,
        batch(6, 16, attention="fa2", parallelism="zero1"),
        {"vocab_size": 151_643, "qk_norm": False, "num_key_value_heads": 16, "intermediate_size": 5461},
    ),
)

# Where the time of one step went, from a profile of the prototype at micro-batch 8: seconds.
PROFILE = {"matmul": 0.690, "attention.cudnn": 0.109, "elementwise": 0.110, "optimizer": 0.036}

# Settings of the founding tests on B200s, by case: micro-batch 24 (Qwen3: 20), accumulation 8, FlashAttention-2.
CASES: dict[str, dict[str, Any]] = {
    "baseline/1.1-plain": {"compile": "none"},
    "baseline/1.2-compile": {},
    "scaling/2.1-plain-gpus8": {"compile": "none"},
    "scaling/2.2-compile-gpus8": {},
    "tiers/tier3": {"cuda_graphs": True},
    "ablations/4.1-sdpa": {"attention": "sdpa"},
    "ablations/4.2-float32": {"dtype": "float32", "attention": "sdpa"},
    "ablations/4.3-accumulation1": {"gradient_accumulation_steps": 1},
    "ablations/4.3-accumulation16": {"gradient_accumulation_steps": 16},
    "ablations/4.4-micro-batch8": {"micro_batch_size": 8},
    "ablations/4.4-micro-batch32": {"micro_batch_size": 32},
    "training/pretrain": {"parallelism": "zero1"},
}
# Micro-batch and accumulation of the founding guides: on B200s, and on two A6000s.
BATCHES_B200 = {"llama2-1.36b": (24, 8), "qwen3-1.8b": (20, 8)}
BATCHES_A6000 = {
    "gpt2-1.36b": (4, 32),
    "llama2-1.36b": (6, 32),
    "llama3-1.5b": (8, 24),
    "llama3-2.2b": (4, 32),
    "qwen3-1.8b": (6, 32),
}


def predict_reading(reading: Reading) -> Prediction:
    model = load_model(reading.model, reading.overrides)
    return predict(plan_run(model, reading.gpus, **reading.settings), reading.gpu)


def compare(readings: tuple[Reading, ...]) -> str:
    lines = [
        "| measured by | machine | model | micro-batch x accumulation | tokens/s/GPU | predicted | error |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in readings:
        prediction = predict_reading(one)
        predicted, config = prediction.tokens_per_s_per_gpu, prediction.config
        lines.append(
            f"| {one.what} | {one.gpus} x {one.gpu.removeprefix('NVIDIA ')} | {one.model} "
            f"| {config.micro_batch_size} x {config.gradient_accumulation_steps} | {one.tokens_per_s_per_gpu:,.0f} "
            f"| {predicted:,.0f} ± {100 * prediction.error_fraction:.0f} % "
            f"| {100 * (predicted / one.tokens_per_s_per_gpu - 1):+.1f} % |"
        )
    return "\n".join(lines)


def measured_table() -> str:
    """The shipped runs, predicted from those of LLaMA-2 1.36B on one GPU alone."""
    folders = [measured_runs.REFERENCE]
    if not measured_runs.REFERENCE.is_dir() or not measured_runs.hold_runs(folders):
        return "No measured study ships yet: every prediction on this page is uncalibrated."
    observations = measured_runs.observe(measured_runs.read_runs(folders), measured_runs.read_all_ceilings(folders))
    checks = check_predictions(observations, fit_model="llama2-1.36b", fit_gpus=1)
    left_out = check_predictions(observations)
    unseen = [abs(check.error_fraction) for check in checks if not check.fitted]
    summary = f"{sum(error <= 0.05 for error in unseen)} of {len(unseen)} runs that were not fitted lie within 5 %."
    if not unseen:
        summary = "All of these runs were fitted: nothing here tells how far off a prediction of others would be."
    off = [abs(check.error_fraction) for check in left_out]
    within = sum(error <= 0.05 for error in off)
    summary += f" Left out one at a time: {within} of {len(off)}, {100 * rms(off):.1f} % root mean square."
    summary += unseen_kernels(observations)
    return f"{format_checks(checks, left_out)}\n{summary}"


def unseen_kernels(observations: Sequence[measured_runs.Observation]) -> str:
    """How far off runs with own kernels on one GPU are when only those without were fitted; empty without either.

    float8 is left out: nothing without own kernels tells of its matmuls.
    """
    single = [one for one in observations if one.config.world_size == 1]
    plain = [one for one in single if one.config.kernels == KernelsConfig()]
    own = [one for one in single if one.config.kernels != KernelsConfig() and not one.config.fp8]
    if not plain or not own:
        return ""
    factors, _ = fit_factors(plain)
    errors = [(one.step_s / predicted_seconds(one, factors) - 1, one.name) for one in own]  # names alike on other cards
    furthest, worst = max(errors, key=lambda pair: abs(pair[0]))
    within = sum(abs(error) <= 0.05 for error, _ in errors)
    return (
        f"\nFitted on the {len(plain)} runs on one GPU without own kernels alone: {within} of the {len(own)} with them "
        f"lie within 5 %; furthest off is {worst}, {100 * furthest:+.1f} %."
    )


def rms(values: Sequence[float]) -> float:
    return math.sqrt(math.fsum(value**2 for value in values) / len(values))


def peak_table() -> str:
    """Measured peaks beside what is counted of tensors, and beside what the other peaks say would be reserved."""
    folders = [measured_runs.REFERENCE]
    if not measured_runs.REFERENCE.is_dir() or not measured_runs.hold_runs(folders):
        return "No measured peak ships yet."
    peaks = measured_runs.observe_memory(measured_runs.read_runs(folders))
    lines = [
        "| run | card's GiB | GPUs | micro-batch | counted, GiB | allocated | error | predicted, GiB, left out "
        "| reserved | error |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for position, one in enumerate(peaks):
        fit = fit_memory([*peaks[:position], *peaks[position + 1 :]])
        counted = estimate_memory(one.config, one.capacity_gib).allocated_gib
        expected = estimate_memory(one.config, one.capacity_gib, fit=fit)
        reserved = expected.allocated_gib + expected.reserve
        allocated, off = "–", "–"
        if one.peak_allocated_gib is not None:
            allocated = f"{one.peak_allocated_gib:.2f}"
            off = f"{100 * (counted / one.peak_allocated_gib - 1):+.1f} %"
        lines.append(
            f"| {one.name} | {one.capacity_gib:.0f} | {one.config.world_size} | {one.config.micro_batch_size} "
            f"| {counted:.2f} | {allocated} | {off} | {reserved:.2f} | {one.peak_reserved_gib:.2f} "
            f"| {100 * (reserved / one.peak_reserved_gib - 1):+.1f} % |"
        )
    return "\n".join(lines)


def limit_table() -> str:
    """Measured memory limits beside the prediction from the peaks of all runs, which no search is among."""
    folders = [measured_runs.REFERENCE]
    limits = measured_runs.read_memory_searches(folders)[1] if measured_runs.REFERENCE.is_dir() else []
    if not limits:
        return "No measured memory limit ships yet."
    fit = fit_memory(measured_runs.observe_memory(measured_runs.read_runs(folders)))
    lines = [
        "| search | model | GPUs | memory | largest micro-batch | predicted | error |",
        "|---|---|---|---|---|---|---|",
    ]
    for limit in limits:
        config, largest = limit.config, limit.largest_micro_batch_size
        predicted = largest_micro_batch(config, limit.capacity_gib, fit)
        lines.append(
            f"| {limit.name} | {config.model.name} | {config.world_size} | {limit.capacity_gib:.1f} GiB "
            f"| {largest} | {predicted} | {100 * (predicted / largest - 1):+.1f} % |"
        )
    return "\n".join(lines)


def scaling_table() -> str:
    """The guide's test 2.2 on one to eight H200s under every parallelism, calibrated on what ships; rates a GPU."""
    calibration = shipped_calibration()
    model = load_model("llama2-1.36b")
    lines = [
        "| parallelism | accumulation | " + " | ".join(f"on {count}" for count in SCALING_GPUS) + " |",
        "|---|---|" + "---|" * len(SCALING_GPUS),
    ]
    for parallelism in ("ddp", "zero1", "fsdp"):
        for accumulation in (8, 1):
            predicted = []
            for count in SCALING_GPUS:
                settings = batch(12, accumulation, attention="cudnn", parallelism=parallelism if count > 1 else "none")
                predicted.append(predict(plan_run(model, count, **settings), H200, calibration=calibration))
            alone = predicted[0].tokens_per_s_per_gpu
            cells = [
                f"{one.tokens_per_s_per_gpu:,.0f} ± {100 * one.error_fraction:.0f} %, "
                f"{100 * one.tokens_per_s_per_gpu / alone:.1f} %"
                for one in predicted[1:]
            ]
            first = f"{alone:,.0f} ± {100 * predicted[0].error_fraction:.0f} %"
            lines.append(f"| {parallelism} | {accumulation} | {first} | {' | '.join(cells)} |")
    return "\n".join(lines)


def eight_table() -> str:
    """Shipped runs with own kernels on one H200 and on several, and what they say of eight; tokens/s a GPU.

    A series is one model, batch, parallelism and way to sum gradients; its prediction takes the settings of the run on
    most cards.
    """
    folders = [measured_runs.REFERENCE]
    if not measured_runs.REFERENCE.is_dir() or not measured_runs.hold_runs(folders):
        return "No measured study ships yet."
    observations = [
        one
        for one in measured_runs.observe(measured_runs.read_runs(folders), measured_runs.read_all_ceilings(folders))
        if one.name.startswith("scaling/") and one.gpu == find_gpu(H200).key and one.config.kernels != KernelsConfig()
    ]
    series: dict[tuple[Any, ...], list[measured_runs.Observation]] = {}
    for one in observations:
        if one.config.world_size > 1:
            series.setdefault((*work_of(one), one.config.parallelism, one.config.communication.reduction), []).append(
                one
            )
    last = SCALING_GPUS[-1]
    header = [f"{count} measured" for count in SCALING_GPUS[:-1]] + [f"{last} predicted"]
    lines = [
        f"| model | micro-batch x accumulation | parallelism | summed by | {' | '.join(header)} |",
        "|---|---|---|---|" + "---|" * len(header),
    ]
    for (model, micro_batch, accumulation, parallelism, reduction), several in sorted(series.items()):
        alone = [one for one in observations if one.config.world_size == 1 and work_of(one) == work_of(several[0])]
        cells = [rates_on(count, alone + several) for count in SCALING_GPUS[:-1]]
        largest = max(several, key=lambda one: one.config.world_size).config
        config = largest.model_copy(update={"world_size": last})
        predicted = predict(config, H200, calibration=shipped_calibration())
        cells.append(f"{predicted.tokens_per_s_per_gpu:,.0f} ± {100 * predicted.error_fraction:.0f} %")
        batch_words = f"{micro_batch} x {accumulation}"
        lines.append(f"| {model} | {batch_words} | {parallelism} | {reduction} | {' | '.join(cells)} |")
    return "\n".join(lines)


def work_of(one: measured_runs.Observation) -> tuple[str, int, int]:
    """Model and batch."""
    return one.config.model.name, one.config.micro_batch_size, one.config.gradient_accumulation_steps


def rates_on(count: int, observations: Sequence[measured_runs.Observation]) -> str:
    """Tokens/s a GPU of the runs on so many cards, in words."""
    of_count = [one for one in observations if one.config.world_size == count]
    rates = sorted(one.config.tokens_per_step / count / one.step_s for one in of_count)
    return " to ".join(f"{rate:,.0f}" for rate in dict.fromkeys([*rates[:1], *rates[-1:]])) or "–"


def reading_table() -> str:
    return compare(READINGS)


def reported_table() -> str:
    return compare(REPORTED)


def profile_table() -> str:
    """The prototype's profile beside the model's terms at their priors."""
    terms = predict_reading(READINGS[0]).terms_s
    lines = ["| term | measured | predicted |", "|---|---|---|"]
    lines += [f"| {term} | {1000 * s:.0f} ms | {1000 * terms[term]:.0f} ms |" for term, s in PROFILE.items()]
    return "\n".join(lines)


def expectation_table() -> str:
    """What the founding documents expect on 8 and 2 B200s and 2 A6000s, what it implies, and the prediction."""
    lines = [
        "| model | machine | case | expected MFU | expected tokens/s | which is an MFU of | predicted MFU, palm "
        "| predicted tokens/s | expected memory | predicted |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name in ("llama2-1.36b", "qwen3-1.8b", "gpt2-1.36b", "llama3-1.5b", "llama3-2.2b"):
        expectations = load_expectations(name)
        for one in expectations.expectations:
            if one.case in CASES and (one.mfu or one.tokens_per_s):
                row = expectation_row(name, expectations, one)
                if row not in lines:
                    lines.append(row)
    return "\n".join(lines)


def expectation_row(name: str, expectations: Expectations, one: Expectation) -> str:
    machine = expectations.machines[one.machine]
    assert one.case is not None
    batches = BATCHES_A6000 if "A6000" in machine.card else BATCHES_B200
    micro_batch_size, accumulation = batches[name]
    settings = batch(micro_batch_size, accumulation, attention="fa2") | CASES[one.case]
    model = load_model(name)
    prediction = predict(plan_run(model, machine.world_size, **settings), machine.card)
    flops = flops_per_token(flop_terms(model, expectations.seq_len), "palm")
    peak = peak_for(machine.card, "bfloat16", tf32=True, fp8=False).tflops

    def percent(value: float) -> str:
        return f"{100 * value:.0f}"

    implied = "–"
    if one.tokens_per_s:
        low, high = (mfu(rate / machine.world_size, flops, peak) for rate in one.tokens_per_s)
        implied = span(low, high, percent, " %")
    memory = prediction.memory.total_gib
    cells = [
        name,
        f"{machine.world_size} x {machine.card.removeprefix('NVIDIA ')}",
        one.case,
        span(*one.mfu, percent, " %") if one.mfu else "–",
        span(*one.tokens_per_s, lambda rate: f"{rate:,.0f}") if one.tokens_per_s else "–",
        implied,
        f"{100 * mfu(prediction.tokens_per_s_per_gpu, flops, peak):.0f} %",
        f"{prediction.tokens_per_s:,.0f} ± {100 * prediction.error_fraction:.0f} %",
        span(*one.memory_gb, lambda size: f"{size:g}", " GB") if one.memory_gb else "–",
        f"{memory:.0f} GiB{'' if prediction.fits else ', does not fit'}",
    ]
    return "| " + " | ".join(cells) + " |"


def span(low: float, high: float, write: Any, unit: str = "") -> str:
    """A range, or one number where both ends read the same."""
    first, last = write(low), write(high)
    return f"{first}{unit}" if first == last else f"{first} to {last}{unit}"
