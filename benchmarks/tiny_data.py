"""A made-up dataset in the form that `prepare` writes, small enough for a test."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mfubench.data.meta import DatasetMeta, DatasetTokenizer, Shard, Skipped, Split, SplitName, write_meta

VOCABULARY = 500


def write_tiny_dataset(folder: Path, train_tokens: int = 40_000, val_tokens: int = 4_000) -> Path:
    """train.bin and val.bin of noisy arithmetic progressions, 16-bit."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    splits: dict[SplitName, Split] = {}
    parts: tuple[tuple[SplitName, int], ...] = (("train", train_tokens), ("val", val_tokens))
    for split, count in parts:
        tokens = (np.arange(count) * 3 + generator.integers(0, 5, count)) % VOCABULARY
        tokens.astype(np.uint16).tofile(folder / f"{split}.bin")
        shard = Shard(file=f"{split}.bin", tokens=count, sha256="0" * 64)
        splits[split] = Split(tokens=count, documents=1, shards=(shard,))
    tokenizer = DatasetTokenizer(name="none", sha256="0" * 64, vocab_size=VOCABULARY, eos_id=0, encoder="tokenizers")
    write_meta(
        DatasetMeta(
            name="progressions",
            source={"name": "arithmetic progressions"},
            config={},
            tokenizer=tokenizer,
            dtype="uint16",
            splits=splits,
            text_bytes=0,
            skipped=Skipped(),
        ),
        folder,
    )
    return folder
