"""How much memory a run takes on one GPU, counted from its configuration: what fits, before anything is rented.

Counted: the weights the module computes with, the optimizer's float32 masters and moments, gradients, what the forward
pass keeps for the backward pass, and the logits. `MemoryFit` corrects the two parts that depend on compiler and
allocator; `calibration` fits it to the peaks of real runs. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mfubench.config import ModelConfig, RunConfig
from mfubench.decisions import (
    ELEMENT_BYTES,
    EXCHANGE_SLOTS,
    GIB,
    ROW_MULTIPLE,
    chunk_bytes,
    fsdp_keeps_weights,
    head_accumulates,
    shard_ranks,
)
from mfubench.flops import count_parameters


@dataclass(frozen=True)
class MemoryFit:
    """Corrections to the count, and how far off it may be."""

    activation_factor: float = 1.0  # what the compiler keeps beyond, or recomputes instead of, what is counted
    reserve_gib: float = 1.5  # allocator blocks not handed out, workspaces of cuBLAS, cuDNN and NCCL
    context_gib: float = 0.8  # CUDA context and kernels, outside the allocator: measured where runs ran out of memory
    error_fraction: float = 0.10  # half-width of the 95 % interval of the total
    source: str = "uncalibrated: counted from the configuration"
    # The same two for tensors alone, as the allocator reports them.
    tensor_activation_factor: float = 1.0
    workspace_gib: float = 0.2

    @property
    def at_the_limit(self) -> MemoryFit:
        """Of a run that barely fits: before it fails, the allocator gives its free blocks back, and tensors count."""
        return replace(self, activation_factor=self.tensor_activation_factor, reserve_gib=self.workspace_gib)


@dataclass(frozen=True)
class MemoryEstimate:
    """GiB of the fullest rank at its peak, by what holds them; arrays where a grid of models was counted."""

    weights: float
    masters: float
    moments: float
    gradients: float
    activations: float
    logits: float
    reserve: float
    context: float

    @property
    def allocated_gib(self) -> float:
        """Tensors: what a run records as allocated at its peak, but for workspaces."""
        return self.weights + self.masters + self.moments + self.gradients + self.activations + self.logits

    @property
    def total_gib(self) -> float:
        """What must fit on the card."""
        return self.allocated_gib + self.reserve + self.context


def estimate_memory(
    config: RunConfig, capacity_gib: float, model: ModelConfig | None = None, fit: MemoryFit = MemoryFit()
) -> MemoryEstimate:
    """Peak memory of one rank on a card with `capacity_gib` (it decides how fsdp spends memory, nothing else).

    `model` replaces the config's; it may be a grid (`planner.search.shapes`).
    """
    model = model or config.model
    tokens = config.micro_batch_size * config.seq_len
    activations = tokens * activation_bytes_per_token(config, model) * fit.activation_factor
    logits = logit_bytes(config, model)
    states = state_bytes(config, model, capacity_gib, activations + logits)
    return MemoryEstimate(
        **{name: gib(value) for name, value in states.items()},
        activations=gib(activations),
        logits=gib(logits),
        reserve=fit.reserve_gib,
        context=fit.context_gib,
    )


def gib(size_bytes: Any) -> Any:
    """Bytes in GiB: an array of them as it is, one as a plain number."""
    return size_bytes / GIB if np.ndim(size_bytes) else float(size_bytes / GIB)


def state_bytes(config: RunConfig, model: ModelConfig, capacity_gib: float, passing: Any) -> dict[str, Any]:
    """Bytes that stay through a step, where `passing` bytes of activations and logits come and go: weights, masters,
    moments, gradients.

    bf16 and fp16: 2 a compute weight, 4 a master, 8 for Adam's two moments, and 4 for gradients, which are accumulated
    in float32 (each parameter's own gradient is freed at once); beside them the buckets of an exchange. float32: the
    weights are the masters. zero1 divides masters and moments among the ranks; fsdp everything (`fsdp_state_bytes`).
    """
    element = ELEMENT_BYTES[config.dtype]
    if config.parallelism == "fsdp":
        return fsdp_state_bytes(config, model, capacity_gib, passing)
    parameters = count_parameters(model).total
    share = 1 / config.world_size if config.parallelism == "zero1" else 1.0
    return {
        "weights": element * parameters,
        "masters": 4 * parameters * share if element < 4 else 0 * parameters,
        "moments": 8 * parameters * share,
        "gradients": 4 * parameters + exchange_bytes(config, model),
    }


def exchange_bytes(config: RunConfig, model: ModelConfig) -> Any:
    """What an exchange receives of the largest buckets: those of embedding and head, each a parameter by itself."""
    if config.communication.reduction != "exchange":
        return 0
    bucket = 1e6 * config.communication.bucket_mb / 4
    return EXCHANGE_SLOTS * 4 * np.maximum(model.vocab_size * model.hidden_size, bucket)


def fsdp_state_bytes(config: RunConfig, model: ModelConfig, capacity_gib: float, passing: Any) -> dict[str, Any]:
    """`state_bytes` of fsdp, whose shards are the masters; beside them their rounded form, which is gathered.

    Weights are gathered all of them for a step where they fit (`fsdp_keeps_weights`), else for the block at hand and
    the one prefetched. What was gathered last is held once more until the next gather, which several micro-steps do
    not wait for. Whole gradients are kept from one micro-step to the next, and made in whole buffers where matmuls
    accumulate; else each block's are reduced at once, while the activations give up more than they take. The shards of
    reduced gradients come as activations and weights that were kept go: what of them finds no room there is counted,
    and all of those of earlier micro-steps.
    """
    counts = count_parameters(model)
    element, parameters = ELEMENT_BYTES[config.dtype], counts.total
    block = (counts.attention + counts.mlp) / model.num_hidden_layers
    several = config.gradient_accumulation_steps > 1
    keeps = fsdp_keeps_weights(config, parameters, capacity_gib)
    exchanges = config.communication.reduction == "exchange"
    tied = model.tie_word_embeddings
    held = 0 if several else block if tied else counts.lm_head
    if exchanges:  # what arrives has a place of its own: of a block and those ahead of it, of embedding and head
        ahead = config.communication.prefetch_blocks
        held = (1 + ahead) * block + counts.token_embedding + (0 if tied else counts.lm_head)
    gathered = np.where(keeps, parameters + held, 2 * np.maximum(block, counts.lm_head))
    if several or exchanges:
        whole = parameters
    elif config.kernels.weight_gradient == "accumulate":
        whole = parameters - counts.token_embedding - (0 if head_accumulates(config) else counts.lm_head)
    else:
        whole = 0
    shard = parameters / shard_ranks(config)
    going = passing + np.where(keeps, element * gathered, 0)
    without_room = np.maximum(4 * shard - going, 0)
    reduced = np.where(np.logical_or(keeps, not several), without_room, 4 * shard)
    received = 4 * np.maximum(block, counts.token_embedding) if exchanges else 0
    return {
        "weights": element * gathered + (element * shard if element < 4 else 0),
        "masters": 4 * shard,
        "moments": 8 * shard,
        "gradients": reduced + np.where(keeps, 4 * whole, element * gathered) + received,
    }


def activation_kernel(config: RunConfig, model: ModelConfig) -> str:
    """What computes the activation: a value of kernels.swiglu or kernels.gelu."""
    return {"swiglu": config.kernels.swiglu, "gelu": config.kernels.gelu}.get(model.mlp, "plain")


def activation_bytes_per_token(config: RunConfig, model: ModelConfig) -> Any:
    """What blocks and final norm keep of one token between forward and backward, bytes.

    A block keeps the inputs of its matmuls and of what is not linear: the residual stream before each norm and the
    norm's output, q, k, v, the attention's output, gate, up and their product (unless it is recomputed); without a
    compiler the plain activation keeps its own output as well. RoPE and q/k-norms leave q and k twice, since v is a
    view of the one matmul that made all three, unless RoPE overwrites them (`kernels.rope: fused`, without q/k-norms);
    without a compiler, and with it in float32, q/k-norms keep them once more. With fp8 the compiler keeps what only
    matmuls read, norm outputs and the product, as the one byte an element that they read of it.
    Attention kernels keep one float32 a head for the softmax, `eager` the probabilities. Selective checkpointing keeps
    matmul and attention outputs only; full keeps a block's input and rebuilds one block at a time. The final norm keeps
    its input, and the head the norm's output. The norms' own statistics, 4 bytes a token each, are left out.
    """
    element = ELEMENT_BYTES[config.dtype]
    hidden, intermediate = model.hidden_size, model.intermediate_size
    q_width = model.num_attention_heads * model.head_dim
    kv_width = model.num_key_value_heads * model.head_dim
    gated = 2 if model.mlp == "swiglu" else 1

    kept = 2 * hidden + (q_width + 2 * kv_width) + q_width + gated * intermediate
    own_rope = config.kernels.rope == "fused"
    if model.qk_norm:
        kept = kept + q_width + kv_width * (2 if own_rope else 1)  # q and k before their norm; own kernel: a copy of v
    elif model.position == "rope" and not own_rope and config.activation_checkpointing != "selective":
        kept = kept + q_width + kv_width
    if config.activation_checkpointing != "selective":
        recomputed = activation_kernel(config, model) in ("recompute", "matmul")
        inputs = 2 * hidden + (0 if recomputed else intermediate)  # norm outputs, product: could be rebuilt
        kept = kept + (inputs // element if config.fp8 and config.compile != "none" else inputs)
        if config.compile == "none" and model.mlp == "swiglu" and config.kernels.swiglu == "plain":
            kept = kept + intermediate  # silu(gate)
        if model.qk_norm and not own_rope and (config.compile == "none" or config.dtype == "float32"):
            kept = kept + q_width + kv_width  # normalised, before the norm's weight: in half precision rebuilt
    block = element * kept + 4 * model.num_attention_heads
    if config.attention == "eager":
        block = block + (element + 4) * model.num_attention_heads * config.seq_len  # probabilities, float32 softmax

    layers = model.num_hidden_layers
    final_norm = 2 * element * hidden
    if config.activation_checkpointing == "full":
        return layers * element * hidden + block + final_norm
    return layers * block + final_norm


def logit_bytes(config: RunConfig, model: ModelConfig) -> Any:
    """Logits and what else head and loss hold beside the activations at their fullest moment, bytes.

    full: the gradient takes the place of the logits, in the own kernel and in the compiler's, which owns the logits
    (torch's donated buffers); beside it the gradient of the head's weight as its matmul writes it, unless that
    accumulates. Neither compiled nor own: three float32 copies (log-softmax, its gradient and the loss's).

    A vocabulary that is no multiple of 8 has rows of zeros below it in the head's matmuls: one more copy of the weight
    (fused, liger-kernel's, does without).

    chunked and fused make the gradients in the forward pass: the weight's, a float32 sum over the chunks (chunked: the
    main gradient itself, where matmuls accumulate), and that of the hidden states. Beside them stand a chunk's logits
    or, afterwards, the gradients as they are handed on. fused (liger-kernel) takes chunks of about hidden / vocabulary
    of the tokens.
    """
    element = ELEMENT_BYTES[config.dtype]
    tokens, vocab_size = config.micro_batch_size * config.seq_len, model.vocab_size
    logits = element * tokens * vocab_size
    own = config.kernels.cross_entropy == "fused"
    head = vocab_size * model.hidden_size
    accumulates = head_accumulates(config)
    handed_on = 0 if accumulates else element * head
    rows_below = np.where(vocab_size % 8, -vocab_size % ROW_MULTIPLE, 0)
    aligned = np.where(rows_below, element * (vocab_size + rows_below) * model.hidden_size, 0)
    if config.loss == "full":
        if own or config.compile != "none":
            return logits + handed_on + aligned
        return 3 * 4 * tokens * vocab_size + aligned

    hidden_gradient = element * tokens * model.hidden_size
    if config.loss == "fused":
        rows = 2 ** np.ceil(np.log2(np.ceil(tokens / np.ceil(vocab_size / model.hidden_size))))
        chunk = element * np.minimum(rows, tokens) * vocab_size
        return 4 * head + hidden_gradient + np.maximum(chunk, element * head)
    chunks = np.ceil(logits / chunk_bytes(own))
    # logits, their gradient; without a compiler three float32 copies on the way to it
    copies = 1 if own else 2 if config.compile != "none" else 1 + 3 * 4 / element
    summed = 0 if accumulates else 4 * head
    return summed + hidden_gradient + aligned + np.maximum(copies * logits / chunks, handed_on + hidden_gradient)


def largest_micro_batch(config: RunConfig, capacity_gib: float, fit: MemoryFit = MemoryFit()) -> int:
    """The largest micro-batch whose tensors fit in `capacity_gib`; 0 where not even one's do."""

    def total(micro_batch_size: int) -> float:
        tried = config.model_copy(update={"micro_batch_size": micro_batch_size})
        return estimate_memory(tried, capacity_gib, fit=fit.at_the_limit).total_gib

    if total(1) > capacity_gib:
        return 0
    largest = 1
    while total(2 * largest) <= capacity_gib:
        largest *= 2
    too_large = 2 * largest
    while too_large - largest > 1:
        middle = (largest + too_large) // 2
        largest, too_large = (middle, too_large) if total(middle) <= capacity_gib else (largest, middle)
    return largest
