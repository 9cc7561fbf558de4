"""Documents of every kind of file, in one order however they are sliced; damage stops, bad documents are counted."""

from __future__ import annotations

import gzip
import json
import os
import sysconfig
from collections import Counter
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from data.texts import make_documents, write_jsonl
from hypothesis import given, settings
from hypothesis import strategies as st

from mfubench.config import ConfigError
from mfubench.data import corpus as corpora
from mfubench.data.config import EmbeddedCorpus, LocalCorpus
from mfubench.data.corpus import group_files, list_files, slices_of
from mfubench.data.documents import first_documents, read_documents


def read(corpus: LocalCorpus, slice_size: int = 2**20, limit: int = 2**20) -> tuple[list[str], Counter[str]]:
    """All documents of a corpus that is cut into slices of `slice_size` bytes."""
    skipped: Counter[str] = Counter()
    documents = []
    for group in group_files(list_files(corpus), slice_size):
        for part in slices_of(corpus, [Path(file.name) for file in group], slice_size):
            documents += [text for text, _ in read_documents(part, corpus, limit, skipped)]
    return documents, skipped


def local(*paths: Path, **options: str) -> LocalCorpus:
    return LocalCorpus(source="local", paths=tuple(map(str, paths)), **options)


def write_parquet(path: Path, documents: list, row_group_size: int = 10, column: str = "text") -> Path:
    table = pyarrow.table({"id": range(len(documents)), column: documents})
    pyarrow.parquet.write_table(table, path, row_group_size=row_group_size)
    return path


@pytest.mark.parametrize("slice_size", [1, 100, 1000, 10**6])
@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet", "txt by line"])
def test_slicing_changes_nothing(tmp_path: Path, kind: str, slice_size: int) -> None:
    documents = [text.replace("\n", " ").replace("\r", " ") for text in make_documents(40, seed=3, words=12)]
    plain = write_jsonl(tmp_path / "text.jsonl", documents)
    options = {}
    match kind:
        case "jsonl":
            path = plain
        case "jsonl.gz":
            path = tmp_path / "text.jsonl.gz"
            path.write_bytes(gzip.compress(plain.read_bytes()))
        case "jsonl.zst":  # two frames, as `cat` of two files makes them
            path, half = tmp_path / "text.jsonl.zst", len(plain.read_bytes()) // 2
            halves = (plain.read_bytes()[:half], plain.read_bytes()[half:])
            path.write_bytes(b"".join(map(zstandard.ZstdCompressor().compress, halves)))
        case "parquet":
            path = write_parquet(tmp_path / "text.parquet", documents)
        case _:
            path, options = tmp_path / "text.txt", {"sample_by": "line"}
            path.write_text("\n".join(documents) + "\n", encoding="utf-8")
    found, skipped = read(local(path, **options), slice_size)
    assert found == documents
    assert not skipped.total()


@given(lines=st.lists(st.integers(0, 30), min_size=1, max_size=20), slice_size=st.integers(1, 40), last=st.booleans())
@settings(max_examples=100, deadline=None)
def test_each_line_belongs_to_one_slice(
    tmp_path_factory: pytest.TempPathFactory, lines: list[int], slice_size: int, last: bool
) -> None:
    path = tmp_path_factory.mktemp("lines") / "text.txt"
    documents = [f"{i:02d}" * length for i, length in enumerate(lines)]
    path.write_text("\n".join(documents) + ("\n" if last else ""))
    found, skipped = read(local(path, sample_by="line"), slice_size)
    assert found == [text for text in documents if text]
    assert skipped["empty"] <= documents.count("")


def test_small_files_share_a_slice_and_order_is_by_name(tmp_path: Path) -> None:
    for name in ("c", "a", "b"):
        (tmp_path / f"{name}.txt").write_text(name)
    (tmp_path / "notes.md").write_text("not one of the known kinds, so left out of a folder")
    files = list_files(local(tmp_path))
    assert [Path(file.name).name for file in files] == ["a.txt", "b.txt", "c.txt"]
    assert [len(group) for group in group_files(files, 2)] == [2, 1]
    assert read(local(tmp_path / "*.txt"))[0] == ["a", "b", "c"]
    assert read(local(tmp_path / "c.txt", tmp_path))[0] == ["c", "a", "b"]


def test_embedded_text_is_the_standard_library() -> None:
    files = list_files(EmbeddedCorpus(source="embedded"))
    assert len(files) > 300
    assert all("/test/" not in file.name and "/site-packages/" not in file.name for file in files)
    assert files == list_files(EmbeddedCorpus(source="embedded"))
    assert sum(map(len, first_documents(EmbeddedCorpus(source="embedded"), 10**5))) >= 9 * 10**4


def test_embedded_text_is_missing_from_a_zipped_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "python311.zip")})
    with pytest.raises(ConfigError, match="zip archive or compiled"):
        list_files(EmbeddedCorpus(source="embedded"))


# --- documents that cannot be used -----------------------------------------------------------------------------------


def test_bad_documents_of_jsonl_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    rows = [b'{"text": "good"}', b'{"text": ""}', b'{"text": null}', b'{"text": "\\ud800"}', b'{"text": "\xff"}', b""]
    rows += [
        json.dumps({"text": "x" * 2000}).encode(),
        json.dumps({"text": "y" * 5_000_000}).encode(),
        b'{"text": "end"}',
    ]
    path.write_bytes(b"\n".join(rows))
    documents, skipped = read(local(path), slice_size=10**7, limit=1000)
    assert documents == ["good", "end"]
    assert skipped == {"empty": 1, "null_text": 1, "invalid_utf8": 2, "too_large": 2}


def test_bad_documents_of_parquet_are_counted(tmp_path: Path) -> None:
    binary = pyarrow.array([b"good", b"", None, b"\xff\xfe", b"x" * 2000], pyarrow.binary())
    texts = pyarrow.StringArray.from_buffers(len(binary), binary.buffers()[1], binary.buffers()[2], binary.buffers()[0])
    documents, skipped = read(local(write_parquet(tmp_path / "text.parquet", texts)), limit=1000)
    assert documents == ["good"]
    assert skipped == {"empty": 1, "null_text": 1, "invalid_utf8": 1, "too_large": 1}


def test_bad_documents_of_text_are_counted(tmp_path: Path) -> None:
    for name, content in {"a": b"good", "b": b"", "c": b"\xff", "d": b"x" * 2000}.items():
        (tmp_path / f"{name}.txt").write_bytes(content)
    documents, skipped = read(local(tmp_path), limit=1000)
    assert documents == ["good"]
    assert skipped == {"empty": 1, "invalid_utf8": 1, "too_large": 1}


# --- files that are damaged ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet"])
def test_a_file_cut_in_half_stops_the_work(tmp_path: Path, suffix: str) -> None:
    documents = make_documents(200, seed=5)
    plain = write_jsonl(tmp_path / "whole", documents).read_bytes()
    path = tmp_path / f"text.{suffix}"
    match suffix:
        case "jsonl.gz":
            content = gzip.compress(plain)
        case "jsonl.zst":
            content = zstandard.ZstdCompressor().compress(plain)
        case "parquet":
            content = write_parquet(path, documents).read_bytes()
        case _:
            content = plain
    path.write_bytes(content[: len(content) // 2 + 5])
    with pytest.raises(ConfigError, match=rf"text\.{suffix}: .*fetch it again"):
        read(local(path))


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_missing_text_column_names_those_that_are_there(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"text.{suffix}"
    if suffix == "parquet":
        write_parquet(path, ["a"], column="content")
    else:
        path.write_text('{"id": 0, "content": "a"}\n')
    with pytest.raises(ConfigError, match=r"no text column 'text' \(found: id, content\); set text_column"):
        read(local(path))
    assert read(local(path, text_column="content"))[0] == ["a"]
    with pytest.raises(ConfigError, match=r"column 'id' holds int.*, not text"):
        read(local(path, text_column="id"))


def test_no_file_and_unknown_kinds(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="matches no file"):
        list_files(local(tmp_path / "*.jsonl"))
    (tmp_path / "text.docx").write_text("")
    with pytest.raises(ConfigError, match="unknown kind of file"):
        list_files(local(tmp_path / "text.docx"))
    assert corpora.file_format(Path("a/b.jsonl.zst")) == ("jsonl", True)


@pytest.mark.parametrize("path", ["~nobody-of-this-name/text", "x" * 300])
def test_a_path_that_cannot_be_looked_at_is_a_sentence(path: str) -> None:
    """As the workflow needs it, which looks at all local text before it knows what of it is used."""
    with pytest.raises(ConfigError, match=r"^paths: '(~nobody|xxx).*: (Could not determine home|File name)"):
        list_files(local(Path(path)))


def test_a_name_that_is_no_utf8_is_a_sentence(tmp_path: Path) -> None:
    """Neither Snakemake's list of inputs nor the digest of a preparation could hold it."""
    os.close(os.open(os.fsencode(tmp_path) + b"/caf\xe9.txt", os.O_CREAT | os.O_WRONLY))
    with pytest.raises(ConfigError, match=r"caf\\udce9.txt': its name is not UTF-8; rename it"):
        list_files(local(tmp_path))
