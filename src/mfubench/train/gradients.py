"""Gradient statistics by layer, of the gradient that the optimizer has just used, computed where it is."""

from __future__ import annotations

import re

import torch
import torch.distributed as dist
from torch import Tensor

from mfubench.run_log import GradientStatistics
from mfubench.train.optimizer import Optimizer
from mfubench.train.parallel import Engine
from mfubench.train.process import Process

BLOCK = re.compile(r"^(blocks\.\d+)\.")


class GradientMeter:
    """Mean, largest absolute value and standard deviation of each block's gradient, and of what is outside blocks."""

    def __init__(self, engine: Engine, optimizer: Optimizer, process: Process):
        self.engine, self.optimizer, self.process = engine, optimizer, process
        fragments = list(engine.fragments())
        names = (
            process.gather([fragment.name for fragment in fragments])
            if engine.sharded
            else [[fragment.name for fragment in fragments]]
        )
        self.layers = sorted({layer_of(name) for part in names for name in part}, key=natural)
        self.parts = [(self.layers.index(layer_of(fragment.name)), fragment) for fragment in fragments]
        self.pending: list[tuple[int, Tensor]] = []

    @torch.no_grad()
    def measure(self, step: int) -> None:
        """Take the statistics of `step`, before the next one overwrites its gradients; they stay on the device.

        They are those before clipping: what the optimizer has left in the gradients is divided out.
        """
        gradients = self.engine.gradients()
        sums = torch.zeros(len(self.layers), 3, dtype=torch.float64, device=self.process.device)  # count, sum, squares
        largest = torch.zeros(len(self.layers), device=self.process.device)
        for layer, fragment in self.parts:
            gradient = gradients[fragment.piece].view(-1)[fragment.piece_start :][: fragment.length]
            sums[layer, 0] += fragment.length
            sums[layer, 1] += gradient.sum()
            sums[layer, 2] += gradient.square().sum()
            largest[layer] = torch.maximum(largest[layer], gradient.abs().max())
        if self.engine.sharded:
            self.process.sum_(sums)
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        mean = sums[:, 1] / sums[:, 0]
        deviation = (sums[:, 2] / sums[:, 0] - mean.square()).clamp(min=0).sqrt()
        self.pending.append(
            (step, torch.stack((mean, largest.double(), deviation), dim=1) / self.optimizer.gradient_factor)
        )

    def collect(self) -> list[GradientStatistics]:
        """Read out what was measured since the last call."""
        records = []
        for step, values in self.pending:
            rows = zip(self.layers, values.tolist(), strict=True)
            layers = {layer: dict(zip(("mean", "max", "std"), row, strict=True)) for layer, row in rows}
            records.append(GradientStatistics(step=step, layers=layers))
        self.pending.clear()
        return records


def layer_of(name: str) -> str:
    """blocks.3.mlp.down.weight -> blocks.3; lm_head.weight -> lm_head."""
    match = BLOCK.match(name)
    return match[1] if match else name.split(".")[0]


def natural(layer: str) -> tuple[str, int]:
    head, _, number = layer.partition(".")
    return head, int(number or -1)
