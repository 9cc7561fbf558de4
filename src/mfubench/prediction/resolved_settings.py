"""What settings turn into on a GPU: each `auto` replaced, what a card or a model has no use for left out. No torch."""

from __future__ import annotations

import math

from mfubench.config import ModelConfig, RunConfig
from mfubench.decisions import LARGE_VOCABULARY, fsdp_without_sum, may_exchange, no_exchange
from mfubench.flops import count_parameters
from mfubench.hardware import find_gpu
from mfubench.prediction.card_rates import Rates, generation
from mfubench.prediction.memory import activation_kernel

WITHOUT_MATMULS = {"swiglu": "fused", "gelu": "plain"}  # what runs where `matmul` cannot
WRITES_ONE_GRADIENT = ("fa3", "fa4")  # the keys of attention_kernels.PACKED, which needs torch


def resolve_settings(config: RunConfig, rates: Rates) -> RunConfig:
    """What settings will turn into on this card: the fastest attention, the loss that suits vocabulary and compiler.

    Flash kernels have no float32: such a run falls back to torch's own attention.
    """
    changes: dict[str, str] = {}
    if config.dtype == "float32" and config.attention != "eager":
        changes["attention"] = "sdpa"
    elif config.attention == "auto":
        changes["attention"] = max(("cudnn", "sdpa"), key=lambda name: rates.attention[name])  # no package needed
    if config.world_size == 1:
        changes["parallelism"] = "none"  # as the trainer takes it
    config = config.model_copy(update=changes)
    card = find_gpu(rates.gpu)
    if generation(card) != "hopper":
        config = without_matmuls(config)
    if not card.joins_all and config.communication.reduction == "auto":
        config = with_reduction(config, "collective")
    return resolve_auto(config, rates.memory_gib)


def resolve_auto(config: RunConfig, capacity_gib: float = math.inf) -> RunConfig:
    """Own kernels, loss and reduction of `auto` as on a GPU that runs all; attention aside, which depends on it."""
    return resolve_reduction(resolve_loss(resolve_kernels(config, capacity_gib)), capacity_gib)


def resolve_reduction(config: RunConfig, capacity_gib: float) -> RunConfig:
    """`communication.reduction` replaced by what runs, as between GPUs that can exchange."""
    parameters = count_parameters(config.model).total
    whole = config.parallelism != "fsdp" or fsdp_without_sum(config, parameters, capacity_gib) is None
    possible = whole and no_exchange(config) is None
    return with_reduction(config, "exchange" if possible and may_exchange(config) else "collective")


def with_reduction(config: RunConfig, reduction: str) -> RunConfig:
    communication = config.communication.model_copy(update={"reduction": reduction})
    return config.model_copy(update={"communication": communication})


def resolve_kernels(config: RunConfig, capacity_gib: float) -> RunConfig:
    """`auto` of the own kernels replaced by the kernel where model and settings allow it, as on a GPU that runs all;
    activations by those that need no package. `matmul` and `accumulate` by what runs in their stead where they are
    forbidden.

    capacity_gib: of a card; fsdp has whole gradients to accumulate in where they fit.
    """
    captured = config.compile != "none" and config.compile_mode == "reduce-overhead"
    parameters = count_parameters(config.model).total
    no_sum = config.parallelism == "fsdp" and fsdp_without_sum(config, parameters, capacity_gib) is not None
    cannot_accumulate = no_sum or captured or config.fp8
    best = {
        **dict.fromkeys(lacking(config.model), "plain"),
        **({} if config.model.position == "rope" or not writes_one_gradient(config) else {"rope": "fused"}),
        "gelu": "plain",  # in the matmuls it needs a package, as SwiGLU there does
        "cross_entropy": "plain" if config.loss == "fused" else "fused",
        "weight_gradient": "plain" if cannot_accumulate else "accumulate",
    }
    if not matmuls_take_activations(config):
        config = without_matmuls(config)
    asked = config.kernels.model_dump()
    if cannot_accumulate:
        asked["weight_gradient"] = "auto"  # the plain form, whatever was asked for
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


def writes_one_gradient(config: RunConfig) -> bool:
    """Whether attention's backward pass writes the gradients of q, k and v side by side, as one of their matmul."""
    return config.attention in WRITES_ONE_GRADIENT and not config.model.qk_norm


def rotates_in_place(config: RunConfig) -> bool:
    """Whether the own RoPE turns q and k where their matmul wrote them: nobody else may need that output."""
    return not (config.model.qk_norm or config.fp8 or config.activation_checkpointing == "selective")


def rotates_gradients_in_place(config: RunConfig) -> bool:
    """Whether attention's backward pass writes one tensor, in which the own RoPE's then turns q and k."""
    return config.attention in WRITES_ONE_GRADIENT and rotates_in_place(config)
