"""One rank of `test_weights_are_the_rounded_masters`: RANK RANKS STORE."""

from __future__ import annotations

import sys

import torch
import torch.distributed

from mfubench.config import RunConfig, parse
from mfubench.model import build_model
from mfubench.presets import load_model
from mfubench.train.fsdp import FsdpEngine, sharded_modules
from mfubench.train.process import Process


def main(rank: int, ranks: int, store: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    process = Process(rank=rank, world_size=ranks, local_rank=rank, device=torch.device("cpu"))
    model = build_model(small_run(ranks), device="meta")
    engine = FsdpEngine(model, dtype=torch.bfloat16, process=process, gradient_accumulation_steps=1, keeps_weights=True)
    for piece in engine.pieces:
        piece.master.mul_(1.7).add_(0.001)
    engine.publish()
    masters = {name: parameter.full_tensor() for name, parameter in engine.parameters.items()}
    model(torch.zeros(1, 16, dtype=torch.int64), torch.zeros(1, 16, dtype=torch.int64))  # fully_shard's own setup
    for module in sharded_modules(engine.root):
        module.unshard()
    weights = dict(model.named_parameters())
    assert weights.keys() == masters.keys()
    for name, weight in weights.items():
        assert weight.dtype == torch.bfloat16 and torch.equal(weight, masters[name].bfloat16()), name
    torch.distributed.destroy_process_group()


def small_run(ranks: int) -> RunConfig:
    """Of rows that two ranks do not share evenly, and three neither."""
    model = load_model("llama2-tiny").model_dump(mode="json") | {"vocab_size": 257, "num_hidden_layers": 2}
    values = {"name": "gathered/weights", "model": model, "dataset": "none", "seq_len": 16, "micro_batch_size": 1}
    values |= {"gradient_accumulation_steps": 1, "max_iters": 1, "world_size": ranks, "parallelism": "fsdp"}
    return parse(RunConfig, values, "gathered weights")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
