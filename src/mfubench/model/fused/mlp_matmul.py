"""The activation of an MLP in the matmuls beside it: no kernel of its own. quack-kernels' matmuls, on Hopper.

SwiGLU
    forward   inputs @ gate_up.T and, of each tile as it leaves the registers, silu(gate) * up
    backward  grad @ down, and of each tile the gradients of gate and up, and their product once more
GELU (tanh form)
    the same of inputs @ up.T + bias

What a kernel of its own reads again stays on the chip: for SwiGLU 2 I E bytes a token and layer forward and as many
backward. The activation's output is not kept for the backward pass.

Between SwiGLU's matmuls gate and up stand in turn, column by column (`woven`): a tile holds both of what it multiplies.
The weight, and its gradient, have all rows of gate before those of up as everywhere else; the matmuls that read or
write them are told so.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mfubench.model.weight_gradient import Linear, accumulate_product, add_product

Tile = tuple[int, int, bool, int, int]  # rows, columns, whether two groups of warps take turns, cluster

# The fastest ones on an H200 at its power limit (benchmarks/matmuls.py, LLaMA-2 1.36B)
FORWARD: Tile = (128, 192, True, 1, 2)
BACKWARD: Tile = (128, 128, True, 2, 1)
INPUT_GRADIENT: tuple[Tile, ...] = ((256, 192, False, 2, 1), (256, 128, False, 1, 2))
WEIGHT_GRADIENT: Tile = (128, 192, True, 2, 1)
HALVES = ("B",)  # quack's word for a weight with all rows of gate first
HALVES_ADDED, HALVES_WRITTEN = ("C", "out"), ("out",)
GELU = "gelu_tanh_approx"


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


def fewest_waves(choices: tuple[Tile, ...], rows: int, columns: int, multiprocessors: int) -> Tile:
    """The tile whose waves over a result [rows, columns] take the least time, the first of equal ones.

    In a wave each multiprocessor computes one tile, which takes as long as it is large; the last is as long as any.
    """

    def time(tile: Tile) -> int:
        tiles_in_all = math.ceil(rows / tile[0]) * math.ceil(columns / tile[1])
        return math.ceil(tiles_in_all / multiprocessors) * tile[0] * tile[1]

    return min(choices, key=time)


# --- the matmuls: on CUDA quack's, on a CPU what they compute, step by step -------------------------------------------


def forward_of(activation: str, inputs: Tensor, weight: Tensor, width: int, **more: Any) -> tuple[Tensor, Tensor]:
    """What the activation reads [N, rows of weight], and what it makes of it [N, width]."""
    before, after = inputs.new_empty(inputs.shape[0], weight.shape[0]), inputs.new_empty(inputs.shape[0], width)
    quack().gemm_act(
        inputs,
        weight.t(),
        activation=activation,
        preact_out=before,
        postact_out=after,
        tuned=False,
        config=tiles(*FORWARD),
        **more,
    )
    return before, after


@torch.library.custom_op("mfubench::gated_matmul", mutates_args=(), device_types="cuda")
def gated_matmul(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """woven gate_up [N, 2I] of inputs [N, H] and weight [2I, H], and silu(gate) * up [N, I]; there is no bias."""
    return forward_of("swiglu", inputs, weight, weight.shape[0] // 2, concat_layout=HALVES)


@torch.library.custom_op("mfubench::gelu_matmul", mutates_args=(), device_types="cuda")
def gelu_matmul(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """inputs [N, H] @ weight [I, H].T + bias [I], and its GELU, each [N, I]."""
    return forward_of(GELU, inputs, weight, weight.shape[0], bias=bias)


def backward_of(activation: str, grad: Tensor, weight: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    grad_before, after = torch.empty_like(before), grad.new_empty(grad.shape[0], weight.shape[1])
    quack().gemm_dact(
        grad,
        weight,
        before,
        activation=activation,
        dx_out=grad_before,
        postact_out=after,
        dynamic_scheduler=False,
        tuned=False,
        config=tiles(*BACKWARD),
    )
    return grad_before, after


@torch.library.custom_op("mfubench::gated_matmul_backward", mutates_args=(), device_types="cuda")
def gated_matmul_backward(grad: Tensor, weight: Tensor, woven: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient of woven [N, 2I] where that of the product is grad [N, H] @ weight [H, I]; and the product [N, I]."""
    return backward_of("swiglu", grad, weight, woven)


@torch.library.custom_op("mfubench::gelu_matmul_backward", mutates_args=(), device_types="cuda")
def gelu_matmul_backward(grad: Tensor, weight: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient of before [N, I] where that of its GELU is grad [N, H] @ weight [H, I]; and the GELU [N, I]."""
    return backward_of(GELU, grad, weight, before)


@torch.library.custom_op("mfubench::woven_input_gradient", mutates_args=(), device_types="cuda")
def woven_input_gradient(grad_woven: Tensor, weight: Tensor) -> Tensor:
    """Gradient of the inputs [N, H] of grad_woven [N, 2I] and weight [2I, H]."""
    out = grad_woven.new_empty(grad_woven.shape[0], weight.shape[1])
    multiprocessors = torch.cuda.get_device_properties(out.device).multi_processor_count
    tile = fewest_waves(INPUT_GRADIENT, out.shape[0], out.shape[1], multiprocessors)
    quack().gemm_tuned.fn(grad_woven, weight, out, concat_layout=HALVES, config=tiles(*tile))
    return out


@torch.library.custom_op("mfubench::accumulate_woven_product", mutates_args=("total",), device_types="cuda")
def accumulate_woven_product(total: Tensor, grad_woven: Tensor, inputs: Tensor, overwrite: Tensor) -> None:
    """total [2I, H] += grad_woven [N, 2I].T @ inputs [N, H], or = where `overwrite` (on the host) says so."""
    adds = not overwrite
    layout = HALVES_ADDED if adds else HALVES_WRITTEN
    quack().gemm_tuned.fn(
        grad_woven.t(), inputs, total, add_to_output=adds, concat_layout=layout, config=tiles(*WEIGHT_GRADIENT)
    )


def weave(halves: Tensor, dim: int = 1) -> Tensor:
    """[N, 2I], all of gate first -> gate and up in turn; dim 0: of rows."""
    return torch.stack(halves.chunk(2, dim), dim + 1).flatten(dim, dim + 1)


def unweave(woven: Tensor) -> Tensor:
    """[N, 2I], gate and up in turn -> all of gate first."""
    return torch.cat((woven[:, 0::2], woven[:, 1::2]), dim=1)


@gated_matmul.register_kernel("cpu")
def _(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    halves = inputs @ weight.t()
    gate, up = halves.float().chunk(2, dim=-1)
    return weave(halves), (F.silu(gate) * up).to(inputs.dtype)


@gelu_matmul.register_kernel("cpu")
def _(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    before = F.linear(inputs, weight, bias)
    return before, F.gelu(before, approximate="tanh")


@gated_matmul_backward.register_kernel("cpu")
def _(grad: Tensor, weight: Tensor, woven: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = unweave(woven).float().chunk(2, dim=-1)
    incoming, sigmoid = (grad @ weight).float(), gate.sigmoid()
    of_gate, of_up = incoming * up * sigmoid * (1 + gate * (1 - sigmoid)), incoming * gate * sigmoid
    return weave(torch.cat((of_gate, of_up), dim=-1).to(woven.dtype)), (gate * sigmoid * up).to(grad.dtype)


@gelu_matmul_backward.register_kernel("cpu")
def _(grad: Tensor, weight: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    of_before = torch.ops.aten.gelu_backward(grad @ weight, before, approximate="tanh")
    return of_before, F.gelu(before, approximate="tanh")


@woven_input_gradient.register_kernel("cpu")
def _(grad_woven: Tensor, weight: Tensor) -> Tensor:
    return unweave(grad_woven) @ weight


@accumulate_woven_product.register_kernel("cpu")
def _(total: Tensor, grad_woven: Tensor, inputs: Tensor, overwrite: Tensor) -> None:
    add_product(total, unweave(grad_woven).t(), inputs, bool(overwrite))


@gated_matmul.register_fake
def _(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    rows, width = inputs.shape[0], weight.shape[0]
    return inputs.new_empty(rows, width), inputs.new_empty(rows, width // 2)


@gelu_matmul.register_fake
def _(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    before = inputs.new_empty(inputs.shape[0], weight.shape[0])
    return before, torch.empty_like(before)


@gated_matmul_backward.register_fake
@gelu_matmul_backward.register_fake
def _(grad: Tensor, weight: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(before), grad.new_empty(grad.shape[0], weight.shape[1])


@woven_input_gradient.register_fake
def _(grad_woven: Tensor, weight: Tensor) -> Tensor:
    return grad_woven.new_empty(grad_woven.shape[0], weight.shape[1])


# --- the layer --------------------------------------------------------------------------------------------------------


class MlpInMatmuls(torch.autograd.Function):
    """inputs [..., H] -> activation(inputs @ up.T + its bias) @ down.T + its bias [..., H].

    gated: SwiGLU, whose `up` [2I, H] has the rows of gate first and no bias; else GELU, `up` [I, H]. down [H, I]. After
    each weight its bias or None, and the parts of its main gradient or three times None.
    """

    @staticmethod
    def forward(
        ctx: Any,
        gated: bool,
        inputs: Tensor,
        up: Tensor,
        up_bias: Tensor | None,
        up_total: Tensor | None,
        up_overwrite: Tensor | None,
        up_ticket: Tensor | None,
        down: Tensor,
        down_bias: Tensor | None,
        down_total: Tensor | None,
        down_overwrite: Tensor | None,
        down_ticket: Tensor | None,
    ) -> Tensor:
        before, after = (gated_matmul if gated else gelu_matmul)(inputs.flatten(0, -2), up, up_bias)
        ctx.save_for_backward(inputs, before, up, up_total, up_overwrite, down, down_total, down_overwrite)
        ctx.gated, ctx.biased = gated, (up_bias is not None, down_bias is not None)
        return F.linear(after, down, down_bias).view(*inputs.shape[:-1], down.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs, before, up, up_total, up_overwrite, down, down_total, down_overwrite = ctx.saved_tensors
        rows, grad_rows = inputs.flatten(0, -2), grad.flatten(0, -2).contiguous()
        backward = gated_matmul_backward if ctx.gated else gelu_matmul_backward
        grad_before, after = backward(grad_rows, down, before)
        of_biases = [
            grads.sum(dim=0) if has else None for grads, has in zip((grad_before, grad_rows), ctx.biased, strict=True)
        ]
        of_weights: list[Tensor | None] = [None, None]
        if down_total is not None:
            accumulate_product(down_total, grad_rows.t(), after, down_overwrite)
        else:
            of_weights[1] = grad_rows.t() @ after
        accumulate = accumulate_woven_product if ctx.gated else accumulate_product
        if up_total is not None:
            accumulate(up_total, grad_before.t() if not ctx.gated else grad_before, rows, up_overwrite)
        elif ctx.gated:
            of_weights[0] = torch.empty_like(up)
            accumulate(of_weights[0], grad_before, rows, torch.ones((), dtype=torch.bool, device="cpu"))
        else:
            of_weights[0] = grad_before.t() @ rows
        of_inputs = woven_input_gradient(grad_before, up) if ctx.gated else grad_before @ up
        tickets = [grad.new_empty(0) if total is not None else None for total in (up_total, down_total)]
        return (
            *(None, of_inputs.view(inputs.shape)),
            *(of_weights[0], of_biases[0], None, None, tickets[0]),
            *(of_weights[1], of_biases[1], None, None, tickets[1]),
        )


def mlp_in_matmuls(inputs: Tensor, up: Linear, down: Linear, gated: bool) -> Tensor:
    """The layer, [..., H] -> [..., H], whose weights' gradients go to main gradients where there are any.

    gated: SwiGLU, without biases; else GELU.
    """
    return MlpInMatmuls.apply(gated, inputs, *parts_of(up), *parts_of(down))


def parts_of(layer: Linear) -> tuple[Tensor | None, ...]:
    """Weight, bias, and the parts of the main gradient."""
    if layer.main is None:
        return layer.weight, layer.bias, None, None, None
    return layer.weight.detach(), layer.bias, *layer.main
