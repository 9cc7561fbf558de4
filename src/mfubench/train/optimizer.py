"""AdamW on the flat masters: clipping and loss scale are folded into its one pass over memory.

The accumulated gradient is a multiple of the mean gradient: `engine.divisor` times (micro-batches and ranks are summed)
the loss scale (float16). Instead of a pass that divides it and one that clips it, both factors are handed to the
kernel of the update, torch's or the project's own, as one device scalar. Nothing here waits for the device, so that a
whole step can be captured as a CUDA graph.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mfubench.config import OptimizerConfig
from mfubench.train.parallel import Engine
from mfubench.train.process import Process

# Dynamic loss scale of float16 (torch.amp.GradScaler's defaults)
FIRST_SCALE, GROWTH, BACKOFF, GROWTH_INTERVAL = 65536.0, 2.0, 0.5, 2000


def learning_rate_at(step: int, config: OptimizerConfig) -> float:
    """Linear warm-up over warmup_iters, then cosine from learning_rate to min_learning_rate at lr_decay_iters."""
    if step < config.warmup_iters:
        return config.learning_rate * (step + 1) / config.warmup_iters
    if step >= config.lr_decay_iters:
        return config.min_learning_rate
    progress = (step - config.warmup_iters) / max(1, config.lr_decay_iters - config.warmup_iters)
    span = config.learning_rate - config.min_learning_rate
    return config.min_learning_rate + span * 0.5 * (1 + math.cos(math.pi * progress))


class Optimizer:
    """Masters' AdamW of one rank, the gradient norm over all ranks, and float16's loss scale."""

    def __init__(
        self, engine: Engine, config: OptimizerConfig, *, process: Process, scale_loss: bool, fused: bool = False
    ):
        """fused: the update is `fused_adamw`, which also rounds the weights where an engine keeps rounded ones."""
        self.engine, self.config, self.process = engine, config, process
        self.rounds = fused  # the compute weights of the pieces, if they have any, are written by the update
        device = process.device
        self.learning_rate = torch.zeros((), device=device)
        self.clip = torch.ones((), device=device)  # factor of the last step's clipping: 1 = not clipped
        # once a step has been taken, `engine.gradients()` are this times the mean gradient before clipping
        self.gradient_factor = torch.ones((), device=device) if fused else self.clip
        self.scale = torch.full((), FIRST_SCALE if scale_loss else 1.0, device=device)
        self.growth_tracker = torch.zeros((), dtype=torch.int32, device=device)
        self.scales_loss = scale_loss
        groups = [
            {"params": [piece.master for piece in engine.pieces if piece.decay], "weight_decay": config.weight_decay},
            {"params": [piece.master for piece in engine.pieces if not piece.decay], "weight_decay": 0.0},
        ]
        self.adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=self.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=True,
            capturable=process.on_cuda,  # the step counts live on the device: a replayed graph must advance them
        )
        for piece in engine.pieces:  # at once, not at the first step: a checkpoint fills them, a graph captures them
            self.adamw.state[piece.master] = {
                "step": torch.zeros((), device=device),
                "exp_avg": torch.zeros_like(piece.master),
                "exp_avg_sq": torch.zeros_like(piece.master),
            }

    def state(self, kind: str) -> list[Tensor]:
        """`kind` ("step", "exp_avg", "exp_avg_sq") of each piece, in the order of `engine.pieces`."""
        return [self.adamw.state[piece.master][kind] for piece in self.engine.pieces]

    def set_learning_rate(self, value: float) -> None:
        self.learning_rate.fill_(value)

    def scale_loss(self, loss: Tensor) -> Tensor:
        return loss * self.scale if self.scales_loss else loss

    @torch.no_grad()
    def step(self) -> Tensor:
        """Clip by the global norm and update the masters. Returns the norm before clipping, a device scalar.

        In float16 a gradient that is not finite skips the update and halves the scale.
        """
        gradients = self.engine.gradients()
        divisor = self.scale * self.engine.divisor
        grad_norm = self.global_norm() / divisor
        if self.config.grad_clip > 0:
            self.clip.copy_((self.config.grad_clip / (grad_norm + 1e-6)).clamp(max=1.0))
        found_inf = (~grad_norm.isfinite()).float() if self.scales_loss else None
        if self.rounds:
            self.update_fused(gradients, divisor, found_inf)
        else:
            self.update(gradients, divisor / self.clip, found_inf)
        if found_inf is not None:
            torch._amp_update_scale_(self.scale, self.growth_tracker, found_inf, GROWTH, BACKOFF, GROWTH_INTERVAL)
        return grad_norm

    @torch.no_grad()
    def warm_up(self) -> None:
        """Load the kernels of the update, changing nothing: a capture must not be what compiles and loads them."""
        if self.rounds:
            self.update_fused(self.engine.gradients(), torch.ones_like(self.clip), found_inf=torch.ones_like(self.clip))

    def update(self, gradients: list[Tensor], divisor: Tensor, found_inf: Tensor | None) -> None:
        """torch's fused AdamW; it leaves the gradients divided."""
        # where torch.amp.GradScaler leaves them for a fused optimizer
        self.adamw.grad_scale, self.adamw.found_inf = divisor, found_inf  # type: ignore[attr-defined]
        for piece, gradient in zip(self.engine.pieces, gradients, strict=True):
            piece.master.grad = gradient
        self.adamw.step()
        for piece in self.engine.pieces:  # fsdp makes new ones in each step: these must not outlive it
            piece.master.grad = None

    def update_fused(self, gradients: list[Tensor], divisor: Tensor, found_inf: Tensor | None) -> None:
        """The project's own; it leaves the gradients as they were."""
        from mfubench.train.fused_adamw import fused_adamw  # needs triton

        self.gradient_factor.copy_(divisor)
        fused_adamw(
            self.engine.pieces,
            gradients,
            *(self.state(kind) for kind in ("exp_avg", "exp_avg_sq", "step")),
            config=self.config,
            learning_rate=self.learning_rate,
            divisor=divisor / self.clip,
            found_inf=found_inf,
        )

    def global_norm(self) -> Tensor:
        """2-norm of the accumulated gradient over all parameters, of which each rank reads its part alone."""
        norm = torch.nn.utils.get_total_norm(self.engine.normed())
        if self.process.world_size > 1:
            norm = (self.process.sum_(norm.square()) / self.engine.copies).sqrt()
        return norm
