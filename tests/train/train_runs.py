"""A tiny dataset and a tiny run, small enough for many real processes on two cores."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mfubench.config import ModelConfig, RunConfig

VOCABULARY = 97


def write_dataset(folder: Path, train_tokens: int = 20_000, val_tokens: int = 2_000) -> Path:
    """A prepared dataset of tokens that are worth learning: noisy arithmetic progressions."""
    generator = np.random.default_rng(0)
    splits = {}
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", train_tokens), ("val", val_tokens)):
        tokens = (np.arange(count) * 3 + generator.integers(0, 5, count)) % VOCABULARY
        tokens.astype(np.uint16).tofile(folder / f"{split}.bin")
        shard = {"file": f"{split}.bin", "tokens": count, "sha256": "0" * 64}
        splits[split] = {"tokens": count, "documents": 1, "shards": [shard]}
    tokenizer = {"name": "none", "sha256": "0" * 64, "vocab_size": VOCABULARY, "eos_id": 0, "encoder": "tokenizers"}
    meta = {
        "schema_version": 1,
        "name": "tiny",
        "source": {"name": "arithmetic progressions"},
        "config": {},
        "tokenizer": tokenizer,
        "dtype": "uint16",
        "splits": splits,
        "text_bytes": 0,
        "skipped": {},
    }
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


def tiny_config(**overrides) -> RunConfig:
    """Float32, global batch 8 by default, warm-up short enough that weights really move."""
    model = {
        "name": "tiny",
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    } | overrides.pop("model", {})
    values = {
        "name": "test/tiny",
        "model": ModelConfig(**model),
        "dataset": "tiny",
        "seq_len": 16,
        "micro_batch_size": 8,
        "max_iters": 20,
        "dtype": "float32",
        "device": "cpu",
        "parallelism": "ddp",
        "optimizer": {"learning_rate": 0.01, "min_learning_rate": 0.001, "warmup_iters": 4, "lr_decay_iters": 20},
        "measurement": {"profile": False, "warmup_steps": 1},
    }
    return RunConfig.model_validate(values | overrides)


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "tiny")
