"""Bus bandwidth of all-reduce and reduce-scatter between processes of this node: NCCL, or gloo on a CPU."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from mfubench.ceilings.schema import CollectiveRate

MIB = 2**20
SIZES = {"cuda": (MIB, 16 * MIB, 128 * MIB, 512 * MIB), "cpu": (MIB // 4, 4 * MIB)}
TIMEOUT_S = 120.0
ROUNDS = 3  # timed; one more warms up

Operation = Literal["all_reduce", "reduce_scatter"]


def measure_collectives(
    world_sizes: list[int], device_type: Literal["cuda", "cpu"], seconds: float
) -> tuple[list[CollectiveRate], dict[str, str]]:
    """Rates for each world size above 1, and for those that could not be measured the reason."""
    rates: list[CollectiveRate] = []
    skipped: dict[str, str] = {}
    for world_size in sorted({size for size in world_sizes if size > 1}):
        if device_type == "cuda" and world_size > torch.cuda.device_count():
            skipped[str(world_size)] = f"{torch.cuda.device_count()} cards are visible"
            continue
        found, problem = run_ranks(world_size, device_type, seconds)
        rates += found
        if problem:
            skipped[str(world_size)] = problem
    return rates, skipped


def run_ranks(
    world_size: int, device_type: Literal["cuda", "cpu"], seconds: float
) -> tuple[list[CollectiveRate], str | None]:
    """Start the ranks, wait for them, and read what rank 0 wrote."""
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        ranks = [
            context.Process(target=run_rank, args=(rank, world_size, device_type, seconds, folder))
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        deadline_s = time.monotonic() + TIMEOUT_S
        for process in ranks:
            process.join(max(0.0, deadline_s - time.monotonic()))
        alive = [process for process in ranks if process.is_alive()]
        for process in alive:
            process.kill()
            process.join()
        result = Path(folder) / "rates.json"
        if alive:
            return [], f"not finished after {TIMEOUT_S:.0f} s"
        if not result.exists():
            return [], f"the ranks ended with exit codes {[process.exitcode for process in ranks]}"
        return [CollectiveRate(**rate) for rate in json.loads(result.read_text(encoding="utf-8"))], None


def run_rank(rank: int, world_size: int, device_type: Literal["cuda", "cpu"], seconds: float, folder: str) -> None:
    """One process: join the others through a file, time each operation and size; rank 0 writes."""
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    backend: Literal["nccl", "gloo"] = "nccl" if device_type == "cuda" else "gloo"
    if device_type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=TIMEOUT_S),
        device_id=device if device_type == "cuda" else None,
    )
    warnings.filterwarnings(
        "ignore", category=FutureWarning
    )  # torch 2.13 renames reduce_scatter_tensor, 2.11 has no other
    # repeated sums in place would grow without bound, and numbers change speed; gloo has no average
    operator = dist.ReduceOp.AVG if backend == "nccl" else dist.ReduceOp.MAX
    rates: list[dict[str, Any]] = []
    for size in SIZES[device_type]:
        elements = size // 2 // world_size * world_size
        dtype = torch.bfloat16 if device_type == "cuda" else torch.float16
        buffer = torch.randn(elements, device=device).to(dtype)
        shard = torch.empty(elements // world_size, device=device, dtype=dtype)
        operations: dict[Operation, Callable[[], object]] = {
            "all_reduce": partial(dist.all_reduce, buffer, op=operator),
            "reduce_scatter": partial(dist.reduce_scatter_tensor, shard, buffer, op=operator),
        }
        for operation, call in operations.items():
            time_s = time_of_call(call, device, seconds)
            share = (world_size - 1) / world_size  # of the buffer that crosses the link, once or twice
            rates.append(
                CollectiveRate(
                    operation=operation,
                    backend=backend,
                    world_size=world_size,
                    bytes=elements * 2,
                    time_s=time_s,
                    bus_gb_s=elements * 2 / time_s / 1e9 * share * (2 if operation == "all_reduce" else 1),
                ).model_dump()
            )
    if rank == 0:
        (Path(folder) / "rates.json").write_text(json.dumps(rates), encoding="utf-8")
    dist.destroy_process_group()


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
