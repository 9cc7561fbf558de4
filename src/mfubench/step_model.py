"""The time of one training step on one GPU, term by term, from the configuration and what the card can do.

A step is matmuls by shape, attention, elementwise work by bytes moved, the optimizer, communication that the backward
pass does not hide, and launches. Each term is seconds from first principles; `calibration` learns one correction
factor a term from measured runs. No torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

from mfubench.card_rates import Rates, generation, tile_share
from mfubench.config import ModelConfig, RunConfig
from mfubench.decisions import (
    ELEMENT_BYTES,
    LARGE_VOCABULARY,
    chunk_bytes,
    fsdp_keeps_weights,
    fsdp_without_sum,
    head_accumulates,
)
from mfubench.flops import count_parameters
from mfubench.hardware import find_gpu
from mfubench.memory import activation_kernel

LAST_BUCKET = 0.02  # share of a reduction whose bucket fills when the backward pass ends
BACKWARD_OVERLAP = 0.9  # share of the backward pass that can hide communication: the first bucket fills late
# Bytes of elementwise work with a kernel an operator over those of fused work, counted operator by operator. Norm:
# forward 10 H (norm, addition), backward 16 H (two gradients, addition) instead of 18 H together. RoPE in float32:
# forward 48 a rotated element (casts, 4 products, 2 sums, concatenation), backward 66 instead of 4 + 6. SwiGLU: forward
# 10 I, backward 26 I instead of 16 I. Softmax: 36 a logit (casts, log-softmax, its gradient) instead of 8.
EAGER_PASSES = {"norm": 1.44, "rope": 11.4, "activation": 2.25, "loss": 4.5}
GRADIENT_BYTES = 4  # gradients are accumulated in float32
WITHOUT_MATMULS = {"swiglu": "fused", "gelu": "plain"}  # what runs where `matmul` cannot
WRITES_ONE_GRADIENT = ("fa3", "fa4")  # the keys of attention_kernels.PACKED, which needs torch


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
    matmuls = []
    for name, (inputs, outputs, count) in model_matmuls(config).items():
        again = config.activation_checkpointing == "full" and name != "lm_head"
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


def attention_seconds(config: RunConfig, rates: Rates) -> float:
    """Attention of one micro-step over all layers, forward and backward (and again forward when checkpointed)."""
    m = config.model
    scores = config.micro_batch_size * m.num_attention_heads * config.seq_len**2 / 2  # causal
    forward = 4 * m.head_dim * scores  # q.k and p.v, a multiply and an add each
    passes = 3.5 + (1.0 if config.activation_checkpointing == "full" else 0.0)  # backward: 5 matmuls to forward's 2
    flops = m.num_hidden_layers * passes * forward
    slowdown = rates.attention_slowdown(config.seq_len, m.head_dim)
    return flops * slowdown / (rates.attention_tflops(config.attention) * 1e12)


def elementwise_bytes(config: RunConfig) -> float:
    """Bytes that norms, RoPE, activations, residuals and the loss move in one micro-step."""
    return sum(elementwise_bytes_by_group(config).values())


def elementwise_bytes_by_group(config: RunConfig) -> dict[str, float]:
    """`elementwise_bytes` of norm (residual sums and q/k-norms with it), rope, activation, attention (its backward's
    dot product), embedding and loss.

    Fused as a compiler fuses them: each quantity read once and written once where its matmul or attention needs it.
    What the project's own kernels do (`own_groups`) is counted as they do it (mfubench.model.fused).
    """
    m = config.model
    element = ELEMENT_BYTES[config.dtype]
    tokens = config.micro_batch_size * config.seq_len
    hidden, intermediate = m.hidden_size, m.intermediate_size
    q_width, kv_width = m.num_attention_heads * m.head_dim, m.num_key_value_heads * m.head_dim
    forwards = 2 if config.activation_checkpointing != "none" else 1

    own = own_groups(config)
    norm_forward = 4 * hidden  # read stream and branch, write stream and normed
    # read gradient, stream, gradient of the stream; write both onward (own kernel: one tensor for both)
    norm_backward = (4 if "norm" in own else 5) * hidden
    # Forward q and k. Backward the gradient of v as well, which is copied beside theirs, unless attention writes the
    # three side by side. The own kernel also moves v where it cannot work in place; where it can, q and k alone.
    rotated, with_value = 2 * (q_width + kv_width), 2 * (q_width + 2 * kv_width)
    if m.position == "rope":
        rope, rope_backward = rotated, with_value
    else:
        rope, rope_backward = 0, 0 if config.kernels.rope == "fused" and writes_one_gradient(config) else with_value
    query_key_norm = rotated if m.qk_norm else 0  # backward: read again, write
    if "rope" in own:
        rope = rotated if rotates_in_place(config) else with_value
        rope_backward = rotated if rotates_gradients_in_place(config) else with_value
        rope_backward += with_value // 2 if m.qk_norm else 0  # reads what the norm read, and writes once
        query_key_norm = 0
    output_dot = 2 * q_width  # attention backward reads output and gradient
    gated = 2 if m.mlp == "swiglu" else 1
    mlp_forward = (gated + 1) * intermediate
    # gradient and inputs, and their gradients; the product again where it was not kept
    recomputed = "activation" in own and config.kernels.swiglu == "recompute"
    mlp_backward = (2 * gated + (2 if recomputed else 1)) * intermediate
    if "activation" in own and in_matmuls(config):
        # Beside what the matmuls write in any case. Forward what a tile holds is written once more, which costs
        # nothing. Backward it is read (SwiGLU: gate and up), its gradient written in place of its output's, and its
        # output again; a bias wants the sum of that gradient.
        mlp_forward, mlp_backward = 0, (2 * gated + (1 if m.mlp_bias else 0)) * intermediate

    a_layer = {
        "norm": 2 * norm_forward * forwards + 2 * norm_backward + query_key_norm,
        "rope": rope * forwards + rope_backward,
        "activation": mlp_forward * forwards + mlp_backward,
        "attention": output_dot,
    }
    groups = {name: tokens * element * m.num_hidden_layers * width for name, width in a_layer.items()}
    groups["norm"] += tokens * element * (norm_forward + norm_backward)  # the last norm
    groups["embedding"] = tokens * element * 3 * hidden  # lookup and its gradient
    return groups | {"loss": loss_bytes(config)}


def own_groups(config: RunConfig) -> set[str]:
    """Groups of `elementwise_bytes_by_group` that the project's own kernels do."""
    kernels, lacks = config.kernels, lacking(config.model)
    own = {
        "norm": kernels.norm == "fused" and "norm" not in lacks,
        "rope": kernels.rope == "fused" and "rope" not in lacks,
        "activation": in_matmuls(config) or (kernels.swiglu in ("fused", "recompute") and "swiglu" not in lacks),
        "loss": kernels.cross_entropy == "fused" and config.loss in ("full", "chunked"),
    }
    return {name for name, used in own.items() if used}


def in_matmuls(config: RunConfig) -> bool:
    """Whether the matmuls beside it compute the activation."""
    return activation_kernel(config, config.model) == "matmul"


def lacking(model: ModelConfig) -> set[str]:
    """Keys of KernelsConfig for which a model has nothing to do (as mfubench.model.operations decides)."""
    has = {
        "norm": model.norm_position == "pre" and not model.norm_bias,
        "rope": model.position == "rope",
        "swiglu": model.mlp == "swiglu",
        "gelu": model.mlp == "gelu",
    }
    return {name for name, there in has.items() if not there}


def eager_passes(group: str, config: RunConfig) -> float:
    """Bytes that a group's operators move over those of fused work: 1 where compiled, or one operator anyway."""
    one_operator = (group == "activation" and config.model.mlp != "swiglu") or (
        group == "loss" and config.loss == "fused"
    )
    return 1.0 if config.compile != "none" or one_operator else EAGER_PASSES.get(group, 1.0)


def writes_one_gradient(config: RunConfig) -> bool:
    """Whether attention's backward pass writes the gradients of q, k and v side by side, as one of their matmul."""
    return config.attention in WRITES_ONE_GRADIENT and not config.model.qk_norm


def rotates_in_place(config: RunConfig) -> bool:
    """Whether the own RoPE turns q and k where their matmul wrote them: nobody else may need that output."""
    return not (config.model.qk_norm or config.fp8 or config.activation_checkpointing == "selective")


def rotates_gradients_in_place(config: RunConfig) -> bool:
    """Whether attention's backward pass writes one tensor, in which the own RoPE's then turns q and k."""
    return config.attention in WRITES_ONE_GRADIENT and rotates_in_place(config)


def loss_bytes(config: RunConfig) -> float:
    """Bytes of softmax, cross-entropy and their gradient in one micro-step."""
    element = ELEMENT_BYTES[config.dtype]
    tokens, vocab_size = config.micro_batch_size * config.seq_len, config.model.vocab_size
    # read logits for the sum, read and write for the gradient, read (own kernel: in place, so that nothing is left)
    loss = tokens * element * (3 if "loss" in own_groups(config) else 4) * vocab_size
    if config.loss == "fused" or (config.loss == "chunked" and not head_accumulates(config)):
        loss += vocab_size * config.model.hidden_size * (GRADIENT_BYTES + element)  # the weight's gradient, rounded
    return float(loss + chunk_sum_bytes(config))


def chunk_sum_bytes(config: RunConfig) -> float:
    """Bytes of one micro-step that add each chunk's gradient of the head's weight to a float32 sum.

    The matmul's epilogue moves them: part of what the loss costs, but of no kernel of its own. The first chunk writes
    the sum; into a main gradient, which `epilogue_bytes` counts once a micro-step, it is the others that come on top.
    """
    if config.loss == "full":
        return 0.0
    vocab_size = config.model.vocab_size
    logits = config.micro_batch_size * config.seq_len * ELEMENT_BYTES[config.dtype] * vocab_size
    further = math.ceil(logits / chunk_bytes("loss" in own_groups(config))) - 1
    first = 0 if head_accumulates(config) else 1
    return float(vocab_size * config.model.hidden_size * (2 * further + first) * GRADIENT_BYTES)


def accumulation_bytes(config: RunConfig) -> float:
    """Bytes a step that adding micro-batch gradients to the float32 gradient moves: the first is copied.

    Gradients that matmuls accumulate themselves are not among them (`epilogue_bytes`). What ddp and zero1 reduce in
    another dtype is rounded whole, and cast back where this rank needs the sum; fsdp copies in any case.
    """
    element, again = ELEMENT_BYTES[config.dtype], config.gradient_accumulation_steps - 1
    parameters = count_parameters(config.model).total
    added = parameters - accumulating_weights(config)
    cast = 0.0
    if config.parallelism in ("ddp", "zero1") and reduced_bytes(config) != GRADIENT_BYTES:
        back = 1 / config.world_size if config.parallelism == "zero1" else 1
        cast = parameters * (GRADIENT_BYTES + reduced_bytes(config)) * (1 + back)
    return added * (element + GRADIENT_BYTES + (element + 2 * GRADIENT_BYTES) * again) + cast


def epilogue_bytes(config: RunConfig) -> float:
    """Bytes a step that accumulating matmuls move beyond a product of their dtype.

    They write float32, and read it first in all micro-steps but one.
    """
    element, micro_steps = ELEMENT_BYTES[config.dtype], config.gradient_accumulation_steps
    beyond = (GRADIENT_BYTES - element) * micro_steps + GRADIENT_BYTES * (micro_steps - 1)
    return float(accumulating_weights(config) * beyond)


def accumulating_weights(config: RunConfig) -> int:
    """How many weights have their gradient added to the main gradient by the matmul that makes it."""
    if config.kernels.weight_gradient != "accumulate":
        return 0
    counts = count_parameters(config.model)
    return counts.attention + counts.mlp + (counts.lm_head if head_accumulates(config) else 0)


def optimizer_bytes(config: RunConfig) -> float:
    """Bytes a step of clipping, AdamW and writing the compute weights, on one rank."""
    share = 1 / config.world_size if config.parallelism in ("zero1", "fsdp") else 1.0
    norm = 4  # read every gradient
    adamw = 4 * 8  # read and write gradient (scaled in place), master, both moments
    publish = 0 if config.dtype == "float32" else 4 + ELEMENT_BYTES[config.dtype]
    if config.kernels.adamw == "fused":
        adamw = 4 * 7
        if config.dtype != "float32" and config.parallelism != "fsdp":  # which rounds weights when it gathers them
            publish = ELEMENT_BYTES[config.dtype]
    return count_parameters(config.model).total * share * (norm + adamw + publish)


def kernel_count(config: RunConfig) -> float:
    """Kernels of one micro-step, roughly: matmuls, attention and, fused or not, what lies between."""
    m = config.model
    between = 12 if config.compile != "none" else 40
    a_layer = 12 + 5 + between + (between / 2 if config.activation_checkpointing != "none" else 0)
    return m.num_hidden_layers * a_layer + 30


# --- communication ---------------------------------------------------------------------------------------------------


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

    ddp: all-reduce behind the last backward pass. zero1: reduce-scatter behind it, all-gather of the weights after
    the optimizer, in the open. fsdp: weights gathered behind the first forward pass and gradients scattered behind
    the last backward pass, or, where memory does not keep them, both in every micro-step. What is left over is waited
    for, and what is hidden slows the kernels it hides behind. fsdp also copies, which nothing hides: gathered weights
    into their places, whole gradients into the buffer that is scattered, cast to the dtype of the reduction.
    """
    if config.world_size == 1:
        return 0.0
    parameters = count_parameters(config.model).total
    weights, gradients = parameters * ELEMENT_BYTES[config.dtype], parameters * reduced_bytes(config)

    def lost(seconds: float, behind: float, last_piece: float) -> float:
        exposed = max(seconds - BACKWARD_OVERLAP * behind, last_piece * seconds)
        return exposed + rates.contention * (seconds - exposed)

    if config.parallelism == "ddp":
        return lost(collective_seconds(gradients, config, rates, "all_reduce"), backward_s, LAST_BUCKET)
    scatter = collective_seconds(gradients, config, rates, "reduce_scatter")
    gather = collective_seconds(weights, config, rates, "all_gather")
    if config.parallelism == "zero1":
        return lost(scatter, backward_s, LAST_BUCKET) + gather
    block = 1 / config.model.num_hidden_layers  # the first gather and the last scatter
    keeps = fsdp_keeps_weights(config, parameters, rates.memory_gib)
    summed = keeps and config.gradient_accumulation_steps > 1
    of_gradient = (GRADIENT_BYTES if summed else ELEMENT_BYTES[config.dtype]) + reduced_bytes(config)
    into_place, into_buffer = (size / (rates.bandwidth_gb_s * 1e9) for size in (2 * weights, parameters * of_gradient))
    forward, backward = lost(gather, forward_s, block) + into_place, lost(scatter, backward_s, block) + into_buffer
    if keeps:
        return forward + backward
    backward = lost(gather + scatter, backward_s, block) + into_place + into_buffer
    return config.gradient_accumulation_steps * (forward + backward)


def reduced_bytes(config: RunConfig) -> int:
    """Of a gradient on its way between ranks."""
    return ELEMENT_BYTES[config.communication.reduce_dtype]


def slowest_of(cards: int, deviation: float) -> float:
    """How much slower than the mean the slowest of `cards` is expected to be: a normal order statistic (Blom 1958)."""
    return deviation * NormalDist().inv_cdf((cards - 0.375) / (cards + 0.25)) if cards > 1 else 0.0


# --- the step --------------------------------------------------------------------------------------------------------


def resolve_settings(config: RunConfig, rates: Rates) -> RunConfig:
    """What settings will turn into on this card: the fastest attention, the loss that suits vocabulary and compiler.

    Flash kernels have no float32: such a run falls back to torch's own attention.
    """
    changes: dict[str, str] = {}
    if config.dtype == "float32" and config.attention != "eager":
        changes["attention"] = "sdpa"
    elif config.attention == "auto":
        changes["attention"] = max(("cudnn", "sdpa"), key=lambda name: rates.attention[name])  # no package needed
    config = config.model_copy(update=changes)
    if generation(find_gpu(rates.gpu)) != "hopper":
        config = without_matmuls(config)
    return resolve_auto(config, rates.memory_gib)


def resolve_auto(config: RunConfig, capacity_gib: float = math.inf) -> RunConfig:
    """Own kernels and loss of `auto` as on a GPU that runs them all; attention aside, which depends on the card."""
    return resolve_loss(resolve_kernels(config, capacity_gib))


def resolve_kernels(config: RunConfig, capacity_gib: float) -> RunConfig:
    """`auto` of the own kernels replaced by the kernel where model and settings allow it, as on a GPU that runs all;
    activations by those that need no package. `matmul` by what runs in its stead where they forbid it.

    capacity_gib: of a card; fsdp has whole gradients to accumulate in where they fit.
    """
    captured = config.compile != "none" and config.compile_mode == "reduce-overhead"
    parameters = count_parameters(config.model).total
    no_sum = config.parallelism == "fsdp" and fsdp_without_sum(config, parameters, capacity_gib) is not None
    best = {
        **dict.fromkeys(lacking(config.model), "plain"),
        **({} if config.model.position == "rope" or not writes_one_gradient(config) else {"rope": "fused"}),
        "gelu": "plain",  # in the matmuls it needs a package, as SwiGLU there does
        "cross_entropy": "plain" if config.loss == "fused" else "fused",
        "weight_gradient": "plain" if no_sum or captured or config.fp8 else "accumulate",
    }
    if not matmuls_take_activations(config):
        config = without_matmuls(config)
    asked = config.kernels.model_dump()
    chosen = {key: best.get(key, "fused") for key, value in asked.items() if value == "auto"}
    return config.model_copy(update={"kernels": config.kernels.model_copy(update=chosen)})


def without_matmuls(config: RunConfig) -> RunConfig:
    """The config with what runs where no matmul computes activations."""
    asked = config.kernels.model_dump()
    instead = {key: without for key, without in WITHOUT_MATMULS.items() if asked[key] == "matmul"}
    return config.model_copy(update={"kernels": config.kernels.model_copy(update=instead)})


def matmuls_take_activations(config: RunConfig) -> bool:
    """Whether settings and model allow what `matmul` asks for (as mfubench.model.operations decides)."""
    woven_bias = config.model.mlp == "swiglu" and config.model.mlp_bias
    return not woven_bias and config.dtype != "float32" and config.activation_checkpointing != "selective"


def resolve_loss(config: RunConfig) -> RunConfig:
    """`loss: auto` replaced by what suits vocabulary, compiler and cross-entropy on a GPU."""
    if config.loss != "auto":
        return config
    large = config.model.vocab_size >= LARGE_VOCABULARY
    one_pass = config.compile != "none" or config.kernels.cross_entropy == "fused"
    loss = "chunked" if large else "full" if one_pass else "fused"
    return config.model_copy(update={"loss": loss})


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
