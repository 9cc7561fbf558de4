"""Hugging Face transformers' own model in a plain loop, with or without liger-kernel.

float32 weights under bfloat16 autocast, SDPA, fused AdamW. Settings: `liger` (swap in liger-kernel's modules and its
fused linear and cross-entropy) and `compile`.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.driving import drive, init_process_group, package_version, step_batches
from benchmarks.peers.job import Job, MissingPeer
from mfubench.conversion.hf_config import config_json


def version(job: Job) -> str:
    found = package_version("transformers")
    return f"{found} + liger-kernel {package_version('liger-kernel')}" if job.settings.get("liger") else found


def build(job: Job, device: torch.device) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    values = config_json(job.run.model, end_of_text=None)
    if job.settings.get("liger"):
        if device.type != "cuda":
            raise MissingPeer("liger-kernel computes on GPUs only")
        apply_liger(values["model_type"])
    config = AutoConfig.for_model(**values)
    config.use_cache = False
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


def apply_liger(architecture: str) -> None:
    import liger_kernel.transformers as liger

    apply = getattr(liger, f"apply_liger_kernel_to_{architecture}", None)
    if apply is None:
        raise MissingPeer(f"liger-kernel has nothing for {architecture}")
    apply()


def train(job: Job, device: torch.device) -> None:
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.manual_seed(job.run.seed)
    if job.run.world_size > 1:
        init_process_group(device)
    model = build(job, device).train()
    options = job.run.optimizer
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=options.learning_rate,
        betas=(options.beta1, options.beta2),
        eps=options.eps,
        weight_decay=options.weight_decay,
        fused=True,
    )
    step_model: nn.Module = model
    if job.run.world_size > 1:
        step_model = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
    if job.settings.get("compile"):
        step_model.compile()
    for batch in step_batches(job):
        train_step(job, device, step_model, batch)
        nn.utils.clip_grad_norm_(model.parameters(), options.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def train_step(job: Job, device: torch.device, model: nn.Module, batch: Tensor) -> None:
    """Forward and backward of all micro-batches [A, B, T + 1]; gradients are exchanged in the last."""
    if device.type == "cuda":
        batch = batch.pin_memory()
    last = len(batch) - 1
    for micro, tokens in enumerate(batch):
        inputs = tokens[:, :-1].to(device, non_blocking=True)
        waits = isinstance(model, DistributedDataParallel) and micro < last
        with model.no_sync() if waits else nullcontext():  # type: ignore[operator]
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                loss = model(input_ids=inputs, labels=inputs).loss / len(batch)  # the model shifts its labels itself
            loss.backward()


if __name__ == "__main__":
    drive(version, train)
