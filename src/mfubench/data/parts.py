"""One worker's share of a preparation: a slice of text in, two files of token ids (train and val) out."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import IO

import numpy as np
from pydantic import ValidationError

from mfubench.config import ConfigError, Strict
from mfubench.data.config import DatasetConfig
from mfubench.data.corpus import Slice
from mfubench.data.disk import expected_tokens
from mfubench.data.documents import read_documents
from mfubench.data.encoder import Encoder, load_encoder
from mfubench.data.meta import SplitName, TokenDtype
from mfubench.run_log import write_text_atomically

BATCH_BYTES = 2**20  # text that is encoded and written at a time; what bounds a worker's memory


class Part(Strict):
    """What a finished slice holds; stored beside its token files, so that a later run finds it again."""

    tokens: dict[SplitName, int]
    documents: dict[SplitName, int]
    skipped: dict[str, int]
    text_bytes: int
    train_bytes: list[int]  # UTF-8 bytes of each training document, where max_tokens may leave some of them out
    size: int  # bytes of the slice, as stored


def token_dtype(vocab_size: int) -> TokenDtype:
    """Two bytes a token where every id fits, four otherwise."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


def part_path(folder: Path, name: str, split: SplitName) -> Path:
    return folder / f"{name}.{split}.bin"


def read_part(folder: Path, name: str) -> Part | None:
    """The part that an earlier run finished: its .json, written last, says that its token files are whole."""
    try:
        return Part.model_validate_json((folder / f"{name}.json").read_text())
    except (FileNotFoundError, ValidationError):
        return None


def encode_slice(source: Slice, config: DatasetConfig, encoder: Encoder, folder: Path, name: str) -> Part:
    """Write the token files of a slice; its .json last, so that a part with one is complete."""
    finished = read_part(folder, name)
    if finished is not None:
        return finished
    skipped: Counter[str] = Counter()
    tokens: dict[SplitName, int] = {"train": 0, "val": 0}
    documents: dict[SplitName, int] = {"train": 0, "val": 0}
    text_bytes, train_bytes = 0, list[int]()
    with contextlib.ExitStack() as stack:
        files = {split: stack.enter_context(_atomic(part_path(folder, name, split))) for split in tokens}
        for texts, chosen, sizes in _batches(source, config, skipped):
            text_bytes += sum(sizes)
            if config.max_tokens is not None:
                train_bytes += [size for size, of in zip(sizes, chosen, strict=True) if of == "train"]
            ids = encoder.encode_batch(texts)
            for split in tokens:
                mine = [array for array, of in zip(ids, chosen, strict=True) if of == split]
                if mine:
                    tokens[split] += _write(mine, encoder, files[split])
                    documents[split] += len(mine)
    part = Part(
        tokens=tokens,
        documents=documents,
        skipped=dict(skipped),
        text_bytes=text_bytes,
        train_bytes=train_bytes,
        size=source.size,
    )
    write_text_atomically(folder / f"{name}.json", part.model_dump_json())
    return part


def _batches(
    source: Slice, config: DatasetConfig, skipped: Counter[str]
) -> Iterator[tuple[list[str], list[SplitName], list[int]]]:
    """Documents in batches of about BATCH_BYTES: their texts, the split of each, and the size of each in bytes."""
    texts: list[str] = []
    chosen: list[SplitName] = []
    sizes: list[int] = []
    total = 0
    for text, utf8 in read_documents(source, config, config.max_document_bytes, skipped):
        texts.append(text)
        chosen.append(split_of(utf8, config.val_fraction, config.seed))
        sizes.append(len(utf8))
        total += len(utf8)
        if total >= BATCH_BYTES:
            yield texts, chosen, sizes
            texts, chosen, sizes, total = [], [], [], 0
    if texts:
        yield texts, chosen, sizes


def split_of(utf8: bytes, val_fraction: float, seed: int) -> SplitName:
    """By the document's content alone, so that copies of one document never lie on both sides."""
    if val_fraction == 0:
        return "train"
    digest = blake2b(utf8, digest_size=8, key=str(seed).encode()).digest()
    return "val" if int.from_bytes(digest, "big") < val_fraction * 2**64 else "train"


def _write(ids: Sequence[np.ndarray], encoder: Encoder, file: IO[bytes]) -> int:
    """Append documents, each with its end; returns the number of tokens."""
    end = np.array([encoder.eos_id], dtype=ids[0].dtype)
    joined = np.concatenate([array for document in ids for array in (document, end)])
    if (largest := int(joined.max())) >= encoder.vocab_size:
        raise ConfigError(
            f"tokenizer {encoder.name}: gave id {largest}, but its vocabulary ends at {encoder.vocab_size - 1}; "
            "get the tokenizer again"
        )
    if (ends := int(np.count_nonzero(joined == encoder.eos_id))) != len(ids):
        raise ConfigError(
            f"tokenizer {encoder.name}: {len(ids)} documents hold {ends} end-of-document ids ({encoder.eos_id}), "
            "so they could not be told apart; choose another eos_token"
        )
    file.write(joined.astype(token_dtype(encoder.vocab_size), copy=False).tobytes())
    return len(joined)


@contextlib.contextmanager
def _atomic(path: Path) -> Iterator[IO[bytes]]:
    """A file that appears under its name only when it is whole; of a failed attempt nothing stays."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            yield file
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


# --- inside a worker process -----------------------------------------------------------------------------------------

_encoder: Encoder
_config: DatasetConfig
_folder: Path


def start_worker(config: DatasetConfig, tokenizer_dir: Path, folder: Path) -> None:
    """Load the tokenizer once a process; end the process with its parent, even if that is killed."""
    global _encoder, _config, _folder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    threading.Thread(target=_end_with_parent, daemon=True).start()
    gc.disable()  # parsing a vocabulary makes half a million objects, and none of them is garbage
    _encoder, _config, _folder = load_encoder(tokenizer_dir), config, folder
    gc.enable()
    gc.freeze()
    atexit.register(_end_at_once)


def get_ready() -> None:
    """A task that does nothing: its process is one that has loaded the tokenizer."""


def _end_at_once() -> None:
    """Leave a vocabulary's half a million objects to the kernel: taking them down in order takes half a second."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def work(source: Slice, name: str) -> Part:
    return encode_slice(source, _config, _encoder, _folder, name)


def work_sample(source: Slice, total_bytes: int) -> int:
    return expected_tokens(source, total_bytes, _config, _encoder)


def _end_with_parent() -> None:
    import multiprocessing

    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
