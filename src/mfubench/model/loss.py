"""Cross-entropy of the next token, from hidden states and the head's weight; three forms of one signature.

loss(hidden [N, hidden], weight [V, hidden], labels [N]) -> float32 scalar, the mean over the N tokens. Every label
counts: none is ignored. Softmax and mean are computed in float32 whatever the dtype of the inputs. `full` and `chunked`
take a fourth argument: the main gradient that the weight's is added to (weight_gradient.py).

`full` computes all logits at once; `chunked` a slice of the tokens at a time, with the gradients right in the forward
pass, so that neither pass ever holds all logits; `fused` is liger-kernel's form of the same idea.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mfubench.decisions import LARGE_VOCABULARY, ROW_MULTIPLE, chunk_bytes
from mfubench.model.weight_gradient import MainGradient, add_product, linear
from mfubench.run_log import Choice

LossFunction = Callable[..., Tensor]
SoftmaxStep = Callable[[Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]]  # see softmax_form

EVALUATED_BYTES = 2**28  # of logits in a chunk without gradients: float32 copies of it stand beside it
TILE = 128  # rows that a tensor-core matmul computes at once


def full_loss(hidden: Tensor, weight: Tensor, labels: Tensor, main: MainGradient | None = None) -> Tensor:
    """All logits [N, V] at once."""
    logits = linear(hidden, aligned(weight), main=main)[:, : weight.shape[0]]
    return F.cross_entropy(logits.float(), labels)


def full_fused_loss(hidden: Tensor, weight: Tensor, labels: Tensor, main: MainGradient | None = None) -> Tensor:
    """`full_loss` with the Triton cross-entropy, whose gradient takes the place of the logits."""
    from mfubench.model.fused.cross_entropy import mean_cross_entropy

    return mean_cross_entropy(linear(hidden, aligned(weight), main=main), labels, weight.shape[0])


def aligned(weight: Tensor) -> Tensor:
    """The head's weight [V, hidden] with rows of zeros below, where a matmul of this width would be slow."""
    if weight.is_cuda and weight.shape[0] % 8:
        return F.pad(weight, (0, 0, 0, -weight.shape[0] % ROW_MULTIPLE))
    return weight


def chunked_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    main: MainGradient | None = None,
    compile_backend: str = "",
    fused: bool = False,
) -> Tensor:
    """Chunks of tokens one after the other; equal to `full_loss` but for the order of float32 additions.

    The gradients are made in the forward pass. A main gradient is added to there, before it is known what arrives in
    the backward pass: that must be 1. Raises ValueError in float16, whose loss is scaled.
    """
    gradients = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    limit = chunk_bytes(fused) if gradients else EVALUATED_BYTES
    size = chunk_size(hidden.shape[0], hidden.element_size() * weight.shape[0], limit)
    if main is None or not gradients:
        return chunked_cross_entropy(hidden, weight, labels, size, gradients, compile_backend, fused)[0]
    if hidden.dtype == torch.float16:
        raise ValueError("the gradient of a chunked loss cannot be accumulated in float16: its loss is scaled later")
    return AccumulatingLoss.apply(hidden, weight.detach(), labels, size, compile_backend, fused, *main)


def chunk_size(tokens: int, bytes_a_token: int, limit: int) -> int:
    """Tokens of a chunk: equal parts of at most `limit` bytes of logits, large ones in whole tiles of a matmul."""
    chunks = max(1, math.ceil(tokens * bytes_a_token / limit))
    size = math.ceil(tokens / chunks)
    return size if size < TILE else math.ceil(size / TILE) * TILE


@torch.library.custom_op("mfubench::chunked_cross_entropy", mutates_args=())
def chunked_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, size: int, gradients: bool, compile_backend: str, fused: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(mean loss, gradient of hidden, gradient of weight in float32), computed `size` tokens at a time.

    The gradients are those of the summed loss, which float16 can hold, and empty unless asked for. An operator of its
    own: torch.compile takes it as it is, in one graph with the rest of the model. The elementwise part inside is the
    Triton kernel (`fused`), or compiled apart where a `compile_backend` is given.
    """
    if not gradients:
        total = summed_loss(hidden, weight, labels, size)
        return total / hidden.shape[0], hidden.new_empty(0), hidden.new_empty(0, dtype=torch.float32)
    grad_hidden, grad_weight = torch.empty_like(hidden), torch.empty_like(weight, dtype=torch.float32)
    softmax_step = softmax_form(compile_backend, fused)
    total = summed_loss_and_gradients(hidden, weight, labels, size, 1.0, softmax_step, grad_hidden, grad_weight, True)
    return total / hidden.shape[0], grad_hidden, grad_weight


@torch.library.custom_op("mfubench::accumulating_cross_entropy", mutates_args=("main",))
def accumulating_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    size: int,
    compile_backend: str,
    fused: bool,
    main: Tensor,
    overwrite: Tensor,
) -> tuple[Tensor, Tensor]:
    """(mean loss, its gradient of hidden), computed like the above; that of weight is added to `main`, float32.

    It reads `overwrite` (see MainGradient) when it runs.
    """
    grad_hidden, factor = torch.empty_like(hidden), 1 / hidden.shape[0]
    softmax_step = softmax_form(compile_backend, fused)
    total = summed_loss_and_gradients(
        hidden, weight, labels, size, factor, softmax_step, grad_hidden, main, bool(overwrite)
    )
    return total / hidden.shape[0], grad_hidden


def chunks_of_logits(hidden: Tensor, padded: Tensor, vocabulary: int, size: int) -> Iterator[tuple[slice, Tensor]]:
    """Rows of hidden [N, hidden] and their logits [rows, V'], -inf beyond the vocabulary and valid until the next."""
    buffer = hidden.new_empty(min(size, hidden.shape[0]), padded.shape[0])
    for start in range(0, hidden.shape[0], size):
        rows = slice(start, start + size)
        logits = buffer[: hidden[rows].shape[0]]
        torch.mm(hidden[rows], padded.t(), out=logits)
        logits[:, vocabulary:] = -torch.inf
        yield rows, logits


def summed_loss(hidden: Tensor, weight: Tensor, labels: Tensor, size: int) -> Tensor:
    total = hidden.new_zeros((), dtype=torch.float32)
    for rows, logits in chunks_of_logits(hidden, aligned(weight), weight.shape[0], size):
        total += F.cross_entropy(logits.float(), labels[rows], reduction="sum")
    return total


def summed_loss_and_gradients(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    size: int,
    factor: float,
    softmax_step: SoftmaxStep,
    grad_hidden: Tensor,
    grad_weight: Tensor,
    overwrite: bool,
) -> Tensor:
    """Sum of the losses, float32. The gradients are of `factor` times that sum: of hidden written to grad_hidden
    [N, hidden], of weight added to grad_weight [V, hidden] float32, whose old values count unless `overwrite`."""
    padded, vocabulary = aligned(weight), weight.shape[0]  # [V', hidden]
    total, scale = (hidden.new_full((), value, dtype=torch.float32) for value in (0.0, factor))
    for rows, logits in chunks_of_logits(hidden, padded, vocabulary, size):
        loss, grad_logits = softmax_step(logits, labels[rows], scale, vocabulary)
        total += loss
        torch.mm(grad_logits, padded, out=grad_hidden[rows])
        add_product(grad_weight, grad_logits[:, :vocabulary].t(), hidden[rows], overwrite and rows.start == 0)
        del grad_logits  # before the next one is made
    return total


def softmax_form(compile_backend: str, fused: bool) -> SoftmaxStep:
    """(logits [n, V'], labels [n], factor, V) -> summed loss and factor times its gradient, [n, V']."""
    if fused:
        from mfubench.model.fused.cross_entropy import loss_and_gradient  # needs triton

        return loss_and_gradient
    step = compiled_softmax_step(compile_backend) if compile_backend else cross_entropy_step

    def plain(logits: Tensor, labels: Tensor, factor: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
        loss, gradient, at_label = step(logits, labels, factor)
        return loss, gradient.scatter_(1, labels[:, None], at_label)

    return plain


def cross_entropy_step(logits: Tensor, labels: Tensor, factor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Summed loss of logits [n, V] and `factor` (float32 scalar) times its gradient.

    d loss / d logit = softmax - (1 at the label). The gradient is returned without the 1, and apart from it, [n, 1],
    the whole value at the label: computed in float32, since there the difference cancels as the model learns.
    """
    exact = logits.float()
    log_normalizer = exact.logsumexp(dim=-1, keepdim=True)  # [n, 1]
    log_probability = exact.gather(1, labels[:, None]) - log_normalizer  # [n, 1]
    gradient = ((exact - log_normalizer).exp() * factor).to(logits.dtype)
    return -log_probability.sum(), gradient, ((log_probability.exp() - 1) * factor).to(logits.dtype)


@functools.cache
def compiled_softmax_step(backend: str) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
    """`cross_entropy_step`, compiled once a process: two kernels instead of a dozen."""
    return torch.compile(cross_entropy_step, backend=backend, dynamic=False)


@chunked_cross_entropy.register_fake
def _(
    hidden: Tensor, weight: Tensor, labels: Tensor, size: int, gradients: bool, compile_backend: str, fused: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        hidden.new_empty((), dtype=torch.float32),
        hidden.new_empty(hidden.shape if gradients else (0,)),
        weight.new_empty(weight.shape if gradients else (0,), dtype=torch.float32),
    )


@accumulating_cross_entropy.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    size: int,
    compile_backend: str,
    fused: bool,
    main: Tensor,
    overwrite: Tensor,
) -> tuple[Tensor, Tensor]:
    return hidden.new_empty((), dtype=torch.float32), torch.empty_like(hidden)


def save_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    hidden, weight = inputs[:2]
    ctx.save_for_backward(*output[1:])
    ctx.tokens, ctx.weight_dtype = hidden.shape[0], weight.dtype


def scale_gradients(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    """Gradients of the mean, times the gradient that arrives; the weight's scaled and rounded in one pass."""
    grad_hidden, grad_weight = ctx.saved_tensors
    factor = grad / ctx.tokens
    rounded = torch.empty_like(grad_weight, dtype=ctx.weight_dtype)
    torch.mul(grad_weight, factor, out=rounded)
    return grad_hidden * factor, rounded, None, None, None, None, None


chunked_cross_entropy.register_autograd(scale_gradients, setup_context=save_gradients)


class AccumulatingLoss(torch.autograd.Function):
    """`chunked_loss` with a main gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        size: int,
        compile_backend: str,
        fused: bool,
        total: Tensor,
        overwrite: Tensor,
        ticket: Tensor,
    ) -> Tensor:
        loss, grad_hidden = accumulating_cross_entropy(
            hidden, weight, labels, size, compile_backend, fused, total, overwrite
        )
        ctx.save_for_backward(grad_hidden)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (grad_hidden,) = ctx.saved_tensors
        return grad_hidden * grad, None, None, None, None, None, None, None, grad_hidden.new_empty(0)


def load_fused() -> LossFunction:
    """liger-kernel's fused linear cross-entropy (Triton). Raises ImportError without the package."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    fused = LigerFusedLinearCrossEntropyLoss(accum_dtype=torch.float32)

    @torch.compiler.disable  # launches Triton kernels in ways that torch.compile does not trace
    def fused_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return fused(weight, hidden, labels).float()

    return fused_loss


def resolve_loss(
    requested: str,
    *,
    device: torch.device | str,
    vocab_size: int,
    compile_backend: str | None = None,
    capturable: bool = False,
    fused_cross_entropy: bool = False,
) -> tuple[LossFunction, Choice]:
    """The loss function for this device and vocabulary, and what was chosen and why.

    `requested`: full, chunked, fused (falls back to chunked) or auto. With a `compile_backend` (a run that compiles)
    the elementwise part of full and chunked is compiled with it. fused_cross_entropy: that part is the Triton kernel.
    """
    device = torch.device(device)
    compiled = compile_backend is not None
    if requested == "auto":
        wanted, reason = preferred(device, vocab_size, compiled, fused_cross_entropy)
    else:
        wanted, reason = requested, ""
    if wanted == "fused":
        function, why_not = try_fused(device, capturable)
        if function is not None:
            return function, Choice(requested=requested, used="fused", reason=reason or None)
        wanted, reason = "chunked", f"{reason}{'; ' if reason else ''}fused {why_not}"
    if wanted == "chunked":
        function = functools.partial(chunked_loss, compile_backend=compile_backend or "", fused=fused_cross_entropy)
    elif fused_cross_entropy:
        function = full_fused_loss
    else:
        function = torch.compile(full_loss, backend=compile_backend, dynamic=False) if compile_backend else full_loss
    return function, Choice(requested=requested, used=wanted, reason=reason or None)


# What `auto` takes on CUDA, for the shapes of config/models.yaml on an H100 (N = tokens of a micro-batch):
# - V = 32,000, N = 16,384: the logits are 1 GiB in bfloat16. Compiled, `full` is the fastest: three matmuls at full
#   size, and the softmax reads the logits once forward and once backward. Not compiled, it writes them five times in
#   float32 and loses to liger's kernel.
# - V = 150,000, N = 8,192: 2.3 GiB of logits and as many of their gradient. `chunked` gives that memory to a larger
#   micro-batch; it costs one pass over the weight's gradient a chunk. liger's chunks shrink with V (128 tokens here),
#   too few to fill the card.
def preferred(
    device: torch.device, vocab_size: int, compiled: bool, fused_cross_entropy: bool = False
) -> tuple[str, str]:
    """The form that `auto` wants and why."""
    if device.type != "cuda":
        return "full", "no CUDA"
    if vocab_size >= LARGE_VOCABULARY:
        return "chunked", f"a vocabulary of {vocab_size} makes all logits large"
    if compiled:
        return "full", f"compiled, and a vocabulary of {vocab_size} makes all logits small"
    if fused_cross_entropy:
        return "full", f"cross-entropy in one kernel, and a vocabulary of {vocab_size} makes all logits small"
    return "fused", "not compiled"


def try_fused(device: torch.device, capturable: bool) -> tuple[LossFunction | None, str]:
    """liger's loss where a small forward and backward pass works here: (function, "") or (None, reason)."""
    if device.type != "cuda":
        return None, f"needs a CUDA device, not {device.type}"
    if capturable:
        return None, "counts its labels on the host, which a CUDA graph cannot capture"
    try:
        function = load_fused()
    except Exception as error:
        return None, f"needs liger-kernel ({type(error).__name__}: {error})"
    try:
        generator = torch.Generator(device).manual_seed(0)
        hidden, weight = (
            torch.randn(size, 64, generator=generator, device=device).bfloat16().requires_grad_() for size in (40, 128)
        )
        labels = torch.arange(40, device=device)
        found, exact = function(hidden, weight, labels), full_loss(hidden, weight, labels)
        found.backward()
        if not torch.isclose(found, exact, rtol=1e-2):
            return None, f"gives wrong results here ({found.item():.4g} instead of {exact.item():.4g})"
    except Exception as error:
        return None, f"does not run on this device ({type(error).__name__}: {str(error).strip()[:200]})"
    return function, ""
