"""Getting tokenizers: training one, taking one from a folder, and what is wrong with others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from data.texts import make_documents, write_jsonl
from tokenizers import Tokenizer

from mfubench.config import ConfigError
from mfubench.data.config import BpeTokenizer, FilesTokenizer, FolderTokenizer, LocalCorpus
from mfubench.data.encoder import load_encoder
from mfubench.data.meta import TokenizerMeta, read_meta
from mfubench.data.tokenizer import get_tokenizer


def train(folder: Path, out: Path, vocab_size: int = 300, documents: int = 300) -> TokenizerMeta:
    text = write_jsonl(folder / "text.jsonl", make_documents(documents))
    corpus = LocalCorpus(source="local", paths=(str(text),))
    return get_tokenizer(BpeTokenizer(kind="bpe", vocab_size=vocab_size, corpus=corpus), out)


def test_training_is_deterministic_and_described(tmp_path: Path) -> None:
    first, second = train(tmp_path, tmp_path / "one"), train(tmp_path, tmp_path / "two")
    assert first.sha256 == second.sha256
    assert (first.vocab_size, first.largest_id, first.encoder, first.name) == (300, 299, "tiktoken", "one")
    assert read_meta(TokenizerMeta, tmp_path / "one") == first


def test_the_embedded_text_trains_a_tokenizer_of_4096(tmp_path: Path) -> None:
    meta = get_tokenizer(BpeTokenizer(kind="bpe", vocab_size=4096), tmp_path / "small")
    assert meta.vocab_size == 4096
    ids = load_encoder(tmp_path / "small").encode_batch(["def main(self):\n        return None\n"])[0]
    assert len(ids) < 14


def test_transformers_loads_the_folder(small_tokenizer: Path) -> None:
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(str(small_tokenizer))
    text = "Größe of the\n\n  naïve"
    assert (
        loaded(text, add_special_tokens=False)["input_ids"]
        == load_encoder(small_tokenizer).encode_batch([text])[0].tolist()
    )
    assert loaded.eos_token_id == read_meta(TokenizerMeta, small_tokenizer).eos_id


def test_too_little_text_to_train_on(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"enough for \d+ tokens, not for vocab_size 5000"):
        train(tmp_path, tmp_path / "out", vocab_size=5000, documents=3)


def test_a_folder_keeps_its_bytes(small_tokenizer: Path, tmp_path: Path) -> None:
    meta = get_tokenizer(FolderTokenizer(kind="folder", path=str(small_tokenizer)), tmp_path / "copy")
    original = read_meta(TokenizerMeta, small_tokenizer)
    assert (meta.sha256, meta.eos_id) == (original.sha256, original.eos_id)
    assert meta.source == str(small_tokenizer)


def test_vocab_and_merges_make_the_same_tokenizer(small_tokenizer: Path, tmp_path: Path) -> None:
    model = json.loads((small_tokenizer / "tokenizer.json").read_text())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = "".join(" ".join(merge) + "\n" for merge in model["merges"])
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + merges)
    config = FolderTokenizer(kind="folder", path=str(tmp_path), eos_token="<|endoftext|>")
    meta = get_tokenizer(config, tmp_path / "out")
    assert meta.vocabulary_sha256 == read_meta(TokenizerMeta, small_tokenizer).vocabulary_sha256
    documents = make_documents(20)
    ours, original = load_encoder(tmp_path / "out"), load_encoder(small_tokenizer)
    for a, b in zip(ours.encode_batch(documents), original.encode_batch(documents), strict=True):
        assert a.tolist() == b.tolist()


def test_a_llama_like_tokenizer_gets_the_word_cache(llama_like: Tokenizer, tmp_path: Path) -> None:
    llama_like.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    meta = get_tokenizer(FolderTokenizer(kind="folder", path=str(tmp_path)), tmp_path / "out")
    assert (meta.encoder, meta.eos_id) == ("word-cache", 2)


def copy_of(small_tokenizer: Path, folder: Path, cut: int | None = None) -> str:
    folder.mkdir()
    payload = (small_tokenizer / "tokenizer.json").read_bytes()
    (folder / "tokenizer.json").write_bytes(payload[:cut])
    return str(folder)


def test_faults_of_a_folder(small_tokenizer: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match="holds neither"):
        get_tokenizer(FolderTokenizer(kind="folder", path=str(tmp_path / "nowhere")), out)
    cut = copy_of(small_tokenizer, tmp_path / "cut", cut=-100)
    with pytest.raises(ConfigError, match="damaged or none"):
        get_tokenizer(FolderTokenizer(kind="folder", path=cut), out)
    with pytest.raises(ConfigError, match=r"sha256 is .* expected 0000"):
        get_tokenizer(FolderTokenizer(kind="folder", path=cut, sha256="0" * 64), out)
    whole = copy_of(small_tokenizer, tmp_path / "whole")
    with pytest.raises(ConfigError, match=r"names no token that ends a document .* \(special tokens: <\|endoftext\|>"):
        get_tokenizer(FolderTokenizer(kind="folder", path=whole), out)
    with pytest.raises(ConfigError, match=r"token '</s>' is not in its vocabulary; set eos_token"):
        get_tokenizer(FolderTokenizer(kind="folder", path=whole, eos_token="</s>"), out)
    with pytest.raises(ConfigError, match="vocab_size 400, but 32000 is expected"):
        get_tokenizer(FolderTokenizer(kind="folder", path=whole, vocab_size=32000), out)
    with pytest.raises(ConfigError, match="so documents could not be told apart"):
        get_tokenizer(FolderTokenizer(kind="folder", path=whole, eos_token="e"), out)
    assert not (out / "meta.json").exists()


def test_a_missing_rank_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        get_tokenizer(FilesTokenizer(kind="files", family="qwen3", path=str(tmp_path / "none")), tmp_path / "out")
