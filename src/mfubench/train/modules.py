"""What is done to the model before it trains, in place: float8, checkpointing, accumulating matmuls, torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from mfubench.config import RunConfig
from mfubench.decisions import loss_accumulates
from mfubench.model import Decoder
from mfubench.model.weight_gradient import Linear
from mfubench.train.choices import Resolved
from mfubench.train.fsdp import FsdpEngine
from mfubench.train.parallel import FlatEngine

MATMULS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::_scaled_mm")


def convert_to_float8(model: Decoder) -> None:
    """Run the blocks' matmuls in float8 (torchao, one scale a tensor); weights stay as they are stored."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def in_a_block(module: nn.Module, name: str) -> bool:
        return name.startswith("blocks.")

    recipe = Float8LinearConfig.from_recipe_name("tensorwise")
    convert_to_float8_training(model, config=recipe, module_filter_fn=in_a_block)


def checkpoint_activations(model: Decoder, kind: str) -> None:
    """Recompute each block in the backward pass. full: all of it; selective: all but matmuls and attention."""
    context: Callable[[], Any] | None = None
    if kind == "selective":

        def context() -> Any:
            return create_selective_checkpoint_contexts(keep_products)

    for block in model.blocks:
        block.forward = checkpointed(block.forward, context)


def checkpointed(forward: Callable[..., Any], context: Callable[[], Any] | None) -> Callable[..., Any]:
    options: dict[str, Any] = {"context_fn": context} if context is not None else {}

    def run(*arguments: Any) -> Any:
        return checkpoint(forward, *arguments, use_reentrant=False, preserve_rng_state=False, **options)

    return run


def keep_products(context: Any, operator: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    """selective: keep what is dear to compute, the outputs of matmuls and of attention kernels."""
    name = str(operator.name()) if isinstance(operator, torch._ops.OpOverload) else str(operator)
    if name in MATMULS or "attention" in name or "attn" in name:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def accumulate_weight_gradients(model: Decoder, engine: FlatEngine | FsdpEngine, resolved: Resolved) -> None:
    """Let every matmul add its weight's gradient to the engine's main gradient; the head's, where the loss can."""
    tied = model.config.tie_word_embeddings
    for name, module in model.named_modules():
        if isinstance(module, Linear) and module is not model.lm_head:
            engine.accumulate_in_matmul(module, f"{name}.weight")
    if loss_accumulates(resolved.used["loss"].used, resolved.used["dtype"].used):
        engine.accumulate_in_matmul(model.lm_head, "token_embedding.weight" if tied else "lm_head.weight", tied=tied)


def compile_model(model: Decoder, config: RunConfig, resolved: Resolved) -> None:
    """torch.compile the forward of each block or of the whole model: module and parameter names stay as they are."""
    modules: list[nn.Module] = []
    if resolved.used["compile"].used == "block":
        modules = list(model.blocks)
    elif resolved.used["compile"].used == "model":
        modules = [model]
    options: dict[str, Any] = {}
    if config.compile_backend == "inductor":
        # reduce-overhead would capture graphs of its own inside the captured step
        options["mode"] = "default" if resolved.is_on("cuda_graphs") else config.compile_mode
    for module in modules:
        module.forward = torch.compile(module.forward, backend=config.compile_backend, dynamic=False, **options)
