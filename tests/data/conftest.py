"""A small tokenizer, a small tokenizer in LLaMA-2's style, and the four real ones where a registry is in reach."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from data.texts import make_documents, write_jsonl
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers

from mfubench.data.config import BpeTokenizer, LocalCorpus
from mfubench.data.tokenizer import get_tokenizer

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="session")
def small_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a byte-level BPE of 400 tokens."""
    folder = tmp_path_factory.mktemp("tokenizers")
    text = write_jsonl(folder / "text.jsonl", make_documents(2000))
    corpus = LocalCorpus(source="local", paths=(str(text),))
    get_tokenizer(BpeTokenizer(kind="bpe", vocab_size=400, corpus=corpus), folder / "small")
    return folder / "small"


@pytest.fixture(scope="session")
def llama_like() -> Tokenizer:
    """A small tokenizer with LLaMA-2's normalizer, byte fallback and no pre-tokenizer; some tokens are runs of ▁."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trained.train_from_iterator(make_documents(2000), trainers.BpeTrainer(vocab_size=700, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    specials = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    unusable = re.compile("[^▁]▁|[\n\r\t🦙日]")  # crosses words, or left to byte fallback
    learned = [token for token in model["vocab"] if not unusable.search(token)]
    runs = ["▁▁", "▁▁▁▁"]
    vocab = {token: i for i, token in enumerate(dict.fromkeys([*specials, *learned, *runs]))}
    merges = [tuple(merge) for merge in model["merges"] if all(part in vocab for part in (*merge, "".join(merge)))]
    merges = [("▁", "▁"), ("▁▁", "▁▁"), *merges]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in specials[:3]])
    return tokenizer


@pytest.fixture(scope="session")
def real_tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of the four real tokenizers; skips with a reason where no registry is in reach."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import real_tokenizers as fetcher
    finally:
        sys.path.remove(str(BENCHMARKS))
    try:
        return fetcher.lay_out(tmp_path_factory.mktemp("real"))
    except fetcher.Unavailable as reason:
        pytest.skip(f"the real tokenizers cannot be had: {reason}")
