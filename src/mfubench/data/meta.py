"""The two meta.json files: what a tokenizer folder and a dataset folder hold. No tokenizer library, no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field, ValidationError

from mfubench.config import ConfigError, Strict
from mfubench.run_log import write_text_atomically

TokenDtype = Literal["uint16", "uint32"]
SplitName = Literal["train", "val"]
EncoderKind = Literal["tiktoken", "word-cache", "tokenizers"]


class TokenizerMeta(Strict):
    """meta.json beside tokenizer.json."""

    schema_version: Literal[1] = 1
    name: str
    kind: Literal["bpe", "hub", "folder", "files"]
    source: str = Field(description="for people: where the vocabulary came from")
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


def write_meta(meta: TokenizerMeta | DatasetMeta, folder: Path) -> None:
    write_text_atomically(folder / "meta.json", json.dumps(meta.model_dump(mode="json"), indent=2) + "\n")
