"""RMSNorm or LayerNorm with the residual stream's addition: hidden + update -> (their sum, its norm), each [..., H].

    forward   reads hidden and update, writes sum and norm:                4 H E = 302 MB, 0.10 ms
    backward  reads the gradients of both and the sum, writes one tensor:  4 H E = 302 MB, 0.10 ms

Hidden and update receive the same gradient: that of the sum from further up plus what comes through the norm. With the
normalised row u = (x - mean) s, s the inverse deviation, and g = gradient of the norm times weight, that is
s (g - mean(g) - u mean(g u)). An RMSNorm leaves both means of the row and of g out (CENTERED is False). The gradient of
the weight is summed in float32 by each program over its rows, and over the programs by one small reduction
(`PER_MULTIPROCESSOR` x 132 x H x 4 bytes).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mfubench.model.fused.launch import persistent_programs

WARPS = 8  # a row of 2304 is held in registers, padded to 4096: 16 elements a thread
PER_MULTIPROCESSOR, STAGES = 2, 3  # programs of the backward pass, each with some rows on their way; best of a sweep


@triton.jit
def add_norm_forward_kernel(
    hidden, update, weight, total, normed, statistics, width, eps, CENTERED: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    offsets = row * width + columns
    summed = tl.load(hidden + offsets, mask=inside, other=0.0).to(tl.float32)
    summed += tl.load(update + offsets, mask=inside, other=0.0).to(tl.float32)
    rounded = summed.to(total.dtype.element_ty)  # the norm is that of the sum as it is stored
    tl.store(total + offsets, rounded, mask=inside)
    summed = rounded.to(tl.float32)
    if CENTERED:
        mean = tl.sum(summed) / width
        summed = tl.where(inside, summed - mean, 0.0)
        tl.store(statistics + tl.num_programs(0) + row, mean)
    inverse = 1 / tl.sqrt(tl.sum(summed * summed) / width + eps)
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + offsets, (summed * inverse * scale).to(normed.dtype.element_ty), mask=inside)
    tl.store(statistics + row, inverse)


@triton.jit
def add_norm_backward_kernel(
    grad_total,
    grad_normed,
    total,
    statistics,
    weight,
    grad,
    partial_sums,
    rows,
    width,
    CENTERED: tl.constexpr,
    HAS_GRAD_TOTAL: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    grad_weight = tl.zeros((BLOCK,), dtype=tl.float32)
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=STAGES):
        offsets = tl.cast(row, tl.int64) * width + columns
        inverse = tl.load(statistics + row)
        unit = tl.load(total + offsets, mask=inside, other=0.0).to(tl.float32)
        if CENTERED:  # beyond the width a number other than 0, which meets a gradient that is 0
            unit -= tl.load(statistics + rows + row)
        unit *= inverse
        incoming = tl.load(grad_normed + offsets, mask=inside, other=0.0).to(tl.float32)
        grad_weight += incoming * unit
        incoming *= scale
        result = incoming - unit * (tl.sum(incoming * unit) / width)
        if CENTERED:
            result -= tl.sum(incoming) / width
        result *= inverse
        if HAS_GRAD_TOTAL:
            result += tl.load(grad_total + offsets, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad + offsets, result.to(grad.dtype.element_ty), mask=inside)
    tl.store(partial_sums + tl.program_id(0) * width + columns, grad_weight, mask=inside)


@torch.library.custom_op("mfubench::add_norm", mutates_args=())
def add_norm_with_statistics(
    hidden: Tensor, update: Tensor, weight: Tensor, eps: float, centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """hidden + update [..., H], its norm [..., H], and the rows' statistics, float32.

    Statistics [1, rows] are 1 / root mean square of each row; centered [2, rows]: 1 / standard deviation, and mean.
    """
    width = hidden.shape[-1]
    hidden, update = hidden.contiguous(), update.contiguous()
    rows = hidden.numel() // width
    total, normed = torch.empty_like(hidden), torch.empty_like(hidden)
    statistics = hidden.new_empty((2 if centered else 1, rows), dtype=torch.float32)
    add_norm_forward_kernel[(rows,)](
        hidden,
        update,
        weight,
        total,
        normed,
        statistics,
        width,
        eps,
        CENTERED=centered,
        BLOCK=triton.next_power_of_2(width),
        num_warps=WARPS,
    )
    return total, normed, statistics


@torch.library.custom_op("mfubench::add_norm_backward", mutates_args=())
def add_norm_backward(
    grad_total: Tensor | None, grad_normed: Tensor, total: Tensor, statistics: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """The one gradient of hidden and update [..., H], and that of the weight [H]."""
    width = total.shape[-1]
    rows = total.numel() // width
    grad_normed = grad_normed.contiguous()
    grad_total = grad_total if grad_total is None else grad_total.contiguous()
    grad = torch.empty_like(total)
    programs = persistent_programs(total.device, rows, PER_MULTIPROCESSOR)
    partial_sums = total.new_empty((programs, width), dtype=torch.float32)
    add_norm_backward_kernel[(programs,)](
        grad_total,
        grad_normed,
        total,
        statistics,
        weight,
        grad,
        partial_sums,
        rows,
        width,
        CENTERED=statistics.shape[0] == 2,
        HAS_GRAD_TOTAL=grad_total is not None,
        STAGES=STAGES,
        BLOCK=triton.next_power_of_2(width),
        num_warps=WARPS,
    )
    return grad, partial_sums.sum(dim=0).to(weight.dtype)


@add_norm_with_statistics.register_fake
def _(hidden: Tensor, update: Tensor, weight: Tensor, eps: float, centered: bool) -> tuple[Tensor, Tensor, Tensor]:
    shape = (2 if centered else 1, hidden.numel() // hidden.shape[-1])
    return hidden.new_empty(hidden.shape), hidden.new_empty(hidden.shape), hidden.new_empty(shape, dtype=torch.float32)


@add_norm_backward.register_fake
def _(
    grad_total: Tensor | None, grad_normed: Tensor, total: Tensor, statistics: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    return total.new_empty(total.shape), weight.new_empty(weight.shape)


def save_sum(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    total, _, statistics = output
    ctx.set_materialize_grads(False)  # nobody reads the last sum: it has no gradient, rather than one of zeros
    ctx.save_for_backward(total, statistics, inputs[2])


def differentiate(
    ctx: Any, grad_total: Tensor | None, grad_normed: Tensor, _: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, None, None]:
    grad, grad_weight = add_norm_backward(grad_total, grad_normed, *ctx.saved_tensors)
    return grad, grad, grad_weight, None, None


add_norm_with_statistics.register_autograd(differentiate, setup_context=save_sum)


def add_norm(hidden: Tensor, update: Tensor, weight: Tensor, eps: float, centered: bool) -> tuple[Tensor, Tensor]:
    """(hidden + update, its norm), each [..., H] in hidden's dtype; statistics in float32.

    centered: a LayerNorm without bias; else an RMSNorm.
    """
    total, normed, _ = add_norm_with_statistics(hidden, update, weight, eps, centered)
    return total, normed
