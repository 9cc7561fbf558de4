"""What the trainer decides by rule, decided here for it and for whoever predicts it, with their units. No torch."""

from __future__ import annotations

from typing import Any

from mfubench.config import RunConfig

GIB = 2**30
ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
FSDP_KEPT_FRACTION = 0.4  # of the card's memory: fsdp keeps whole weights and gradients within a step up to this
# From this vocabulary on `loss: auto` never holds all logits; why, stands in mfubench.model.loss.
LARGE_VOCABULARY = 65_536
# Logits and their gradient held at once by a chunked loss, in bytes: large, since every chunk adds a pass over its
# weight's float32 gradient.
CHUNK_BYTES = 2**31
# Rows of the head's weight are padded to a multiple of this on CUDA where the vocabulary is not one of 8 (GPT-2's
# 50,257): tensor cores want rows of whole 16-byte pieces, and logits of odd width run several times slower. Of its
# gradient, which has no padding, as many rows make one product.
ROW_MULTIPLE = 64
EXCHANGES_BY_ITSELF = ("ddp", "zero1")  # what `auto` takes an exchange for: measured to be faster
WITHOUT_WHOLE_GRADIENTS = "fsdp sums by exchange what matmuls have written whole, and none have"
EXCHANGE_SLOTS = 2  # buckets whose parts an exchange keeps: while those of one are added up, the next one's arrive


def chunk_bytes(own_kernel: bool) -> int:
    """Bytes of logits in a chunk: the own kernel puts their gradient in their place, any other form beside them."""
    return CHUNK_BYTES if own_kernel else CHUNK_BYTES // 2


def fsdp_keeps_weights(config: RunConfig, parameters: Any, capacity_gib: float) -> Any:
    """Whether fsdp gathers weights and reduces gradients once a step and keeps both whole: as asked, or if they fit."""
    asked = config.communication.reshard_after_forward
    if asked != "auto":
        return asked == "never"
    return parameters * (ELEMENT_BYTES[config.dtype] + 4) <= FSDP_KEPT_FRACTION * capacity_gib * GIB


def shard_ranks(config: RunConfig) -> int:
    """Among how many ranks fsdp shards; beyond them are copies."""
    return config.communication.shard_ranks or config.world_size


def fsdp_without_sum(config: RunConfig, parameters: int, capacity_gib: float) -> str | None:
    """Why fsdp has no whole float32 gradient for matmuls to add to, or None where it has."""
    if config.communication.reduce_dtype != "float32":
        return f"fsdp adds up gradients in communication.reduce_dtype, {config.communication.reduce_dtype}"
    if not fsdp_keeps_weights(config, parameters, capacity_gib):
        return "fsdp reduces gradients in each micro-step where it keeps no whole weights"
    return None


def may_exchange(config: RunConfig) -> bool:
    """Whether settings ask for an exchange (mfubench.train.exchange), or leave it to `auto` and do not forbid it."""
    wanted = config.communication.reduction
    return wanted == "exchange" or (
        wanted == "auto" and config.parallelism in EXCHANGES_BY_ITSELF and no_exchange(config) is None
    )


def no_exchange(config: RunConfig) -> str | None:
    """Why these settings leave no sum over ranks to an exchange, or None where they may."""
    if config.world_size == 1:
        return "one process"
    if config.parallelism == "fsdp":
        if shard_ranks(config) < config.world_size:
            return "fsdp sums by exchange among all ranks"
        if config.communication.reshard_after_forward == "always" or config.kernels.weight_gradient == "plain":
            return WITHOUT_WHOLE_GRADIENTS
    if config.communication.reduce_dtype != "float32":
        return "an exchange sums in float32"
    if config.nnodes > 1:
        return "an exchange stays within a node"
    if config.memory_cap_gib is not None:
        return "memory_cap_gib does not reach memory that cards share"
    return None


def loss_accumulates(form: str, dtype: str) -> bool:
    """Whether a form of the loss (full, chunked, fused) can add its weight's gradient to a main gradient.

    A chunked one makes it in the forward pass, before float16's loss is scaled.
    """
    return form == "full" or (form == "chunked" and dtype != "float16")


def head_accumulates(config: RunConfig) -> bool:
    """Whether the loss does so in a run with these settings, its `auto` replaced."""
    return config.kernels.weight_gradient == "accumulate" and loss_accumulates(config.loss, config.dtype)
