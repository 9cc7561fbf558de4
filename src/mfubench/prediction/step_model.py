"""The time of one training step on one GPU, term by term, from the configuration and what the card can do.

A step is matmuls by shape, attention, elementwise work by bytes moved, the optimizer, communication that the backward
pass does not hide, and launches. Each term is seconds from first principles; `calibration` learns one correction
factor a term from measured runs. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

from mfubench.config import RunConfig
from mfubench.decisions import ELEMENT_BYTES, fsdp_keeps_weights, shard_ranks
from mfubench.flops import count_parameters, repeats_down
from mfubench.prediction.card_rates import Rates, tile_share
from mfubench.prediction.step_bytes import (
    GRADIENT_BYTES,
    accumulating_weights,
    accumulation_bytes,
    eager_passes,
    elementwise_bytes_by_group,
    epilogue_bytes,
    optimizer_bytes,
    own_groups,
    reduced_bytes,
)

LAST_BUCKET = 0.02  # share of a reduction whose bucket fills when the backward pass ends
PASS_OVERLAP = 0.9  # share of a pass that can hide communication: the first bucket fills late


@dataclass(frozen=True)
class Matmul:
    """[rows, inner] x [inner, columns] of projection `name`, done `count` times a micro-step."""

    name: str
    rows: int
    inner: int
    columns: int
    count: int

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.inner * self.columns

    @property
    def elements(self) -> float:
        """Read and written once each."""
        return float(self.rows * self.inner + self.inner * self.columns + self.rows * self.columns)


def model_matmuls(config: RunConfig) -> dict[str, tuple[int, int, int]]:
    """Merged projections of a model: name -> (inputs, outputs, how many)."""
    m = config.model
    q_width, kv_width = m.num_attention_heads * m.head_dim, m.num_key_value_heads * m.head_dim
    gated = 2 if m.mlp == "swiglu" else 1
    layers = m.num_hidden_layers
    return {
        "qkv": (m.hidden_size, q_width + 2 * kv_width, layers),
        "o": (q_width, m.hidden_size, layers),
        "up": (m.hidden_size, gated * m.intermediate_size, layers),
        "down": (m.intermediate_size, m.hidden_size, layers),
        "lm_head": (m.hidden_size, m.vocab_size, 1),
    }


def micro_step_matmuls(config: RunConfig) -> list[Matmul]:
    """All matmuls of one micro-step: forward, gradient of the input, gradient of the weight, recomputation."""
    tokens = config.micro_batch_size * config.seq_len
    repeated = {"qkv", "o", "up"} if config.activation_checkpointing == "full" else set()
    if repeated and repeats_down(config, config.kernels.weight_gradient):
        repeated.add("down")
    matmuls = []
    for name, (inputs, outputs, count) in model_matmuls(config).items():
        again = name in repeated
        matmuls += [
            Matmul(name, tokens, inputs, outputs, count * (2 if again else 1)),
            Matmul(name, tokens, outputs, inputs, count),
            Matmul(name, outputs, tokens, inputs, count),
        ]
    return matmuls


def matmul_seconds(matmul: Matmul, config: RunConfig, rates: Rates) -> float:
    """One matmul: arithmetic at the rate its tiles allow, plus its operands at memory speed.

    The sum, not the larger of the two: with it, one rate and one bandwidth describe the measured rates of an H100 for
    the shapes of a 1.3B model (630 to 774 TFLOP/s) within a few percent. In float8 the head stays in 16 bits, at half
    the rate, and every other operand is cast first: 2 bytes read, 1 written.
    """
    share = tile_share(matmul.rows, matmul.inner, matmul.columns, rates.multiprocessors)
    seconds = matmul.flops / (rates.matmul_tflops * 1e12 * share)
    moved = ELEMENT_BYTES[config.dtype] * matmul.elements
    if config.fp8 and matmul.name == "lm_head":
        seconds *= 2
    elif config.fp8:
        moved += 3 * matmul.inner * (matmul.rows + matmul.columns)
    return seconds + moved / (rates.operand_gb_s * 1e9)


def attention_passes(config: RunConfig) -> float:
    """Attention's matmuls over those of its forward pass: 2 there, 5 in the backward pass, which makes the scores anew.

    Full checkpointing runs the forward pass again.
    """
    return 3.5 + (1.0 if config.activation_checkpointing == "full" else 0.0)


def attention_seconds(config: RunConfig, rates: Rates) -> float:
    """Attention of one micro-step over all layers, forward and backward (and again forward when checkpointed)."""
    m = config.model
    scores = config.micro_batch_size * m.num_attention_heads * config.seq_len**2 / 2  # causal
    forward = 4 * m.head_dim * scores  # q.k and p.v, a multiply and an add each
    flops = m.num_hidden_layers * attention_passes(config) * forward
    slowdown = rates.attention_slowdown(config.seq_len, m.head_dim)
    return flops * slowdown / (rates.attention_tflops(config.attention) * 1e12)


def kernel_count(config: RunConfig) -> float:
    """Kernels of one micro-step, roughly: matmuls, attention and, fused or not, what lies between."""
    m = config.model
    between = 12 if config.compile != "none" else 40
    a_layer = 12 + 5 + between + (between / 2 if config.activation_checkpointing != "none" else 0)
    return m.num_hidden_layers * a_layer + 30


def collective_seconds(size_bytes: float, config: RunConfig, rates: Rates, kind: str) -> float:
    """A ring collective over all ranks. kind: all_reduce (2 (n-1)/n of the data a link) or gather, scatter (half that).

    Over several nodes each card carries its share of the node's data over its own adapter: the slower of the two
    levels bounds the ring, and the inner level comes on top.
    """
    factor = 2.0 if kind == "all_reduce" else 1.0
    local = config.world_size // config.nnodes

    def ring(ranks: int, size: float, gb_s: float) -> float:
        if ranks < 2:
            return 0.0
        return factor * (ranks - 1) / ranks * size / (gb_s * 1e9) + rates.collective_latency_us * 1e-6

    return ring(local, size_bytes, rates.link_gb_s) + ring(config.nnodes, size_bytes / local, rates.network_gb_s)


def lost_to_communication(config: RunConfig, rates: Rates, forward_s: float, backward_s: float) -> float:
    """Seconds a step that communication costs a rank, with `forward_s` and `backward_s` a micro-step to hide behind.

    ddp: all-reduce behind the last backward pass. zero1: reduce-scatter behind it, and the weights gathered behind the
    first forward pass, or in the open. fsdp: weights gathered behind the first forward pass and gradients scattered
    behind the last backward pass, or, where memory does not keep them, both in every micro-step. What is left over is
    waited for, and what is hidden slows the kernels it hides behind: a collective's kernel by more than copies do.
    An exchange also adds up what it has received. fsdp also copies, which nothing hides: gathered weights into their
    places, and into the buffer that is scattered those gradients that no matmul has made there, cast to the dtype of
    the reduction.
    """
    if config.world_size == 1:
        return 0.0
    parameters = count_parameters(config.model).total
    weights, gradients = parameters * ELEMENT_BYTES[config.dtype], parameters * reduced_bytes(config)
    exchanges = config.communication.reduction == "exchange"
    contention = rates.contention["exchange" if exchanges else "collective"]
    bandwidth = rates.bandwidth_gb_s * 1e9
    block = 1 / config.model.num_hidden_layers  # the first gather and fsdp's last scatter

    def lost(seconds: float, behind: float, last_piece: float) -> float:
        exposed = max(seconds - PASS_OVERLAP * behind, last_piece * seconds)
        return exposed + contention * (seconds - exposed)

    group, copies = groups_of(config)
    gather = collective_seconds(weights, group, rates, "all_gather")
    scatter = collective_seconds(gradients, group, rates, "reduce_scatter")
    if config.parallelism in ("ddp", "zero1"):
        added = gradients * (1 + 1 / config.world_size) / bandwidth if exchanges else 0.0
        if config.parallelism == "ddp":
            return added + lost(collective_seconds(gradients, config, rates, "all_reduce"), backward_s, LAST_BUCKET)
        gathered = lost(gather, forward_s, block) if config.communication.overlap_gather else gather
        return added + lost(scatter, backward_s, LAST_BUCKET) + gathered

    over_copies = collective_seconds(gradients / group.world_size, copies, rates, "all_reduce")
    keeps = fsdp_keeps_weights(config, parameters, rates.memory_gib)
    summed = keeps and config.gradient_accumulation_steps > 1
    of_gradient = (GRADIENT_BYTES if summed else ELEMENT_BYTES[config.dtype]) + reduced_bytes(config)
    copied = (parameters - accumulating_weights(config)) * of_gradient
    into_place, into_buffer = (size / bandwidth for size in (2 * weights, copied))

    def backward(seconds: float) -> float:
        return lost(seconds, backward_s, block) + into_buffer

    forward = lost(gather, forward_s, block) + into_place
    if keeps:
        return forward + backward(scatter + over_copies)
    steps, each = config.gradient_accumulation_steps, gather + scatter
    return steps * (forward + into_place) + (steps - 1) * backward(each) + backward(each + over_copies)


def groups_of(config: RunConfig) -> tuple[RunConfig, RunConfig]:
    """The run as the ranks see it that share out one copy of the weights, and as those do that hold the same share."""
    ranks = shard_ranks(config) if config.parallelism == "fsdp" else config.world_size
    copies, local = config.world_size // ranks, config.world_size // config.nnodes
    group = config.model_copy(update={"world_size": ranks, "nnodes": max(1, ranks // local)})
    return group, config.model_copy(update={"world_size": copies, "nnodes": min(copies, config.nnodes)})


def slowest_of(cards: int, deviation: float) -> float:
    """How much slower than the mean the slowest of `cards` is expected to be: a normal order statistic (Blom 1958)."""
    return deviation * NormalDist().inv_cdf((cards - 0.375) / (cards + 0.25)) if cards > 1 else 0.0


def step_terms(config: RunConfig, rates: Rates) -> dict[str, float]:
    """Seconds of one step on one rank by term, uncorrected; the step is their sum.

    Keys: matmul (matmul.fp8, matmul.float32), attention.<backend>, elementwise or elementwise_eager, elementwise_own,
    optimizer, communication, slowest_card, launch.
    """
    steps = config.gradient_accumulation_steps
    matmul = sum(one.count * matmul_seconds(one, config, rates) for one in micro_step_matmuls(config))
    attention = attention_seconds(config, rates)
    by_group, own_names = elementwise_bytes_by_group(config), own_groups(config)
    bandwidth = rates.bandwidth_gb_s * 1e9
    epilogues = epilogue_bytes(config) / bandwidth
    passes = {name: eager_passes(name, config) for name in by_group}
    own = sum(size for name, size in by_group.items() if name in own_names) / bandwidth
    others = sum(passes[name] * size for name, size in by_group.items() if name not in own_names) / bandwidth
    micro_step = matmul + attention + own + others

    kernels = kernel_count(config)
    graph = config.cuda_graphs or (config.compile_mode == "reduce-overhead" and config.compile != "none")
    how = "graph" if graph else "compiled" if config.compile != "none" else "eager"
    waiting = max(0.0, kernels * rates.launch_us[how] * 1e-6 - micro_step)  # the CPU falls behind the GPU
    launch = steps * (kernels * rates.kernel_gap_us * 1e-6 + waiting)

    everything = steps * micro_step
    fused = "elementwise" if config.compile != "none" else "elementwise_eager"
    arithmetic = ".fp8" if config.fp8 else ".float32" if config.dtype == "float32" else ""
    return {
        f"matmul{arithmetic}": steps * matmul + epilogues,
        f"attention.{config.attention}": steps * attention,
        fused: steps * others,
        "elementwise_own": steps * own,
        "optimizer": (accumulation_bytes(config) + optimizer_bytes(config)) / bandwidth,
        "communication": lost_to_communication(config, rates, micro_step / 3, micro_step * 2 / 3),
        "slowest_card": everything * slowest_of(config.world_size, rates.card_deviation),
        "launch": launch,
    }
