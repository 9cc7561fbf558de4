"""Time and energy of a step's matmuls on one card, cuBLAS's beside quack's: `python -m benchmarks.matmuls`.

At a card's power limit the energy of a step sets its time, so both are measured: of a model's matmuls, and of SwiGLU
beside two of them, in quack's epilogue or as a kernel of its own. The variants of a case do the same work on the same
tensors; each result is held against cuBLAS's before its loop is measured.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.meter import Meter
from benchmarks.quack_kernels import Quack, Results, Variant, forget, load_quack
from benchmarks.runner import OutOfTime, deadline_after, errors_in_one_line
from mfubench.config import ConfigError, ModelConfig
from mfubench.decisions import CHUNK_BYTES, ROW_MULTIPLE
from mfubench.model.components import swiglu as plain_swiglu
from mfubench.model.loss import chunk_size
from mfubench.model.weight_gradient import add_product
from mfubench.presets import load_model
from mfubench.run_log import write_json

TINY = {"model": "llama2-tiny", "micro_batch_size": 1, "seq_len": 32, "preheat": 0.0, "seconds": 0.01}
LARGEST_ERROR = 0.01  # of the norm; roundings to bfloat16 make 0.002


@dataclass(frozen=True)
class Case:
    name: str
    flops: int  # of its matmul
    make: Callable[[], list[Variant]]  # draws the tensors on torch's default device; cuBLAS's variants first


def draw(*shape: int, scale: float = 1.0) -> Tensor:
    """Random, since zeros would take less power; one set a case, since one call's tensors exceed the L2 cache."""
    return torch.randn(*shape, dtype=torch.bfloat16) * scale


def blas(x: Tensor) -> str:
    return "cuBLAS" if x.is_cuda else "torch"


def matmul(left: Tensor, right: Tensor, quack: Quack | None) -> list[Variant]:
    out = left.new_empty(left.shape[0], right.shape[1])
    prepare = functools.partial(forget, out)
    variants = [Variant(blas(left), "mm", lambda: (torch.mm(left, right, out=out),), prepare=prepare)]
    return variants + (quack.matmul(left, right, out, prepare) if quack else [])


def forward(N: int, K: int, M: int, quack: Quack | None) -> list[Variant]:
    """inputs [N, K] @ weight [M, K].T"""
    return matmul(draw(N, K), draw(M, K, scale=0.02).t(), quack)


def input_gradient(N: int, K: int, M: int, quack: Quack | None) -> list[Variant]:
    """grad [N, M] @ weight [M, K]"""
    return matmul(draw(N, M), draw(M, K, scale=0.02), quack)


def weight_gradient(N: int, K: int, M: int, quack: Quack | None) -> list[Variant]:
    """total [M, K] in float32 += grad [N, M].T @ inputs [N, K]"""
    left, inputs, total = draw(N, M).t(), draw(N, K), torch.empty(M, K)

    def prepare() -> None:
        total.fill_(math.sqrt(N))  # as large as the product: what does not add is found out

    def accumulate() -> Results:
        add_product(total, left, inputs)
        return (total,)

    variants = [Variant(blas(inputs), "addmm, float32 sum", accumulate, prepare=prepare)]
    return variants + (quack.matmul(left, inputs, total, prepare, add=True) if quack else [])


def swiglu_kernels(x: Tensor) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor, bool], Results]]:
    """The project's kernels, forward and backward; on a CPU torch's operators with the same signatures."""
    if x.is_cuda:
        from mfubench.model.fused.swiglu import swiglu, swiglu_backward

        return swiglu, swiglu_backward

    def backward(grad: Tensor, gate_up: Tensor, recompute: bool) -> Results:
        with torch.enable_grad():
            leaf = gate_up.detach().requires_grad_()
            product = plain_swiglu(leaf)
        return torch.autograd.grad(product, leaf, grad)[0], product.detach()

    return plain_swiglu, backward


def forward_swiglu(N: int, K: int, M: int, quack: Quack | None) -> list[Variant]:
    """gate_up [N, M] = inputs [N, K] @ weight [M, K].T, and the product [N, M / 2] = silu(gate) * up"""
    inputs, weight = draw(N, K), draw(M, K, scale=0.02)
    swiglu, _ = swiglu_kernels(inputs)

    def in_two() -> Results:
        gate_up = F.linear(inputs, weight)
        return gate_up, swiglu(gate_up)

    variants = [Variant(blas(inputs), "mm, then SwiGLU", in_two)]
    return variants + (quack.gated(inputs, weight) if quack else [])


def input_gradient_swiglu(N: int, K: int, M: int, quack: Quack | None) -> list[Variant]:
    """gradient of gate_up [N, 2K] where that of the product is grad [N, M] @ weight [M, K]; the product once more"""
    grad, weight, gate_up = draw(N, M), draw(M, K, scale=0.02), draw(N, 2 * K)
    _, backward = swiglu_kernels(grad)
    variants = [
        Variant(blas(grad), "mm, then SwiGLU and product", lambda: backward(grad @ weight, gate_up, True)),
        Variant(blas(grad), "mm, then SwiGLU", lambda: backward(grad @ weight, gate_up, False)[:1]),
    ]
    return variants + (quack.dgated(grad, weight, gate_up) if quack else [])


PASSES = {"forward": forward, "input gradient": input_gradient, "weight gradient": weight_gradient}


def linear_layers(model: ModelConfig, tokens: int) -> dict[str, tuple[int, int, int]]:
    """Name -> rows N, inputs K and outputs M of a block's linear layers and of the head: N of a chunk of logits, M with
    the padding that the vocabulary needs."""
    queries, keys = model.num_attention_heads * model.head_dim, model.num_key_value_heads * model.head_dim
    hidden, width, vocabulary = model.hidden_size, model.intermediate_size, model.vocab_size
    if vocabulary % 8:
        vocabulary += -vocabulary % ROW_MULTIPLE
    up, outputs = ("gate_up", 2 * width) if model.mlp == "swiglu" else ("up", width)
    return {
        "qkv": (tokens, hidden, queries + 2 * keys),
        "output": (tokens, queries, hidden),
        up: (tokens, hidden, outputs),
        "down": (tokens, width, hidden),
        "head": (min(tokens, chunk_size(tokens, 2 * vocabulary, CHUNK_BYTES)), hidden, vocabulary),
    }


def all_cases(model: ModelConfig, tokens: int, quack: Quack | None) -> list[Case]:
    """Each layer's three matmuls, and before them the two with SwiGLU."""
    layers = linear_layers(model, tokens)
    works = [(layer, name, make) for layer in layers for name, make in PASSES.items()]
    if "gate_up" in layers:
        works.insert(0, ("gate_up", "forward, SwiGLU", forward_swiglu))
        works.insert(1, ("down", "input gradient, SwiGLU", input_gradient_swiglu))
    return [
        Case(f"{layer} {name}", 2 * math.prod(layers[layer]), functools.partial(make, *layers[layer], quack))
        for layer, name, make in works
    ]


def relative_error(results: Results, expected: Results) -> float:
    """The largest norm of a difference over the expected norm; NaN where there is one."""
    norm = functools.partial(torch.linalg.vector_norm, dtype=torch.float32)
    errors = [norm(x - y) / norm(y) for x, y in zip(results, expected, strict=False)]
    return float(torch.stack(errors).max())


def measure(case: Case, meter: Meter, deadline: float) -> Iterator[dict[str, Any]]:
    """A row a variant, the first once more at the end. Raises OutOfTime where the next would end after the deadline."""
    with meter.device:
        variants = case.make()
    variants[0].prepare()
    expected = tuple(result.clone() for result in variants[0].call())
    if len(variants) > 1:
        variants.append(replace(variants[0], name=f"{variants[0].name}, again"))  # tells how far the card has drifted
    first: dict[str, Any] = {}
    for variant in variants:
        if time.monotonic() + meter.seconds > deadline:
            raise OutOfTime
        row: dict[str, Any] = {"case": case.name, "system": variant.system, "variant": variant.name}
        try:
            variant.prepare()
            row["error"] = relative_error(variant.arrange(variant.call()), expected)
            if not row["error"] <= LARGEST_ERROR:
                raise ArithmeticError(f"differs from {variants[0].system}'s result by {row['error']:.1e} of its norm")
            row |= meter.measure(variant.call)
            row["tflops"] = case.flops / row["ms"] / 1e9
            first = first or row
            for key in ("ms", "joules"):
                row[f"{key}_ratio"] = row[key] / first[key] if row[key] and first[key] else None
        except Exception as error:  # what does not compile, start or compute right leaves the others alone
            row["failed"] = one_line(error)
        yield row
        if meter.device.type == "cuda":
            torch.cuda.synchronize()  # raises where a failure took the CUDA context with it


def one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


COLUMNS = {  # key of a row -> heading, width, decimals; ratios are to the case's first row
    "ms": ("ms", 9, 3),
    "joules": ("J", 9, 4),
    "tflops": ("TFLOP/s", 9, 1),
    "watts": ("W", 6, 0),
    "sm_mhz": ("MHz", 6, 0),
    "ms_ratio": ("time", 7, 3),
    "joules_ratio": ("energy", 7, 3),
}


def line_of(row: dict[str, Any] | None = None) -> str:
    """A row for the terminal; without one, the headings."""
    if row is None:
        cells = [f"{heading:>{width}s}" for heading, width, _ in COLUMNS.values()]
        return f"{'case':31s}{'system':8s}{'variant':54s}" + "".join(cells)
    line = f"{row['case']:31s}{row['system']:8s}{row['variant']:54s}"
    if "failed" in row:
        return f"{line}  failed: {row['failed']}"
    values = [(row[key], width, decimals) for key, (_, width, decimals) in COLUMNS.items()]
    return line + "".join(f"{'-':>{w}s}" if x is None else f"{x:{w}.{d}f}" for x, w, d in values)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Time and energy of a step's matmuls, cuBLAS's beside quack's.")
    parser.add_argument("--model", default="llama2-1.36b", help="preset of config/models.yaml")
    parser.add_argument("--micro-batch-size", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases with this in their name")
    parser.add_argument("--preheat", type=float, default=0.5, help="seconds of each loop before it is measured")
    parser.add_argument("--seconds", type=float, default=1.0, help="measured seconds of each loop")
    parser.add_argument("--minutes", type=float, help="begin no loop that would end later")
    parser.add_argument("--json", type=Path, help="also write the rows there, all anew after each")
    parser.add_argument(
        "--tiny", action="store_true", help="all of it on a CPU: a tiny model, without quack and energy"
    )
    return parser


def read_arguments(argv: Sequence[str] | None) -> tuple[argparse.Namespace, ModelConfig]:
    """The options, of which --tiny changes some defaults, and the model. Raises ConfigError."""
    parser = make_parser()
    if parser.parse_args(argv).tiny:
        parser.set_defaults(**TINY)
    arguments = parser.parse_args(argv)
    for name in ("micro_batch_size", "seq_len", "seconds"):
        if not getattr(arguments, name) > 0:
            raise ConfigError(f"--{name.replace('_', '-')}: found {getattr(arguments, name):g}; a positive number")
    if not arguments.preheat >= 0:
        raise ConfigError(f"--preheat: found {arguments.preheat:g}; 0 or more seconds")
    if not arguments.tiny and not torch.cuda.is_available():
        raise ConfigError("no CUDA device is here; --tiny runs all of it on a CPU")
    try:
        return arguments, load_model(arguments.model)
    except ConfigError as error:
        raise ConfigError(f"--model: {error}") from error


@errors_in_one_line
@torch.no_grad()
def main(argv: Sequence[str] | None = None) -> int:
    """0: all was measured; 75: --minutes are over; 1: bad input, or a row failed."""
    arguments, model = read_arguments(argv)
    deadline = deadline_after(arguments.minutes)
    device = torch.device("cpu" if arguments.tiny else "cuda")
    quack = None if arguments.tiny else load_quack()
    tokens = arguments.micro_batch_size * arguments.seq_len
    cases = all_cases(model, tokens, quack)
    chosen = [case for case in cases if arguments.only in case.name]
    if not chosen:
        names = ", ".join(case.name for case in cases)
        raise ConfigError(f"--only: found {arguments.only!r}, which is in none of these names: {names}")
    meter = Meter(device, arguments.preheat, arguments.seconds)
    what = {
        "card": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "power_limit_w": meter.card.get("power_limit_w"),
        "torch": torch.__version__,
        "quack": quack.version if quack is not None else None,
        "model": model.name,
        "tokens": tokens,
    }
    print(", ".join(f"{key} {value}" for key, value in what.items()))
    if meter.problem and not arguments.tiny:
        print(f"no energy: {meter.problem}")
    print(line_of())
    rows: list[dict[str, Any]] = []
    for case in chosen:
        try:
            for row in measure(case, meter, deadline):
                rows.append(row)
                print(line_of(row), flush=True)
                if arguments.json:
                    write_json(arguments.json, what | {"rows": rows})
        except torch.OutOfMemoryError:
            raise ConfigError(f"{case.name}: out of memory; take a smaller --micro-batch-size") from None
        except OutOfTime:
            if not rows:
                raise ConfigError(f"one loop takes about {meter.seconds:g} s: raise --minutes") from None
            tell_failures(rows)
            print(f"the time was up in {case.name!r}; --only TEXT takes what is left by itself", file=sys.stderr)
            return 75
    return 1 if tell_failures(rows) else 0


def tell_failures(rows: Sequence[dict[str, Any]]) -> int:
    """A line on stderr for each row that failed, and how many there are."""
    failed = [row for row in rows if "failed" in row]
    for row in failed:
        print(f"failed: {row['case']}: {row['system']}, {row['variant']}: {row['failed']}", file=sys.stderr)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
