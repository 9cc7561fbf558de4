"""This process among the others of a run: its rank, its device, and the few words the ranks exchange on the host."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mfubench.config import ConfigError, RunConfig
from mfubench.decisions import may_exchange
from mfubench.run_log import write_text_atomically
from mfubench.train.exchange import not_by_itself, take_no_thread_blocks


@dataclass(frozen=True)
class Process:
    """One rank. A run of one process has no process group, and every exchange below is then its own answer."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"

    def barrier(self) -> None:
        """Wait for all ranks, on the host (gloo): the devices are not synchronised."""
        self.maximum([0])

    def maximum(self, values: list[int]) -> list[int]:
        """Element-wise largest of what the ranks hand in; the same list on all of them."""
        if self.world_size == 1:
            return values
        exchanged = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(exchanged, op=dist.ReduceOp.MAX)
        return exchanged.tolist()

    def gather(self, value: Any) -> list[Any]:
        """What every rank hands in, in rank order, on all ranks."""
        if self.world_size == 1:
            return [value]
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, value, group=host_group())
        return gathered

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over all ranks, in place, on the device it is on."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor


_host_group: dist.ProcessGroup | None = None


def host_group() -> dist.ProcessGroup | None:
    """The gloo group that pickled objects travel through: NCCL would copy them to the device and synchronise it."""
    return _host_group


def start_process(config: RunConfig, timeout_s: float) -> Process:
    """Take the place among the ranks that the environment names (as torchrun sets it), and join them.

    Raises ConfigError where the device does not exist.
    """
    global _host_group
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if world_size != config.world_size:
        raise ConfigError(
            f"world_size is {config.world_size}, but {world_size} processes were started: start the run with "
            "workflow/scripts/train_model.py, which starts as many as the configuration says"
        )
    device = choose_device(config, local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world_size > 1:
        timeout = timedelta(seconds=timeout_s)
        store = meet(rank, timeout)
        places: dict[str, Any] = {}
        if store is not None:
            places = {"rank": rank, "world_size": world_size, "store": store}
        if device.type == "cuda":
            asked = config.communication.reduction == "exchange"
            if asked or (may_exchange(config) and not_by_itself(config, device) is None):
                take_no_thread_blocks()
            dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device, timeout=timeout, **places)
            _host_group = dist.new_group(backend="gloo", timeout=timeout)
        else:
            dist.init_process_group("gloo", timeout=timeout, **places)
    return Process(rank, world_size, local_rank, device)


def meet(rank: int, timeout: timedelta) -> dist.Store | None:
    """The store through which the ranks find each other: rank 0 takes a free port and writes it to a file.

    (A port chosen beforehand may be gone when it is needed.) None under torchrun, which brings an address of its own.
    """
    if "MASTER_ADDR" in os.environ or "MFUBENCH_RENDEZVOUS" not in os.environ:
        return None
    file = Path(os.environ["MFUBENCH_RENDEZVOUS"])
    if rank == 0:
        several_nodes = os.environ["LOCAL_WORLD_SIZE"] != os.environ["WORLD_SIZE"]
        host = socket.getfqdn() if several_nodes else "127.0.0.1"
        store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        write_text_atomically(file, f"{host} {store.port}")
        return store
    deadline = time.monotonic() + timeout.total_seconds()
    while not file.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank 0 did not write its address to {file}")
        time.sleep(0.05)
    host, port = file.read_text(encoding="utf-8").split()
    return dist.TCPStore(host, int(port), is_master=False, timeout=timeout)


def choose_device(config: RunConfig, local_rank: int) -> torch.device:
    """The device of this rank: card `local_rank` of the visible ones, or the CPU."""
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("device: cuda was asked for, but torch sees no CUDA device here; use device: auto or cpu")
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"world_size {config.world_size} over {config.nnodes} node(s) needs {config.world_size // config.nnodes} "
            f"CUDA devices a node, but {torch.cuda.device_count()} are visible (CUDA_VISIBLE_DEVICES="
            f"{os.environ.get('CUDA_VISIBLE_DEVICES', 'unset')})"
        )
    return torch.device("cuda", local_rank)


def end_process() -> None:
    """Leave the process group, where there is one."""
    global _host_group
    _host_group = None
    if dist.is_initialized():
        dist.destroy_process_group()
