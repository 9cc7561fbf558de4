"""Linear layers whose backward pass adds the weight's gradient to a float32 main gradient itself.

Plain: the matmul writes a gradient in the weight's dtype, and a second kernel adds it to the main gradient: 10 bytes a
parameter and micro-batch, and one rounding. Here the matmul accumulates: cuBLAS adds its float32 sums to the main
gradient in its own epilogue (8 bytes; 4 on the first micro-step, which overwrites). Nothing is rounded on the way.

To autograd such a weight has no gradient. In its place stands a `ticket`, an empty tensor whose (empty) gradient
arrives when the weight's main gradient is complete: its hook is where gradient reduction is set off.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mfubench.decisions import ROW_MULTIPLE


class MainGradient(NamedTuple):
    """Where a weight's gradient goes."""

    total: Tensor  # [rows, columns] float32, with a version counter of its own: no view of a tensor that others change
    overwrite: Tensor  # bool scalar on the host: the next gradient replaces what is there. Data, since a compiled
    # graph holds for all micro-steps
    ticket: Tensor  # [0], requires grad


def add_product(total: Tensor, left: Tensor, right: Tensor, overwrite: bool = False) -> None:
    """total += left @ right, or = where `overwrite`: in float32, without a product in memory on CUDA.

    total [M, N] float32, left [M, K], right [K, N]. On a CPU, half-precision factors give a product in their dtype.
    """
    if total.is_cuda and total.shape[0] % 8:
        add_product_in_two(total, left, right, overwrite)
    else:
        add_one_product(total, left, right, overwrite)


def add_product_in_two(total: Tensor, left: Tensor, right: Tensor, overwrite: bool = False) -> None:
    """`add_product`, the rows beyond the last multiple of ROW_MULTIPLE apart.

    For M = 50,257 and a float32 sum cuBLAS has a kernel of the generation before Hopper alone, at half the rate.
    """
    aligned = total.shape[0] // ROW_MULTIPLE * ROW_MULTIPLE
    for rows in (slice(0, aligned), slice(aligned, None)):
        if total[rows].shape[0]:
            add_one_product(total[rows], left[rows], right, overwrite)


def add_one_product(total: Tensor, left: Tensor, right: Tensor, overwrite: bool) -> None:
    """`add_product` as one matmul."""
    if left.dtype == torch.float32:
        total.addmm_(left, right, beta=0 if overwrite else 1)
    elif not total.is_cuda:
        product = left @ right
        total.copy_(product) if overwrite else total.add_(product)
    elif overwrite:
        torch.mm(left, right, out_dtype=torch.float32, out=total)
    else:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)


@torch.library.custom_op("mfubench::accumulate_product", mutates_args=("total",))
def accumulate_product(total: Tensor, left: Tensor, right: Tensor, overwrite: Tensor) -> None:
    """`add_product` as an operator that torch.compile takes as it is; it reads `overwrite` when it runs."""
    add_product(total, left, right, bool(overwrite))


class AccumulatingMatmul(torch.autograd.Function):
    """inputs [..., columns] @ weight [V, columns].T + bias -> [..., V].

    `total` may have fewer rows than the weight: the rest are rows of padding, which have no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        total: Tensor,
        overwrite: Tensor,
        ticket: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(inputs, weight, total, overwrite)
        ctx.has_bias = bias is not None
        return F.linear(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight, total, overwrite = ctx.saved_tensors
        rows = grad.flatten(0, -2)  # [N, V]
        accumulate_product(total, rows[:, : total.shape[0]].t(), inputs.flatten(0, -2), overwrite)
        grad_bias = rows.sum(dim=0) if ctx.has_bias else None
        return grad @ weight, None, grad_bias, None, None, grad.new_empty(0)


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None, main: MainGradient | None = None) -> Tensor:
    """F.linear, with the weight's gradient going to `main` where there is one."""
    if main is None:
        return F.linear(inputs, weight, bias)
    return AccumulatingMatmul.apply(inputs, weight.detach(), bias, main.total, main.overwrite, main.ticket)


class Linear(nn.Linear):
    """nn.Linear; an engine that keeps main gradients may set `main`."""

    main: MainGradient | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        return linear(inputs, self.weight, self.bias, self.main)
