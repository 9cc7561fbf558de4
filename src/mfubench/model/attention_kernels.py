"""The attention kernels, one signature: causal attention(q [B,T,H,D], k [B,T,KV,D], v [B,T,KV,D]) -> [B,T,H,D].

Key/value heads may be fewer than query heads (GQA); the kernels handle that without copying them, all but `eager` and,
on CUDA in float32, `sdpa`.

torch's own kernels are called as the operators that they are, not chosen through `sdpa_kernel`: that context manager
acts while a graph is traced, leaves nothing in it, and so a compile cache could hand one backend's graph to another.
The operator is part of the graph and of its cache key. `attention.py` chooses among these functions.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mfubench.cache import cache_root

AttentionFunction = Callable[[Tensor, Tensor, Tensor], Tensor]
Triple = tuple[Tensor, Tensor, Tensor]  # of q, k and v


class PackedKernels(NamedTuple):
    """Kernels of an attention whose backward pass writes the gradients of q, k and v side by side into one tensor."""

    forward: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]  # q, k, v -> out, log-sum-exp
    backward: Callable[..., Tensor]  # grad, qkv, out, log-sum-exp, query_heads, key_heads -> gradient of qkv


def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The plain form, with the whole score matrix in memory: the reference for all others."""
    _, T, H, D = q.shape
    q, k, v = q.transpose(1, 2), repeat_heads(k, H).transpose(1, 2), repeat_heads(v, H).transpose(1, 2)  # [B, H, T, D]
    scores = q @ k.transpose(-2, -1) * D**-0.5  # [B, H, T, T]
    future = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
    exact = torch.promote_types(scores.dtype, torch.float32)  # float32, or float64 where the inputs are
    probabilities = scores.masked_fill(future, -torch.inf).softmax(dim=-1, dtype=exact).to(v.dtype)
    return (probabilities @ v).transpose(1, 2)


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """[B, T, KV, D] -> [B, T, heads, D]: each key/value head once for every query head of its group."""
    return x if x.shape[2] == heads else x.repeat_interleave(heads // x.shape[2], dim=2)


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch's flash kernel; on CUDA in float32, which flash does not have, torch's memory-efficient kernel."""
    if not q.is_cuda:
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            is_causal=True,
            enable_gqa=q.shape[2] != k.shape[2],
        )
    elif q.dtype == torch.float32:
        k, v = repeat_heads(k, q.shape[2]), repeat_heads(v, q.shape[2])
        out = torch.ops.aten._scaled_dot_product_efficient_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), None, compute_log_sumexp=True, is_causal=True
        )[0]
    else:
        out = torch.ops.aten._scaled_dot_product_flash_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )[0]
    return out.transpose(1, 2)


def cudnn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """cuDNN's kernel, as torch brings it."""
    out = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), None, compute_log_sumexp=True, is_causal=True
    )[0]
    return out.transpose(1, 2)


def load_fa2() -> AttentionFunction:
    """FlashAttention-2 of the flash-attn package. Raises ImportError (or what a broken build raises) without it."""
    from flash_attn import flash_attn_func  # not find_spec: flash-attn-4 owns the same namespace

    def fa2(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn_func(q, k, v, causal=True)

    return fa2


class FlashKernels(NamedTuple):
    """Kernels that torch.compile cannot trace, launched from Python or from another library, as operators that it
    takes as they are."""

    attention: AttentionFunction
    packed: PackedKernels


def flash_operators(
    name: str,
    forward: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
    backward: Callable[[Tensor, Triple, Tensor, Tensor, Triple], None],
) -> FlashKernels:
    """The operators mfubench::`name`_attention, _attention_backward and _packed_backward.

    forward: q, k, v -> out [B, T, H, D] and the log-sum-exp of the scores [B, H, T], float32, which the backward pass
    needs. backward: grad, (q, k, v), out, log-sum-exp, (dq, dk, dv); writes the last three, which may be views.
    """

    @torch.library.custom_op(f"mfubench::{name}_attention", mutates_args=())
    def attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return forward(q, k, v)

    @attention.register_fake
    def _(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        B, T, H, _ = q.shape
        return q.new_empty(q.shape), q.new_empty((B, H, T), dtype=torch.float32)

    @torch.library.custom_op(f"mfubench::{name}_attention_backward", mutates_args=())
    def attention_backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum_exp: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        gradients = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
        backward(grad, (q, k, v), out, log_sum_exp, gradients)
        return gradients

    @attention_backward.register_fake
    def _(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum_exp: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)

    @torch.library.custom_op(f"mfubench::{name}_packed_backward", mutates_args=())
    def packed_backward(
        grad: Tensor, qkv: Tensor, out: Tensor, log_sum_exp: Tensor, query_heads: int, key_heads: int
    ) -> Tensor:
        """Gradient of qkv [B, T, (H + 2 KV) D]; grad and out [B, T, H, D]."""
        grad_qkv = torch.empty_like(qkv)
        inputs, gradients = (split_packed(x, query_heads, key_heads) for x in (qkv, grad_qkv))
        backward(grad, inputs, out, log_sum_exp, gradients)
        return grad_qkv

    @packed_backward.register_fake
    def _(grad: Tensor, qkv: Tensor, out: Tensor, log_sum_exp: Tensor, query_heads: int, key_heads: int) -> Tensor:
        return qkv.new_empty(qkv.shape)

    def save(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs, *output)

    def differentiate(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        return attention_backward(grad, *ctx.saved_tensors)

    attention.register_autograd(differentiate, setup_context=save)
    return FlashKernels(lambda q, k, v: attention(q, k, v)[0], PackedKernels(attention, packed_backward))


def split_packed(qkv: Tensor, query_heads: int, key_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """qkv [B, T, (Q + 2K) D] as views of query [B, T, Q, D], key and value [B, T, K, D]."""
    query, key, value = qkv.unflatten(-1, (query_heads + 2 * key_heads, -1)).split(
        (query_heads, key_heads, key_heads), dim=2
    )
    return query, key, value


def fa3_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    # one split: a long sequence is not cut into parts that a second kernel would have to join
    out, log_sum_exp, *_ = torch.ops.flash_attn_3.fwd(q, k, v, is_causal=True, num_splits=1)
    return out, log_sum_exp


def fa3_backward(grad: Tensor, qkv: Triple, out: Tensor, log_sum_exp: Tensor, gradients: Triple) -> None:
    dq, dk, dv = gradients
    torch.ops.flash_attn_3.bwd(grad, *qkv, out, log_sum_exp, dq=dq, dk=dk, dv=dv, is_causal=True)


def fa4_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    from flash_attn.cute.interface import _flash_attn_fwd

    out, log_sum_exp, *_ = _flash_attn_fwd(q, k, v, causal=True, return_lse=True)
    return out, log_sum_exp


def fa4_backward(grad: Tensor, qkv: Triple, out: Tensor, log_sum_exp: Tensor, gradients: Triple) -> None:
    from flash_attn.cute.interface import _flash_attn_bwd

    dq, dk, dv = gradients
    _flash_attn_bwd(*qkv, out, grad, log_sum_exp, causal=True, dq=dq, dk=dk, dv=dv)


FLASH = {
    "fa3": flash_operators("fa3", fa3_forward, fa3_backward),
    "fa4": flash_operators("fa4", fa4_forward, fa4_backward),
}
PACKED: dict[str, PackedKernels] = {name: kernels.packed for name, kernels in FLASH.items()}  # by backend


def load_fa3() -> AttentionFunction:
    """FlashAttention-3, as the operators torch.ops.flash_attn_3 that a package's library registers.

    Of flash_attn_3, which is built from the `hopper` folder of flash-attention, or else of xformers' wheels up to
    0.0.34. Raises ImportError without either, OSError where the library does not load.
    """
    if not hasattr(torch.ops.flash_attn_3, "bwd"):
        if any(path for folder in package_folders("flash_attn_3") for path in folder.glob("_C*")):
            import_module("flash_attn_3._C")
        else:
            load_library_of_xformers()
        if not hasattr(torch.ops.flash_attn_3, "bwd"):
            raise ImportError("its library registers no operators of flash_attn_3")
    return FLASH["fa3"].attention


def load_library_of_xformers() -> None:
    """FlashAttention-3 without xformers around it, whose other libraries want the torch that they were built with.

    This one keeps to torch's stable interface (2.10 and newer), and wants the runtime of CUDA 12 beside whichever torch
    has brought; both talk to the same driver.
    """
    folders = package_folders("xformers")
    library = next((path for folder in folders for path in (folder / "flash_attn_3").glob("_C*.so")), None)
    if library is None:
        raise ImportError("no module named flash_attn_3, and no flash_attn_3/_C.so in xformers")
    for folder in package_folders("nvidia.cuda_runtime"):
        if (runtime := folder / "lib/libcudart.so.12").exists():
            ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)
    try:
        torch.ops.load_library(library)
    except OSError as error:
        raise OSError(f"{library.name} of xformers: {error.__cause__ or error}") from error


def package_folders(name: str) -> list[Path]:
    """Where a package lies, without importing it; empty where there is none."""
    try:
        spec = find_spec(name)
    except ImportError:  # of the package around it
        return []
    return [Path(folder) for folder in (spec.submodule_search_locations or [] if spec else [])]


def load_fa4() -> AttentionFunction:
    """FlashAttention-4 of the flash-attn-4 package: kernels written in CuTe DSL and compiled at the first call."""
    # for seconds, each process anew, unless the package is told to keep what it has compiled
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(cache_root() / "flash-attention-4"))
    import flash_attn.cute.interface  # noqa: F401 (the operators use it)

    return FLASH["fa4"].attention
