"""The project's own kernels beside the compiler's for the same work, one by one: `python -m benchmarks.kernels`.

Each is timed alone on one card at a model's sizes, forward and backward, beside what its bytes take at the rate of
a copy. Where a kernel's launch constants are to be found for another card, `--constants` varies them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mfubench.config import ConfigError, ModelConfig, OptimizerConfig
from mfubench.decisions import CHUNK_BYTES
from mfubench.model.loss import chunk_size
from mfubench.model.operations import PLAIN, load_fused, not_in, trial
from mfubench.presets import load_model
from mfubench.run_log import write_text_atomically

ADAMW_PARAMETERS = 400_000_000
CONSTANTS = {  # module below mfubench.model.fused -> values to try of each of its launch constants
    "swiglu": {"BLOCK": (1024, 2048), "WARPS": (4, 8)},
    "norm": {"WARPS": (4, 8, 16), "PER_MULTIPROCESSOR": (1, 2, 4, 8), "STAGES": (1, 2, 3, 4)},
    "rope": {"WARPS": (4, 8), "BACKWARD_WARPS": (4, 8), "PER_MULTIPROCESSOR": (1, 2, 4), "STAGES": (1, 2, 3)},
}


@dataclass(frozen=True)
class Work:
    """What a kernel does: run(operations, *inputs), and the bytes that must cross the memory bus."""

    kind: str
    inputs: list[Tensor]
    run: Callable[..., tuple[Tensor, ...]]
    forward_bytes: int
    backward_bytes: int


class Clock:
    """Seconds of a call: median and quartiles over `repeats` batches of calls, on the device's own time line."""

    def __init__(self, device: torch.device, repeats: int, batch_s: float):
        self.device, self.repeats, self.batch_s = device, repeats, batch_s

    def once(self, call: Callable[[], object], count: int) -> float:
        if self.device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(count):
                call()
            end.record()
            torch.cuda.synchronize()
            return begin.elapsed_time(end) / 1e3 / count
        began = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - began) / count

    def measure(self, call: Callable[[], object]) -> dict[str, float]:
        for _ in range(2):  # compiles, and warms up
            self.once(call, 1)
        count = max(1, int(self.batch_s / self.once(call, 3)))
        times = sorted(self.once(call, count) for _ in range(self.repeats))
        q1, median, q3 = statistics.quantiles(times, n=4) if len(times) > 1 else times * 3
        return {"median": median, "q1": q1, "q3": q3}


def works(model: ModelConfig, sequences: int, seq_len: int, device: torch.device, dtype: torch.dtype) -> Iterator[Work]:
    """The kernels that a model has work for, on `sequences` sequences of `seq_len` tokens."""
    tokens, E = sequences * seq_len, dtype.itemsize
    queries, keys = model.num_attention_heads, model.num_key_value_heads
    everything = (queries + 2 * keys) * model.head_dim
    rotated = (queries + keys) * model.head_dim
    widths = {  # elements a token that cross the bus, forward and backward
        "swiglu": (3 * model.intermediate_size, 5 * model.intermediate_size),
        "norm": (4 * model.hidden_size, 4 * model.hidden_size),
        # without norms in place: values stay where they are
        "rope": (2 * everything, 3 * everything) if model.qk_norm else (2 * rotated, 2 * everything),
    }

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device).to(dtype)

    for kind, (forward, backward) in widths.items():
        if not_in(model, kind) is None:
            inputs, run = trial(kind, model, draw, device, sequences, seq_len)
            yield Work(kind, inputs, run, tokens * E * forward, tokens * E * backward)


def forward_and_backward(work: Work, form: Callable[..., tuple[Tensor, ...]], clock: Clock) -> dict[str, dict]:
    """Times of both passes; the backward pass alone, over a graph that is kept."""
    with torch.no_grad():
        forward = clock.measure(lambda: form(*work.inputs))
    leaves = [x.detach().requires_grad_() for x in work.inputs]
    outputs = form(*(x.clone() for x in leaves))
    gradients = [torch.randn_like(y) for y in outputs]
    backward = clock.measure(lambda: torch.autograd.grad(outputs, leaves, gradients, retain_graph=True))
    return {"forward": forward, "backward": backward}


def compare(work: Work, clock: Clock, copy_rate: float) -> Iterator[dict[str, Any]]:
    """A row a pass: own kernel, the compiler's, their ratio, and the share of the copy's rate that ours reaches."""
    own = replace(PLAIN, **load_fused(work.kind))
    backend = "inductor" if work.inputs[0].is_cuda else "aot_eager"
    compiled = torch.compile(lambda *inputs: work.run(PLAIN, *inputs), backend=backend, dynamic=False)
    ours = forward_and_backward(work, lambda *inputs: work.run(own, *inputs), clock)
    theirs = forward_and_backward(work, compiled, clock)
    for name, size in (("forward", work.forward_bytes), ("backward", work.backward_bytes)):
        yield row(work.kind, name, ours[name], theirs[name], size, copy_rate)


def row(
    kind: str, name: str, ours: dict[str, float], theirs: dict[str, float], size: int, copy_rate: float
) -> dict[str, Any]:
    return {
        "kernel": kind,
        "pass": name,
        "own_s": ours,
        "compiled_s": theirs,
        "speedup": theirs["median"] / ours["median"],
        "bytes": size,
        "of_copy": size / ours["median"] / copy_rate,
    }


def compare_cross_entropy(
    model: ModelConfig, tokens: int, device: torch.device, clock: Clock, copy_rate: float
) -> Iterator[dict[str, Any]]:
    """Loss of bfloat16 logits, at most 2 GiB of them, and its gradient, which takes their place."""
    from mfubench.model.fused.cross_entropy import cross_entropy_backward, cross_entropy_forward

    vocabulary = model.vocab_size
    tokens = min(tokens, chunk_size(tokens, 2 * vocabulary, CHUNK_BYTES))
    logits = torch.randn(tokens, vocabulary, device=device).bfloat16()
    labels = torch.randint(vocabulary, (tokens,), device=device)
    backend = "inductor" if device.type == "cuda" else "aot_eager"
    compiled = torch.compile(lambda x: F.cross_entropy(x.float(), labels), backend=backend, dynamic=False)
    leaf = logits.clone().requires_grad_()
    loss = compiled(leaf)
    with torch.no_grad():
        theirs = clock.measure(lambda: compiled(logits))
        ours = clock.measure(lambda: cross_entropy_forward(logits, labels, vocabulary))
    yield row("loss", "forward", ours, theirs, logits.nbytes, copy_rate)
    theirs = clock.measure(lambda: torch.autograd.grad(loss, leaf, retain_graph=True))
    normalizers, factor = cross_entropy_forward(logits, labels, vocabulary)[1], torch.ones((), device=device)
    ours = clock.measure(lambda: cross_entropy_backward(logits, labels, normalizers, factor, vocabulary))
    yield row("loss", "backward", ours, theirs, 2 * logits.nbytes, copy_rate)


def compare_adamw(device: torch.device, count: int, clock: Clock, copy_rate: float) -> dict[str, Any]:
    """The update with its rounding, beside torch's fused AdamW and the copy that rounds."""
    from mfubench.train.fused_adamw import fused_adamw
    from mfubench.train.parallel import Piece

    config = OptimizerConfig()
    master, gradient, average, square = (torch.zeros(count, device=device) for _ in range(4))
    compute = torch.zeros(count, device=device, dtype=torch.bfloat16)
    one, steps = torch.ones((), device=device), [torch.zeros((), device=device)]

    def ours() -> None:
        pieces = [Piece(master, decay=True, compute=compute)]
        fused_adamw(
            pieces,
            [gradient],
            [average],
            [square],
            steps,
            config=config,
            learning_rate=one * config.learning_rate,
            divisor=one,
            found_inf=None,
        )

    master.grad = gradient
    torchs = torch.optim.AdamW([master], lr=config.learning_rate, fused=True)

    def theirs() -> None:
        torchs.step()
        compute.copy_(master)

    return row("adamw", "update", clock.measure(ours), clock.measure(theirs), 30 * count, copy_rate)


def vary(work: Work, clock: Clock, copy_rate: float) -> Iterator[dict[str, Any]]:
    """A row a choice of launch constants."""
    import importlib

    module = importlib.import_module(f"mfubench.model.fused.{work.kind}")
    own = replace(PLAIN, **load_fused(work.kind))
    values = CONSTANTS[work.kind]
    before = {key: getattr(module, key) for key in values}
    for choice in itertools.product(*values.values()):
        constants = dict(zip(values, choice, strict=True))
        for key, value in constants.items():
            setattr(module, key, value)
        times = forward_and_backward(work, lambda *inputs: work.run(own, *inputs), clock)
        for one, size in (("forward", work.forward_bytes), ("backward", work.backward_bytes)):
            of_copy = size / times[one]["median"] / copy_rate
            yield {"kernel": work.kind, "pass": one, "constants": constants, "own_s": times[one], "of_copy": of_copy}
    for key, value in before.items():
        setattr(module, key, value)


def copy_rate_of(device: torch.device, clock: Clock, size: int) -> float:
    """Bytes a second that a copy reads and writes."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / clock.measure(lambda: target.copy_(source))["median"]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Time own kernels beside the compiler's.")
    parser.add_argument("--model", default="llama2-1.36b", help="preset of config/models.yaml")
    parser.add_argument("--micro-batch-size", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--batch-seconds", type=float, default=0.05, help="seconds of calls between two readings")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--adamw-parameters", type=int, default=ADAMW_PARAMETERS)
    parser.add_argument("--constants", action="store_true", help="vary the launch constants instead")
    parser.add_argument("--json", type=Path, help="also write the rows there")
    return parser


def device_and_model(arguments: argparse.Namespace, without_cuda: str) -> tuple[torch.device, ModelConfig]:
    """What --device and --model name. Raises ConfigError for what is not to be had; without_cuda: what that means."""
    device = torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"no CUDA device is here, {without_cuda}")
    try:
        return device, load_model(arguments.model)
    except ConfigError as error:
        raise ConfigError(f"--model: {error}") from None


def main(argv: Sequence[str] | None = None) -> int:
    arguments = make_parser().parse_args(argv)
    try:
        device, model = device_and_model(arguments, without_cuda="and the kernels need one")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    clock = Clock(device, arguments.repeats, arguments.batch_seconds)
    tokens = arguments.micro_batch_size * arguments.seq_len
    copy_rate = copy_rate_of(device, clock, 4 * tokens * model.intermediate_size)
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{card}, {model.name}, {tokens:,} tokens, torch {torch.__version__}; copy {copy_rate / 1e9:,.0f} GB/s")
    rows = []
    for work in works(model, arguments.micro_batch_size, arguments.seq_len, device, torch.bfloat16):
        for found in vary(work, clock, copy_rate) if arguments.constants else compare(work, clock, copy_rate):
            show(found)
            rows.append(found)
    if not arguments.constants:
        for found in compare_cross_entropy(model, tokens, device, clock, copy_rate):
            show(found)
            rows.append(found)
        rows.append(compare_adamw(device, arguments.adamw_parameters, clock, copy_rate))
        show(rows[-1])
    if arguments.json:
        what = {"card": card, "torch": torch.__version__, "model": model.name, "tokens": tokens, "copy_rate": copy_rate}
        write_text_atomically(arguments.json, json.dumps(what | {"rows": rows}, indent=1) + "\n")
    return 0


def show(found: dict[str, Any]) -> None:
    own = found["own_s"]
    line = f"{found['kernel']:8s}{found['pass']:10s}{own['median'] * 1e3:9.3f} ms "
    line += f"({own['q1'] * 1e3:.3f} … {own['q3'] * 1e3:.3f})  {found['of_copy']:5.0%} of a copy's rate"
    if "compiled_s" in found:
        line += f"  compiled {found['compiled_s']['median'] * 1e3:.3f} ms, {found['speedup']:.2f} times"
    else:
        line += "  " + " ".join(f"{key}={value}" for key, value in found["constants"].items())
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
