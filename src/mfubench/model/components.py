"""The parts a decoder is made of: norms, positions, MLPs. Numerics equal Hugging Face's GPT-2, Llama and Qwen3.

Axes: B batch, T tokens, H heads (query, or query and key together), D head_dim. Everything is written so that the
compiler can fuse it: no casts of parameters, no copies of activations, statistics in float32 inside the fused kernel.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mfubench.config import ModelConfig
from mfubench.model.weight_gradient import Linear

ACTIVATIONS = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),  # GPT-2's form ("gelu_new")
    "silu": F.silu,
    "relu": F.relu,
}


def make_norm(model: ModelConfig, size: int) -> nn.LayerNorm | nn.RMSNorm:
    """The model's norm over the last axis, of `size` elements; both kinds compute their statistics in float32."""
    if model.norm == "layernorm":
        return nn.LayerNorm(size, eps=model.rms_norm_eps, bias=model.norm_bias)
    return nn.RMSNorm(size, eps=model.rms_norm_eps)


def rope_tables(positions: int, head_dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rotary position embedding (arXiv 2104.09864), float32, each [positions, D/2].

    Angle of position t and pair i: t / theta^(2i/D).
    """
    frequencies = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim)  # [D/2]
    angles = torch.outer(torch.arange(positions, dtype=torch.float32, device=device), frequencies)  # [positions, D/2]
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [B, T, H, D] by its positions; cos, sin [T, D/2] in float32. Returns x's dtype.

    Element i is paired with element i + D/2 (Hugging Face's layout, not the interleaved one of the paper).
    """
    first, second = x.float().chunk(2, dim=-1)  # [B, T, H, D/2] each
    cos, sin = cos[:, None, :], sin[:, None, :]  # [T, 1, D/2]: the same for all heads
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def split_heads(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    eps: float,
    query_heads: int,
    key_heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """query [B, T, Q, D], key and value [B, T, K, D] of qkv [B, T, (Q + 2K) D]: normalised (Qwen3) and rotated.

    Weights [D] of the norms of query and key, and cos, sin [T, D/2] in float32, or None where the model has none.
    """
    B, T, width = qkv.shape
    heads = qkv.view(B, T, query_heads + 2 * key_heads, width // (query_heads + 2 * key_heads))
    # queries and keys are normalised and rotated together, as one kernel; splitting copies nothing
    query_key, value = heads.split((query_heads + key_heads, key_heads), dim=2)  # [B, T, H, D]
    head_dim = heads.shape[-1]
    if query_weight is not None and key_weight is not None:
        weight = torch.cat((query_weight.expand(query_heads, head_dim), key_weight.expand(key_heads, head_dim)))
        query_key = F.rms_norm(query_key, (head_dim,), eps=eps) * weight  # weight [H, D]
    if cos is not None and sin is not None:
        query_key = apply_rope(query_key, cos, sin)
    query, key = query_key.split((query_heads, key_heads), dim=2)
    return query, key, value


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, [..., I], of gate_up [..., 2I]; gate first."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


class Mlp(nn.Module):
    """up -> activation -> down (GPT-2)."""

    def __init__(self, model: ModelConfig, in_matmuls: Callable[..., Tensor] | None = None):
        """in_matmuls: all of it, of (inputs, up, down, gated), where gradients are wanted."""
        super().__init__()
        self.in_matmuls = in_matmuls
        self.up = Linear(model.hidden_size, model.intermediate_size, bias=model.mlp_bias)
        self.down = Linear(model.intermediate_size, model.hidden_size, bias=model.mlp_bias)
        self.activation = ACTIVATIONS[model.mlp]

    def forward(self, hidden: Tensor) -> Tensor:
        if self.in_matmuls is not None and torch.is_grad_enabled():
            return self.in_matmuls(hidden, self.up, self.down, False)
        return self.down(self.activation(self.up(hidden)))


class SwiGlu(nn.Module):
    """silu(gate) * up -> down (arXiv 2002.05202); gate and up are one matmul, gate first."""

    def __init__(
        self,
        model: ModelConfig,
        activation: Callable[[Tensor], Tensor] = swiglu,
        with_linear: Callable[..., Tensor] | None = None,
        in_matmuls: Callable[..., Tensor] | None = None,
    ):
        """with_linear: the activation and `down` in one, of (gate_up, weight, bias, main gradient).

        in_matmuls: all of it, of (inputs, gate_up, down, gated), before the others where gradients are wanted.
        """
        super().__init__()
        self.activation, self.with_linear, self.in_matmuls = activation, with_linear, in_matmuls
        self.gate_up = Linear(model.hidden_size, 2 * model.intermediate_size, bias=model.mlp_bias)
        self.down = Linear(model.intermediate_size, model.hidden_size, bias=model.mlp_bias)

    def forward(self, hidden: Tensor) -> Tensor:
        if self.in_matmuls is not None and torch.is_grad_enabled():
            return self.in_matmuls(hidden, self.gate_up, self.down, True)
        if self.with_linear is not None:
            return self.with_linear(self.gate_up(hidden), self.down.weight, self.down.bias, self.down.main)
        return self.down(self.activation(self.gate_up(hidden)))


def make_mlp(
    model: ModelConfig,
    activation: Callable[[Tensor], Tensor] = swiglu,
    with_linear: Callable[..., Tensor] | None = None,
    in_matmuls: Callable[..., Tensor] | None = None,
) -> nn.Module:
    """The model's feed-forward layer, [B, T, hidden] -> [B, T, hidden]; `activation`, `with_linear` are SwiGLU's."""
    if model.mlp == "swiglu":
        return SwiGlu(model, activation, with_linear, in_matmuls)
    return Mlp(model, in_matmuls)
