"""Sustained rates of single kernels on one device: matmuls, attention, copy."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from mfubench.ceilings.schema import Arithmetic, AttentionRate, CopyRate, MatmulRate, Product
from mfubench.config import ModelConfig
from mfubench.model.attention import LOADERS, Shape, describe, try_backend

CHUNK_S = 0.02  # calls are timed in chunks of about this long: far above the clock's and the launches' cost
LARGE_SIZE = {"cuda": 8192, "cpu": 1024}  # of the square matmul: [size, size] @ [size, size]
COPY_BYTES = {"cuda": 2**30, "cpu": 2**26}  # far larger than any cache
TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "tf32": torch.float32, "fp32": torch.float32}
PRODUCTS: tuple[Product, ...] = ("forward", "input_gradient", "weight_gradient")


def sustained(call: Callable[[], object], device: torch.device, seconds: float) -> list[float]:
    """Seconds of one call, for each chunk of calls, over `seconds` of uninterrupted work after a first chunk."""
    call()
    synchronize(device)
    started_s = time.perf_counter()
    call()
    synchronize(device)
    calls = max(1, round(CHUNK_S / max(time.perf_counter() - started_s, 1e-6)))
    return cuda_chunks(call, calls, seconds) if device.type == "cuda" else host_chunks(call, calls, seconds)


def cuda_chunks(call: Callable[[], object], calls: int, seconds: float) -> list[float]:
    """As `sustained`, by CUDA events; the queue is kept a chunk ahead, so that the device never waits."""
    events = [torch.cuda.Event(enable_timing=True)]
    events[0].record()
    started_s = time.perf_counter()
    while time.perf_counter() - started_s < seconds or len(events) < 4:
        for _ in range(calls):
            call()
        events.append(torch.cuda.Event(enable_timing=True))
        events[-1].record()
        events[-2].synchronize()
    events[-1].synchronize()
    times_s = [a.elapsed_time(b) / 1e3 / calls for a, b in itertools.pairwise(events)]
    return times_s[1:]


def host_chunks(call: Callable[[], object], calls: int, seconds: float) -> list[float]:
    times_s: list[float] = []
    started_s = chunk_started_s = time.perf_counter()
    while chunk_started_s - started_s < seconds or len(times_s) < 2:
        for _ in range(calls):
            call()
        now_s = time.perf_counter()
        times_s.append((now_s - chunk_started_s) / calls)
        chunk_started_s = now_s
    return times_s


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def float32_matmuls(arithmetic: Arithmetic) -> Iterator[None]:
    """TF32 on for "tf32", off otherwise; as it was before on the way out."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if arithmetic == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@dataclass(frozen=True)
class Linear:
    """One weight of a model, [n, k], applied to m rows; `calls` times in a micro-step."""

    model: str | None
    name: str
    m: int
    k: int
    n: int
    calls: int


def model_linears(model: ModelConfig, rows: int) -> list[Linear]:
    """The weights of a model as this project multiplies them: q, k, v merged, gate and up merged."""
    q_width = model.num_attention_heads * model.head_dim
    qkv_width = q_width + 2 * model.num_key_value_heads * model.head_dim
    up_width = model.intermediate_size * (2 if model.mlp == "swiglu" else 1)
    hidden, layers = model.hidden_size, model.num_hidden_layers
    return [
        Linear(model.name, "qkv", rows, hidden, qkv_width, layers),
        Linear(model.name, "attention_output", rows, q_width, hidden, layers),
        Linear(model.name, "mlp_up", rows, hidden, up_width, layers),
        Linear(model.name, "mlp_down", rows, model.intermediate_size, hidden, layers),
        Linear(model.name, "lm_head", rows, hidden, model.vocab_size, 1),
    ]


def large_linear(device: torch.device) -> Linear:
    size = LARGE_SIZE[device.type]
    return Linear(None, "large", size, size, size, 1)


def measure_matmuls(
    linear: Linear,
    arithmetic: Arithmetic,
    device: torch.device,
    seconds: float,
    products: tuple[Product, ...] = PRODUCTS,
) -> list[MatmulRate]:
    """The products of training one weight: x W^T, and for the gradients dy W and dy^T x."""
    dtype = TORCH_DTYPES[arithmetic]
    rows = fitting_rows(linear, dtype, device)
    x = torch.randn(rows, linear.k, device=device, dtype=dtype)
    weight = torch.randn(linear.n, linear.k, device=device, dtype=dtype)
    dy = torch.randn(rows, linear.n, device=device, dtype=dtype)
    forms: dict[Product, tuple[Callable[[], object], tuple[int, int, int]]] = {
        "forward": (lambda: x @ weight.t(), (rows, linear.k, linear.n)),
        "input_gradient": (lambda: dy @ weight, (rows, linear.n, linear.k)),
        "weight_gradient": (lambda: dy.t() @ x, (linear.n, rows, linear.k)),
    }
    rates = []
    with float32_matmuls(arithmetic):
        for product in products:
            call, (m, k, n) = forms[product]
            times_s = sustained(call, device, seconds)
            tflop = 2e-12 * m * k * n
            quarters = statistics.quantiles(times_s, n=4, method="inclusive")
            # a CPU is shared with other processes, which only ever slow a chunk down
            time_s = statistics.mean(times_s) if device.type == "cuda" else quarters[0]
            rates.append(
                MatmulRate(
                    model=linear.model,
                    name=linear.name,
                    product=product,
                    arithmetic=arithmetic,
                    m=m,
                    k=k,
                    n=n,
                    calls_per_step=linear.calls,
                    tflops=tflop / time_s,
                    tflops_quartiles=(tflop / quarters[2], tflop / quarters[1], tflop / quarters[0]),
                    seconds=seconds,
                )
            )
    return rates


def fitting_rows(linear: Linear, dtype: torch.dtype, device: torch.device) -> int:
    """Rows for which inputs and two outputs fit into half of the free memory (the logits of many tokens do not)."""
    rows = linear.m
    if device.type == "cuda":
        free_bytes = torch.cuda.mem_get_info(device)[0]
        while rows > 256 and (3 * rows * (linear.n + linear.k) + linear.n * linear.k) * dtype.itemsize > free_bytes / 2:
            rows //= 2
    return rows


def measure_copy(device: torch.device, seconds: float) -> CopyRate:
    size = COPY_BYTES[device.type]
    source = torch.randn(size // 4, device=device)
    target = torch.empty_like(source)
    times_s = sustained(lambda: target.copy_(source), device, seconds)
    return CopyRate(bytes=size, gb_s=2 * size / statistics.mean(times_s) / 1e9)


def measure_attention(
    model: ModelConfig,
    backend: str,
    batch_size: int,
    seq_len: int,
    dtype: torch.dtype,
    device: torch.device,
    seconds: float,
) -> AttentionRate:
    """Causal attention forward, and forward with backward, by one backend; a reason where it does not run."""
    shape = Shape(
        batch_size, seq_len, model.num_attention_heads, model.num_key_value_heads, model.head_dim, dtype, device
    )
    rate = AttentionRate(
        model=model.name,
        backend=backend,
        dtype=str(dtype).removeprefix("torch."),
        batch_size=batch_size,
        seq_len=seq_len,
        query_heads=shape.query_heads,
        key_value_heads=shape.key_value_heads,
        head_dim=shape.head_dim,
    )
    function, reason = try_backend(backend, shape)
    if function is None:
        return rate.model_copy(update={"reason": reason})
    *inputs, gradient = shape.inputs()

    def forward() -> object:
        with torch.no_grad():
            return function(*inputs)

    def forward_backward() -> object:
        return torch.autograd.grad(function(*inputs), inputs, gradient)

    try:
        forward_s = statistics.mean(sustained(forward, device, seconds))
        both_s = statistics.mean(sustained(forward_backward, device, seconds))
    except torch.OutOfMemoryError as error:  # the plain form holds the whole score matrix
        return rate.model_copy(update={"reason": describe(error)})
    return rate.model_copy(
        update={
            "forward_tflops": shape.flops * 2 / 7 / forward_s / 1e12,  # 2 of the 7 matmuls are forward
            "forward_backward_tflops": shape.flops / both_s / 1e12,
        }
    )


def attention_backends_for(device: torch.device) -> list[str]:
    return list(LOADERS) if device.type == "cuda" else ["sdpa", "eager"]
