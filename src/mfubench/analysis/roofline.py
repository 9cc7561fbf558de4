"""Kernel groups on a roofline: FLOPs by formula and shape, bytes by shape, time from the profile."""

from __future__ import annotations

from dataclasses import dataclass

from mfubench.analysis.ideal import memory_traffic
from mfubench.analysis.profiles import Profiled
from mfubench.config import RunConfig
from mfubench.decisions import ELEMENT_BYTES
from mfubench.prediction.measured_runs import as_run
from mfubench.prediction.step_model import Matmul, attention_passes, micro_step_matmuls

# Arithmetic an element moved, counting multiply, add, divide, exponential and root as one each: a place on the axis of
# intensity, where a factor of two is a small step. Norm forward 5 operations for 4 elements moved, backward 10 for 5;
# RoPE 3 for 2; SwiGLU 6 for 3 and 14 for 6; softmax and its gradient 7 for 4.
OPERATIONS = {"norm": 15 / 9, "rope": 3 / 2, "activation": 20 / 9, "loss": 7 / 4}
ACCUMULATION_BYTES_AN_ADDITION = 10.0  # a 16-bit gradient read, a float32 sum read and written
ADAMW_BYTES_AN_OPERATION = 42 / 15  # clip, two moments, update, decay
MATMUL_NAMES = {"qkv": "qkv", "o": "attention output", "up": "MLP up", "down": "MLP down", "lm_head": "head"}


@dataclass(frozen=True)
class Point:
    """A kernel group. Rates are of one GPU while the group runs."""

    label: str
    kind: str  # matmul | attention | memory
    flops: float
    bytes: float
    time_s: float

    @property
    def intensity(self) -> float:
        """FLOPs a byte."""
        return self.flops / self.bytes

    @property
    def tflops(self) -> float:
        return self.flops / self.time_s / 1e12


def points_of(profiled: Profiled) -> list[Point]:
    """The groups of a profiled step whose FLOPs and bytes are known, in the order of the waterfall."""
    config = as_run(profiled.judged.log)
    points = matmul_points(profiled, config)
    times = {row.key: row.time_s for row in profiled.rows}
    if times.get("attention"):
        points.append(attention_point(config, times["attention"]))
    element = ELEMENT_BYTES[config.dtype]
    rates = {name: operations / element for name, operations in OPERATIONS.items()}
    rates |= {"accumulation": 1 / ACCUMULATION_BYTES_AN_ADDITION, "optimizer": 1 / ADAMW_BYTES_AN_OPERATION}
    labels = {row.key: row.label for row in profiled.rows}
    for name, size in memory_traffic(config).items():
        if name in rates and size and times.get(name):
            points.append(Point(labels[name], "memory", size * rates[name], size, times[name]))
    return points


def matmul_points(profiled: Profiled, config: RunConfig) -> list[Point]:
    """One point a projection where the profiler recorded shapes, else one for all matmuls."""
    steps, element = config.gradient_accumulation_steps, ELEMENT_BYTES[config.dtype]
    known = micro_step_matmuls(config)
    by_name: dict[str, list[Matmul]] = {}
    for one in known:
        by_name.setdefault(one.name, []).append(one)
    points = []
    for name, products in by_name.items():
        # the gradient of the weight may run as either product of a transpose: the same three sizes
        sizes = {tuple(sorted((one.rows, one.inner, one.columns))) for one in products}
        own = [one.total_s for one in profiled.rank.matmuls if tuple(sorted(one.shape)) in sizes]
        others = {tuple(sorted((one.rows, one.inner, one.columns))) for one in known if one.name != name}
        time_s = sum(own)
        if time_s > 0 and not sizes & others:
            flops = steps * sum(one.flops * one.count for one in products)
            moved = steps * element * sum(one.elements * one.count for one in products)
            points.append(Point(f"matmul: {MATMUL_NAMES[name]}", "matmul", flops, moved, time_s))
    total_s = profiled.rank.parts["matmul"]
    if total_s > 0 and sum(point.time_s for point in points) < 0.8 * total_s:
        flops = steps * sum(one.flops * one.count for one in known)
        moved = steps * element * sum(one.elements * one.count for one in known)
        points = [Point("matmuls", "matmul", flops, moved, total_s)]
    return points


def attention_point(config: RunConfig, time_s: float) -> Point:
    """Causal FLOPs; bytes of q, k, v and output, twice over in the backward pass with their gradients.

    Full checkpointing runs the forward pass again.
    """
    m = config.model
    tokens = config.micro_batch_size * config.seq_len * config.gradient_accumulation_steps
    scores = tokens * m.num_attention_heads * config.seq_len / 2
    flops = m.num_hidden_layers * attention_passes(config) * 4 * m.head_dim * scores
    width = (2 * m.num_attention_heads + 2 * m.num_key_value_heads) * m.head_dim  # q and output, k and v
    times = 4 if config.activation_checkpointing == "full" else 3
    moved = m.num_hidden_layers * tokens * ELEMENT_BYTES[config.dtype] * times * width
    return Point("attention", "attention", flops, moved, time_s)
