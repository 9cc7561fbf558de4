"""The hub: found out once and quickly, mirrors and caches honoured, and each fault with a way out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from data.fake_hub import COMMIT, FakeHub, serve
from data.texts import make_documents, write_jsonl

from mfubench.data.meta import DatasetMeta, TokenizerMeta, read_meta
from mfubench.data.reader import TokenDataset

CODE = """
import json, sys
from pathlib import Path
from mfubench.config import ConfigError
from mfubench.data.config import dataset_from_json, tokenizer_from_json
if __name__ == "__main__":
    what, configs, out, tokenizer = sys.argv[1:]
    said = []
    for config in json.loads(configs):
        try:
            if what == "tokenizer":
                from mfubench.data.tokenizer import get_tokenizer
                get_tokenizer(tokenizer_from_json(config), Path(out))
            else:
                from mfubench.data.prepare import prepare_dataset
                prepare_dataset(dataset_from_json(config), Path(tokenizer), Path(out), 1)
            said.append("fine")
        except ConfigError as error:
            said.append(str(error))
    print(json.dumps(said))
"""


def run(
    what: str, configs: list[str], out: Path, home: Path, endpoint: str, tokenizer: Path | str = "", **env: str
) -> list[str]:
    """What became of each entry, in a fresh process, since the client libraries read their settings once."""
    script = home.parent / "run.py"
    script.write_text(CODE)
    command = [sys.executable, str(script), what, json.dumps(configs), str(out), str(tokenizer)]
    settings = {"HF_HOME": str(home), "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_XET": "1", **env}
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    done = subprocess.run(command, env=inherited | settings, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def tokenizer_files(small_tokenizer: Path) -> dict[str, bytes]:
    return {name: (small_tokenizer / name).read_bytes() for name in ("tokenizer.json", "tokenizer_config.json")}


def test_a_tokenizer_from_a_mirror_and_then_from_the_cache(small_tokenizer: Path, tmp_path: Path) -> None:
    config = '{"kind": "hub", "repo": "owner/small"}'
    home = tmp_path / "home"
    with serve(FakeHub({"owner/small": tokenizer_files(small_tokenizer)})) as hub:
        assert run("tokenizer", [config], tmp_path / "first", home, hub.endpoint) == ["fine"]
    meta = read_meta(TokenizerMeta, tmp_path / "first")
    assert meta.sha256 == read_meta(TokenizerMeta, small_tokenizer).sha256
    assert (meta.kind, meta.source) == ("hub", "owner/small@main")

    # the mirror is gone: the cache serves, in offline mode and without it
    assert run("tokenizer", [config], tmp_path / "second", home, hub.endpoint) == ["fine"]
    assert run("tokenizer", [config], tmp_path / "third", home, hub.endpoint, HF_HUB_OFFLINE="1") == ["fine"]
    assert read_meta(TokenizerMeta, tmp_path / "third").sha256 == meta.sha256


def test_no_hub_is_found_out_quickly(tmp_path: Path) -> None:
    config = '{"kind": "hub", "family": "llama2"}'
    started = time.monotonic()
    # 192.0.2.1 is reserved for documentation: packets to it go nowhere, so that only a timeout ends the waiting
    (said,) = run("tokenizer", [config], tmp_path / "out", tmp_path / "home", "http://192.0.2.1")
    assert time.monotonic() - started < 45  # the client library's own retries take a minute
    assert "http://192.0.2.1 does not answer" in said
    assert "Ways out: a mirror (HF_ENDPOINT), a cache filled elsewhere (HF_HOME), or local files" in said
    (said,) = run("tokenizer", [config], tmp_path / "out", tmp_path / "home", "http://192.0.2.1", HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE is set" in said


def test_faults_of_a_repository(small_tokenizer: Path, tmp_path: Path) -> None:
    files = tokenizer_files(small_tokenizer)
    cut = {**files, "tokenizer.json": files["tokenizer.json"][:-1000]}
    repositories = {"owner/small": files, "owner/cut": cut, "owner/empty": {}, "meta-llama/Llama-2-7b-hf": files}
    expectations = {
        '{"kind": "hub", "family": "llama2"}': "is gated. Accept its licence at http://127.0.0.1",
        '{"kind": "hub", "repo": "owner/none"}': "no such repository",
        '{"kind": "hub", "repo": "owner/empty"}': "no such file at this revision",
        '{"kind": "hub", "repo": "owner/small", "revision": "v9"}': "has no revision 'v9'",
        '{"kind": "hub", "repo": "owner/cut"}': "tokenizer.json is damaged or none",
        '{"kind": "hub", "repo": "owner/small", "family": "gpt2", "revision": "main"}': "vocab_size 400, but 50257",
    }
    with serve(FakeHub(repositories, gated={"meta-llama/Llama-2-7b-hf"})) as hub:
        said = run("tokenizer", list(expectations), tmp_path / "out", tmp_path / "home", hub.endpoint)
    for expected, message in zip(expectations.values(), said, strict=True):
        assert expected in message
    assert not (tmp_path / "out" / "meta.json").exists()


def dataset_files(folder: Path) -> dict[str, bytes]:
    files = {}
    for i in range(2):
        path = write_jsonl(folder / "part.jsonl", make_documents(50, seed=i))
        files[f"data/train-{i:05d}-of-00002.jsonl"] = path.read_bytes()
    files["data/validation-00000-of-00001.jsonl"] = b'{"text": "not for training"}\n'
    return files


@pytest.mark.parametrize("keep", ["true", "false"])
def test_a_dataset_from_a_mirror(small_tokenizer: Path, tmp_path: Path, keep: str) -> None:
    config = f'{{"source": "hub", "tokenizer": "small", "dataset": "owner/texts", "keep_downloads": {keep}}}'
    files = dataset_files(tmp_path)
    home = tmp_path / "home"
    with serve(FakeHub({"datasets/owner/texts": files})) as hub:
        assert run("dataset", [config], tmp_path / "out", home, hub.endpoint, small_tokenizer) == ["fine"]
    meta = read_meta(DatasetMeta, tmp_path / "out")
    assert sum(split.documents for split in meta.splits.values()) + meta.skipped.total == 100
    assert (meta.source["dataset"], meta.source["commit"], meta.source["files"]) == ("owner/texts", COMMIT, 2)
    kept = list(home.rglob("train-0000*"))
    assert bool(kept) == (keep == "true")
    assert not list(tmp_path.glob(".out*"))
    if keep == "true":  # once more from the cache, with the mirror gone
        run("dataset", [config], tmp_path / "again", home, hub.endpoint, small_tokenizer, HF_HUB_OFFLINE="1")
        first, second = (TokenDataset.open(tmp_path / name, "train") for name in ("out", "again"))
        assert first.read(0, first.num_tokens).tolist() == second.read(0, second.num_tokens).tolist()
        kept[0].unlink()
        (said,) = run("dataset", [config], tmp_path / "third", home, hub.endpoint, small_tokenizer, HF_HUB_OFFLINE="1")
        assert "the cache holds 1 of 2 files of split 'train'" in said


def test_faults_of_a_dataset(small_tokenizer: Path, tmp_path: Path) -> None:
    repositories = {"datasets/owner/texts": dataset_files(tmp_path), "datasets/owner/closed": {}}
    expectations = {
        '"dataset": "owner/none"': "no such dataset",
        '"dataset": "owner/closed"': "is gated. Accept its licence at http://127.0.0.1",
        '"dataset": "owner/texts", "split": "tets"': "has no split 'tets' (found: train, validation)",
        '"dataset": "owner/texts", "text_column": "content"': "no text column 'content' (found: text)",
    }
    with serve(FakeHub(repositories, gated={"datasets/owner/closed"})) as hub:
        configs = [f'{{"source": "hub", "tokenizer": "small", {options}}}' for options in expectations]
        said = run("dataset", configs, tmp_path / "out", tmp_path / "home", hub.endpoint, small_tokenizer)
    for expected, message in zip(expectations.values(), said, strict=True):
        assert expected in message
