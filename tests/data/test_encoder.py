"""The fast encoders give the reference's ids, and are not taken where they would not."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from data.texts import make_documents
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, normalizers, pre_tokenizers

from mfubench.config import ConfigError
from mfubench.data import encoder as encoders
from mfubench.data.encoder import NotApplicable, choose_encoder, load_encoder, tokenizers_encoder, word_cache_encoder

# Text that is hard to split: blanks, ▁, line breaks, letters with and without marks, other scripts.
texts = st.text(
    alphabet=st.one_of(
        st.sampled_from(list(" \n\r\t▁the'sA1.é\u0301日🦙<>/s|")), st.characters(exclude_categories=["Cs"])
    )
)


@given(documents=st.lists(texts, max_size=4))
@settings(max_examples=200, deadline=None)
def test_tiktoken_gives_the_ids_of_tokenizers(small_tokenizer: Path, documents: list[str]) -> None:
    spec = json.loads((small_tokenizer / "tokenizer.json").read_text())
    expected = tokenizers_encoder(spec)(documents)
    encoder = load_encoder(small_tokenizer)
    assert encoder.kind == "tiktoken"
    found = encoder.encode_batch(documents)
    assert [ids.tolist() for ids in found] == [ids.tolist() for ids in expected]
    assert [encoder.decode(ids) for ids in found] == documents


@given(documents=st.lists(texts, max_size=4))
@settings(max_examples=300, deadline=None)
def test_word_cache_gives_the_ids_of_tokenizers(llama_like: Tokenizer, documents: list[str]) -> None:
    spec = json.loads(llama_like.to_str())
    expected = tokenizers_encoder(spec)(documents)
    found = word_cache_encoder(spec)(documents)
    assert [ids.tolist() for ids in found] == [ids.tolist() for ids in expected]


def test_word_cache_is_right_when_full_and_when_warm(llama_like: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoders, "WORD_CACHE_SIZE", 50)
    monkeypatch.setattr(encoders, "LONGEST_CACHED_WORD", 4)
    spec = json.loads(llama_like.to_str())
    encode_batch = word_cache_encoder(spec)
    for seed in range(5):
        documents = make_documents(40, seed=seed // 2)
        expected = tokenizers_encoder(spec)(documents)
        assert [ids.tolist() for ids in encode_batch(documents)] == [ids.tolist() for ids in expected]


def test_word_cache_refuses_a_vocabulary_whose_tokens_cross_words(llama_like: Tokenizer) -> None:
    spec = json.loads(llama_like.to_str())
    spec["model"]["vocab"]["e▁"] = len(spec["model"]["vocab"])
    spec["model"]["merges"].append(["e", "▁"])
    with pytest.raises(NotApplicable, match="reaches over the boundary"):
        word_cache_encoder(spec)


def test_special_tokens_in_text_are_text(llama_like: Tokenizer, small_tokenizer: Path) -> None:
    spec = json.loads(llama_like.to_str())
    assert 2 not in tokenizers_encoder(spec)(["a </s> b"])[0]
    encoder = load_encoder(small_tokenizer)
    ids = encoder.encode_batch(["a <|endoftext|> b"])[0]
    assert encoder.eos_id not in ids
    assert encoder.decode(ids) == "a <|endoftext|> b"


def test_the_slow_road_is_taken_where_the_fast_one_differs(small_tokenizer: Path) -> None:
    spec = json.loads((small_tokenizer / "tokenizer.json").read_text())
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(False)])
    tokenizer.normalizer = normalizers.Lowercase()
    other = json.loads(tokenizer.to_str())
    kind, _, reason = choose_encoder(other, ["Text 123"], tokenizers_encoder(other))
    assert kind == "tokenizers"
    assert reason is not None
    assert "its pre-tokenizer is not a split by one regular expression" in reason


def test_the_fast_road_is_given_up_when_one_id_differs(small_tokenizer: Path) -> None:
    spec = json.loads((small_tokenizer / "tokenizer.json").read_text())
    kind, _, reason = choose_encoder(spec, ["some text"], lambda texts: [np.array([1, 2, 3]) for _ in texts])
    assert kind == "tokenizers"
    assert reason is not None
    assert "no tiktoken: its ids differ" in reason


def test_a_million_blanks_are_encoded_too(small_tokenizer: Path) -> None:
    documents = ["the end" + " " * 1_200_000 + "of it", "and"]
    found = load_encoder(small_tokenizer).encode_batch(documents)
    expected = tokenizers_encoder(json.loads((small_tokenizer / "tokenizer.json").read_text()))(documents)
    assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


def test_nfc_is_that_of_tokenizers() -> None:
    normalize = encoders._normalizer({"type": "NFC"})
    reference = normalizers.NFC().normalize_str
    choose = random.Random(0)
    marks = [chr(code) for code in (0x301, 0x327, 0x323, 0x1AC1, 0x1E08F, 0x9FE, 0x1133B, 0x1161, 0x11A8)]
    for _ in range(3000):
        text = "".join(choose.choices(["e", "\u1100", "가", "Å", *marks], k=6))
        assert normalize(text) == reference(text)


def test_a_changed_tokenizer_is_noticed(small_tokenizer: Path, tmp_path: Path) -> None:
    for name in ("meta.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((small_tokenizer / name).read_bytes())
    assert load_encoder(tmp_path).vocab_size == 400
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json: missing, or changed since meta\.json was written"):
        load_encoder(tmp_path)
