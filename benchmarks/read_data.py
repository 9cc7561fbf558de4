"""How fast batches can be read: tokens/s of the loader alone, and what a GPU would need.

    python benchmarks/read_data.py [--seq-len 2048] [--micro-batch-size 8] [--seconds 5] [--json]

Reads a made-up dataset of 200 MB in random order, as training does, from this process (memmap) and through a DataLoader
with 1 and 4 workers, and makes sure that all of them give the same batches.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from mfubench.config import ModelConfig, RunConfig
from mfubench.data.meta import DatasetMeta, DatasetTokenizer, Shard, Skipped, Split, write_meta
from mfubench.data.reader import TokenDataset
from mfubench.train.loader import Batches
from mfubench.train.process import Process

LOADERS: tuple[dict[str, Any], ...] = (
    {"kind": "memmap"},
    {"kind": "dataloader", "num_workers": 1},
    {"kind": "dataloader", "num_workers": 4},
)


def write_random_dataset(folder: Path, tokens: int, vocab_size: int) -> None:
    """Two shards of random ids, as prepare_dataset lays them out."""
    generator = np.random.default_rng(0)
    shards = []
    for i in range(2):
        ids = generator.integers(0, vocab_size, tokens // 2, dtype=np.uint32)
        ids.tofile(folder / f"train-{i:05d}.bin")
        shards.append(Shard(file=f"train-{i:05d}.bin", tokens=len(ids), sha256="0" * 64))
    meta = DatasetMeta(
        name="random",
        source={},
        config={},
        tokenizer=DatasetTokenizer(name="none", sha256="0" * 64, vocab_size=vocab_size, eos_id=0, encoder="tokenizers"),
        dtype="uint32",
        splits={"train": Split(tokens=sum(shard.tokens for shard in shards), documents=1, shards=tuple(shards))},
        text_bytes=0,
        skipped=Skipped(),
    )
    write_meta(meta, folder)


def run_config(loader: dict[str, Any], seq_len: int, micro_batch_size: int) -> RunConfig:
    presets = yaml.safe_load((Path(__file__).parents[1] / "config" / "models.yaml").read_text(encoding="utf-8"))
    model = ModelConfig(name="llama2-1.36b", **presets["llama2-1.36b"])
    values = {
        "name": "read/loader",
        "model": model.model_dump(mode="json"),
        "dataset": "random",
        "seq_len": seq_len,
        "micro_batch_size": micro_batch_size,
        "max_iters": 1,
        "loader": loader,
    }
    return RunConfig.model_validate_json(json.dumps(values))


def read_throughput(dataset: TokenDataset, config: RunConfig, seconds: float) -> tuple[float, torch.Tensor]:
    """Tokens/s after a first batch, and that first batch [A, B, T]."""
    process = Process(rank=0, world_size=1, local_rank=0, device=torch.device("cpu"))
    batches = Batches(dataset, config, process, first_position=0, steps=10**6)
    first, _, _ = batches.next()
    tokens, t0 = 0, time.perf_counter()
    while time.perf_counter() - t0 < seconds:
        inputs, _, _ = batches.next()
        tokens += inputs.numel()
    return tokens / (time.perf_counter() - t0), first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--micro-batch-size", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=5.0, help="for each loader")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    arguments = parser.parse_args()

    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        write_random_dataset(Path(temporary), 50_000_000, 32_000)
        dataset = TokenDataset.open(temporary, "train")
        expected = None
        for loader in LOADERS:
            config = run_config(loader, arguments.seq_len, arguments.micro_batch_size)
            tokens_per_s, first = read_throughput(dataset, config, arguments.seconds)
            expected = first if expected is None else expected
            rows.append({**loader, "tokens_per_s": tokens_per_s, "same_batches": torch.equal(first, expected)})
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return
    for row in rows:
        workers = f"{row['num_workers']} workers" if "num_workers" in row else ""
        rate = f"{row['tokens_per_s'] / 1e6:7.1f}M tokens/s"
        print(f"{row['kind']:10} {workers:9} {rate}  same batches: {row['same_batches']}")


if __name__ == "__main__":
    main()
