"""Read token datasets: memory-mapped, cheap to open, picklable (a DataLoader worker maps the files anew)."""

from __future__ import annotations

import bisect
from pathlib import Path
from typing import Any

import numpy as np

from mfubench.config import ConfigError
from mfubench.data.meta import DatasetMeta, SplitName, TokenizerMeta, read_meta


class TokenDataset:
    """One split of a prepared dataset, seen as one long array of token ids over all its shards."""

    def __init__(self, folder: Path, split: SplitName, meta: DatasetMeta) -> None:
        self.folder = folder
        self.split: SplitName = split
        self.meta = meta
        self.num_tokens = meta.splits[split].tokens
        self.vocab_size = meta.tokenizer.vocab_size
        self.eos_id = meta.tokenizer.eos_id
        self._map()

    def _map(self) -> None:
        shards = [
            shard for shard in self.meta.splits[self.split].shards if shard.tokens
        ]  # empty files cannot be mapped
        self._arrays = [np.memmap(self.folder / shard.file, dtype=self.meta.dtype, mode="r") for shard in shards]
        self._starts = [0]  # first token of each shard, and the end of the last
        for shard in shards:
            self._starts.append(self._starts[-1] + shard.tokens)

    @classmethod
    def open(cls, folder: Path | str, split: SplitName) -> TokenDataset:
        """Map a split; raises ConfigError where the folder is not a complete dataset or a file's size is wrong."""
        folder = Path(folder)
        meta = read_meta(DatasetMeta, folder)
        if split not in meta.splits:
            raise ConfigError(f"{folder}: has no split {split!r}, only {', '.join(meta.splits)} (val_fraction is 0?)")
        index = meta.splits[split]
        if index.tokens != sum(shard.tokens for shard in index.shards):
            raise ConfigError(
                f"{folder / 'meta.json'}: splits.{split}.tokens is not the sum of its shards; prepare again"
            )
        itemsize = np.dtype(meta.dtype).itemsize
        for shard in index.shards:
            path = folder / shard.file
            size = path.stat().st_size if path.is_file() else None
            if size != shard.tokens * itemsize:
                found = "is missing" if size is None else f"has {size:,} bytes"
                raise ConfigError(
                    f"{path}: {found}, but meta.json says {shard.tokens:,} tokens of {meta.dtype} = "
                    f"{shard.tokens * itemsize:,} bytes; the file was cut or replaced: "
                    "prepare the dataset again (remove meta.json and start again)"
                )
        return cls(folder, split, meta)

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens [start, start + count) as int64 [count]; raises IndexError beyond the end."""
        if start < 0 or count < 0 or start + count > self.num_tokens:
            raise IndexError(f"tokens [{start}, {start + count}) of {self.num_tokens} in {self.folder}, {self.split}")
        out = np.empty(count, dtype=np.int64)
        shard = bisect.bisect_right(self._starts, start) - 1
        filled = 0
        while filled < count:
            offset = start + filled - self._starts[shard]
            piece = self._arrays[shard][offset : offset + count - filled]
            out[filled : filled + len(piece)] = piece
            filled += len(piece)
            shard += 1
        return out

    def __len__(self) -> int:
        return self.num_tokens

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "split": self.split, "meta": self.meta}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


def check_tokenizer(meta: DatasetMeta, tokenizer_dir: Path | str) -> TokenizerMeta:
    """The tokenizer's meta; raises ConfigError where it is not the one that the dataset was prepared with."""
    tokenizer = read_meta(TokenizerMeta, Path(tokenizer_dir))
    if tokenizer.sha256 != meta.tokenizer.sha256:
        raise ConfigError(
            f"{tokenizer_dir}: tokenizer {tokenizer.name} has hash {tokenizer.sha256[:12]}…, but dataset {meta.name} "
            f"was prepared with {meta.tokenizer.name}, hash {meta.tokenizer.sha256[:12]}…: prepare the dataset again"
        )
    return tokenizer
