"""Entries under `tokenizers:` and `datasets:`."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from pydantic import TypeAdapter

from mfubench.config import ConfigError
from mfubench.data.config import (
    DatasetConfig,
    HubTokenizer,
    TokenizerConfig,
    dataset_from_json,
    families,
    tokenizer_from_json,
)


@pytest.mark.parametrize(
    "values",
    [
        {"kind": "bpe", "vocab_size": 4096},
        {"kind": "bpe", "vocab_size": 4096, "corpus": {"source": "local", "paths": ["a.txt"]}},
        {"kind": "hub", "family": "llama2"},
        {"kind": "hub", "repo": "owner/name", "revision": "main", "eos_token": "</s>"},
        {"kind": "folder", "path": "somewhere"},
        {"kind": "files", "family": "llama3", "path": "tokenizer.model"},
    ],
)
def test_tokenizer_travels_as_json(values: dict) -> None:
    config = tokenizer_from_json(json.dumps(values))
    assert tokenizer_from_json(config.to_json()) == config
    assert TypeAdapter(TokenizerConfig).validate_json(config.to_json()) == config


@pytest.mark.parametrize(
    "values",
    [
        {"source": "embedded", "tokenizer": "small"},
        {"source": "local", "tokenizer": "small", "paths": ["a/*.jsonl", "b.parquet"], "text_column": "content"},
        {"source": "hub", "tokenizer": "llama2", "dataset": "DKYoon/SlimPajama-6B", "max_tokens": 10**9},
    ],
)
def test_dataset_travels_as_json(values: dict) -> None:
    config = dataset_from_json(json.dumps(values))
    assert dataset_from_json(config.to_json()) == config
    assert TypeAdapter(DatasetConfig).validate_json(config.to_json()) == config


def test_family_fills_in_what_is_not_stated() -> None:
    config = HubTokenizer(kind="hub", family="llama2", repo="mirror/llama2")
    facts = families()["llama2"]
    assert config.repo == "mirror/llama2"
    assert (config.revision, config.vocab_size, config.eos_token) == (facts["revision"], 32000, "</s>")


def test_a_family_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row of tokenizers.yaml adds a family, with as many facts as it has."""
    with pytest.raises(ConfigError, match=r"family 'mine' has no row in tokenizers\.yaml, which has gpt2, llama2"):
        tokenizer_from_json('{"kind": "folder", "family": "mine", "path": "x"}')
    monkeypatch.setitem(families(), "mine", {"vocab_size": 300, "eos_token": "<end>"})
    config = tokenizer_from_json('{"kind": "folder", "family": "mine", "path": "x"}')
    assert (config.vocab_size, config.eos_token, config.vocabulary_sha256) == (300, "<end>", None)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"source": "embedded", "tokenizer": "small", "val_fractoin": 0.1}, "val_fractoin: unknown key"),
        ({"source": "elsewhere", "tokenizer": "small"}, "'embedded', 'local', 'hub'"),
        ({"source": "local", "tokenizer": "small"}, "paths: missing"),
        ({"source": "embedded", "tokenizer": "small", "val_fraction": 1.0}, "val_fraction: found 1.0"),
        ({"source": "embedded", "tokenizer": "small", "shard_tokens": "1e9"}, "shard_tokens: found '1e9'"),
    ],
)
def test_faults_name_the_key(values: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        dataset_from_json(json.dumps(values))


def test_a_tokenizer_needs_a_repository() -> None:
    with pytest.raises(ConfigError, match="repo: missing"):
        tokenizer_from_json('{"kind": "hub"}')


def test_importing_the_schema_loads_nothing_heavy() -> None:
    code = "import sys, mfubench.data.config; print([m for m in ('torch', 'numpy', 'tokenizers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
