"""From the merged q, k, v of one matmul to the three tensors that attention reads: q/k-norm, RoPE, split, in one pass.

qkv [B, T, (Q + 2K) D] (Q query heads, K key heads, D head_dim) -> query [B, T, Q, D], key and value [B, T, K, D].

    forward   reads qkv, writes q, k, v:                  2 (Q + 2K) D E = 453 MB, 0.15 ms
              in place, without q/k-norm:                 2 (Q + K) D E = 302 MB, 0.10 ms
    backward  reads three gradients, writes one of qkv:   2 (Q + 2K) D E = 453 MB, 0.15 ms (q/k-norm: reads qkv too)

In place, query and key are rotated where the matmul has left them, and the value stays; q, k and v are views. Nobody
else reads that output: neither the matmul's nor RoPE's backward pass does. The norms' does: with them (or where a
checkpoint keeps that output) three tensors are written, the value copied along so that the output is free at once.
The backward pass writes the one tensor that the matmul's backward pass reads: no concatenation. Element i of a head is
paired with element i + D/2.

`PackedAttention` takes in the attention too, where its kernels write the three gradients side by side: they are then
turned back in place as well (2 (Q + K) D E = 302 MB, 0.10 ms). Without RoPE nothing at all is left to do, where three
gradients of their own would have to be concatenated (2 (Q + 2K) D E = 453 MB, 0.15 ms).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mfubench.model.attention_kernels import PACKED, split_packed
from mfubench.model.fused.launch import persistent_programs

WARPS = 8  # a token of 54 heads, padded to 64, by 128: 32 elements a thread
# of the backward pass, whose programs each have some tokens on their way; best of a sweep on an H100
BACKWARD_WARPS, PER_MULTIPROCESSOR, STAGES = 4, 2, 3


@triton.jit
def inverse_root_mean_square(first, second, head_dim, eps):
    """1 / sqrt(mean of squares + eps) of each head, [heads, 1]; first, second [heads, D/2] are its two halves."""
    squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
    return (1 / tl.sqrt(squares / head_dim + eps))[:, None]


@triton.jit
def norm_weights(query_weight, key_weight, pairs, half, is_query):
    """The norm's weight at the two halves of each head, [heads, D/2] each."""
    query_first = tl.load(query_weight + pairs, mask=pairs < half, other=0.0).to(tl.float32)
    query_second = tl.load(query_weight + half + pairs, mask=pairs < half, other=0.0).to(tl.float32)
    key_first = tl.load(key_weight + pairs, mask=pairs < half, other=0.0).to(tl.float32)
    key_second = tl.load(key_weight + half + pairs, mask=pairs < half, other=0.0).to(tl.float32)
    return tl.where(is_query, query_first, key_first), tl.where(is_query, query_second, key_second)


@triton.jit
def rope_forward_kernel(
    qkv,
    cos,
    sin,
    query_weight,
    key_weight,
    query,
    key,
    value,
    eps,
    positions,
    query_heads,
    key_heads,
    half,
    NORM: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    heads, pairs = tl.arange(0, HEADS)[:, None], tl.arange(0, PAIRS)[None, :]
    all_heads, head_dim = query_heads + 2 * key_heads, 2 * half
    inside = (heads < all_heads) & (pairs < half)
    is_query, is_rotated = heads < query_heads, heads < query_heads + key_heads

    source = qkv + (token * all_heads + heads) * head_dim + pairs
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        inverse = inverse_root_mean_square(first, second, head_dim, eps)
        first_weight, second_weight = norm_weights(query_weight, key_weight, pairs, half, is_query)
        first = tl.where(is_rotated, first * inverse * first_weight, first)
        second = tl.where(is_rotated, second * inverse * second_weight, second)
    angles = (token % positions) * half + pairs
    cosine = tl.where(is_rotated, tl.load(cos + angles, mask=pairs < half, other=0.0), 1.0)
    sine = tl.where(is_rotated, tl.load(sin + angles, mask=pairs < half, other=0.0), 0.0)
    first, second = first * cosine - second * sine, second * cosine + first * sine

    first, second = first.to(query.dtype.element_ty), second.to(query.dtype.element_ty)
    target = query + (token * query_heads + heads) * head_dim + pairs
    tl.store(target, first, mask=inside & is_query)
    tl.store(target + half, second, mask=inside & is_query)
    target = key + (token * key_heads + heads - query_heads) * head_dim + pairs
    tl.store(target, first, mask=inside & is_rotated & (heads >= query_heads))
    tl.store(target + half, second, mask=inside & is_rotated & (heads >= query_heads))
    target = value + (token * key_heads + heads - query_heads - key_heads) * head_dim + pairs
    tl.store(target, first, mask=inside & (heads >= query_heads + key_heads))
    tl.store(target + half, second, mask=inside & (heads >= query_heads + key_heads))


@triton.jit
def rope_in_place_kernel(
    qkv,
    cos,
    sin,
    positions,
    rotated_heads,
    all_heads,
    half,
    INVERSE: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    heads, pairs = tl.arange(0, HEADS)[:, None], tl.arange(0, PAIRS)[None, :]
    inside = (heads < rotated_heads) & (pairs < half)
    place = qkv + (token * all_heads + heads) * 2 * half + pairs
    first = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(place + half, mask=inside, other=0.0).to(tl.float32)
    angles = (token % positions) * half + pairs
    cosine = tl.load(cos + angles, mask=pairs < half, other=0.0)
    sine = tl.load(sin + angles, mask=pairs < half, other=0.0)
    if INVERSE:
        sine = -sine
    tl.store(place, (first * cosine - second * sine).to(qkv.dtype.element_ty), mask=inside)
    tl.store(place + half, (second * cosine + first * sine).to(qkv.dtype.element_ty), mask=inside)


@triton.jit
def load_halves(gradient, token_offset, head_stride, heads, pairs, half, mask):
    """The two halves of some heads of one token, [heads, D/2] each in float32; 0 where `mask` is not set."""
    source = gradient + token_offset + heads * head_stride + pairs
    first = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    return first, tl.load(source + half, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def rope_backward_kernel(
    grad_query,
    grad_key,
    grad_value,
    qkv,
    cos,
    sin,
    query_weight,
    key_weight,
    grad_qkv,
    partial_sums,
    eps,
    tokens,
    positions,
    query_heads,
    key_heads,
    half,
    query_batch_stride,
    query_token_stride,
    query_head_stride,
    key_batch_stride,
    key_token_stride,
    key_head_stride,
    value_batch_stride,
    value_token_stride,
    value_head_stride,
    NORM: tl.constexpr,
    STAGES: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    heads, pairs = tl.arange(0, HEADS)[:, None], tl.arange(0, PAIRS)[None, :]
    all_heads, head_dim, rotated_heads = query_heads + 2 * key_heads, 2 * half, query_heads + key_heads
    inside = (heads < all_heads) & (pairs < half)
    is_query, is_rotated = heads < query_heads, heads < rotated_heads
    grad_first_weight = tl.zeros((HEADS, PAIRS), dtype=tl.float32)
    grad_second_weight = tl.zeros((HEADS, PAIRS), dtype=tl.float32)

    for token in tl.range(tl.program_id(0), tokens, tl.num_programs(0), num_stages=STAGES):
        batch, position = tl.cast(token // positions, tl.int64), tl.cast(token % positions, tl.int64)
        offset = batch * query_batch_stride + position * query_token_stride
        first, second = load_halves(grad_query, offset, query_head_stride, heads, pairs, half, inside & is_query)
        offset = batch * key_batch_stride + position * key_token_stride
        mask = inside & is_rotated & (heads >= query_heads)
        more_first, more_second = load_halves(grad_key, offset, key_head_stride, heads - query_heads, pairs, half, mask)
        first, second = first + more_first, second + more_second
        offset = batch * value_batch_stride + position * value_token_stride
        mask = inside & (heads >= rotated_heads)
        more_first, more_second = load_halves(
            grad_value, offset, value_head_stride, heads - rotated_heads, pairs, half, mask
        )
        first, second = first + more_first, second + more_second

        angles = position * half + pairs
        cosine = tl.where(is_rotated, tl.load(cos + angles, mask=pairs < half, other=0.0), 1.0)
        sine = tl.where(is_rotated, tl.load(sin + angles, mask=pairs < half, other=0.0), 0.0)
        first, second = first * cosine + second * sine, second * cosine - first * sine  # turned back

        place = (tl.cast(token, tl.int64) * all_heads + heads) * head_dim + pairs
        if NORM:
            unit_first = tl.load(qkv + place, mask=inside, other=0.0).to(tl.float32)
            unit_second = tl.load(qkv + place + half, mask=inside, other=0.0).to(tl.float32)
            inverse = inverse_root_mean_square(unit_first, unit_second, head_dim, eps)
            unit_first, unit_second = unit_first * inverse, unit_second * inverse
            grad_first_weight += first * unit_first
            grad_second_weight += second * unit_second
            first_weight, second_weight = norm_weights(query_weight, key_weight, pairs, half, is_query)
            through_first, through_second = first * first_weight, second * second_weight
            along = tl.sum(through_first * unit_first, axis=1) + tl.sum(through_second * unit_second, axis=1)
            along = (along / head_dim)[:, None]
            first = tl.where(is_rotated, (through_first - unit_first * along) * inverse, first)
            second = tl.where(is_rotated, (through_second - unit_second * along) * inverse, second)
        tl.store(grad_qkv + place, first.to(grad_qkv.dtype.element_ty), mask=inside)
        tl.store(grad_qkv + place + half, second.to(grad_qkv.dtype.element_ty), mask=inside)

    if NORM:  # [programs, query or key, D]
        is_key = is_rotated & (heads >= query_heads)
        target = partial_sums + tl.program_id(0) * 2 * head_dim + tl.arange(0, PAIRS)
        mask = tl.arange(0, PAIRS) < half
        tl.store(target, tl.sum(tl.where(is_query, grad_first_weight, 0.0), axis=0), mask=mask)
        tl.store(target + half, tl.sum(tl.where(is_query, grad_second_weight, 0.0), axis=0), mask=mask)
        target += head_dim
        tl.store(target, tl.sum(tl.where(is_key, grad_first_weight, 0.0), axis=0), mask=mask)
        tl.store(target + half, tl.sum(tl.where(is_key, grad_second_weight, 0.0), axis=0), mask=mask)


@torch.library.custom_op("mfubench::split_rotated", mutates_args=())
def split_rotated(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    eps: float,
    query_heads: int,
    key_heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """query [B, T, Q, D], key and value [B, T, K, D] of qkv [B, T, (Q + 2K) D]; cos, sin [T, D/2] float32.

    Query and key are normalised where there are weights [D] for it, and rotated; all in float32, rounded once.
    """
    B, T, width = qkv.shape
    head_dim = width // (query_heads + 2 * key_heads)
    qkv, cos, sin = qkv.contiguous(), cos.contiguous(), sin.contiguous()
    query = qkv.new_empty((B, T, query_heads, head_dim))
    key, value = (qkv.new_empty((B, T, key_heads, head_dim)) for _ in range(2))
    rope_forward_kernel[(B * T,)](
        qkv,
        cos,
        sin,
        query_weight,
        key_weight,
        query,
        key,
        value,
        eps,
        T,
        query_heads,
        key_heads,
        head_dim // 2,
        NORM=query_weight is not None,
        HEADS=triton.next_power_of_2(query_heads + 2 * key_heads),
        PAIRS=triton.next_power_of_2(head_dim // 2),
        num_warps=WARPS,
    )
    return query, key, value


@torch.library.custom_op("mfubench::split_rotated_backward", mutates_args=())
def split_rotated_backward(
    grad_query: Tensor,
    grad_key: Tensor,
    grad_value: Tensor,
    qkv: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Gradients of qkv [B, T, (Q + 2K) D] and of both norms' weights [2, D], float32 (empty without norms).

    The three gradients may have any strides, but that elements of a head must lie side by side.
    """
    B, T, query_heads, head_dim = grad_query.shape
    key_heads = grad_key.shape[2]
    grads = [x if x.stride(-1) == 1 else x.contiguous() for x in (grad_query, grad_key, grad_value)]
    cos, sin = cos.contiguous(), sin.contiguous()
    all_heads = query_heads + 2 * key_heads
    grad_qkv = grad_query.new_empty((B, T, all_heads * head_dim))
    programs = persistent_programs(grad_query.device, B * T, PER_MULTIPROCESSOR)
    norms = 2 if qkv is not None else 0
    partial_sums = grad_query.new_empty((programs, norms, head_dim), dtype=torch.float32)
    rope_backward_kernel[(programs,)](
        *grads,
        qkv if qkv is None else qkv.contiguous(),
        cos,
        sin,
        query_weight,
        key_weight,
        grad_qkv,
        partial_sums,
        eps,
        B * T,
        T,
        query_heads,
        key_heads,
        head_dim // 2,
        *(stride for x in grads for stride in x.stride()[:3]),
        NORM=qkv is not None,
        STAGES=STAGES,
        HEADS=triton.next_power_of_2(all_heads),
        PAIRS=triton.next_power_of_2(head_dim // 2),
        num_warps=BACKWARD_WARPS,
    )
    return grad_qkv, partial_sums.sum(dim=0)


@split_rotated.register_fake
def _(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    eps: float,
    query_heads: int,
    key_heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    B, T, width = qkv.shape
    head_dim = width // (query_heads + 2 * key_heads)
    query = qkv.new_empty((B, T, query_heads, head_dim))
    key, value = (qkv.new_empty((B, T, key_heads, head_dim)) for _ in range(2))
    return query, key, value


@split_rotated_backward.register_fake
def _(
    grad_query: Tensor,
    grad_key: Tensor,
    grad_value: Tensor,
    qkv: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    B, T, query_heads, head_dim = grad_query.shape
    width = (query_heads + 2 * grad_key.shape[2]) * head_dim
    norms = 2 if qkv is not None else 0
    return grad_query.new_empty((B, T, width)), grad_query.new_empty((norms, head_dim), dtype=torch.float32)


def save_what_norms_need(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    qkv, cos, sin, query_weight, key_weight, ctx.eps, _, _ = inputs
    ctx.save_for_backward(None if query_weight is None else qkv, cos, sin, query_weight, key_weight)


def differentiate(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    query_weight = ctx.saved_tensors[3]
    grad_qkv, grad_weights = split_rotated_backward(*grads, *ctx.saved_tensors, ctx.eps)
    if query_weight is None:
        return grad_qkv, None, None, None, None, None, None, None
    of_query, of_key = grad_weights.to(query_weight.dtype)
    return grad_qkv, None, None, of_query, of_key, None, None, None


split_rotated.register_autograd(differentiate, setup_context=save_what_norms_need)


@torch.library.custom_op("mfubench::rotate_in_place", mutates_args=("qkv",))
def rotate_in_place(
    qkv: Tensor, cos: Tensor, sin: Tensor, query_heads: int, key_heads: int, inverse: bool = False
) -> None:
    """Rotate queries and keys of a contiguous qkv [B, T, (Q + 2K) D]; cos, sin [T, D/2] float32.

    inverse: by the negative angle, which is the gradient's way back.
    """
    B, T, width = qkv.shape
    all_heads = query_heads + 2 * key_heads
    half = width // all_heads // 2
    rope_in_place_kernel[(B * T,)](
        qkv,
        cos.contiguous(),
        sin.contiguous(),
        T,
        query_heads + key_heads,
        all_heads,
        half,
        INVERSE=inverse,
        HEADS=triton.next_power_of_2(query_heads + key_heads),
        PAIRS=triton.next_power_of_2(half),
        num_warps=WARPS,
    )


class SplitInPlace(torch.autograd.Function):
    """`split_rotated` without norms, as views of the qkv that it overwrites."""

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, query_heads: int, key_heads: int
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        rotate_in_place(qkv, cos, sin, query_heads, key_heads)
        return split_packed(qkv, query_heads, key_heads)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_qkv, _ = split_rotated_backward(*grads, None, *ctx.saved_tensors, None, None, 0.0)
        return grad_qkv, None, None, None, None


def split_in_place(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    eps: float,
    query_heads: int,
    key_heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """`split_rotated`; without norms it overwrites qkv, which nobody may read afterwards."""
    if query_weight is not None:
        return split_rotated(qkv, cos, sin, query_weight, key_weight, eps, query_heads, key_heads)
    return SplitInPlace.apply(qkv, cos, sin, query_heads, key_heads)


class PackedAttention(torch.autograd.Function):
    """The split into heads, RoPE and attention: qkv [B, T, (Q + 2K) D] -> [B, T, Q, D].

    cos, sin [T, D/2] float32: qkv is overwritten, and nobody may read it afterwards; None: no RoPE, it stays as it is.
    backend: a key of PACKED.
    """

    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        query_heads: int,
        key_heads: int,
        backend: str,
    ) -> Tensor:
        if cos is not None and sin is not None:
            rotate_in_place(qkv, cos, sin, query_heads, key_heads)
        out, log_sum_exp = PACKED[backend].forward(*split_packed(qkv, query_heads, key_heads))
        ctx.save_for_backward(qkv, out, log_sum_exp, cos, sin)
        ctx.heads, ctx.backend = (query_heads, key_heads), backend
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        qkv, out, log_sum_exp, cos, sin = ctx.saved_tensors
        grad_qkv = PACKED[ctx.backend].backward(grad, qkv, out, log_sum_exp, *ctx.heads)
        if cos is not None:
            rotate_in_place(grad_qkv, cos, sin, *ctx.heads, inverse=True)
        return grad_qkv, None, None, None, None, None
