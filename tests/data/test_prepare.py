"""From documents to token files: right, the same for any number of workers, safe against what happens to machines."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from data.texts import make_documents, write_jsonl

from mfubench.config import ConfigError
from mfubench.data import corpus, disk, progress
from mfubench.data.config import HubCorpus, LocalDataset
from mfubench.data.encoder import load_encoder
from mfubench.data.meta import DatasetMeta
from mfubench.data.parts import encode_slice, split_of, token_dtype
from mfubench.data.prepare import prepare_dataset
from mfubench.data.reader import TokenDataset


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Several slices of text, in three files of different kinds of length."""
    folder = tmp_path_factory.mktemp("text")
    for i in range(3):
        write_jsonl(folder / f"{i}.jsonl", make_documents(6000, seed=i, words=(20, 300, 100)[i]))
    return folder


def dataset(path: Path, **options: object) -> LocalDataset:
    values = {"source": "local", "paths": [str(path)], "tokenizer": "small", "val_fraction": 0.1} | options
    return LocalDataset.model_validate(values)


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name != "meta.json"}


def documents_of(folder: Path, split: str, eos_id: int) -> list[list[int]]:
    data = TokenDataset.open(folder, split)
    ids = data.read(0, data.num_tokens)
    ends = np.flatnonzero(ids == eos_id)
    return [part.tolist()[: len(part) - 1] for part in np.split(ids, ends + 1)[:-1]]


@pytest.fixture(scope="module")
def prepared(text: Path, small_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared") / "mine"
    prepare_dataset(dataset(text), small_tokenizer, folder, num_workers=2)
    return folder


def test_documents_come_back_whole_and_in_order(text: Path, small_tokenizer: Path, prepared: Path) -> None:
    encoder = load_encoder(small_tokenizer)
    lines = [line for path in sorted(text.iterdir()) for line in path.read_text(encoding="utf-8").splitlines()]
    documents = [json.loads(line)["text"] for line in lines]
    for split in ("train", "val"):
        expected = [text for text in documents if split_of(text.encode(), 0.1, 0) == split]
        found = documents_of(prepared, split, encoder.eos_id)
        assert len(found) == len(expected)
        assert found == [ids.tolist() for ids in encoder.encode_batch(expected)]


def test_meta_says_what_is_there(text: Path, small_tokenizer: Path, prepared: Path) -> None:
    meta = DatasetMeta.model_validate_json((prepared / "meta.json").read_text())
    encoder = load_encoder(small_tokenizer)
    assert (meta.name, meta.dtype, meta.tokenizer.sha256, meta.tokenizer.vocab_size) == (
        "mine",
        "uint16",
        encoder.sha256,
        400,
    )
    assert meta.config == dataset(text).model_dump(mode="json")
    assert meta.source["files"] == 3
    assert meta.text_bytes == bytes_of_first(text, {"train": 18000, "val": 18000})
    assert sum(split.documents for split in meta.splits.values()) == 18000 - meta.skipped.total
    assert 0.08 < meta.splits["val"].documents / 18000 < 0.12
    assert sorted(files_of(prepared)) == ["train.bin", "val.bin"]
    assert not list(prepared.parent.glob(".*"))  # nothing is left of the work


def test_the_number_of_workers_changes_no_byte(
    text: Path, small_tokenizer: Path, prepared: Path, tmp_path: Path
) -> None:
    prepare_dataset(dataset(text), small_tokenizer, tmp_path / "mine", num_workers=1)
    assert files_of(tmp_path / "mine") == files_of(prepared)
    assert (tmp_path / "mine" / "meta.json").read_text() == (prepared / "meta.json").read_text()


def test_shards_hold_the_same_tokens(text: Path, small_tokenizer: Path, prepared: Path, tmp_path: Path) -> None:
    meta = prepare_dataset(dataset(text, shard_tokens=400_000), small_tokenizer, tmp_path, num_workers=2)
    names = [shard.file for shard in meta.splits["train"].shards]
    assert len(names) > 2
    assert names[0] == "train-00000.bin"
    whole, sharded = TokenDataset.open(prepared, "train"), TokenDataset.open(tmp_path, "train")
    assert np.array_equal(whole.read(0, whole.num_tokens), sharded.read(0, sharded.num_tokens))
    assert (tmp_path / "val.bin").read_bytes() == (prepared / "val.bin").read_bytes()


def test_limits(text: Path, small_tokenizer: Path, prepared: Path, tmp_path: Path) -> None:
    config = dataset(text, max_tokens=50_000, max_bytes=3 * 2**20)
    meta = prepare_dataset(config, small_tokenizer, tmp_path, num_workers=1)
    tokens = meta.splits["train"].tokens
    assert 50_000 <= tokens < 51_000  # up to the end of a document
    whole, part = TokenDataset.open(prepared, "train"), TokenDataset.open(tmp_path, "train")
    assert np.array_equal(part.read(0, tokens), whole.read(0, tokens))
    assert part.read(tokens - 1, 1)[0] == part.eos_id
    assert meta.text_bytes == bytes_of_first(text, {split: index.documents for split, index in meta.splits.items()})


def bytes_of_first(text: Path, counts: dict[str, int]) -> int:
    """UTF-8 bytes of the first documents of each split."""
    lines = [line for path in sorted(text.iterdir()) for line in path.read_text(encoding="utf-8").splitlines()]
    documents = [json.loads(line)["text"].encode() for line in lines]
    sizes = {split: [len(one) for one in documents if split_of(one, 0.1, 0) == split] for split in counts}
    return sum(sum(sizes[split][:count]) for split, count in counts.items())


def test_bad_documents_are_reported(small_tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = ['{"text": "good"}', '{"text": ""}', '{"text": null}', '{"text": "\\ud800"}', '{"text": "%s"}' % ("x" * 200)]
    (tmp_path / "text.jsonl").write_text("\n".join(rows))
    config = dataset(tmp_path / "text.jsonl", val_fraction=0.0, max_document_bytes=100)
    meta = prepare_dataset(config, small_tokenizer, tmp_path / "out", num_workers=1)
    assert meta.splits.keys() == {"train"}
    assert meta.splits["train"].documents == 1
    assert meta.skipped.model_dump() == {"empty": 1, "null_text": 1, "invalid_utf8": 1, "too_large": 1}
    assert "skipped: 1 empty, 1 null_text, 1 invalid_utf8, 1 too_large" in capsys.readouterr().err


@pytest.mark.parametrize(("val_fraction", "warns"), [(0.1, True), (0.0, False)])
def test_a_validation_set_that_got_no_document_is_said(
    small_tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], val_fraction: float, warns: bool
) -> None:
    (tmp_path / "text.txt").write_text("a whole book " * 500)
    meta = prepare_dataset(
        dataset(tmp_path / "text.txt", val_fraction=val_fraction), small_tokenizer, tmp_path / "out", num_workers=1
    )
    assert "val" not in meta.splits or meta.splits["val"].tokens == 0
    said = " ".join(capsys.readouterr().err.split())
    assert ("warning: no document of 1 went to val" in said and "sample_by: line" in said) == warns


@pytest.mark.faults
def test_a_damaged_file_stops_with_its_name_and_leaves_no_dataset(small_tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text('{"text": "good"}\n{"text": "cut')
    with pytest.raises(ConfigError, match=r"text\.jsonl: .* is not JSON .* fetch it again"):
        prepare_dataset(dataset(tmp_path / "text.jsonl"), small_tokenizer, tmp_path / "out", num_workers=1)
    assert not (tmp_path / "out" / "meta.json").exists()


def test_nothing_usable(small_tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("x" * 2000)
    config = dataset(tmp_path / "text.txt", max_document_bytes=1000)
    with pytest.raises(ConfigError, match="no document for training; skipped: 1 too_large"):
        prepare_dataset(config, small_tokenizer, tmp_path / "out", num_workers=1)


class Misbehaving:
    """An encoder whose ids are as given, whatever the text."""

    name, eos_id, vocab_size = "wrong", 0, 400

    def __init__(self, ids: list[int]) -> None:
        self.encode_batch = lambda texts: [np.array(ids, dtype=np.uint32) for _ in texts]


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        ([1, 400], "gave id 400, but its vocabulary ends at 399"),
        ([1, 0, 2], "1 documents hold 2 end-of-document ids"),
    ],
)
def test_ids_are_checked_while_they_are_written(tmp_path: Path, ids: list[int], says: str) -> None:
    path = write_jsonl(tmp_path / "text.jsonl", ["one document"])
    part = corpus.slices_of(dataset(path), [path], 10**6)[0]
    with pytest.raises(ConfigError, match=says):
        encode_slice(part, dataset(path), Misbehaving(ids), tmp_path, "part")  # type: ignore[arg-type]
    assert not list(tmp_path.glob("*part*"))


def test_progress_in_a_log_says_rate_and_time_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LINE_INTERVAL_S", 0.0)
    with progress.PreparationProgress("mine", 4_000_000_000) as shown:
        shown.resume(1_000_000_000)
        shown.advance(1_000_000_000, 250_000_000)
    lines = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"mine: 50\.0% of 4\.00 GB, [\d.]+M tokens/s, \d+ min left", lines[-1])


# --- what happens to machines ----------------------------------------------------------------------------------------

PREPARE = """
import sys
from pathlib import Path
from mfubench.config import ConfigError
from mfubench.data.config import dataset_from_json
from mfubench.data.prepare import prepare_dataset
if __name__ == "__main__":
    try:
        prepare_dataset(dataset_from_json(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), 2)
    except ConfigError as error:
        sys.exit(f"ConfigError: {error}")
"""


def start(config: LocalDataset, tokenizer: Path, out: Path, script: Path, **options: object) -> subprocess.Popen[str]:
    script.write_text(PREPARE)
    command = [sys.executable, str(script), config.to_json(), str(tokenizer), str(out)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **options)  # type: ignore[call-overload]


@pytest.mark.faults
def test_two_at_once_then_killed_then_resumed(
    text: Path, small_tokenizer: Path, prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "mine"
    journal = tmp_path / ".mine.prepare" / "journal.json"
    first = start(dataset(text), small_tokenizer, out, tmp_path / "prepare.py")
    deadline = time.monotonic() + 300
    while not journal.exists():
        assert first.poll() is None and time.monotonic() < deadline, "ended before it could be killed"
        time.sleep(0.005)
    first.send_signal(signal.SIGSTOP)  # now it holds its lock for as long as this test needs
    with pytest.raises(ConfigError, match="another preparation is writing this dataset right now"):
        prepare_dataset(dataset(text), small_tokenizer, out, num_workers=1)
    first.kill()
    first.wait()
    assert not list(out.iterdir())
    done = json.loads(journal.read_text())["done_bytes"]
    assert 0 < done < sum(path.stat().st_size for path in text.iterdir())

    prepare_dataset(dataset(text), small_tokenizer, out, num_workers=1)
    assert "goes on after" in capsys.readouterr().err
    assert files_of(out) == files_of(prepared)


def test_a_changed_source_starts_afresh(text: Path, small_tokenizer: Path, tmp_path: Path) -> None:
    work = tmp_path / ".mine.prepare"
    work.mkdir()
    journal = {"fingerprint": "of something else", "group": 2, "splits": {"train": {"open_tokens": 0}, "val": {}}}
    (work / "journal.json").write_text(json.dumps(journal))
    (work / "train-00000.bin").write_bytes(b"of something else")
    meta = prepare_dataset(dataset(text / "0.jsonl"), small_tokenizer, tmp_path / "mine", num_workers=1)
    assert sum(split.documents for split in meta.splits.values()) + meta.skipped.total == 6000


@pytest.mark.faults
def test_a_disk_that_fills_is_said_and_resumed(
    text: Path, small_tokenizer: Path, prepared: Path, tmp_path: Path
) -> None:
    def limit() -> None:  # a file that may not grow fails in the same way as a disk without room
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))

    out = tmp_path / "mine"
    process = start(dataset(text), small_tokenizer, out, tmp_path / "prepare.py", preexec_fn=limit)
    _, errors = process.communicate()
    assert process.returncode == 1
    assert "no room left to write" in errors and "make room and run again" in errors
    assert "Traceback" not in errors
    assert not (out / "meta.json").exists()
    prepare_dataset(dataset(text), small_tokenizer, out, num_workers=2)
    assert files_of(out) == files_of(prepared)


@pytest.mark.faults
def test_too_little_room_is_known_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"about 1e\+06B tokens of uint32 need 4.4e\+06 GB .* are free"):
        disk.check_disk(10**15, "uint32", [tmp_path])
    disk.check_disk(10, "uint32", [tmp_path])


def test_too_little_room_for_downloads_is_known_before_the_first(tmp_path: Path) -> None:
    files = [corpus.SourceFile("data/train.parquet", 10**15, None, "0" * 40)]
    hub = HubCorpus(source="hub", dataset="owner/texts")
    with pytest.raises(ConfigError, match=r"1e\+06 GB are to be downloaded, .* keep_downloads: false"):
        disk.check_downloads(hub, files, 10**15, tmp_path)
    disk.check_downloads(hub, files, 1000, tmp_path)  # max_bytes leaves less to download


def test_expected_tokens_are_about_right(text: Path, small_tokenizer: Path, prepared: Path) -> None:
    config = dataset(text / "2.jsonl")
    path = text / "2.jsonl"
    size = path.stat().st_size
    first = corpus.slices_of(config, [path], 10**6)[0]
    expected = disk.expected_tokens(first, size, config, load_encoder(small_tokenizer))
    exact = sum(
        len(ids) + 1 for ids in load_encoder(small_tokenizer).encode_batch(make_documents(6000, seed=2, words=100))
    )
    assert exact <= expected < 1.2 * exact


@pytest.mark.faults
def test_a_killed_parent_takes_its_workers_along(text: Path, small_tokenizer: Path, tmp_path: Path) -> None:
    process = start(dataset(text), small_tokenizer, tmp_path / "mine", tmp_path / "prepare.py", start_new_session=True)
    deadline = time.monotonic() + 300
    while not list((tmp_path / ".mine.prepare").glob("part-*")):
        assert process.poll() is None and time.monotonic() < deadline, "ended before it could be killed"
        time.sleep(0.005)
    process.kill()
    process.wait()
    while group_is_alive(process.pid):
        assert time.monotonic() < deadline, "workers outlive their parent"
        time.sleep(0.05)


def group_is_alive(group: int) -> bool:
    """Whether the process group has a member that has not ended."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, of = stat.read_text().rsplit(")", 1)[1].split()[:3]
        except OSError:
            continue
        if int(of) == group and state != "Z":
            return True
    return False


@pytest.mark.faults
def test_a_killed_worker_is_said(text: Path, small_tokenizer: Path, tmp_path: Path) -> None:
    process = start(dataset(text), small_tokenizer, tmp_path / "mine", tmp_path / "prepare.py")
    deadline = time.monotonic() + 300
    while not list((tmp_path / ".mine.prepare").glob("part-*")):
        assert process.poll() is None and time.monotonic() < deadline, "ended before a worker could be killed"
        time.sleep(0.005)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    _, errors = process.communicate()
    assert process.returncode == 1
    assert "a worker process was killed" in errors


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(2, "uint16"), (65_535, "uint16"), (65_537, "uint32"), (151_669, "uint32")]
)
def test_token_dtype(vocab_size: int, dtype: str) -> None:
    assert token_dtype(vocab_size) == dtype
    assert np.iinfo(dtype).max >= vocab_size - 1
