"""GPT-2, LLaMA-2, LLaMA-3 and Qwen3 as they really are: golden vectors, Hugging Face's ids, facts about them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from data.texts import make_documents

from mfubench.config import ConfigError
from mfubench.data.config import FilesTokenizer, FolderTokenizer, families
from mfubench.data.encoder import PROBE, load_encoder
from mfubench.data.meta import TokenizerMeta, read_meta
from mfubench.data.tokenizer import get_tokenizer

pytestmark = pytest.mark.registry
VECTORS = Path(__file__).parent / "vectors"
NAMES = ("gpt2", "llama2", "llama3", "qwen3")


def golden(name: str) -> list[tuple[str, list[int]]]:
    texts = (VECTORS / "texts.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    ids = (VECTORS / f"{name}.out").read_text().split("\n")
    assert len(texts) == len(ids) == 47
    return [(text, [int(i) for i in line.split()]) for text, line in zip(texts, ids, strict=True)]


@pytest.mark.parametrize("name", NAMES)
def test_golden_vectors(real_tokenizers: dict[str, Path], name: str) -> None:
    encoder = load_encoder(real_tokenizers[name])
    vectors = golden(name)
    found = encoder.encode_batch([text for text, _ in vectors])
    wrong = [text for (text, ids), array in zip(vectors, found, strict=True) if array.tolist() != ids]
    assert wrong == []


@pytest.mark.parametrize("name", NAMES)
def test_ids_are_those_of_transformers(real_tokenizers: dict[str, Path], name: str) -> None:
    from transformers import AutoTokenizer

    folder = real_tokenizers[name]
    reference = AutoTokenizer.from_pretrained(str(folder), split_special_tokens=True)
    assert type(reference).__name__ in ("PreTrainedTokenizerFast", "TokenizersBackend")
    texts = [
        *make_documents(300, seed=1),
        PROBE,
        "a" * 3000,
        " " * 3000,
        "ab" * 2000 + "\n" * 300,
        "é" * 1000,
        "<s> </s>",
    ]
    expected = reference(texts, add_special_tokens=False)["input_ids"]
    for text, ids, array in zip(texts, expected, load_encoder(folder).encode_batch(texts), strict=True):
        assert array.tolist() == ids, text[:50]


@pytest.mark.parametrize("name", NAMES)
def test_facts(real_tokenizers: dict[str, Path], name: str) -> None:
    meta = read_meta(TokenizerMeta, real_tokenizers[name])
    facts = families()[name]
    assert meta.vocab_size == facts["vocab_size"] == meta.largest_id + 1
    assert meta.vocab_size <= facts["embedding_rows"]
    assert meta.eos_id <= meta.largest_id
    assert meta.vocabulary_sha256 == facts["vocabulary_sha256"]
    assert meta.encoder == ("word-cache" if name == "llama2" else "tiktoken")


def test_embedding_rows_are_those_of_the_presets() -> None:
    import yaml

    presets = yaml.safe_load((Path(__file__).parents[2] / "config" / "models.yaml").read_text())
    rows = {preset["vocab_size"] for name, preset in presets.items() if name.startswith("qwen3")}
    assert families()["qwen3"]["embedding_rows"] in rows


def test_decode_gives_the_text_back(real_tokenizers: dict[str, Path]) -> None:
    for name in ("gpt2", "llama3"):
        encoder = load_encoder(real_tokenizers[name])
        assert encoder.decode(encoder.encode_batch([PROBE])[0]) == PROBE


def test_another_models_vocabulary_is_found(real_tokenizers: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="vocab_size 128256, but 151669 is expected"):
        folder = FolderTokenizer(kind="folder", family="qwen3", path=str(real_tokenizers["llama3"]))
        get_tokenizer(folder, tmp_path / "wrong")
    assert not (tmp_path / "wrong" / "meta.json").exists()


def test_same_size_but_other_tokens_are_found(real_tokenizers: dict[str, Path], tmp_path: Path) -> None:
    spec = json.loads((real_tokenizers["llama2"] / "tokenizer.json").read_text())
    first, second = "▁Hello", "▁world"
    vocabulary = spec["model"]["vocab"]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(ConfigError, match="another model's tokenizer"):
        get_tokenizer(FolderTokenizer(kind="folder", family="llama2", path=str(tmp_path)), tmp_path / "out")


def test_same_vocabulary_but_other_splits_are_found(real_tokenizers: dict[str, Path], tmp_path: Path) -> None:
    spec = json.loads((real_tokenizers["qwen3"] / "tokenizer.json").read_text())
    spec["normalizer"] = None  # NFC left out, as the bare rank file does
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(ConfigError, match="splits or merges text differently"):
        get_tokenizer(FolderTokenizer(kind="folder", family="qwen3", path=str(tmp_path)), tmp_path / "out")


def test_cut_rank_file_is_found(real_tokenizers: dict[str, Path], tmp_path: Path) -> None:
    import real_tokenizers as fetcher

    whole = (fetcher.raw_files() / "llama3.tiktoken").read_bytes()
    (tmp_path / "tokenizer.model").write_bytes(whole[: len(whole) // 2])
    config = FilesTokenizer(kind="files", family="llama3", path=str(tmp_path / "tokenizer.model"))
    with pytest.raises(ConfigError, match=r"sha256 is .* cut while downloading"):
        get_tokenizer(config, tmp_path / "out")


def test_no_document_holds_the_end_of_document_id(real_tokenizers: dict[str, Path]) -> None:
    for name in NAMES:
        encoder = load_encoder(real_tokenizers[name])
        ids = encoder.encode_batch(["<|endoftext|></s><|end_of_text|><s><|im_end|>"])[0]
        assert encoder.eos_id not in ids
        assert int(np.max(ids)) < encoder.vocab_size
