"""What the parts of a step take at best on the machine at hand: FLOPs at measured rates, bytes at the copy rate."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from mfubench.analysis.measures import Measures
from mfubench.analysis.units import format_bytes, format_percent, format_tflops
from mfubench.ceilings.schema import Ceilings
from mfubench.config import RunConfig
from mfubench.decisions import ELEMENT_BYTES, fsdp_keeps_weights, shard_ranks
from mfubench.flops import FlopTerms, count_parameters, flop_terms
from mfubench.hardware import arithmetic_of_run, rank_share
from mfubench.prediction.measured_runs import as_run
from mfubench.prediction.resolved_settings import in_matmuls
from mfubench.prediction.step_bytes import (
    accumulation_bytes,
    chunk_sum_bytes,
    elementwise_bytes_by_group,
    epilogue_bytes,
    optimizer_bytes,
    reduced_bytes,
)
from mfubench.prediction.step_model import attention_passes, micro_step_matmuls


@dataclass(frozen=True)
class Ideals:
    """Seconds of one step on one GPU, by row of the waterfall, and in words what each is."""

    seconds: dict[str, float] = field(default_factory=dict)
    words: dict[str, str] = field(default_factory=dict)
    peak_matmul_s: float | None = None  # the model's own FLOPs (causal) at the datasheet peak, matmuls...
    peak_attention_s: float | None = None  # ...and attention
    recomputed_s: float = 0.0  # of the matmuls' ideal: what activation checkpointing computes twice
    collectives_s: float | None = None  # all collectives at the measured bus rate

    @property
    def peak_s(self) -> float | None:
        if self.peak_matmul_s is None or self.peak_attention_s is None:
            return None
        return self.peak_matmul_s + self.peak_attention_s


def tokens_of(config: RunConfig) -> int:
    """Tokens a step on one GPU."""
    return config.tokens_per_step // config.world_size


def ideals_of(judged: Measures, ceilings: Ceilings | None) -> Ideals:
    """Ideal times of a run's step. Without measured ceilings only what needs none."""
    log = judged.log
    config = as_run(log)
    terms = flop_terms(config.model, config.seq_len)
    ideals = Ideals(
        seconds={"communication": 0.0, "copy": 0.0, "host": 0.0, "queue": 0.0, "data": 0.0},
        words={
            "communication": "all of it hidden behind the backward pass",
            "copy": "none: no arithmetic asks for it",
            "host": "none",
            "queue": "none",
            "data": "none: loaded while the device computes",
        },
        **peak_times(judged, terms),
    )
    if ceilings is None or ceilings.device != log.environment.device:
        return ideals
    recomputed = add_arithmetic(ideals, config, terms, ceilings, arithmetic_of_run(log), rank_share(log, ceilings))
    if ceilings.copy_rate is not None:
        add_memory_traffic(ideals, config, ceilings.copy_rate.gb_s)
        add_epilogues(ideals, config, ceilings.copy_rate.gb_s)
    capacity = min((gpu.memory_gib for gpu in log.environment.gpus), default=math.inf)  # a CPU has enough
    return Ideals(**{**ideals.__dict__, "recomputed_s": recomputed, **bus_time(config, ceilings, capacity)})


def peak_times(judged: Measures, terms: FlopTerms) -> dict[str, float]:
    """The model's FLOPs at the peak: causal, without recomputation."""
    if judged.peak is None:
        return {}
    tokens, peak = tokens_of(judged.log.config), judged.peak.tflops * 1e12
    return {
        "peak_matmul_s": tokens * 6 * terms.matmul_parameters / peak,
        "peak_attention_s": tokens * terms.attention / 2 / peak,
    }


def add_arithmetic(
    ideals: Ideals, config: RunConfig, terms: FlopTerms, ceilings: Ceilings, arithmetic: str, share: float
) -> float:
    """Matmuls and attention at their measured ceilings; returns the seconds of recomputed matmuls."""
    tokens, model = tokens_of(config), config.model.name
    by_shape = ceilings.model_matmul_tflops(model, arithmetic)
    rate = by_shape or ceilings.large_matmul_tflops(arithmetic)
    recomputed = 0.0
    hot = "measured hot" if share == 1 else f"a process's {format_percent(share, 0)} of what was measured hot"
    if rate is not None:
        flops = sum(one.flops * one.count for one in micro_step_matmuls(config)) * config.gradient_accumulation_steps
        ideals.seconds["matmul"] = flops / (rate * share * 1e12)
        recomputed = max(0.0, flops - tokens * 6 * terms.matmul_parameters) / (rate * share * 1e12)
        of_what = "its own shapes, one by one:" if by_shape else "the large matmul:"
        ideals.words["matmul"] = f"{of_what} {format_tflops(rate * share)}, {hot}"
    rates = {
        one.backend: one.forward_backward_tflops
        for one in ceilings.attention
        if (one.model, one.dtype) == (model, config.dtype) and one.forward_backward_tflops is not None
    }
    if rates:
        backend = max(rates, key=lambda name: rates[name])
        forward = terms.attention / 2 / 3  # the rates count what is executed: more than the three thirds of a model's
        flops = tokens * attention_passes(config) * forward
        ideals.seconds["attention"] = flops / (rates[backend] * share * 1e12)
        of_all = "" if share == 1 else f", {hot}"
        reached = f"{format_tflops(rates[backend] * share)} forward and backward{of_all}"
        ideals.words["attention"] = f"{backend}, the fastest here: {reached}"
    return recomputed


def add_memory_traffic(ideals: Ideals, config: RunConfig, copy_gb_s: float) -> None:
    """Elementwise work, accumulation and optimizer: each byte once, at the measured copy rate."""
    elsewhere = {"attention", "activation"} if in_matmuls(config) else {"attention"}
    for name, size in memory_traffic(config).items():
        if name not in elsewhere:
            ideals.seconds[name] = size / (copy_gb_s * 1e9)
            ideals.words[name] = f"{format_bytes(size)} at {copy_gb_s:,.4g} GB/s"


def add_epilogues(ideals: Ideals, config: RunConfig, copy_gb_s: float) -> None:
    """What matmuls move beyond those of the ceilings, on top of their arithmetic: weight gradients, activations.

    P weights of matmuls, E bytes of the compute dtype, A micro-steps: P ((4 - E) A + 4 (A - 1)) bytes a step at the
    measured copy rate. Each such matmul writes float32 where the measured one writes the compute dtype, and reads the
    sum before it in all micro-steps but the first (`step_bytes.epilogue_bytes`).
    """
    activations = memory_traffic(config)["activation"] if in_matmuls(config) else 0
    for size, what in ((epilogue_bytes(config), "float32 sums"), (activations, "activations in their tiles")):
        if size > 0 and "matmul" in ideals.seconds:
            ideals.seconds["matmul"] += size / (copy_gb_s * 1e9)
            ideals.words["matmul"] += f"; and {format_bytes(size)} of {what} at {copy_gb_s:,.4g} GB/s"


def memory_traffic(config: RunConfig) -> dict[str, float]:
    """Bytes a step on one GPU by row of the waterfall, fused as far as a compiler fuses.

    What a chunked loss adds up of its weight's gradient is not among them: its matmuls move that.
    """
    steps = config.gradient_accumulation_steps
    groups = {name: steps * size for name, size in elementwise_bytes_by_group(config).items()}
    groups["loss"] -= steps * chunk_sum_bytes(config)
    return groups | {"accumulation": accumulation_bytes(config), "optimizer": optimizer_bytes(config)}


def bus_time(config: RunConfig, ceilings: Ceilings, capacity_gib: float) -> dict[str, float]:
    """All that a step sends between GPUs at the bus rate that was measured with as many ranks and the largest buffer.

    The rate is that of the operation which sums the run's gradients, or of another where that was not measured. Of
    groups of ranks (`communication.shard_ranks`) none is measured. capacity_gib: memory of a card.
    """
    ranks = config.world_size
    rates = [one for one in ceilings.collectives if one.world_size == ranks]
    if ranks == 1 or not rates or (config.parallelism == "fsdp" and shard_ranks(config) != ranks):
        return {}
    summed_by = "all_reduce" if config.parallelism == "ddp" else "reduce_scatter"
    if config.communication.reduction == "exchange":
        summed_by = "exchange"
    gb_s = max(rates, key=lambda one: (one.operation == summed_by, one.bytes)).bus_gb_s
    parameters = count_parameters(config.model).total
    reduced, gathered = times_sent(config, parameters, capacity_gib)
    moved = parameters * (reduced * reduced_bytes(config) + gathered * ELEMENT_BYTES[config.dtype])
    return {"collectives_s": (ranks - 1) / ranks * moved / (gb_s * 1e9)}


def times_sent(config: RunConfig, parameters: int, capacity_gib: float) -> tuple[int, int]:
    """How often in a step a rank sends all gradients and all weights.

    ddp: a sum that all have is a scatter and a gather. fsdp that keeps no whole weights gathers them in the forward and
    in the backward pass of every micro-step, and scatters gradients in each.
    """
    if config.parallelism == "ddp":
        return 2, 0
    if config.parallelism == "zero1" or fsdp_keeps_weights(config, parameters, capacity_gib):
        return 1, 1
    return config.gradient_accumulation_steps, 2 * config.gradient_accumulation_steps
