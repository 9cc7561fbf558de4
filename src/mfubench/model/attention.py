"""Which attention kernel runs, and how that is known.

`resolve_attention` turns what was asked for into what works on this device for this dtype and these heads, and says
why. A kernel works when a tiny forward and backward pass on the device gives what the plain form gives; whatever goes
wrong on the way (no package, no kernel for the card, no float32) becomes the reason for the next one of the chain.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from mfubench.model.attention_kernels import AttentionFunction, cudnn, eager, load_fa2, load_fa3, load_fa4, sdpa
from mfubench.model.attention_times import holds_for, keep_times, read_times
from mfubench.run_log import Choice

LOADERS: dict[str, Callable[[], AttentionFunction]] = {
    "fa4": load_fa4,
    "fa3": load_fa3,
    "fa2": load_fa2,
    "cudnn": lambda: cudnn,
    "sdpa": lambda: sdpa,
    "eager": lambda: eager,
}
PACKAGES = {
    "fa4": "flash-attn-4",
    "fa3": "FlashAttention-3 (flash_attn_3, or xformers up to 0.0.34 with nvidia-cuda-runtime-cu12)",
    "fa2": "flash-attn",
}

# What is tried next where a backend does not work. Nothing falls to cudnn or fa4: both are asked for by name (or auto).
FALLBACKS = {
    "fa4": ("fa3", "fa2", "sdpa", "eager"),
    "fa3": ("fa2", "sdpa", "eager"),
    "fa2": ("sdpa", "eager"),
    "cudnn": ("sdpa", "eager"),
    "sdpa": ("eager",),
    "eager": (),
}
# Candidates of auto on CUDA. Those within NOISE of the fastest count as equal, and the first of them in this order is
# taken, so that the runs of a study agree. fa4 comes before cudnn: as fast alone, it makes a whole step on an H100 2 %
# faster (benchmarks/NOTES.md), and RoPE's backward pass can join it.
AUTO_ORDER = ("fa4", "fa3", "cudnn", "fa2", "sdpa")
NOISE = 0.03
# Largest relative error (Frobenius norm) of a working kernel against the float64 reference: several times the
# rounding of inputs, probabilities and outputs to the dtype (float32: to TF32, which may be on), and far below what a
# wrong mask or head order gives.
TOLERANCES = {torch.float32: 5e-3, torch.float16: 5e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Shape:
    """What a kernel is asked to do."""

    batch_size: int
    seq_len: int
    query_heads: int
    key_value_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    def __str__(self) -> str:
        return (
            f"B{self.batch_size} T{self.seq_len} H{self.query_heads}/{self.key_value_heads} D{self.head_dim} "
            f"{str(self.dtype).removeprefix('torch.')}"
        )

    @property
    def flops(self) -> float:
        """Causal forward and backward: 2 matmuls forward, 5 backward (one recomputed), 2*B*H*T*T*D/2 FLOPs each."""
        return 7 * self.batch_size * self.query_heads * self.seq_len**2 * self.head_dim

    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v, as views of one merged tensor as in the model, and a gradient of the output."""
        B, T, H, KV, D = self.batch_size, self.seq_len, self.query_heads, self.key_value_heads, self.head_dim
        generator = torch.Generator(self.device).manual_seed(0)  # leaves the run's own random state alone

        def normal(heads: int) -> Tensor:
            return torch.randn(B, T, heads, D, generator=generator, device=self.device).to(self.dtype)

        q, k, v = normal(H + 2 * KV).split((H, KV, KV), dim=2)
        return *(x.detach().requires_grad_() for x in (q, k, v)), normal(H)


def resolve_attention(
    requested: str,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    num_attention_heads: int,
    num_key_value_heads: int,
    head_dim: int,
    seq_len: int,
    batch_size: int = 4,
) -> tuple[AttentionFunction, Choice]:
    """The attention function for a model on this device, and what was chosen, with each reason on the way.

    `requested` is a key of LOADERS or "auto": the fastest that works, on CUDA by a short measurement with the real
    shape (all processes of a run then agree on the slowest one's figures), elsewhere sdpa.
    """
    device = torch.device(device)
    shape = Shape(batch_size, seq_len, num_attention_heads, num_key_value_heads, head_dim, dtype, device)
    if requested == "auto" and device.type == "cuda":
        return choose_fastest(shape)
    first = "sdpa" if requested == "auto" else requested
    reasons = ["torch's own kernel; nothing to choose from without CUDA"] if requested == "auto" else []
    for name in (first, *FALLBACKS[first]):
        function, reason = try_backend(name, shape)
        if reason:
            reasons.append(f"{name}: {reason}")
        if function is not None:
            return function, Choice(requested=requested, used=name, reason="; ".join(reasons) or None)
    raise RuntimeError(f"no attention works on {device}: {'; '.join(reasons)}")


def attention_backends(device: torch.device | str) -> dict[str, str | None]:
    """Each backend with None where it works on `device` (bfloat16, 4 heads of 64), or the reason why not."""
    shape = Shape(1, 128, 4, 4, 64, torch.bfloat16, torch.device(device))
    backends = {}
    for name in LOADERS:
        function, reason = try_backend(name, shape)
        backends[name] = None if function is not None else reason
    return backends


def try_backend(name: str, shape: Shape) -> tuple[AttentionFunction | None, str | None]:
    """Load a backend and let it work on a small piece of `shape`: (function, remark) or (None, reason)."""
    if name not in ("sdpa", "eager"):
        if shape.device.type != "cuda":
            return None, f"needs a CUDA device, not {shape.device.type}"
        if shape.dtype == torch.float32:
            return None, "has no float32 kernel (FlashAttention and cuDNN take float16 and bfloat16)"
    try:
        function = LOADERS[name]()
    except Exception as error:  # a build for another torch or CUDA fails in many ways
        return None, f"{PACKAGES[name]} cannot be imported ({describe(error)})"
    small = Shape(
        1, 130, shape.query_heads, shape.key_value_heads, shape.head_dim, shape.dtype, shape.device
    )  # 130 tokens: more than one tile, and not a whole number of them
    try:
        error_found = largest_error(function, small)
    except Exception as error:
        return None, f"does not run on this device ({describe(error)})"
    if not error_found <= TOLERANCES[shape.dtype]:
        return None, f"gives wrong results here (relative error {error_found:.2g})"
    # torch's kernels and the operators of fa3 and fa4 are traceable by construction
    if name == "fa2" and (obstacle := tracing_obstacle(function, small)) is not None:
        return torch.compiler.disable(function), f"torch.compile breaks its graph around it ({obstacle})"
    if name == "sdpa" and shape.device.type == "cuda" and shape.dtype == torch.float32:
        return function, "flash has no float32: torch's memory-efficient kernel"
    return function, None


def largest_error(function: AttentionFunction, shape: Shape) -> float:
    """Relative error of output and gradients against eager in float64, the largest of the four."""
    *inputs, grad = shape.inputs()
    exact_inputs = [x.detach().double().requires_grad_() for x in inputs]
    exact = eager(*exact_inputs)
    found = function(*inputs)
    pairs = [
        (found, exact),
        *zip(
            torch.autograd.grad(found, inputs, grad),
            torch.autograd.grad(exact, exact_inputs, grad.double()),
            strict=True,
        ),
    ]
    return max(((a.double() - b).norm() / b.norm()).item() for a, b in pairs)


def tracing_obstacle(function: AttentionFunction, shape: Shape) -> str | None:
    """Why torch.compile cannot trace through a kernel (a build that does not describe its operators), or None."""
    mode = FakeTensorMode()
    *inputs, grad = (mode.from_tensor(x.detach()) for x in shape.inputs())
    try:
        with mode:
            torch.autograd.grad(function(*(x.requires_grad_() for x in inputs)), inputs, grad)
    except Exception as error:
        return describe(error)
    return None


def choose_fastest(shape: Shape) -> tuple[AttentionFunction, Choice]:
    """The fastest of what works on this card for this shape, by what was measured here before, or else is now."""
    functions: dict[str, AttentionFunction] = {}
    missing = []
    for name in AUTO_ORDER:
        function, reason = try_backend(name, shape)
        if function is not None:
            try:
                measure({name: function}, shape, rounds=0, calls=1)  # the real shape may be too much for it
                functions[name] = function
            except Exception as error:
                reason = f"does not run at {shape} ({describe(error)})"
        if name not in functions:
            missing.append(f"{name} {reason}")
    about = holds_for(str(shape), shape.device, functions)
    kept = read_times(about)
    times_s = agree(kept.times_s if kept is not None else measure(functions, shape), shape.device)
    if not times_s:
        return eager, Choice(requested="auto", used="eager", reason=f"nothing else works: {'; '.join(missing)}")
    if kept is None:
        keep_times(about, times_s)
    fastest_s = min(times_s.values())
    used = next(name for name, time_s in times_s.items() if time_s <= fastest_s * (1 + NOISE))
    figures = ", ".join(
        f"{name} {time_s * 1e3:.3f} ms ({shape.flops / time_s / 1e12:.0f} TFLOP/s causal)"
        for name, time_s in times_s.items()
    )
    reason = f"fastest on this card, forward and backward at {shape}, within {NOISE:.0%} the first named: {figures}"
    if kept is not None:
        reason += f" (measured {kept.measured_at}, kept in the cache)"
    if missing:
        reason += f"; not to be had: {'; '.join(missing)}"
    return functions[used], Choice(requested="auto", used=used, reason=reason)


def measure(functions: dict[str, AttentionFunction], shape: Shape, rounds: int = 8, calls: int = 5) -> dict[str, float]:
    """Seconds of a forward and backward pass of each function, at best.

    Rounds of them alternate, so that drift hits all alike; the first round warms up and does not count. The least of
    the rounds, since whatever else a machine does can only add to them.
    """
    *inputs, grad = shape.inputs()
    times_s: dict[str, list[float]] = {name: [] for name in functions}
    for name in list(functions) * (rounds + 1):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(calls):
            torch.autograd.grad(functions[name](*inputs), inputs, grad)
        end.record()
        torch.cuda.synchronize(shape.device)
        times_s[name].append(start.elapsed_time(end) / 1e3 / calls)
    return {name: min(times[1:] or times) for name, times in times_s.items()}


def agree(times_s: dict[str, float], device: torch.device) -> dict[str, float]:
    """The slowest process's time of each backend, so that all processes choose alike; what fails on one is left out."""
    if not torch.distributed.is_initialized():
        return times_s
    slowest = torch.tensor([times_s.get(name, torch.inf) for name in AUTO_ORDER], device=device)
    torch.distributed.all_reduce(slowest, torch.distributed.ReduceOp.MAX)
    return {name: time_s for name, time_s in zip(AUTO_ORDER, slowest.tolist(), strict=True) if time_s < torch.inf}


def describe(error: Exception) -> str:
    """An exception in one short line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
