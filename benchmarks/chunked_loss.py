"""The chunked loss by the size of its chunks and where its weight's gradient goes: `python -m benchmarks.chunked_loss`.

One micro-step of it alone, loss and gradients, on random numbers of a model's sizes. All forms in turn, a call each,
so that clock and temperature are the same for all; first each must give the gradients of the first.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels import Clock, device_and_model
from benchmarks.rows import markdown_table
from mfubench.config import ConfigError, ModelConfig
from mfubench.model.loss import accumulating_cross_entropy, chunk_size, chunked_cross_entropy
from mfubench.run_log import write_json

GIB = 2**30
LIMITS = [GIB, 2 * GIB, 4 * GIB, 8 * GIB]  # of logits in a chunk, bytes
TOLERANCE = 2e-2  # between sums of products in another order, relative to the largest gradient


class Loss:
    """One micro-step's tensors, and the two ways to make its gradients; the own kernel on a card, torch on a CPU."""

    def __init__(self, model: ModelConfig, tokens: int, device: torch.device):
        generator = torch.Generator(device).manual_seed(0)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        shape = (model.vocab_size, model.hidden_size)
        self.hidden = torch.randn(tokens, model.hidden_size, generator=generator, device=device).to(dtype)
        self.weight = (0.02 * torch.randn(*shape, generator=generator, device=device)).to(dtype)
        self.labels = torch.randint(model.vocab_size, (tokens,), generator=generator, device=device)
        self.main = torch.zeros(shape, device=device)  # the float32 main gradient
        self.no = torch.tensor(False, device=device)  # its old values count
        self.fused = device.type == "cuda"

    def size(self, limit: int) -> int:
        return chunk_size(self.hidden.shape[0], self.hidden.element_size() * self.weight.shape[0], limit)

    def apart(self, limit: int) -> Tensor:
        """The weight's gradient in a sum of its own, then scaled and added. The gradient of hidden."""
        _, grad_hidden, grad_weight = chunked_cross_entropy(
            self.hidden, self.weight, self.labels, self.size(limit), True, "", self.fused
        )
        self.main.add_(grad_weight / self.hidden.shape[0])
        return grad_hidden / self.hidden.shape[0]

    def added(self, limit: int) -> Tensor:
        """The weight's gradient added to the main gradient chunk by chunk. The gradient of hidden."""
        return accumulating_cross_entropy(
            self.hidden, self.weight, self.labels, self.size(limit), "", self.fused, self.main, self.no
        )[1]

    def forms(self, limits: Sequence[int]) -> dict[str, Callable[[], Tensor]]:
        """Name -> form; of limits that make the same chunks the first."""
        named: dict[str, Callable[[], Tensor]] = {
            f"a sum of its own, chunks of {limits[0] / GIB:g} GiB": lambda: self.apart(limits[0])
        }
        sizes: set[int] = set()
        for limit in limits:
            if self.size(limit) not in sizes:
                sizes.add(self.size(limit))
                named[f"added, chunks of {limit / GIB:g} GiB"] = lambda limit=limit: self.added(limit)
        return named


def compare(loss: Loss, forms: dict[str, Callable[[], Tensor]], clock: Clock, calls: int) -> list[dict[str, Any]]:
    """A row a form. Raises ArithmeticError where one gives other gradients than the first."""
    held: dict[str, float | None] = {}
    first: tuple[Tensor, Tensor] | None = None
    for name, form in forms.items():
        loss.main.zero_()
        held[name], grad_hidden = gib_held(form)
        if first is None:
            first = (grad_hidden, loss.main.clone())
        for found, expected in zip((grad_hidden, loss.main), first, strict=True):
            if (found - expected).abs().max() > TOLERANCE * expected.abs().max():
                raise ArithmeticError(f"{name}: gives other gradients than the first form")
    times: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(calls):
        for name, form in forms.items():
            times[name].append(clock.once(form, 1))
    quartiles = {name: statistics.quantiles(seconds, n=4) for name, seconds in times.items()}
    return [
        {"form": name, "q1_s": q1, "median_s": median, "q3_s": q3, "held_gib": held[name]}
        for name, (q1, median, q3) in quartiles.items()
    ]


def gib_held(form: Callable[[], Tensor]) -> tuple[float | None, Tensor]:
    """GiB that a call holds beyond what was there, its result among them (None on a CPU), and the result."""
    if not torch.cuda.is_available():
        return None, form()
    form()  # what is loaded once does not count
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = form()
    return (torch.cuda.max_memory_allocated() - before) / GIB, result


def table(rows: Sequence[dict[str, Any]]) -> str:
    first = rows[0]["median_s"]
    lines = [
        [
            row["form"],
            f"{1e3 * row['median_s']:.2f} ({1e3 * row['q1_s']:.2f}–{1e3 * row['q3_s']:.2f})",
            f"{row['median_s'] / first:.3f}",
            f"{row['held_gib']:.2f}" if row["held_gib"] is not None else "",
        ]
        for row in rows
    ]
    return markdown_table(["the weight's gradient", "ms a micro-step", "to the first", "GiB held"], lines)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Time the chunked loss by the size of its chunks.")
    parser.add_argument("--model", default="qwen3-1.8b", help="preset of config/models.yaml")
    parser.add_argument("--micro-batch-size", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--calls", type=int, default=50, help="of each form; two at least")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--limits", type=float, nargs="+", default=[limit / GIB for limit in LIMITS], metavar="GIB")
    parser.add_argument("--json", type=Path, help="also write the rows there")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    arguments = make_parser().parse_args(argv)
    tokens = arguments.micro_batch_size * arguments.seq_len
    try:
        device, model = device_and_model(arguments, without_cuda="where --device cpu tries the harness alone")
        loss = Loss(model, tokens, device)
        forms = loss.forms([int(limit * GIB) for limit in arguments.limits])
        rows = compare(loss, forms, Clock(device, 1, 0.0), max(2, arguments.calls))
    except (ConfigError, ArithmeticError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{card}, {model.name}, {tokens:,} tokens, torch {torch.__version__}\n\n{table(rows)}", end="")
    if arguments.json:
        what = {"card": card, "torch": torch.__version__, "model": model.name, "tokens": tokens}
        write_json(arguments.json, what | {"rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
