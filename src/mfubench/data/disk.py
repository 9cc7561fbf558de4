"""How much disk a preparation will take, and whether it is there: known before hours of work, not after."""

from __future__ import annotations

import shutil
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import zstandard

from mfubench.config import ConfigError
from mfubench.data import hub_dataset
from mfubench.data.config import DatasetConfig, HubCorpus
from mfubench.data.corpus import Slice, SourceFile
from mfubench.data.documents import read_documents
from mfubench.data.encoder import Encoder
from mfubench.data.local_files import file_format
from mfubench.data.meta import TokenDtype
from mfubench.data.streams import stream_errors

SAMPLE_BYTES = 2**18  # text on which tokens per byte are measured
MARGIN = 1.1  # the rest of a corpus is not quite like its start


def expected_tokens(first: Slice, total_bytes: int, config: DatasetConfig, encoder: Encoder) -> int:
    """Tokens of `total_bytes` of files like the first slice, from a sample of it."""
    texts: list[str] = []
    size = 0
    for text, utf8 in read_documents(first, config, config.max_document_bytes, Counter()):
        texts.append(text)
        size += len(utf8)
        if size >= SAMPLE_BYTES:
            break
    if not size:
        return 0
    tokens = sum(len(ids) + 1 for ids in encoder.encode_batch(texts))
    return int(tokens / size * expansion(first.pieces[0].path, config) * total_bytes)


def expansion(path: Path, config: DatasetConfig) -> float:
    """Bytes of text for a stored byte; for jsonl with other columns too much, which is the safe side."""
    format_, compressed = file_format(path)
    if format_ == "parquet":
        import pyarrow.parquet

        metadata = pyarrow.parquet.read_metadata(path)
        name = getattr(config, "text_column", "text")
        column = metadata.schema.to_arrow_schema().names.index(name)
        text = sum(metadata.row_group(i).column(column).total_uncompressed_size for i in range(metadata.num_row_groups))
        return text / path.stat().st_size
    if not compressed:
        return 1.0
    with stream_errors(path), path.open("rb") as file:
        stored = file.read(2**18)
    if path.suffix == ".gz":
        return len(zlib.decompressobj(wbits=31).decompress(stored)) / len(stored)
    return len(zstandard.ZstdDecompressor().decompressobj().decompress(stored)) / len(stored)


def check_downloads(corpus: HubCorpus, files: list[SourceFile], total_bytes: int, work: Path) -> None:
    """Raise ConfigError unless there is room for what the hub will send."""
    listed = [(file.name, file.size, file.commit) for file in files if file.commit is not None]
    needed, folder = hub_dataset.download_needs(corpus, listed, work)
    needed = min(needed, total_bytes)
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise ConfigError(
            f"{folder}: {needed / 1e9:.3g} GB are to be downloaded, but {free / 1e9:.3g} GB are free: set HF_HOME to a "
            "larger disk, or keep_downloads: false, or prepare less (max_bytes)"
        )


def check_disk(tokens: int, dtype: TokenDtype, folders: list[Path]) -> None:
    """Raise ConfigError unless each folder has room for `tokens` more."""
    needed = int(tokens * np.dtype(dtype).itemsize * MARGIN)
    for folder in folders:
        free = shutil.disk_usage(folder).free
        if free < needed:
            raise ConfigError(
                f"{folder}: about {tokens / 1e9:.3g}B tokens of {dtype} need {needed / 1e9:.3g} GB (with "
                f"{MARGIN - 1:.0%} to spare), but {free / 1e9:.3g} GB are free: make room, choose another folder, or "
                "prepare less (max_tokens, max_bytes)"
            )
