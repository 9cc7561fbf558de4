"""The elementwise work between the matmuls, and which form of it runs: plain (torch's operators) or fused (Triton).

Plain forms are what the compiler fuses, or what runs one kernel an operator without it. Fused ones are in `fused`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mfubench.config import KernelsConfig, ModelConfig
from mfubench.model.attention_kernels import PACKED, AttentionFunction
from mfubench.model.components import make_mlp, rope_tables, split_heads, swiglu
from mfubench.run_log import Choice

KINDS = ("norm", "rope", "swiglu")  # keys of KernelsConfig with a fused form
IN_MATMULS = ("swiglu", "gelu")  # those whose work the matmuls beside it can do
TOKENS = 5  # of a sequence of the try that a kernel must pass before it is used
JOINED_TOKENS = 256  # of the try of split_heads and attention as one
TILED_TOKENS = 512  # of the try of activations in the matmuls: a few tiles
# Largest difference to float32 results that such a try may show, in units of the largest value, by dtype.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2**-6, torch.float16: 2**-9}


@dataclass(frozen=True)
class Operations:
    """The functions a decoder is built with; signatures and shapes as in components.py and fused/."""

    add_norm: Callable[[Tensor, Tensor, Tensor, float, bool], tuple[Tensor, Tensor]] | None = None  # None: plain
    split_heads: Callable[..., tuple[Tensor, Tensor, Tensor]] = split_heads
    swiglu: Callable[[Tensor], Tensor] = swiglu
    swiglu_linear: Callable[..., Tensor] | None = None  # with the matmul behind, where the product is not kept
    mlp_in_matmuls: Callable[..., Tensor] | None = None  # the activation in the tiles of the matmuls beside it
    packed_attention: Callable[..., Tensor] | None = None  # split_heads and attention in one; None: one by one

    def add_and_norm(
        self, hidden: Tensor, update: Tensor | None, norm: nn.LayerNorm | nn.RMSNorm
    ) -> tuple[Tensor, Tensor]:
        """(hidden + update, its norm), each [B, T, hidden]; without an update, hidden is what is normalised.

        Only a model whose norms have no bias has `add_norm`.
        """
        if update is None:
            return hidden, norm(hidden)
        if self.add_norm is not None:
            assert norm.eps is not None
            return self.add_norm(hidden, update, norm.weight, norm.eps, isinstance(norm, nn.LayerNorm))
        hidden = hidden + update
        return hidden, norm(hidden)


PLAIN = Operations()


def load_fused(kind: str, in_place: bool = True) -> dict[str, Any]:
    """The field of Operations that the fused kernel of a kind fills. in_place: as for `resolve_operations`."""
    if kind == "norm":
        from mfubench.model.fused.norm import add_norm

        return {"add_norm": add_norm}
    if kind == "rope":
        from mfubench.model.fused.rope import split_in_place, split_rotated

        return {"split_heads": split_in_place if in_place else split_rotated}
    from mfubench.model.fused.swiglu import swiglu as fused_swiglu

    return {"swiglu": fused_swiglu}


def load_packed_attention(backend: str) -> Callable[..., Tensor]:
    from mfubench.model.fused.rope import PackedAttention

    def packed_attention(
        qkv: Tensor, cos: Tensor | None, sin: Tensor | None, query_heads: int, key_heads: int
    ) -> Tensor:
        return PackedAttention.apply(qkv, cos, sin, query_heads, key_heads, backend)

    return packed_attention


def load_swiglu_linear() -> dict[str, Any]:
    from mfubench.model.fused.swiglu import swiglu_linear

    return {"swiglu_linear": swiglu_linear}


def resolve_operations(
    requested: KernelsConfig,
    *,
    model: ModelConfig,
    device: torch.device | str,
    dtype: torch.dtype,
    in_place: bool = True,
) -> tuple[Operations, dict[str, Choice]]:
    """The functions for this model and device, and by key of KernelsConfig what was chosen and why.

    in_place: operations may overwrite what a matmul has written, which a checkpoint of matmuls' outputs forbids.

    `auto` and `fused` end in the fused form where the model has such an operation and a try on the device gives what
    the plain form gives, else in the plain one. `auto` of swiglu and gelu ends in the matmuls where that can be had.
    """
    device = torch.device(device)
    operations, choices = PLAIN, {}
    for kind in KINDS:
        wanted = getattr(requested, kind)
        used, reason = "plain", None
        if wanted != "plain":
            fused, reason = try_fused(kind, model, device, dtype, in_place)
            if fused is not None:
                operations, used = replace(operations, **fused), "fused"
            if fused is not None and wanted == "recompute":
                operations, used = replace(operations, **load_swiglu_linear()), "recompute"
        choices[kind] = Choice(requested=wanted, used=used, reason=reason)
    for kind in IN_MATMULS:
        wanted = getattr(requested, kind)
        choice = choices.setdefault(kind, Choice(requested=wanted, used="plain"))
        if wanted in ("auto", "matmul"):
            in_matmuls, reason = try_in_matmuls(kind, model, device, dtype, in_place)
            if in_matmuls is not None:
                operations = replace(operations, mlp_in_matmuls=in_matmuls)
                choices[kind] = Choice(requested=wanted, used="matmul")
            else:
                choices[kind] = choice.model_copy(update={"reason": choice.reason or reason})
    return operations, choices


def join_split_and_attention(
    operations: Operations,
    choice: Choice,
    backend: str,
    attention: AttentionFunction,
    *,
    model: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    in_place: bool = True,
) -> tuple[Operations, Choice]:
    """The operations with split_heads (RoPE in place) and attention as one where that can be had, and the new choice.

    choice: what `resolve_operations` made of `kernels.rope`. With RoPE, a fused one stays so without attention in it.
    Without RoPE there is nothing else to fuse: the choice is fused if attention is joined, and plain otherwise.
    """
    has_rope = model.position == "rope"
    wanted = choice.used == "fused" and in_place if has_rope else choice.requested != "plain"
    if not wanted:
        return operations, choice
    packed, obstacle = try_packed_attention(operations, backend, attention, model, device, dtype)
    if packed is None:
        if not has_rope:
            choice = Choice(requested=choice.requested, used="plain", reason=f"the model has no RoPE, and {obstacle}")
        return operations, choice
    reason = "as one with attention, which writes its three gradients side by side"
    if not has_rope:
        reason = f"the model has no RoPE; the split into q, k and v {reason}"
    return replace(operations, packed_attention=packed), Choice(requested=choice.requested, used="fused", reason=reason)


def try_packed_attention(
    operations: Operations,
    backend: str,
    attention: AttentionFunction,
    model: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[Callable[..., Tensor] | None, str | None]:
    """split_heads and attention as one where a try gives what the two give one by one, or None and the reason."""
    if model.qk_norm:
        return None, "q/k-norms come between its matmul and attention"
    if backend not in PACKED:
        return None, f"{backend} attention does not write its three gradients side by side"
    heads = model.num_attention_heads, model.num_key_value_heads
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(1, JOINED_TOKENS, *shape, generator=generator, device=device).to(dtype)

    leaf, weight = draw((heads[0] + 2 * heads[1]) * model.head_dim).requires_grad_(), draw(heads[0], model.head_dim)
    tables: tuple[Tensor | None, Tensor | None] = (None, None)
    if model.position == "rope":
        tables = rope_tables(JOINED_TOKENS, model.head_dim, model.rope_theta, device)
    try:
        packed = load_packed_attention(backend)
        apart = attention(*operations.split_heads(leaf.clone(), *tables, None, None, 0.0, *heads))
        outputs = packed(leaf.clone(), *tables, *heads), apart
        results = [(out.detach(), *torch.autograd.grad(out, leaf, weight)) for out in outputs]
    except Exception as error:  # kernels that cannot do this here cost the gain, not the run
        return None, f"attention with one gradient of q, k and v {not_running(error)}"
    difference = largest_relative(*results)
    if not difference <= TOLERANCE[dtype]:
        return None, f"attention with one gradient of q, k and v {wrong_by(difference)}"
    return packed, None


def try_fused(
    kind: str, model: ModelConfig, device: torch.device, dtype: torch.dtype, in_place: bool
) -> tuple[dict[str, Any] | None, str | None]:
    """The field of Operations that a fused kernel fills, or None and the reason."""
    if (reason := not_in(model, kind)) is not None:
        return None, reason
    if device.type != "cuda":
        return None, f"Triton's kernels need a CUDA device, not {device.type}"
    try:
        fused = load_fused(kind, in_place)
    except Exception as error:
        return None, f"needs triton ({type(error).__name__}: {error})"
    try:
        difference = largest_difference(kind, fused, model, device, dtype)
    except Exception as error:
        return None, not_running(error)
    if not difference <= TOLERANCE[dtype]:
        return None, wrong_by(difference)
    return fused, None


def try_in_matmuls(
    kind: str, model: ModelConfig, device: torch.device, dtype: torch.dtype, in_place: bool
) -> tuple[Callable[..., Tensor] | None, str | None]:
    """The MLP with its activation in the matmuls where a try gives what the plain layer gives in float32, or None and
    why not."""
    if (reason := not_in(model, kind)) is not None:
        return None, reason
    if (obstacle := obstacle_to_matmuls(model, device, dtype, in_place)) is not None:
        return None, f"not in the matmuls: {obstacle}"
    try:
        from mfubench.model.fused import mlp_matmul

        mlp_matmul.quack()
    except Exception as error:  # beside other versions than its own it raises errors of many kinds
        return None, f"not in the matmuls: needs quack-kernels ({type(error).__name__}: {error})"
    generator = torch.Generator(device).manual_seed(0)
    inputs, weight = (
        torch.randn(TILED_TOKENS, model.hidden_size, generator=generator, device=device).to(dtype) for _ in range(2)
    )
    layer = make_mlp(model, in_matmuls=mlp_matmul.mlp_in_matmuls).to(device, dtype)
    exact = make_mlp(model).to(device)
    exact.load_state_dict(layer.state_dict())
    try:
        results = []
        for one, leaf in ((layer, inputs.clone()), (exact, inputs.float())):
            out = one(leaf.requires_grad_())
            gradients = torch.autograd.grad(out, [leaf, *one.parameters()], weight.to(out.dtype))
            results.append([out.detach(), *gradients])
    except Exception as error:
        return None, f"in the matmuls it {not_running(error)}"
    difference = largest_relative(*results)
    if not difference <= TOLERANCE[dtype]:
        return None, f"in the matmuls it {wrong_by(difference)}"
    return mlp_matmul.mlp_in_matmuls, None


def obstacle_to_matmuls(model: ModelConfig, device: torch.device, dtype: torch.dtype, in_place: bool) -> str | None:
    if device.type != "cuda":
        return f"quack's need a CUDA device, not {device.type}"
    if model.mlp == "swiglu" and model.mlp_bias:
        return "the one before SwiGLU has a bias, which does not come in turn"
    if not in_place:
        return "fp8 or selective checkpointing wants those for itself"
    if dtype == torch.float32:
        return "quack's compute in half precision"
    if torch.cuda.get_device_capability(device)[0] != 9:
        return "they were tried on Hopper alone"
    return None


def wrong_by(difference: float) -> str:
    """Why a kernel is not used whose try on the device gave something else."""
    return f"gives wrong results here (off by {difference:.2g} of the largest value)"


def not_running(error: Exception) -> str:
    """Why a kernel is not used whose try on the device ended so."""
    return f"does not run on this device ({type(error).__name__}: {str(error).strip()[:200]})"


def not_in(model: ModelConfig, kind: str) -> str | None:
    """Why a model has nothing to do for a kernel of this kind, or None."""
    if kind == "norm" and model.norm_position != "pre":
        return "fuses a norm with an addition whose sum is read further on; norm_position: post reads the norm alone"
    if kind == "norm" and model.norm_bias:
        return "fuses norms without bias, and the model's have one (norm_bias)"
    if kind == "rope" and model.position != "rope":
        return "the model has no RoPE"
    if kind in IN_MATMULS and model.mlp != kind:
        return f"the model's MLP is {model.mlp}"
    return None


def largest_difference(
    kind: str, fused: dict[str, Any], model: ModelConfig, device: torch.device, dtype: torch.dtype
) -> float:
    """Of outputs and gradients between the fused form in `dtype` and the plain one in float32, for the model's sizes.

    In units of the largest value of each tensor; not a number where one is.
    """
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    inputs, run = trial(kind, model, draw, device)
    results = []
    for operations, exact in ((replace(PLAIN, **fused), dtype), (PLAIN, torch.float32)):
        leaves = [x.detach().to(exact).requires_grad_() for x in inputs]
        outputs = run(operations, *(x.clone() for x in leaves))  # nothing may overwrite a leaf
        weights = [torch.linspace(-1, 1, y.numel(), device=device).view(y.shape).to(dtype) for y in outputs]
        gradients = torch.autograd.grad(outputs, leaves, [w.to(exact) for w in weights])
        results.append([x.detach() for x in (*outputs, *gradients)])
    return largest_relative(*results)


def largest_relative(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Largest difference between two lists of tensors, each in units of its largest value; NaN where there is one."""
    pairs = [(x.float(), y.float()) for x, y in zip(found, expected, strict=True)]
    return torch.stack([(x - y).abs().max() / y.abs().max() for x, y in pairs]).max().item()


def trial(
    kind: str,
    model: ModelConfig,
    draw: Callable[..., Tensor],
    device: torch.device,
    sequences: int = 2,
    seq_len: int = TOKENS,
) -> tuple[list[Tensor], Callable[..., tuple[Tensor, ...]]]:
    """Inputs with gradients, and the function of (operations, *inputs) that a kind of kernel computes."""
    hidden, D, tokens = model.hidden_size, model.head_dim, sequences * seq_len
    if kind == "swiglu":
        return [draw(tokens, 2 * model.intermediate_size)], lambda operations, x: (operations.swiglu(x),)
    if kind == "norm":
        centered = model.norm == "layernorm"

        def add_and_norm(operations: Operations, x: Tensor, update: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
            if operations.add_norm is not None:
                return operations.add_norm(x, update, weight, model.rms_norm_eps, centered)
            total = x + update
            norm = F.layer_norm if centered else F.rms_norm
            return total, norm(total, (hidden,), weight, eps=model.rms_norm_eps)

        return [draw(tokens, hidden), draw(tokens, hidden), draw(hidden)], add_and_norm

    cos, sin = rope_tables(seq_len, D, model.rope_theta, device)
    heads = model.num_attention_heads, model.num_key_value_heads

    def split(operations: Operations, qkv: Tensor, *norms: Tensor) -> tuple[Tensor, ...]:
        query_weight, key_weight = norms or (None, None)
        return operations.split_heads(qkv, cos, sin, query_weight, key_weight, model.rms_norm_eps, *heads)

    qkv = draw(sequences, seq_len, (heads[0] + 2 * heads[1]) * D)
    return [qkv, *([draw(D), draw(D)] if model.qk_norm else [])], split
