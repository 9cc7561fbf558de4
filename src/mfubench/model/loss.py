"""Cross-entropy of the next token, from hidden states and the head's weight; three forms of one signature.

loss(hidden [N, hidden], weight [V, hidden], labels [N]) -> float32 scalar, the mean over the N tokens. Every label
counts: none is ignored. Softmax and mean are computed in float32 whatever the dtype of the inputs. `full` and `chunked`
take a fourth argument: the main gradient that the weight's is added to (see weight_gradient.py).

`full` computes all logits at once; `chunked` a slice of the tokens at a time, with the gradients right in the forward
pass, so that neither pass ever holds all logits; `fused` is liger-kernel's form of the same idea.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mfubench.model.weight_gradient import ROW_MULTIPLE, MainGradient, add_product, linear
from mfubench.run_log import Choice

LossFunction = Callable[..., Tensor]
ACCUMULATING = ("full", "chunked")  # forms that take a main gradient

# What `auto` takes on CUDA, for the shapes of config/models.yaml on an H100 (N = tokens of a micro-batch):
# - V = 32,000, N = 16,384: the logits are 1 GiB in bfloat16. Compiled, `full` is the fastest: three matmuls at full
#   size, and the softmax reads the logits once forward and once backward. Not compiled, it writes them five times in
#   float32 and loses to liger's kernel.
# - V = 150,000, N = 8,192: 2.3 GiB of logits and as many of their gradient. `chunked` gives that memory to a larger
#   micro-batch; it costs one pass over the weight's gradient a chunk. liger's chunks shrink with V (128 tokens here),
#   too few to fill the card.
LARGE_VOCABULARY = 65_536
# Logits held at once by `chunked`, in bytes: large, since every chunk adds a pass over the weight's float32 gradient.
CHUNK_BYTES = 2**30
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
    """Chunks of tokens one after the other; equal to `full_loss` but for the order of float32 additions."""
    gradients = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    size = chunk_size(hidden.shape[0], hidden.element_size() * weight.shape[0])
    parts = main or ()
    if main is not None:
        weight = weight.detach()  # its gradient goes elsewhere
    return chunked_cross_entropy(hidden, weight, labels, size, gradients, compile_backend, fused, *parts)[0]


def chunk_size(tokens: int, bytes_a_token: int) -> int:
    """Tokens of a chunk: equal parts of at most CHUNK_BYTES of logits, large ones in whole tiles of a matmul."""
    chunks = max(1, math.ceil(tokens * bytes_a_token / CHUNK_BYTES))
    size = math.ceil(tokens / chunks)
    return size if size < TILE else math.ceil(size / TILE) * TILE


@torch.library.custom_op("mfubench::chunked_cross_entropy", mutates_args=())
def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    size: int,
    gradients: bool,
    compile_backend: str,
    fused: bool,
    total_gradient: Tensor | None = None,
    overwrite: Tensor | None = None,
    ticket: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(mean loss, gradient of hidden, gradient of weight in float32), computed `size` tokens at a time.

    The gradients are those of the summed loss, which float16 can hold, and empty unless asked for. An operator of its
    own: torch.compile takes it as it is, in one graph with the rest of the model. The elementwise part inside is the
    Triton kernel (`fused`), or compiled apart where a `compile_backend` is given. The parts of a main gradient are for
    the backward pass.
    """
    softmax_step = compiled_softmax_step(compile_backend) if compile_backend else cross_entropy_step
    padded = aligned(weight)  # [V', hidden]
    total = hidden.new_zeros((), dtype=torch.float32)
    grad_hidden = hidden.new_empty(hidden.shape if gradients else (0,))
    grad_weight = weight.new_zeros(padded.shape if gradients else (0,), dtype=torch.float32)
    for start in range(0, hidden.shape[0], size):
        rows = slice(start, start + size)
        logits = F.linear(hidden[rows], padded)  # [rows, V']
        logits[:, weight.shape[0] :] = -torch.inf
        if not gradients:
            total += F.cross_entropy(logits.float(), labels[rows], reduction="sum")
            continue
        if fused:
            loss, grad_logits = loss_and_gradient_in_place(logits, labels[rows], weight.shape[0]), logits
        else:
            loss, grad_logits, grad_at_label = softmax_step(logits, labels[rows])
            grad_logits.scatter_(1, labels[rows, None], grad_at_label)
        total += loss
        torch.mm(grad_logits, padded, out=grad_hidden[rows])
        add_product(grad_weight, grad_logits.t(), hidden[rows])
    return total / hidden.shape[0], grad_hidden, grad_weight[: weight.shape[0]]


def loss_and_gradient_in_place(logits: Tensor, labels: Tensor, vocabulary: int) -> Tensor:
    from mfubench.model.fused.cross_entropy import loss_and_gradient  # needs triton

    return loss_and_gradient(logits, labels, vocabulary)


def cross_entropy_step(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Summed loss of logits [n, V] and its gradient.

    d loss / d logit = softmax - (1 at the label). The gradient is returned without the 1, and apart from it, [n, 1],
    the whole value at the label: computed in float32, since there the difference cancels as the model learns.
    """
    exact = logits.float()
    log_normalizer = exact.logsumexp(dim=-1, keepdim=True)  # [n, 1]
    log_probability = exact.gather(1, labels[:, None]) - log_normalizer  # [n, 1]
    gradient = (exact - log_normalizer).exp().to(logits.dtype)
    return -log_probability.sum(), gradient, (log_probability.exp() - 1).to(logits.dtype)


@functools.cache
def compiled_softmax_step(backend: str) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
    """`cross_entropy_step`, compiled once a process: two kernels instead of a dozen."""
    return torch.compile(cross_entropy_step, backend=backend, dynamic=False)


@chunked_cross_entropy.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    size: int,
    gradients: bool,
    compile_backend: str,
    fused: bool,
    total_gradient: Tensor | None = None,
    overwrite: Tensor | None = None,
    ticket: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        hidden.new_empty((), dtype=torch.float32),
        hidden.new_empty(hidden.shape if gradients else (0,)),
        weight.new_empty(weight.shape if gradients else (0,), dtype=torch.float32),
    )


@torch.library.custom_op("mfubench::accumulate_scaled", mutates_args=("total",))
def accumulate_scaled(total: Tensor, gradient: Tensor, factor: Tensor, overwrite: Tensor) -> None:
    """total += gradient * factor (a scalar on the device), or = where `overwrite` says so; all float32."""
    if overwrite:
        torch.mul(gradient, factor, out=total)
    else:
        total.addcmul_(gradient, factor)


def save_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    hidden, weight, _, _, _, _, _, total_gradient, overwrite, _ = inputs
    ctx.save_for_backward(*output[1:], total_gradient, overwrite)
    ctx.tokens, ctx.weight_dtype = hidden.shape[0], weight.dtype


def scale_gradients(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    """Gradients of the mean, times the gradient that arrives; each scaled and stored in one pass over memory."""
    grad_hidden, grad_weight, total_gradient, overwrite = ctx.saved_tensors
    factor = grad / ctx.tokens
    if total_gradient is not None:
        accumulate_scaled(total_gradient, grad_weight, factor, overwrite)
        return grad_hidden * factor, None, None, None, None, None, None, None, None, grad_hidden.new_empty(0)
    rounded = torch.empty_like(grad_weight, dtype=ctx.weight_dtype)
    torch.mul(grad_weight, factor, out=rounded)
    return grad_hidden * factor, rounded, None, None, None, None, None, None, None, None


chunked_cross_entropy.register_autograd(scale_gradients, setup_context=save_gradients)


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


def preferred(
    device: torch.device, vocab_size: int, compiled: bool, fused_cross_entropy: bool = False
) -> tuple[str, str]:
    """The form that `auto` wants and why; see LARGE_VOCABULARY."""
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
