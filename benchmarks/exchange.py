"""Sums of gradients by collectives and by exchange, alone and beside matmuls: `python -m benchmarks.exchange`.

The gradients are numbers in a model's real buckets. Beside matmuls, as in a backward pass: before each bucket is sent
off, as many products of tokens with the gate/up weights as make the FLOPs of its parameters' gradients. All forms in
turn, a call each, so that clock and temperature are the same for all; first each must give the sums of the first.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from benchmarks.kernels import device_and_model
from benchmarks.rows import markdown_table
from benchmarks.runner import leave
from mfubench.ceilings.collectives import join_ranks
from mfubench.config import ConfigError, ModelConfig
from mfubench.machine import describe_cards
from mfubench.model import build_model
from mfubench.prediction.predict import plan_run
from mfubench.run_log import write_json
from mfubench.stop_signals import on_stop
from mfubench.train.buckets import plan_buckets
from mfubench.train.exchange import Exchange, gather_parts, missing_on, symmetric_zeros
from mfubench.train.process import Process

TOLERANCE = 1e-5  # between sums in another order, relative to the largest
MATMULS = "matmuls alone"
TIMEOUT_S = 600.0  # of one collective


class Sums:
    """One rank's gradients in buckets, the forms to sum them, and the matmuls of a backward pass."""

    def __init__(self, model: ModelConfig, tokens: int, process: Process):
        self.process, device = process, process.device
        dtype = torch.bfloat16 if process.on_cuda else torch.float32
        run = plan_run(model, process.world_size, seq_len=model.max_position_embeddings)
        buckets = plan_buckets(build_model(run, device="meta"), process.world_size)
        total = buckets[-1].end
        gradient = symmetric_zeros(total, torch.float32, device)
        weights = symmetric_zeros(total, dtype, device)
        self.buckets = [gradient[one.start : one.end] for one in buckets]
        self.weights = [weights[one.start : one.end] for one in buckets]
        self.exchange = Exchange(max(len(bucket) for bucket in self.buckets), process.world_size, device)
        generator = torch.Generator(device).manual_seed(process.rank)
        self.generator, self.gradient = generator, gradient
        self.draw()
        wide = 2 * model.intermediate_size
        self.operands = [
            torch.randn(*shape, generator=generator, device=device).to(dtype)
            for shape in ((tokens, model.hidden_size), (model.hidden_size, wide))
        ]
        self.product = torch.empty(tokens, wide, dtype=dtype, device=device)
        self.matmuls = [max(1, round(2 * len(bucket) / (model.hidden_size * wide))) for bucket in self.buckets]

    def draw(self) -> None:
        """New gradients: sums of sums would grow until nothing is finite."""
        self.gradient.normal_(generator=self.generator)

    def part(self, whole: Tensor) -> Tensor:
        """This rank's part of a bucket."""
        return whole.chunk(self.process.world_size)[self.process.rank]

    def all_reduce(self, bucket: Tensor) -> Any:
        return dist.all_reduce(bucket, async_op=True)

    def reduce_scatter(self, bucket: Tensor) -> Any:
        return dist.reduce_scatter_tensor(self.part(bucket), bucket, async_op=True)

    def exchanged(self, bucket: Tensor) -> None:
        self.exchange.sum(bucket, self.part(bucket), everywhere=True)

    def exchanged_in_part(self, bucket: Tensor) -> None:
        self.exchange.sum(bucket, self.part(bucket), everywhere=False)

    def run(self, send: Callable[[Tensor], Any] | None, matmuls: bool) -> None:
        """All buckets by one form, each after its matmuls; ends when all have come."""
        works = []
        for bucket, count in zip(self.buckets, self.matmuls, strict=True):
            for _ in range(count if matmuls else 0):
                torch.mm(*self.operands, out=self.product)
            works.append(send(bucket) if send is not None else None)
        for work in works:
            if work is not None:
                work.wait()
        self.exchange.finish()

    def gather(self) -> None:
        for work in [gather_parts(whole, self.part(whole)) for whole in self.weights]:
            work.wait()

    def forms(self) -> dict[str, Callable[[], None]]:
        sends: dict[str, Callable[[Tensor], Any]] = {"all-reduce": self.all_reduce, "exchange": self.exchanged}
        if self.process.on_cuda:  # gloo reduces and scatters nothing in place
            sends["reduce-scatter"] = self.reduce_scatter
        sends["exchange, each rank its part"] = self.exchanged_in_part
        alone = {name: lambda send=send: self.run(send, False) for name, send in sends.items()}
        beside = {f"matmuls and {name}": lambda send=send: self.run(send, True) for name, send in sends.items()}
        gathered = {"all-gather of the weights": self.gather}
        return alone | gathered | {MATMULS: lambda: self.run(None, True)} | beside

    def check(self) -> None:
        """Raises ArithmeticError where an exchange finds other sums than a collective."""
        found = []
        start = self.gradient.clone()
        for send in (self.all_reduce, self.exchanged):
            self.gradient.copy_(start)
            self.run(send, False)
            found.append(self.gradient.clone())
        self.gradient.copy_(start)
        if (found[0] - found[1]).abs().max() > TOLERANCE * found[0].abs().max():
            raise ArithmeticError("an exchange finds other sums than all-reduce")

    def milliseconds(self, form: Callable[[], None]) -> float:
        if not self.process.on_cuda:
            began = time.perf_counter()
            form()
            return 1e3 * (time.perf_counter() - began)
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        form()
        last.record()
        last.synchronize()
        return first.elapsed_time(last)


def measure(rank: int, arguments: argparse.Namespace, model: ModelConfig, meeting: str) -> None:
    """One rank of all; rank 0 prints and writes."""
    process = join_ranks(rank, arguments.gpus, arguments.device, Path(meeting), TIMEOUT_S, by_copies=True)
    if process.on_cuda and (obstacle := missing_on(process)) is not None:
        raise ConfigError(f"these GPUs cannot exchange: {obstacle}")
    if process.on_cuda:
        torch.cuda.set_stream(torch.cuda.Stream())  # the default one would wait for all others
    sums = Sums(model, arguments.micro_batch_size * arguments.seq_len, process)
    sums.check()
    forms = sums.forms()
    times: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(1 + arguments.calls):  # the first one warms up
        for name, form in forms.items():
            sums.draw()
            process.barrier()
            times[name].append(sums.milliseconds(form))
    of_ranks = process.gather({name: of_form[1:] for name, of_form in times.items()})
    if process.is_main:
        report(arguments, sums, of_ranks)
    dist.destroy_process_group()


def report(arguments: argparse.Namespace, sums: Sums, of_ranks: Sequence[dict[str, list[float]]]) -> None:
    """A call takes as long as its slowest rank."""
    rows = []
    for name in of_ranks[0]:
        calls = [max(of_call) for of_call in zip(*(of_rank[name] for of_rank in of_ranks), strict=True)]
        q1, median, q3 = statistics.quantiles(calls, n=4, method="inclusive")
        rows.append({"form": name, "q1_ms": q1, "median_ms": median, "q3_ms": q3})
    size = sums.gradient.nbytes / 1e9
    card = torch.cuda.get_device_name() if sums.process.on_cuda else "CPU"
    what = f"{arguments.gpus} x {card}, {arguments.model}, {size:.2f} GB of gradients in {len(sums.buckets)} buckets"
    print(f"{what}, {arguments.calls} calls, torch {torch.__version__}\n\n{table(rows)}", end="", flush=True)
    if arguments.json:
        facts = {"card": card, "gpus": arguments.gpus, "torch": torch.__version__, "model": arguments.model}
        finite = bool(sums.gradient.isfinite().all())
        numbers = {
            "finite": finite,
            "gradient_gb": size,
            "buckets": len(sums.buckets),
            "calls": arguments.calls,
            "rows": rows,
        }
        write_json(arguments.json, facts | numbers)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Times, and what a form adds to the matmuls that it runs beside."""
    alone = next(row["median_ms"] for row in rows if row["form"] == MATMULS)
    lines = [
        [
            row["form"],
            f"{row['median_ms']:.2f} ({row['q1_ms']:.2f}–{row['q3_ms']:.2f})",
            f"{row['median_ms'] - alone:+.2f}" if row["form"].startswith("matmuls and") else "",
        ]
        for row in rows
    ]
    return markdown_table(["", "ms", "beyond the matmuls"], lines)


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"found {text}; give a number of 1 and more")
    return value


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Time sums of gradients by collectives and by exchange.")
    parser.add_argument("--gpus", type=int, help="left out: all; on a CPU 2 processes")
    parser.add_argument("--model", default="llama2-1.36b", help="preset of config/models.yaml")
    parser.add_argument("--micro-batch-size", type=positive, default=8)
    parser.add_argument("--seq-len", type=positive, default=2048)
    parser.add_argument("--calls", type=positive, default=20, help="of each form; two at least")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--json", type=Path, help="also write the rows there")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    arguments = make_parser().parse_args(argv)
    try:
        device, model = device_and_model(arguments, without_cuda="where --device cpu tries the harness alone")
        here = len(describe_cards()[0]) if device.type == "cuda" else 2
        arguments.gpus, arguments.calls = arguments.gpus or here, max(2, arguments.calls)
        if not 2 <= arguments.gpus <= here:
            raise ConfigError(f"--gpus: found {arguments.gpus}; give 2 or more, of {here} that are here")
        if arguments.json and not arguments.json.parent.is_dir():
            raise ConfigError(f"--json: {arguments.json.parent} is no folder")
        with tempfile.TemporaryDirectory() as folder:
            run_ranks(arguments, model, f"{folder}/meeting")
    except (ConfigError, ProcessRaisedException, ProcessExitedException) as error:
        print(f"error: {str(error).strip().splitlines()[-1]}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def run_ranks(arguments: argparse.Namespace, model: ModelConfig, meeting: str) -> None:
    """All ranks as processes that end with this one, however it is stopped."""
    ranks = torch.multiprocessing.spawn(measure, (arguments, model, meeting), nprocs=arguments.gpus, join=False)
    with on_stop(leave):
        try:
            while not ranks.join():
                pass
        finally:
            for process in ranks.processes:
                process.kill()


if __name__ == "__main__":
    sys.exit(main())
