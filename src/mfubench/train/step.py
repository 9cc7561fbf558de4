"""One training step: micro-steps, gradient reduction, clipping, optimizer; as a whole also a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from mfubench.train.optimizer import Optimizer
from mfubench.train.parallel import Engine

StepFunction = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class TrainStep:
    """inputs, labels [A, B, T] int64 (A micro-batches of B sequences) -> this rank's mean loss, global gradient norm.

    Both results are device scalars; nothing in here waits for the device.
    """

    def __init__(self, model: nn.Module, engine: Engine, optimizer: Optimizer):
        self.model, self.engine, self.optimizer = model, engine, optimizer

    def __call__(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        loss = self.forward_backward(inputs, labels)
        grad_norm = self.optimizer.step()
        self.engine.publish(rounded=self.optimizer.rounds)
        return loss, grad_norm

    def forward_backward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """All micro-steps and the reduction. Alone, it leaves weights and optimizer as they were."""
        steps = inputs.shape[0]
        total = torch.zeros((), device=inputs.device)
        for micro in range(steps):
            self.engine.begin_micro_step(first=micro == 0, last=micro == steps - 1)
            loss = self.model(inputs[micro], labels[micro])
            self.optimizer.scale_loss(loss).backward()
            total += loss.detach()
        self.engine.finish_backward()
        return total / steps


def warm_up(step: TrainStep, inputs: Tensor, labels: Tensor) -> None:
    """What is lazy happens, before a capture: cuBLAS workspaces, NCCL channels, autotuning. Collective."""
    for _ in range(2):
        step.forward_backward(inputs, labels)
    step.optimizer.warm_up()


class GraphedStep:
    """A TrainStep captured once and replayed: the CPU launches one graph instead of thousands of kernels.

    A replay reads what `inputs`, `labels` and the learning rate's tensor hold at that moment, so every step has its
    own micro-batches and its own learning rate.
    """

    def __init__(self, step: TrainStep, inputs: Tensor, labels: Tensor):
        """Capture on the current stream, which must not be the default one, after `warm_up`. No step is taken."""
        self.inputs, self.labels = inputs.clone(), labels.clone()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        self.graph = torch.cuda.CUDAGraph()
        # thread_local: the threads that pin the next batches must not break the capture
        with torch.cuda.graph(self.graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
            self.results = step(self.inputs, self.labels)

    def __call__(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        self.inputs.copy_(inputs)
        self.labels.copy_(labels)
        self.graph.replay()
        return self.results
