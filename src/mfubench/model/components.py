"""The parts a decoder is made of: norms, positions, MLPs. Numerics equal Hugging Face's GPT-2, Llama and Qwen3.

Axes: B batch, T tokens, H heads (query, or query and key together), D head_dim. Everything is written so that the
compiler can fuse it: no casts of parameters, no copies of activations, statistics in float32 inside the fused kernel.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mfubench.config import ModelConfig

ACTIVATIONS = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),  # GPT-2's form ("gelu_new")
    "silu": F.silu,
    "relu": F.relu,
}


def make_norm(model: ModelConfig, size: int) -> nn.Module:
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


class Mlp(nn.Module):
    """up -> activation -> down (GPT-2)."""

    def __init__(self, model: ModelConfig):
        super().__init__()
        self.up = nn.Linear(model.hidden_size, model.intermediate_size, bias=model.mlp_bias)
        self.down = nn.Linear(model.intermediate_size, model.hidden_size, bias=model.mlp_bias)
        self.activation = ACTIVATIONS[model.mlp]

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(self.activation(self.up(hidden)))


class SwiGlu(nn.Module):
    """silu(gate) * up -> down (arXiv 2002.05202); gate and up are one matmul, gate first."""

    def __init__(self, model: ModelConfig):
        super().__init__()
        self.gate_up = nn.Linear(model.hidden_size, 2 * model.intermediate_size, bias=model.mlp_bias)
        self.down = nn.Linear(model.intermediate_size, model.hidden_size, bias=model.mlp_bias)

    def forward(self, hidden: Tensor) -> Tensor:
        gate, up = self.gate_up(hidden).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


def make_mlp(model: ModelConfig) -> nn.Module:
    """The model's feed-forward layer, [B, T, hidden] -> [B, T, hidden]."""
    return SwiGlu(model) if model.mlp == "swiglu" else Mlp(model)
