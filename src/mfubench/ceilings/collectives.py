"""Bus bandwidth of all-reduce, reduce-scatter and exchange between processes of this node: NCCL, or gloo on a CPU."""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor

from mfubench.ceilings.schema import CollectiveRate, ElementType, Operation
from mfubench.config import CommunicationConfig
from mfubench.run_log import write_json
from mfubench.train.exchange import Exchange, missing_on, symmetric_zeros, take_no_thread_blocks
from mfubench.train.failures import failure_of, how_ended, read_failures, write_failure
from mfubench.train.process import Process

MIB = 2**20
SIZES = {"cuda": (MIB, 16 * MIB, 128 * MIB, 512 * MIB), "cpu": (MIB // 4, 4 * MIB)}
OPERATIONS = 2  # of one size, at most
ROUNDS = 3  # timed; one more warms up
TIMEOUT_S = 120.0  # for all that is not measured: starting, meeting, filling buffers
ENDING_S = 10.0  # for the ranks to end by themselves once their result is there
RESULT = "rates.json"
ELEMENT_TYPES: dict[torch.dtype, ElementType] = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
}

Device = Literal["cuda", "cpu"]
Measure = Callable[[Process, float], list[CollectiveRate] | str]


def measure_collectives(
    world_sizes: list[int], device_type: Device, seconds: float
) -> tuple[list[CollectiveRate], dict[str, str]]:
    """Rates for each world size above 1, and for those that could not be measured the reason.

    Processes of their own measure the exchange: what keeps NCCL from taking thread blocks holds for all a process does.
    """
    rates: list[CollectiveRate] = []
    skipped: dict[str, str] = {}
    for world_size in sorted({size for size in world_sizes if size > 1}):
        if device_type == "cuda" and world_size > torch.cuda.device_count():
            skipped[f"collectives over {world_size}"] = f"{torch.cuda.device_count()} cards are visible"
            continue
        for what, measure in (("collectives", measure_by_kernels), ("exchange", measure_exchange)):
            if what == "exchange" and device_type == "cpu":
                skipped[f"exchange over {world_size}"] = "it is made by the copy engines of GPUs"
                continue
            found, problem = run_ranks(measure, world_size, device_type, seconds)
            rates += found
            if problem:
                skipped[f"{what} over {world_size}"] = problem
    return rates, skipped


def run_ranks(
    measure: Measure, world_size: int, device_type: Device, seconds: float
) -> tuple[list[CollectiveRate], str | None]:
    """Start the ranks and read what rank 0 wrote: rates, or in words what there are none for.

    A result that is whole counts, however the ranks end.
    """
    with tempfile.TemporaryDirectory() as name:
        folder, limit_s = Path(name), time_limit_s(device_type, seconds)
        context = multiprocessing.get_context("spawn")
        ranks = [
            context.Process(target=run_rank, args=(measure, rank, world_size, device_type, seconds, folder))
            for rank in range(world_size)
        ]
        try:
            for process in ranks:
                process.start()
            failed = wait_for(ranks, folder / RESULT, limit_s)
        finally:
            for process in ranks:
                if process.is_alive():
                    process.kill()
                    process.join()
        if (folder / RESULT).exists():
            found = json.loads((folder / RESULT).read_text(encoding="utf-8"))
            return ([], found) if isinstance(found, str) else ([CollectiveRate(**rate) for rate in found], None)
        return [], why(*failed, folder) if failed else f"not finished after {limit_s:.0f} s"


def time_limit_s(device_type: Device, seconds: float) -> float:
    """For the ranks, from their start: it grows with the time that they are to measure for."""
    return TIMEOUT_S + len(SIZES[device_type]) * OPERATIONS * (ROUNDS + 1) / ROUNDS * seconds


def wait_for(ranks: Sequence[BaseProcess], result: Path, limit_s: float) -> tuple[int, int] | None:
    """Wait until all ranks have ended, or a while after their result; or the first that fails, and its exit code."""
    ends_s = time.monotonic() + limit_s
    told = False
    running = dict(enumerate(ranks))
    while running and time.monotonic() < ends_s:
        wait([process.sentinel for process in running.values()], timeout=0.1)
        for rank, process in list(running.items()):
            code = process.exitcode
            if code:
                return rank, code
            if code is not None:
                del running[rank]
        if not told and result.exists():
            told, ends_s = True, time.monotonic() + ENDING_S
    return None


def why(rank: int, code: int, folder: Path) -> str:
    """Why there is no result: what the first rank to fail has recorded, or how one ended that could record nothing."""
    failures = read_failures(folder)
    if code < 0 or not failures:
        return f"rank {rank} {how_ended(code)}"
    return f"rank {failures[0].rank}: {failures[0].reason}"


def run_rank(measure: Measure, rank: int, world_size: int, device_type: Device, seconds: float, folder: Path) -> None:
    """One process: time each operation and size; rank 0 writes. A rank that fails leaves a record."""
    if device_type == "cpu":
        torch.set_num_threads(1)
    try:
        limit_s, by_copies = time_limit_s(device_type, seconds), measure is measure_exchange
        process = join_ranks(rank, world_size, device_type, folder / "store", limit_s, by_copies=by_copies)
        found = measure(process, seconds)
        if rank == 0:
            write_json(folder / RESULT, found if isinstance(found, str) else [rate.model_dump() for rate in found])
        dist.destroy_process_group()
    except BaseException as error:
        write_failure(folder, failure_of(rank, error, folder))
        sys.excepthook(type(error), error, error.__traceback__)
        sys.stderr.flush()
        os._exit(1)  # leaving the process group in order would wait for ranks that are stuck


def join_ranks(
    rank: int, world_size: int, device_type: Device, store: Path, limit_s: float, *, by_copies: bool
) -> Process:
    """Take a rank's device and meet the others through a file. by_copies: to exchange, which needs its own NCCL."""
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    if device_type == "cuda":
        torch.cuda.set_device(device)
        if by_copies:
            take_no_thread_blocks()
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=limit_s),
        device_id=device if device_type == "cuda" else None,
    )
    warnings.filterwarnings(  # torch 2.13 renames them, 2.11 has no others
        "ignore", message=".*(all_gather_into|reduce_scatter)_tensor.*", category=FutureWarning
    )
    return Process(rank, world_size, rank, device)


def measure_by_kernels(process: Process, seconds: float) -> list[CollectiveRate]:
    """All-reduce and reduce-scatter as NCCL or gloo make them."""
    device, ranks = process.device, process.world_size
    # repeated sums in place would grow without bound, and numbers change speed; gloo has no average
    operator = dist.ReduceOp.AVG if process.on_cuda else dist.ReduceOp.MAX
    dtype = torch.bfloat16 if process.on_cuda else torch.float16
    rates = []
    for size in SIZES[process.device.type]:
        buffer = torch.randn(size // 2 // ranks * ranks, device=device).to(dtype)
        shard = torch.empty(len(buffer) // ranks, device=device, dtype=dtype)
        operations: dict[Operation, Callable[[], object]] = {
            "all_reduce": partial(dist.all_reduce, buffer, op=operator),
            "reduce_scatter": partial(dist.reduce_scatter_tensor, shard, buffer, op=operator),
        }
        for operation, call in operations.items():
            rates.append(rate_of(operation, buffer, process, time_of_call(call, device, seconds)))
    return rates


def measure_exchange(process: Process, seconds: float) -> list[CollectiveRate] | str:
    """Sums by copy engines as runs make them, in buckets of the usual size; in words why these cards make none."""
    device, ranks = process.device, process.world_size
    if process.on_cuda and (obstacle := missing_on(process)) is not None:
        return obstacle
    if process.on_cuda:
        torch.cuda.set_stream(torch.cuda.Stream(device))  # the default one would wait for all others
    bucket = int(CommunicationConfig().bucket_mb * 1e6) // 4 // ranks * ranks
    exchange = Exchange(bucket, ranks, device)
    rates = []
    for size in SIZES[process.device.type]:
        buffer = symmetric_zeros(size // 4 // ranks * ranks, torch.float32, device)  # sums of others would grow

        def call(buffer: Tensor = buffer) -> None:
            for whole in buffer.split(bucket):
                exchange.sum(whole, whole.chunk(ranks)[process.rank], everywhere=True)
            exchange.finish()

        rates.append(rate_of("exchange", buffer, process, time_of_call(call, device, seconds)))
    return rates


def rate_of(operation: Operation, buffer: Tensor, process: Process, time_s: float) -> CollectiveRate:
    """Of what crosses a rank's link: its buffer but for its own share, once, or for sums on all ranks twice."""
    ranks = process.world_size
    crossings = 1 if operation == "reduce_scatter" else 2
    return CollectiveRate(
        operation=operation,
        backend="nccl" if process.on_cuda else "gloo",
        world_size=ranks,
        dtype=ELEMENT_TYPES[buffer.dtype],
        bytes=buffer.nbytes,
        time_s=time_s,
        bus_gb_s=buffer.nbytes / time_s / 1e9 * (ranks - 1) / ranks * crossings,
    )


def time_of_call(call: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Median seconds of one call, of the slowest rank; all ranks make the same number of calls."""
    once_s = agreed(timed(call, 2, device), device)
    calls = max(1, min(1000, int(seconds / ROUNDS / once_s)))
    times_s = [timed(call, calls, device) for _ in range(1 + ROUNDS)]
    return agreed(statistics.median(times_s[1:]), device)


def timed(call: Callable[[], object], calls: int, device: torch.device) -> float:
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started_s = time.perf_counter()
    for _ in range(calls):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - started_s) / calls


def agreed(seconds: float, device: torch.device) -> float:
    slowest = torch.tensor([seconds], device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()
