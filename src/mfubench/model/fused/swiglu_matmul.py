"""SwiGLU in the matmuls beside it: no kernel of its own. quack-kernels' matmuls, on Hopper.

    forward   inputs @ gate_up.T and, of each tile as it leaves the registers, silu(gate) * up
    backward  grad @ down, and of each tile the gradients of gate and up, and their product once more

What a kernel of its own reads again stays on the chip: a token and layer read and write 2 I E bytes less forward and
2 I E less backward. The product is not kept for the backward pass.

Between the matmuls gate and up stand in turn, column by column (`woven`): a tile holds both of what it multiplies. The
weight, and its gradient, have all rows of gate before those of up as everywhere else; the matmuls that read or write
them are told so.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mfubench.model.weight_gradient import MainGradient, accumulate_product, add_product

# Tiles of the fastest form on an H200 at its power limit (benchmarks/matmuls.py, LLaMA-2 1.36B): rows, columns, whether
# two warp groups take turns, cluster
GATED = (128, 192, True, 1, 2)
GATED_BACKWARD = (128, 128, True, 2, 1)
INPUT_GRADIENT = (256, 192, False, 2, 1)
WEIGHT_GRADIENT = (128, 192, True, 2, 1)
HALVES = ("B",)  # quack's word for a weight with all rows of gate first
HALVES_ADDED, HALVES_WRITTEN = ("C", "out"), ("out",)


def quack() -> Any:
    """quack's interface. Raises ImportError without the package."""
    from quack import gemm_interface

    return gemm_interface


@functools.cache
def tiles(rows: int, columns: int, in_turn: bool, cluster_rows: int, cluster_columns: int) -> Any:
    """One object for each configuration: quack looks its compiled kernels up by identity."""
    from quack.gemm_config import GemmConfig

    return GemmConfig(
        tile_m=rows,
        tile_n=columns,
        pingpong=in_turn,
        cluster_m=cluster_rows,
        cluster_n=cluster_columns,
        is_dynamic_persistent=False,
    )


# --- the matmuls: on CUDA quack's, on a CPU what they compute, step by step -------------------------------------------


@torch.library.custom_op("mfubench::gated_matmul", mutates_args=(), device_types="cuda")
def gated_matmul(inputs: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """woven gate_up [N, 2I] of inputs [N, H] and weight [2I, H], and silu(gate) * up [N, I]."""
    woven = inputs.new_empty(inputs.shape[0], weight.shape[0])
    product = inputs.new_empty(inputs.shape[0], weight.shape[0] // 2)
    quack().gemm_gated(
        inputs,
        weight.t(),
        activation="swiglu",
        preact_out=woven,
        postact_out=product,
        tuned=False,
        config=tiles(*GATED),
        concat_layout=HALVES,
    )
    return woven, product


@torch.library.custom_op("mfubench::gated_matmul_backward", mutates_args=(), device_types="cuda")
def gated_matmul_backward(grad: Tensor, weight: Tensor, woven: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient of woven [N, 2I] where that of the product is grad [N, H] @ weight [H, I]; and the product [N, I]."""
    grad_woven, product = torch.empty_like(woven), grad.new_empty(grad.shape[0], weight.shape[1])
    quack().gemm_dgated(
        grad,
        weight,
        woven,
        activation="swiglu",
        dx_out=grad_woven,
        postact_out=product,
        dynamic_scheduler=False,
        tuned=False,
        config=tiles(*GATED_BACKWARD),
    )
    return grad_woven, product


@torch.library.custom_op("mfubench::woven_input_gradient", mutates_args=(), device_types="cuda")
def woven_input_gradient(grad_woven: Tensor, weight: Tensor) -> Tensor:
    """Gradient of the inputs [N, H] of grad_woven [N, 2I] and weight [2I, H]."""
    out = grad_woven.new_empty(grad_woven.shape[0], weight.shape[1])
    quack().gemm_tuned.fn(grad_woven, weight, out, concat_layout=HALVES, config=tiles(*INPUT_GRADIENT))
    return out


@torch.library.custom_op("mfubench::accumulate_woven_product", mutates_args=("total",), device_types="cuda")
def accumulate_woven_product(total: Tensor, grad_woven: Tensor, inputs: Tensor, overwrite: Tensor) -> None:
    """total [2I, H] += grad_woven [N, 2I].T @ inputs [N, H], or = where `overwrite` (on the host) says so."""
    adds = not overwrite
    layout = HALVES_ADDED if adds else HALVES_WRITTEN
    quack().gemm_tuned.fn(
        grad_woven.t(), inputs, total, add_to_output=adds, concat_layout=layout, config=tiles(*WEIGHT_GRADIENT)
    )


def weave(halves: Tensor) -> Tensor:
    """[..., 2I], all of gate first -> gate and up in turn."""
    return torch.stack(halves.chunk(2, dim=-1), dim=-1).flatten(-2)


def unweave(woven: Tensor) -> Tensor:
    return torch.cat((woven[..., 0::2], woven[..., 1::2]), dim=-1)


@gated_matmul.register_kernel("cpu")
def _(inputs: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    halves = inputs @ weight.t()
    gate, up = halves.float().chunk(2, dim=-1)
    return weave(halves), (F.silu(gate) * up).to(inputs.dtype)


@gated_matmul_backward.register_kernel("cpu")
def _(grad: Tensor, weight: Tensor, woven: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = unweave(woven).float().chunk(2, dim=-1)
    incoming, sigmoid = (grad @ weight).float(), gate.sigmoid()
    of_gate, of_up = incoming * up * sigmoid * (1 + gate * (1 - sigmoid)), incoming * gate * sigmoid
    return weave(torch.cat((of_gate, of_up), dim=-1).to(woven.dtype)), (gate * sigmoid * up).to(grad.dtype)


@woven_input_gradient.register_kernel("cpu")
def _(grad_woven: Tensor, weight: Tensor) -> Tensor:
    return unweave(grad_woven) @ weight


@accumulate_woven_product.register_kernel("cpu")
def _(total: Tensor, grad_woven: Tensor, inputs: Tensor, overwrite: Tensor) -> None:
    add_product(total, unweave(grad_woven).t(), inputs, bool(overwrite))


@gated_matmul.register_fake
def _(inputs: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    rows, width = inputs.shape[0], weight.shape[0]
    return inputs.new_empty(rows, width), inputs.new_empty(rows, width // 2)


@gated_matmul_backward.register_fake
def _(grad: Tensor, weight: Tensor, woven: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(woven), grad.new_empty(grad.shape[0], weight.shape[1])


@woven_input_gradient.register_fake
def _(grad_woven: Tensor, weight: Tensor) -> Tensor:
    return grad_woven.new_empty(grad_woven.shape[0], weight.shape[1])


# --- the layer --------------------------------------------------------------------------------------------------------


class SwiGluMlp(torch.autograd.Function):
    """inputs [..., H], gate_up [2I, H], down [H, I] -> silu(gate) * up @ down.T [..., H].

    After each weight come the parts of its main gradient, or three times None.
    """

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        gate_up: Tensor,
        gate_up_total: Tensor | None,
        gate_up_overwrite: Tensor | None,
        gate_up_ticket: Tensor | None,
        down: Tensor,
        down_total: Tensor | None,
        down_overwrite: Tensor | None,
        down_ticket: Tensor | None,
    ) -> Tensor:
        rows = inputs.flatten(0, -2)
        woven, product = gated_matmul(rows, gate_up)
        totals = (gate_up_total, gate_up_overwrite, down_total, down_overwrite)
        ctx.save_for_backward(inputs, gate_up, down, woven, *totals)
        return F.linear(product, down).view(inputs.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs, gate_up, down, woven, gate_up_total, gate_up_overwrite, down_total, down_overwrite = ctx.saved_tensors
        rows, grad_rows = inputs.flatten(0, -2), grad.flatten(0, -2).contiguous()
        grad_woven, product = gated_matmul_backward(grad_rows, down, woven)
        of_gate_up: tuple[Tensor | None, ...] = None, None, None, grad.new_empty(0)
        of_down = of_gate_up  # weight, total, overwrite and ticket
        if down_total is not None:
            accumulate_product(down_total, grad_rows.t(), product, down_overwrite)
        else:
            of_down = grad_rows.t() @ product, None, None, None
        if gate_up_total is not None:
            accumulate_woven_product(gate_up_total, grad_woven, rows, gate_up_overwrite)
        else:
            whole = torch.empty_like(gate_up)
            accumulate_woven_product(whole, grad_woven, rows, torch.ones((), dtype=torch.bool, device="cpu"))
            of_gate_up = whole, None, None, None
        return woven_input_gradient(grad_woven, gate_up).view(inputs.shape), *of_gate_up, *of_down


def swiglu_mlp(
    inputs: Tensor, gate_up: Tensor, down: Tensor, gate_up_main: MainGradient | None, down_main: MainGradient | None
) -> Tensor:
    """The layer, [..., H] -> [..., H], whose weights' gradients go to main gradients where there are any."""
    return SwiGluMlp.apply(inputs, *with_main(gate_up, gate_up_main), *with_main(down, down_main))


def with_main(weight: Tensor, main: MainGradient | None) -> tuple[Tensor | None, ...]:
    return (weight, None, None, None) if main is None else (weight.detach(), *main)
