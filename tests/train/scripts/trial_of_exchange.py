"""One rank of `test_a_rank_that_fails_alone_in_the_trial_of_an_exchange_says_so`: RANK RANKS STORE FAILING.

FAILING: ranks whose exchange breaks down, such as 0,1. Prints what the rank finds, or raises.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed

from mfubench.train import exchange
from mfubench.train.process import Process


def broken(self, whole, own, everywhere):
    raise RuntimeError("planted: the copy engines are gone")


def main(rank: int, ranks: int, store: str, failing: list[int]) -> None:
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    process = Process(rank=rank, world_size=ranks, local_rank=rank, device=torch.device("cpu"))
    exchange.TRIAL_S = 2.0
    exchange.missing_here = exchange.no_room = lambda process: None  # what a CPU lacks
    if rank in failing:
        exchange.Exchange.sum = broken
    print(f"found: {exchange.missing_on(process)}", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], [int(rank) for rank in sys.argv[4].split(",") if rank])
