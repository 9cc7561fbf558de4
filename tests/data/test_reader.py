"""Reading token files: the tokens that were written, and a message where they are not."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mfubench.config import ConfigError
from mfubench.data.meta import DatasetMeta, DatasetTokenizer, Shard, Skipped, Split, write_meta
from mfubench.data.reader import TokenDataset, check_tokenizer


def write_dataset(folder: Path, shards: list[np.ndarray], dtype: str = "uint16") -> DatasetMeta:
    folder.mkdir(parents=True, exist_ok=True)
    index = []
    for i, ids in enumerate(shards):
        ids.astype(dtype).tofile(folder / f"train-{i:05d}.bin")
        index.append(Shard(file=f"train-{i:05d}.bin", tokens=len(ids), sha256="0" * 64))
    meta = DatasetMeta(
        name="made-up",
        source={},
        config={},
        tokenizer=DatasetTokenizer(name="small", sha256="a" * 64, vocab_size=70_000, eos_id=0, encoder="tiktoken"),
        dtype=dtype,  # type: ignore[arg-type]
        splits={"train": Split(tokens=sum(map(len, shards)), documents=1, shards=tuple(index))},
        text_bytes=1,
        skipped=Skipped(),
    )
    write_meta(meta, folder)
    return meta


@given(sizes=st.lists(st.integers(0, 9), min_size=1, max_size=6), data=st.data())
@settings(max_examples=100, deadline=None)
def test_reads_across_shards(tmp_path_factory: pytest.TempPathFactory, sizes: list[int], data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("dataset")
    tokens = np.arange(sum(sizes))
    write_dataset(folder, np.split(tokens, np.cumsum(sizes)[:-1]))
    dataset = TokenDataset.open(folder, "train")
    start = data.draw(st.integers(0, len(tokens)))
    count = data.draw(st.integers(0, len(tokens) - start))
    found = dataset.read(start, count)
    assert found.dtype == np.int64
    assert found.tolist() == tokens[start : start + count].tolist()
    with pytest.raises(IndexError):
        dataset.read(start, len(tokens) - start + 1)


@pytest.mark.parametrize(("dtype", "largest"), [("uint16", 65_535), ("uint32", 69_999)])
def test_large_ids_survive(tmp_path: Path, dtype: str, largest: int) -> None:
    write_dataset(tmp_path, [np.array([0, largest])], dtype)
    dataset = TokenDataset.open(tmp_path, "train")
    assert dataset.read(0, 2).tolist() == [0, largest]
    assert (dataset.num_tokens, len(dataset), dataset.vocab_size, dataset.eos_id) == (2, 2, 70_000, 0)


def test_a_worker_gets_the_same_tokens_without_the_data_being_sent(tmp_path: Path) -> None:
    write_dataset(tmp_path, [np.arange(50_000)])
    dataset = TokenDataset.open(tmp_path, "train")
    sent = pickle.dumps(dataset)
    assert len(sent) < 5_000
    assert np.array_equal(pickle.loads(sent).read(10, 100), dataset.read(10, 100))


def change(folder: Path, **values: Any) -> None:
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(meta | values))


@pytest.mark.faults
def test_faults(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="never finished"):
        TokenDataset.open(tmp_path, "train")
    write_dataset(tmp_path, [np.arange(100), np.arange(50)])
    with pytest.raises(ConfigError, match="has no split 'val', only train"):
        TokenDataset.open(tmp_path, "val")

    shard = tmp_path / "train-00001.bin"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    with pytest.raises(ConfigError, match=r"train-00001\.bin: has 99 bytes, but meta\.json says 50 tokens of uint16"):
        TokenDataset.open(tmp_path, "train")
    shard.unlink()
    with pytest.raises(ConfigError, match=r"train-00001\.bin: is missing"):
        TokenDataset.open(tmp_path, "train")
    shard.write_bytes(whole)

    change(tmp_path, dtype="uint64")
    with pytest.raises(ConfigError, match="dtype: Input should be 'uint16' or 'uint32'"):
        TokenDataset.open(tmp_path, "train")
    change(tmp_path, dtype="uint32")  # the files hold uint16
    with pytest.raises(ConfigError, match="has 200 bytes, but"):
        TokenDataset.open(tmp_path, "train")
    (tmp_path / "meta.json").write_text('{"schema_version": 1, "na')
    with pytest.raises(ConfigError, match=r"not a dataset's meta\.json"):
        TokenDataset.open(tmp_path, "train")


def test_the_index_must_add_up(tmp_path: Path) -> None:
    write_dataset(tmp_path, [np.arange(100)])
    splits = json.loads((tmp_path / "meta.json").read_text())["splits"]
    splits["train"]["tokens"] = 99
    change(tmp_path, splits=splits)
    with pytest.raises(ConfigError, match="not the sum of its shards"):
        TokenDataset.open(tmp_path, "train")


def test_the_tokenizer_must_be_the_datasets(small_tokenizer: Path, tmp_path: Path) -> None:
    meta = write_dataset(tmp_path, [np.arange(10)])
    with pytest.raises(ConfigError, match="was prepared with small, hash aaaa"):
        check_tokenizer(meta, small_tokenizer)
    with pytest.raises(ConfigError, match=r"meta\.json: missing, so this tokenizer was never finished"):
        check_tokenizer(meta, tmp_path / "nowhere")
