"""The two meta.json files: what a tokenizer folder and a dataset folder hold. No tokenizer library, no torch."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field, ValidationError

from mfubench.config import ConfigError, Strict
from mfubench.run_log import Dataset, write_text_atomically

TokenDtype = Literal["uint16", "uint32"]
# What to do where val holds too few tokens to evaluate on.
MORE_VALIDATION = (
    "give the dataset more documents, a larger val_fraction or, where a text file is one document, sample_by: line"
)
SplitName = Literal["train", "val"]
EncoderKind = Literal["tiktoken", "word-cache", "tokenizers"]


class TokenizerMeta(Strict):
    """meta.json beside tokenizer.json."""

    schema_version: Literal[1] = 1
    name: str
    kind: Literal["bpe", "hub", "folder", "files"]
    source: str = Field(description="for people: where the vocabulary came from")
    config: dict[str, Any] | None = Field(None, description="the TokenizerConfig that it was made with")
    vocab_size: int = Field(description="ids the data can hold: largest id + 1; the embedding needs as many rows")
    largest_id: int
    eos_id: int = Field(description="ends each document and occurs nowhere else")
    eos_token: str
    sha256: str = Field(description="of tokenizer.json as written here")
    vocabulary_sha256: str = Field(description="of tokens and ids, however a file spells them")
    encoder: EncoderKind
    encoder_reason: str | None = Field(None, description="why it is not a faster one")


class Shard(Strict):
    file: str
    tokens: int
    sha256: str


class Split(Strict):
    tokens: int
    documents: int
    shards: tuple[Shard, ...] = Field(strict=False)


class Skipped(Strict):
    """Documents left out, by reason."""

    empty: int = 0
    null_text: int = 0
    invalid_utf8: int = 0
    too_large: int = 0

    @property
    def total(self) -> int:
        return self.empty + self.null_text + self.invalid_utf8 + self.too_large


class DatasetTokenizer(Strict):
    """The part of a TokenizerMeta that a reader needs."""

    name: str
    sha256: str
    vocab_size: int
    eos_id: int
    encoder: EncoderKind


class DatasetMeta(Strict):
    """meta.json of a dataset folder; written last, so that a folder with it is complete."""

    schema_version: Literal[1] = 1
    name: str
    source: dict[str, Any] = Field(description="where the text came from, as precisely as it is known")
    config: dict[str, Any] = Field(description="the DatasetConfig that was prepared")
    tokenizer: DatasetTokenizer
    dtype: TokenDtype
    splits: dict[SplitName, Split]
    text_bytes: int = Field(description="UTF-8 bytes of the documents that were kept")
    skipped: Skipped

    @property
    def sha256(self) -> str:
        """Of what the token files hold: a digest of the shards' own, in their order."""
        lines = (f"{split} {shard.sha256}\n" for split in sorted(self.splits) for shard in self.splits[split].shards)
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    @property
    def description(self) -> Dataset:
        """What the log of a run says of its data."""
        source = self.source.get("name") or ", ".join(f"{key}={value}" for key, value in self.source.items())
        return Dataset(
            name=self.name,
            train_tokens=self.splits["train"].tokens,
            val_tokens=self.splits["val"].tokens if "val" in self.splits else 0,
            vocab_size=self.tokenizer.vocab_size,
            token_dtype=self.dtype,
            tokenizer_sha256=self.tokenizer.sha256,
            sha256=self.sha256,
            source=str(source),
        )


Meta = TypeVar("Meta", TokenizerMeta, DatasetMeta)


def read_meta(schema: type[Meta], folder: Path) -> Meta:
    """Read folder/meta.json; raises ConfigError where it is missing or not what the schema says."""
    path = folder / "meta.json"
    kind = "tokenizer" if schema is TokenizerMeta else "dataset"
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: missing, so this {kind} was never finished; prepare it again") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); prepare this {kind} again") from None
    try:
        return schema.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        at = ".".join(str(part) for part in first["loc"]) or "the file"
        raise ConfigError(f"{path}: not a {kind}'s meta.json: {at}: {first['msg']}; prepare it again") from None


def is_made_with(config: Strict, schema: type[Meta], folder: Path) -> bool:
    """Whether a folder holds a tokenizer or dataset that is complete and was made with these values."""
    try:
        return read_meta(schema, folder).config == config.model_dump(mode="json")
    except ConfigError:
        return False


def write_meta(meta: TokenizerMeta | DatasetMeta, folder: Path) -> None:
    write_text_atomically(folder / "meta.json", json.dumps(meta.model_dump(mode="json"), indent=2) + "\n")
