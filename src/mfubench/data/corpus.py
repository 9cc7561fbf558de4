"""Documents of a corpus, in one fixed order, cut into slices that workers can read apart.

The files of a corpus are sorted, small neighbours are grouped, large ones are cut by byte range (text, jsonl) or row
group (parquet). Where the cuts fall depends on the files alone, so the documents and their order are the same whatever
the number of workers.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mfubench.config import ConfigError
from mfubench.data import hub_dataset
from mfubench.data.config import CorpusConfig, EmbeddedCorpus, HubCorpus, LocalCorpus
from mfubench.data.local_files import file_format, local_paths
from mfubench.data.streams import stream_errors

SMALLEST_SLICE, LARGEST_SLICE = 2 * 2**20, 64 * 2**20  # bytes as stored
NOT_TEXT = {"test", "tests", "idle_test", "lib2to3", "site-packages", "__pycache__"}  # of the standard library


@dataclass(frozen=True)
class SourceFile:
    """A file of a corpus; of a hub's, only the listing is known until `fetch` brings it here."""

    name: str
    size: int  # bytes, as stored
    path: Path | None  # None: not here yet
    commit: str | None = None  # of a hub's


@dataclass(frozen=True)
class Piece:
    """Part of a file: bytes [start, stop) of a plain one, row groups [start, stop) of a parquet one, else all of it."""

    path: Path
    start: int = 0
    stop: int | None = None


@dataclass(frozen=True)
class Slice:
    """What one worker reads in one go."""

    pieces: tuple[Piece, ...]
    size: int  # bytes, as stored


# --- which files, and what they are ----------------------------------------------------------------------------------


def list_files(corpus: CorpusConfig) -> list[SourceFile]:
    """The files of a corpus in reading order; raises ConfigError where there are none."""
    match corpus:
        case EmbeddedCorpus():
            return [SourceFile(str(path), path.stat().st_size, path) for path in standard_library()]
        case LocalCorpus():
            paths = local_paths(corpus)
            return [SourceFile(str(path), path.stat().st_size, path) for path in paths]
        case HubCorpus():
            return [SourceFile(f.name, f.size, f.path, f.commit) for f in hub_dataset.list_files(corpus)]
    raise TypeError(type(corpus).__name__)


def standard_library() -> list[Path]:
    """The .py files of this Python's standard library, without tests and installed packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in NOT_TEXT]  # not even looked into
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    if len(paths) < 100:
        raise ConfigError(
            f"source: embedded reads the source of Python's standard library, but {root} holds {len(paths)} .py files "
            "(some Pythons ship it as a zip archive or compiled): use another Python, or source: local"
        )
    return sorted(paths, key=lambda path: path.relative_to(root).as_posix())


def fetch(corpus: CorpusConfig, file: SourceFile, local_dir: Path | None = None) -> Path:
    """A file of a corpus on this machine, downloaded (into the hub's cache or `local_dir`) if it has to be."""
    if file.path is not None:
        return file.path
    assert isinstance(corpus, HubCorpus) and file.commit is not None
    return hub_dataset.fetch(corpus, file.name, file.commit, local_dir)


def describe(corpus: CorpusConfig, files: list[SourceFile]) -> dict[str, Any]:
    """What the text was, for meta.json: nothing that differs between two preparations of the same text."""
    listing = "".join(f"{Path(file.name).name}\t{file.size}\n" for file in files)
    facts: dict[str, Any] = {
        "source": corpus.source,
        "files": len(files),
        "bytes": sum(file.size for file in files),
        "listing_sha256": hashlib.sha256(listing.encode()).hexdigest(),
    }
    if isinstance(corpus, EmbeddedCorpus):
        digest = hashlib.sha256(b"".join(path.read_bytes() for path in standard_library()))
        facts |= {"python": platform.python_version(), "text_sha256": digest.hexdigest(), "licence": "PSF-2.0"}
    if isinstance(corpus, HubCorpus):
        commit = files[0].commit if files else None
        facts |= {"dataset": corpus.dataset, "revision": corpus.revision, "commit": commit, "split": corpus.split}
    return facts


# --- slices ----------------------------------------------------------------------------------------------------------


def slice_size(total: int) -> int:
    """Bytes a slice for `total` bytes of files: a few thousand slices, for progress, resuming and sharing out work."""
    return min(max(total // 4096, SMALLEST_SLICE), LARGEST_SLICE)


def group_files(files: list[SourceFile], size: int) -> list[list[SourceFile]]:
    """Neighbours that fit into one slice together, as groups; larger files alone."""
    groups: list[list[SourceFile]] = []
    filled = 0
    for file in files:
        if not groups or filled + file.size > size:
            groups.append([])
            filled = 0
        groups[-1].append(file)
        filled += file.size
    return groups


def slices_of(corpus: CorpusConfig, paths: list[Path], size: int) -> list[Slice]:
    """The slices of a group of files."""
    total = sum(path.stat().st_size for path in paths)
    if len(paths) > 1:
        return [Slice(tuple(Piece(path) for path in paths), total)]
    path = paths[0]
    format_, compressed = file_format(path)
    if format_ == "parquet":
        return _row_group_slices(path, total, size)
    if compressed or total <= size or (format_ == "txt" and not by_line(corpus)):
        return [Slice((Piece(path),), total)]
    starts = range(0, total, size)
    return [Slice((Piece(path, start, min(start + size, total)),), min(size, total - start)) for start in starts]


def by_line(corpus: CorpusConfig) -> bool:
    return isinstance(corpus, LocalCorpus) and corpus.sample_by == "line"


def _row_group_slices(path: Path, total: int, size: int) -> list[Slice]:
    import pyarrow.parquet

    with stream_errors(path):
        metadata = pyarrow.parquet.read_metadata(path)
    if metadata.num_row_groups == 0:
        return []
    weights = [metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)]
    share = total / max(sum(weights), 1)  # stored bytes for a byte of row group
    slices, start, filled = [], 0, 0
    for i, weight in enumerate(weights):
        filled += weight
        if filled >= size or i == len(weights) - 1:
            slices.append(Slice((Piece(path, start, i + 1),), int(filled * share)))
            start, filled = i + 1, 0
    return slices
