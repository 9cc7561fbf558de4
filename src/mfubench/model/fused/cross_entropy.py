"""Cross-entropy of logits [N, W] whose first V columns are the vocabulary: two passes over memory, none in float32.

    forward   reads the logits:                        N V E = 1,049 MB, 0.35 ms (V = 32,000)
    backward  reads them and writes their gradient:  2 N V E = 2,097 MB, 0.70 ms

The gradient takes the place of the logits: nothing as large is allocated. Softmax, loss and gradient are computed in
float32, the gradient at the label too, where the difference to 1 cancels as the model learns.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 4096, 8  # columns at once, 16 a thread
STAGES = 3  # blocks on their way while one is reduced


@triton.jit
def cross_entropy_forward_kernel(
    logits, labels, losses, normalizers, stride, vocabulary, STAGES: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    largest, total = -float("inf"), 0.0
    for start in tl.range(0, vocabulary, BLOCK, num_stages=STAGES):
        columns = start + tl.arange(0, BLOCK)
        values = tl.load(logits + row * stride + columns, mask=columns < vocabulary, other=-float("inf")).to(tl.float32)
        before, largest = largest, tl.maximum(largest, tl.max(values))
        total = total * tl.exp(before - largest) + tl.sum(tl.exp(values - largest))
    normalizer = largest + tl.log(total)
    at_label = tl.load(logits + row * stride + tl.load(labels + row)).to(tl.float32)
    tl.store(normalizers + row, normalizer)
    tl.store(losses + row, normalizer - at_label)


@triton.jit
def cross_entropy_backward_kernel(logits, labels, normalizers, factor, stride, vocabulary, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = logits + row * stride + columns
    values = tl.load(place, mask=columns < vocabulary, other=-float("inf")).to(tl.float32)
    gradient = tl.exp(values - tl.load(normalizers + row)) - (columns == tl.load(labels + row)).to(tl.float32)
    gradient *= tl.load(factor)
    tl.store(place, gradient.to(logits.dtype.element_ty), mask=columns < width)  # 0 where the vocabulary ends


@torch.library.custom_op("mfubench::cross_entropy", mutates_args=())
def cross_entropy_forward(logits: Tensor, labels: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Loss and log of the softmax's normalizer of each row of logits [N, W], both [N] float32; labels [N]."""
    rows = logits.shape[0]
    losses, normalizers = (logits.new_empty(rows, dtype=torch.float32) for _ in range(2))
    cross_entropy_forward_kernel[(rows,)](
        logits,
        labels,
        losses,
        normalizers,
        logits.stride(0),
        vocabulary,
        STAGES=STAGES,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    return losses, normalizers


@torch.library.custom_op("mfubench::cross_entropy_backward", mutates_args=("logits",))
def cross_entropy_backward(
    logits: Tensor, labels: Tensor, normalizers: Tensor, factor: Tensor, vocabulary: int
) -> None:
    """Put the gradient of factor * (sum of losses) in the place of logits [N, W]; factor: float32 scalar."""
    rows, width = logits.shape
    cross_entropy_backward_kernel[(rows, triton.cdiv(width, BLOCK))](
        logits,
        labels,
        normalizers,
        factor,
        logits.stride(0),
        vocabulary,
        width,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )


@cross_entropy_forward.register_fake
def _(logits: Tensor, labels: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    rows = logits.shape[0]
    return logits.new_empty(rows, dtype=torch.float32), logits.new_empty(rows, dtype=torch.float32)


class MeanCrossEntropy(torch.autograd.Function):
    """logits [N, W] (overwritten by the backward pass), labels [N] -> mean loss, a float32 scalar."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, vocabulary: int) -> Tensor:
        losses, normalizers = cross_entropy_forward(logits, labels, vocabulary)
        ctx.save_for_backward(logits, labels, normalizers)
        ctx.vocabulary = vocabulary
        return losses.mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, labels, normalizers = ctx.saved_tensors
        cross_entropy_backward(logits, labels, normalizers, grad / logits.shape[0], ctx.vocabulary)
        return logits, None, None


def mean_cross_entropy(logits: Tensor, labels: Tensor, vocabulary: int) -> Tensor:
    """F.cross_entropy(logits[:, :vocabulary], labels) in float32, of logits that nobody else reads."""
    return MeanCrossEntropy.apply(logits, labels, vocabulary)


def loss_and_gradient(logits: Tensor, labels: Tensor, factor: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Sum of the losses, float32, and `factor` (float32 scalar) times its gradient, in place of the logits [N, W]."""
    losses, normalizers = cross_entropy_forward(logits, labels, vocabulary)
    cross_entropy_backward(logits, labels, normalizers, factor, vocabulary)
    return losses.sum(), logits
