"""This process among the others of a run: its rank, its device, and the few words the ranks exchange on the host."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mfubench.config import ConfigError, RunConfig


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
        if device.type == "cuda":
            dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device, timeout=timeout)
            _host_group = dist.new_group(backend="gloo", timeout=timeout)
        else:
            dist.init_process_group("gloo", timeout=timeout)
    return Process(rank, world_size, local_rank, device)


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
