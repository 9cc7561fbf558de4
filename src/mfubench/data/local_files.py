"""Text files on this machine: which ones a corpus means, and of what format. No library: imported where a workflow is
parsed.
"""

from __future__ import annotations

from glob import glob
from pathlib import Path
from typing import Literal

from mfubench.config import ConfigError
from mfubench.data.config import BpeTokenizer, DatasetConfig, LocalCorpus, TokenizerConfig

Format = Literal["jsonl", "parquet", "txt"]
SUFFIXES: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".txt": "txt",
    ".py": "txt",
}
COMPRESSIONS = (".gz", ".zst")


def text_files(config: DatasetConfig | TokenizerConfig) -> list[Path]:
    """Files on this machine whose text becomes a dataset or trains a tokenizer. Raises ConfigError where they are gone.

    None for text from elsewhere, and for a tokenizer that exists already.
    """
    corpus = config.corpus if isinstance(config, BpeTokenizer) else config
    return local_paths(corpus) if isinstance(corpus, LocalCorpus) else []


def local_paths(corpus: LocalCorpus) -> list[Path]:
    """Files, folders and patterns of `paths`, in the order given and sorted within each; no file twice."""
    found: dict[Path, None] = {}
    for pattern in corpus.paths:
        try:
            paths = files_of(Path(pattern).expanduser())
        except (OSError, RuntimeError) as error:  # a folder that may not be entered, a user who is not here
            raise ConfigError(f"paths: {pattern!r}: {getattr(error, 'strerror', None) or error}") from None
        if not paths:
            raise ConfigError(
                f"paths: {pattern!r} matches no file that can be read ({', '.join(SUFFIXES)}, +.gz, +.zst)"
            )
        for file in paths:
            file_format(file)
            if any("\ud800" <= character <= "\udfff" for character in str(file)):  # a byte that is no UTF-8
                raise ConfigError(f"paths: {str(file)!a}: its name is not UTF-8; rename it")
            found[file] = None
    return list(found)


def files_of(path: Path) -> list[Path]:
    """Those of a known kind in a folder and below it, or all that match a pattern."""
    if path.is_dir():
        return [file for file in sorted(path.rglob("*")) if file.is_file() and known_format(file)]
    return sorted(file for file in map(Path, glob(str(path), recursive=True)) if file.is_file())  # noqa: PTH207


def known_format(path: Path) -> bool:
    suffix = Path(path.stem).suffix if path.suffix in COMPRESSIONS else path.suffix
    return suffix in SUFFIXES


def file_format(path: Path) -> tuple[Format, bool]:
    """Format by name, and whether the file is compressed as a whole."""
    if not known_format(path):
        raise ConfigError(f"{path}: unknown kind of file; known: {', '.join(SUFFIXES)}, the text ones also +.gz, +.zst")
    compressed = path.suffix in COMPRESSIONS
    return SUFFIXES[Path(path.stem).suffix if compressed else path.suffix], compressed
