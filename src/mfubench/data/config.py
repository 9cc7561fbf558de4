"""What a study says about tokenizers and datasets: the entries under `tokenizers:` and `datasets:`.

    tokenizers:
      small:  {kind: bpe, vocab_size: 4096}                   # trained here, on text that Python itself ships
      llama2: {kind: hub, family: llama2}                     # repository, revision and checks from tokenizers.yaml
      qwen3:  {kind: folder, family: qwen3, path: /models/Qwen3-1.7B-Base}
      llama3: {kind: files, family: llama3, path: /models/llama3/tokenizer.model}
    datasets:
      embedded:   {source: embedded, tokenizer: small}
      mine:       {source: local, tokenizer: llama3, paths: ["text/*.jsonl.zst"]}
      slimpajama: {source: hub, tokenizer: llama2, dataset: DKYoon/SlimPajama-6B}

`family` names one of the tokenizers of tokenizers.yaml; what that file knows is filled in here, so that the resolved
entry holds everything that decides the result. No torch and no tokenizer library: this is imported wherever a
workflow is parsed.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, TypeAdapter, ValidationError, model_validator

from mfubench.complaints import explain_all
from mfubench.config import ConfigError, Strict

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Revision = Annotated[str, Field(pattern=r"^[A-Za-z0-9._/-]+$")]
HubId = Annotated[str, Field(pattern=r"^[\w.-]+(/[\w.-]+)?$", description="owner/name on the hub")]


class JsonConfig(Strict):
    def to_json(self) -> str:
        """One line, keys sorted: the form in which an entry travels to a job, and Snakemake's rerun trigger."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True)


# --- where text comes from -------------------------------------------------------------------------------------------


class EmbeddedCorpus(JsonConfig):
    """The source of the Python standard library: about 12 MB that every installation has."""

    source: Literal["embedded"]


class LocalCorpus(JsonConfig):
    """Files on this machine: .jsonl, .parquet and .txt, the first and last also as .gz or .zst."""

    source: Literal["local"]
    paths: tuple[str, ...] = Field(min_length=1, strict=False, description="files, folders or glob patterns")
    text_column: str = Field("text", description="jsonl and parquet")
    sample_by: Literal["document", "line"] = Field("document", description="txt: a file or a line is one document")


class HubCorpus(JsonConfig):
    """A dataset of the Hugging Face hub (or the mirror that HF_ENDPOINT names) with a text column."""

    source: Literal["hub"]
    dataset: HubId
    revision: Revision = Field("main", description="branch, tag or, to be reproducible, commit")
    config_name: str | None = None
    split: str = "train"
    text_column: str = "text"
    keep_downloads: bool = Field(True, description="false: each file is deleted once its tokens are written")


CorpusConfig = Annotated[EmbeddedCorpus | LocalCorpus | HubCorpus, Field(discriminator="source")]

# --- datasets --------------------------------------------------------------------------------------------------------


class Preparation(Strict):
    """How text becomes token files; the same for every source."""

    tokenizer: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]*$", description="key under `tokenizers:`")
    val_fraction: float = Field(0.005, ge=0, lt=1, description="documents whose hash puts them into val.bin")
    shard_tokens: int = Field(1_000_000_000, ge=1, description="a shard is closed once it holds this many tokens")
    max_tokens: int | None = Field(None, ge=1, description="stop after this many training tokens")
    max_bytes: int | None = Field(None, ge=1, description="stop after this many bytes of source files, as stored")
    max_document_bytes: int = Field(64 * 2**20, ge=1, description="larger documents are skipped and counted")
    seed: int = Field(0, ge=0, description="of the hash that chooses validation documents")


class EmbeddedDataset(EmbeddedCorpus, Preparation):
    # There are few documents, so a larger part of them
    val_fraction: float = Field(0.05, ge=0, lt=1, description="documents whose hash puts them into val.bin")


class LocalDataset(LocalCorpus, Preparation):
    pass


class HubDataset(HubCorpus, Preparation):
    pass


DatasetConfig = Annotated[EmbeddedDataset | LocalDataset | HubDataset, Field(discriminator="source")]

# --- tokenizers ------------------------------------------------------------------------------------------------------


@functools.cache
def families() -> dict[str, dict[str, Any]]:
    """The rows of tokenizers.yaml: facts about the tokenizers that the presets use, and others that are added."""
    return yaml.safe_load(Path(__file__).with_name("tokenizers.yaml").read_text(encoding="utf-8"))


class BpeTokenizer(JsonConfig):
    """A byte-level BPE, trained on `corpus` in a few seconds; for runs that need no download."""

    kind: Literal["bpe"]
    vocab_size: int = Field(ge=257, description="256 bytes and the end-of-document token at least")
    corpus: CorpusConfig = EmbeddedCorpus(source="embedded")
    max_bytes: int = Field(64 * 2**20, ge=1, description="text to train on, from the start of the corpus")


class ExistingTokenizer(JsonConfig):
    """Checks that a tokenizer from elsewhere must pass. What is null is not checked."""

    family: str | None = Field(None, description="row of tokenizers.yaml that fills in what is not stated")
    eos_token: str | None = Field(None, description="ends each document; null: as tokenizer_config.json says")
    vocab_size: int | None = Field(None, ge=1, description="largest id + 1")
    sha256: Sha256 | None = Field(None, description="of the downloaded or given file, byte by byte")
    vocabulary_sha256: Sha256 | None = Field(None, description="of tokens and ids, however the file spells them")

    @model_validator(mode="before")
    @classmethod
    def fill_from_family(cls, values: Any) -> Any:
        if not isinstance(values, dict) or values.get("family") not in families():
            return values
        facts = families()[values["family"]]
        return {key: facts[key] for key in cls.model_fields if key in facts} | values

    @model_validator(mode="after")
    def check_family(self) -> ExistingTokenizer:
        if self.family is not None and self.family not in families():
            raise ValueError(f"family {self.family!r} has no row in tokenizers.yaml, which has {', '.join(families())}")
        return self


class HubTokenizer(ExistingTokenizer):
    """tokenizer.json of a repository on the hub (or the mirror that HF_ENDPOINT names)."""

    kind: Literal["hub"]
    repo: HubId
    revision: Revision = Field("main", description="branch, tag or, to be reproducible, commit")


class FolderTokenizer(ExistingTokenizer):
    """A local folder with tokenizer.json, or with vocab.json and merges.txt, as transformers saves them."""

    kind: Literal["folder"]
    path: str


class FilesTokenizer(ExistingTokenizer):
    """A tiktoken rank file (LLaMA-3's tokenizer.model, Qwen's qwen.tiktoken), or GPT-2's folder of two files."""

    kind: Literal["files"]
    family: Literal["gpt2", "llama3", "qwen3"]
    path: str


TokenizerConfig = Annotated[BpeTokenizer | HubTokenizer | FolderTokenizer | FilesTokenizer, Field(discriminator="kind")]


def dataset_from_json(text: str) -> DatasetConfig:
    """The inverse of to_json; raises ConfigError."""
    return _from_json(DatasetConfig, text, "dataset")


def tokenizer_from_json(text: str) -> TokenizerConfig:
    """The inverse of to_json; raises ConfigError."""
    return _from_json(TokenizerConfig, text, "tokenizer")


def _from_json(schema: Any, text: str, where: str) -> Any:
    try:
        return TypeAdapter(schema).validate_json(text)
    except ValidationError as error:
        raise ConfigError("\n".join(explain_all(error.errors(), where, schema))) from None
