"""Bytes that a training step moves beside its matmuls and attention, counted by group of work. No torch."""

from __future__ import annotations

import math

from mfubench.config import RunConfig
from mfubench.decisions import ELEMENT_BYTES, chunk_bytes, head_accumulates, shard_ranks
from mfubench.flops import count_parameters
from mfubench.prediction.resolved_settings import (
    in_matmuls,
    lacking,
    rotates_gradients_in_place,
    rotates_in_place,
    writes_one_gradient,
)

# Bytes of elementwise work with a kernel an operator over those of fused work, counted operator by operator. Norm:
# forward 10 H (norm, addition), backward 16 H (two gradients, addition) instead of 18 H together. RoPE in float32:
# forward 48 a rotated element (casts, 4 products, 2 sums, concatenation), backward 66 instead of 4 + 6. SwiGLU: forward
# 10 I, backward 26 I instead of 16 I. Softmax: 36 a logit (casts, log-softmax, its gradient) instead of 8.
EAGER_PASSES = {"norm": 1.44, "rope": 11.4, "activation": 2.25, "loss": 4.5}
GRADIENT_BYTES = 4  # gradients are accumulated in float32


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


def eager_passes(group: str, config: RunConfig) -> float:
    """Bytes that a group's operators move over those of fused work: 1 where compiled, or one operator anyway."""
    one_operator = (group == "activation" and config.model.mlp != "swiglu") or (
        group == "loss" and config.loss == "fused"
    )
    return 1.0 if config.compile != "none" or one_operator else EAGER_PASSES.get(group, 1.0)


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
    another dtype is rounded whole, and cast back where this rank needs the sum. fsdp adds up nothing where there is one
    micro-step; what it copies to reduce it counts as communication (`step_model.lost_to_communication`).
    """
    if config.parallelism == "fsdp" and config.gradient_accumulation_steps == 1:
        return 0.0
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
    owners = {"zero1": config.world_size, "fsdp": shard_ranks(config)}.get(config.parallelism, 1)
    norm = 4 / (config.world_size if config.parallelism == "ddp" else 1)  # read every gradient, or a part of each
    adamw = 4 * 8  # read and write gradient (scaled in place), master, both moments
    publish = 0 if config.dtype == "float32" else 4 + ELEMENT_BYTES[config.dtype]
    if config.kernels.adamw == "fused":
        adamw = 4 * 7
        if config.dtype != "float32":
            publish = ELEMENT_BYTES[config.dtype]
    return count_parameters(config.model).total / owners * (norm + adamw + publish)


def reduced_bytes(config: RunConfig) -> int:
    """Of a gradient on its way between ranks."""
    return ELEMENT_BYTES[config.communication.reduce_dtype]
