"""Documents out of the slices of a corpus.

A file that is damaged stops the work with a message; a document that cannot be used is counted.
"""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from mfubench.config import ConfigError
from mfubench.data.config import CorpusConfig, EmbeddedCorpus
from mfubench.data.corpus import (
    Piece,
    Slice,
    by_line,
    fetch,
    group_files,
    list_files,
    slice_size,
    slices_of,
)
from mfubench.data.local_files import file_format
from mfubench.data.streams import open_stream, stream_errors


def read_documents(
    part: Slice, corpus: CorpusConfig, max_document_bytes: int, skipped: Counter[str]
) -> Iterator[tuple[str, bytes]]:
    """Text and its UTF-8 bytes, document by document; what cannot be used is counted in `skipped` by reason.

    Raises ConfigError where a file is damaged, or has no text column.
    """
    for piece in part.pieces:
        with stream_errors(piece.path):
            for found in _raw_documents(piece, corpus, max_document_bytes):
                if found is None:
                    skipped["null_text"] += 1
                    continue
                try:
                    utf8 = found if isinstance(found, bytes) else found.encode()  # fails on lone surrogates
                    text = found.decode() if isinstance(found, bytes) else found
                except UnicodeError:
                    skipped["invalid_utf8"] += 1
                    continue
                if not utf8:
                    skipped["empty"] += 1
                elif len(utf8) > max_document_bytes:
                    skipped["too_large"] += 1
                else:
                    yield text, utf8


def _raw_documents(piece: Piece, corpus: CorpusConfig, limit: int) -> Iterator[bytes | str | None]:
    format_, _ = file_format(piece.path)
    if isinstance(corpus, EmbeddedCorpus):
        yield piece.path.read_bytes()
    elif format_ == "parquet":
        yield from _parquet_texts(piece, corpus.text_column)
    elif format_ == "jsonl":
        # A JSON string is longer than its text by its escapes; a line beyond this holds too large a document.
        for line in _lines(piece, 2 * limit + 2**20):
            if len(line) > 2 * limit + 2**20:
                yield b" " * (limit + 1)
            elif not line.isspace():
                yield _json_text(line, piece.path, corpus.text_column)
    elif by_line(corpus):
        for line in _lines(piece, limit):
            yield line.rstrip(b"\r\n")
    else:
        with open_stream(piece.path) as stream:
            yield stream.read(limit + 1)


def _lines(piece: Piece, limit: int) -> Iterator[bytes]:
    """Lines that begin within the piece; of one longer than `limit`, its first limit + 1 bytes."""
    with open_stream(piece.path) as stream:
        position = 0
        if piece.start:
            stream.seek(piece.start - 1)
            position = piece.start - 1 + _skip_line(stream)
        while piece.stop is None or position < piece.stop:
            line = stream.readline(limit + 1)
            if not line:
                return
            position += len(line)
            if len(line) > limit and not line.endswith(b"\n"):
                position += _skip_line(stream)
            yield line


def _skip_line(stream: io.BufferedIOBase) -> int:
    """Read to the end of the line; the number of bytes read."""
    count = 0
    while True:
        rest = stream.readline(2**20)
        count += len(rest)
        if not rest or rest.endswith(b"\n"):
            return count


def _json_text(line: bytes, path: Path, column: str) -> str | bytes | None:
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError:
        return b"\xff"  # counted as invalid UTF-8
    except ValueError as error:
        raise ConfigError(
            f"{path}: a line that begins {line[:60]!r} is not JSON ({error}): the file was probably cut short or is no "
            "jsonl; fetch it again"
        ) from None
    if not isinstance(row, dict) or column not in row:
        names = ", ".join(map(str, row)) if isinstance(row, dict) else f"none, a {type(row).__name__}"
        raise ConfigError(f"{path}: no text column {column!r} (found: {names}); set text_column")
    text = row[column]
    if text is not None and not isinstance(text, str):
        raise ConfigError(f"{path}: column {column!r} holds {type(text).__name__}, not text; set text_column")
    return text


def _parquet_texts(piece: Piece, column: str) -> Iterator[bytes | None]:
    import pyarrow
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(piece.path) as file:
        schema = file.schema_arrow
        if column not in schema.names:
            raise ConfigError(
                f"{piece.path}: no text column {column!r} (found: {', '.join(schema.names)}); set text_column"
            )
        kind = schema.field(column).type
        if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
            raise ConfigError(f"{piece.path}: column {column!r} holds {kind}, not text; set text_column")
        stop = file.metadata.num_row_groups if piece.stop is None else piece.stop
        for batch in file.iter_batches(256, row_groups=range(piece.start, stop), columns=[column]):
            # As bytes: parquet does not promise valid UTF-8.
            yield from batch.column(0).cast(pyarrow.large_binary()).to_pylist()


def first_documents(corpus: CorpusConfig, max_bytes: int) -> Iterator[str]:
    """Documents from the start of a corpus until `max_bytes` of text are reached."""
    files = list_files(corpus)
    size = slice_size(min(sum(file.size for file in files), max_bytes))
    total = 0
    for group in group_files(files, size):
        for part in slices_of(corpus, [fetch(corpus, file) for file in group], size):
            for text, utf8 in read_documents(part, corpus, max_bytes, Counter()):
                yield text
                total += len(utf8)
                if total >= max_bytes:
                    return
