"""What fsdp keeps whole on a card: decided here for the trainer and for whoever predicts it. No torch."""

from __future__ import annotations

from typing import Any

from mfubench.config import RunConfig

GIB = 2**30
ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
FSDP_KEPT_FRACTION = 0.4  # of the card's memory: fsdp keeps whole weights and gradients within a step up to this


def fsdp_keeps_weights(config: RunConfig, parameters: Any, capacity_gib: float) -> Any:
    """Whether fsdp gathers weights and reduces gradients once a step and keeps both whole: as asked, or if they fit."""
    asked = config.communication.reshard_after_forward
    if asked != "auto":
        return asked == "never"
    return parameters * (ELEMENT_BYTES[config.dtype] + 4) <= FSDP_KEPT_FRACTION * capacity_gib * GIB


def fsdp_without_sum(config: RunConfig, parameters: int, capacity_gib: float) -> str | None:
    """Why fsdp has no whole float32 gradient for matmuls to add to, or None where it has."""
    if config.gradient_accumulation_steps == 1:
        return "with one micro-step fsdp has no gradients to add up"
    if config.communication.reduce_dtype != "float32":
        return f"fsdp adds up gradients in communication.reduce_dtype, {config.communication.reduce_dtype}"
    if not fsdp_keeps_weights(config, parameters, capacity_gib):
        return "fsdp reduces gradients in each micro-step where it keeps no whole weights"
    return None
