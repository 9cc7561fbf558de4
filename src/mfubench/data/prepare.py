"""Text to token files: sharded, resumable, in constant memory, and the same bytes whatever the number of workers.

Slices of the corpus (corpus.py) are encoded by worker processes into parts (parts.py), and the parts are appended in
order to shards (assembly.py). All of that happens in a work folder; the dataset folder gets its files at the end, and
its meta.json last of all, so that a folder with a meta.json is complete.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import multiprocessing
import os
import shutil
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from mfubench.config import ConfigError
from mfubench.data import corpus, parts
from mfubench.data.assembly import Assembly
from mfubench.data.config import DatasetConfig, HubCorpus
from mfubench.data.corpus import Slice, SourceFile
from mfubench.data.disk import check_disk, check_downloads
from mfubench.data.encoder import read_tokenizer
from mfubench.data.meta import MORE_VALIDATION, DatasetMeta, DatasetTokenizer, SplitName, TokenizerMeta, write_meta
from mfubench.data.progress import PreparationProgress

SLICES_AHEAD = 2  # a worker: enough to keep it busy, few enough for the disk


@dataclass(frozen=True)
class Task:
    """A slice to encode, and where the plan goes on after it."""

    name: str
    source: Slice
    after: tuple[int, int]  # group, slice


def prepare_dataset(
    config: DatasetConfig, tokenizer_dir: Path, out_dir: Path, num_workers: int, work_dir: Path | None = None
) -> DatasetMeta:
    """Write the dataset folder `out_dir`; raises ConfigError with what to do.

    work_dir: where unfinished work is kept, beside `out_dir` by default; a call after a kill goes on from it.
    """
    work = (work_dir or out_dir.parent) / f".{out_dir.name}.prepare"
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        work.mkdir(parents=True, exist_ok=True)
        with _exclusive(out_dir), _exclusive(work):
            meta = _prepare(config, tokenizer_dir, out_dir, num_workers, work)
            shutil.rmtree(work)
            return meta
    except BrokenProcessPool:
        raise ConfigError(
            f"{out_dir}: a worker process was killed, most likely for lack of memory: run again with fewer workers; "
            "what is done is kept"
        ) from None
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise ConfigError(
            f"{work}: no room left to write ({error.strerror}); make room and run again, what is done is kept"
        ) from None


def _prepare(config: DatasetConfig, tokenizer_dir: Path, out_dir: Path, num_workers: int, work: Path) -> DatasetMeta:
    tokenizer, _ = read_tokenizer(tokenizer_dir)
    dtype = parts.token_dtype(tokenizer.vocab_size)
    files = corpus.list_files(config)
    splits: list[SplitName] = ["train", "val"] if config.val_fraction else ["train"]
    fingerprint = _fingerprint(config, tokenizer, files)
    assembly = Assembly.resume(work, fingerprint, splits, dtype, config.shard_tokens, tokenizer.eos_id)
    total = min(sum(file.size for file in files), config.max_bytes or 2**63)
    if isinstance(config, HubCorpus):
        check_downloads(config, files, total, work)
    num_workers = min(num_workers, -(-total // corpus.slice_size(total)) or 1)  # no more than there are slices

    with (
        PreparationProgress(out_dir.name, total) as progress,
        _workers(config, tokenizer_dir, num_workers, work) as workers,
    ):
        if assembly.journal.done_bytes:
            progress.note(f"goes on after {assembly.journal.done_bytes / 1e9:.3g} GB that an earlier run has done")
            progress.resume(assembly.journal.done_bytes)
        plan = _plan(config, files, total, assembly)
        first = next(plan, None)
        if first is not None:
            tokens = workers.submit(parts.work_sample, first.source, total - assembly.journal.done_bytes).result()
            if config.max_tokens is not None:
                tokens = min(tokens, config.max_tokens - assembly.journal.splits["train"].tokens)
            check_disk(tokens, dtype, [work, out_dir])
            _assemble(chain([first], plan), workers, SLICES_AHEAD * num_workers, assembly, progress, config.max_tokens)

        meta = DatasetMeta(
            name=out_dir.name,
            source=corpus.describe(config, files),
            config=config.model_dump(mode="json"),
            tokenizer=DatasetTokenizer(**tokenizer.model_dump(include=set(DatasetTokenizer.model_fields))),
            dtype=dtype,
            splits=assembly.finish(),
            text_bytes=assembly.journal.text_bytes,
            skipped=assembly.skipped(),
        )
        _require_documents(meta)
        assembly.publish(meta.splits, out_dir)
        write_meta(meta, out_dir)
        progress.note(_summary(meta, progress.tokens_per_s))
        if config.val_fraction and not meta.splits["val"].tokens:
            progress.note(
                f"warning: no document of {meta.splits['train'].documents:,} went to val, so that no run can evaluate "
                f"on it; {MORE_VALIDATION}"
            )
    return meta


def _fingerprint(config: DatasetConfig, tokenizer: TokenizerMeta, files: list[SourceFile]) -> str:
    """Of everything that decides the bytes; a journal of another one is of no use."""
    digest = hashlib.sha256(f"{config.to_json()}\n{tokenizer.sha256}\n{tokenizer.encoder}\n".encode())
    for file in files:
        changed = file.path.stat().st_mtime_ns if file.path is not None else ""
        digest.update(f"{file.name}\t{file.size}\t{changed}\n".encode())
    return digest.hexdigest()


def _plan(config: DatasetConfig, files: list[SourceFile], total: int, assembly: Assembly) -> Iterator[Task]:
    """The slices that are still to be done; the files of the next group are fetched while one is worked on."""
    journal = assembly.journal
    size = corpus.slice_size(total)
    groups = corpus.group_files(files, size)
    planned = journal.done_bytes
    first_group, first_slice = journal.group, journal.slice
    downloads = None if not isinstance(config, HubCorpus) or config.keep_downloads else assembly.folder / "downloads"

    def fetch(number: int) -> list[Path]:
        return [corpus.fetch(config, file, downloads) for file in groups[number]]

    with ThreadPoolExecutor(1) as fetcher:
        ahead: Future[list[Path]] | None = None
        for number in range(first_group, len(groups)):
            if planned >= total:
                break
            paths = ahead.result() if ahead else fetch(number)
            ahead = fetcher.submit(fetch, number + 1) if number + 1 < len(groups) else None
            slices = corpus.slices_of(config, paths, size)
            for i in range(first_slice if number == first_group else 0, len(slices)):
                if planned >= total:
                    break
                planned += slices[i].size
                after = (number, i + 1) if i + 1 < len(slices) else (number + 1, 0)
                yield Task(f"part-{number:06d}-{i:06d}", slices[i], after)


@contextmanager
def _workers(config: DatasetConfig, tokenizer_dir: Path, num_workers: int, work: Path) -> Iterator[ProcessPoolExecutor]:
    """Worker processes that have loaded the tokenizer."""
    context = multiprocessing.get_context("spawn")  # a fork would copy this process's threads in unknown states
    pool = ProcessPoolExecutor(num_workers, context, parts.start_worker, (config, tokenizer_dir, work))
    for _ in range(num_workers):  # the pool starts a process only when a task finds none idle: now, all side by side
        pool.submit(parts.get_ready)
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _assemble(
    plan: Iterator[Task],
    workers: ProcessPoolExecutor,
    ahead: int,
    assembly: Assembly,
    progress: PreparationProgress,
    max_tokens: int | None,
) -> None:
    """Keep the workers busy and append their parts in the order of the plan."""
    pending: deque[tuple[Task, Future[parts.Part]]] = deque()
    train = assembly.journal.splits["train"]
    while max_tokens is None or train.tokens < max_tokens:
        while len(pending) <= ahead and (task := next(plan, None)) is not None:
            pending.append((task, workers.submit(parts.work, task.source, task.name)))
        if not pending:
            return
        task, future = pending.popleft()
        part = future.result()
        assembly.append(part, task.name, task.after, max_tokens)
        progress.advance(part.size, sum(part.tokens.values()))
        downloads = assembly.folder / "downloads"
        if task.after[1] == 0 and downloads.is_dir():
            for piece in task.source.pieces:
                piece.path.unlink(missing_ok=True)


def _require_documents(meta: DatasetMeta) -> None:
    if not meta.splits["train"].tokens:
        skipped = ", ".join(f"{count} {reason}" for reason, count in meta.skipped if count) or "none"
        raise ConfigError(
            f"dataset {meta.name}: no document for training; skipped: {skipped}. Is text_column right? (A text file is "
            "one document unless sample_by: line; documents above max_document_bytes are skipped)"
        )


def _summary(meta: DatasetMeta, tokens_per_s: float) -> str:
    counts = ", ".join(
        f"{split}: {index.tokens:,} tokens in {index.documents:,} documents and {len(index.shards)} shard(s)"
        for split, index in meta.splits.items()
    )
    skipped = ", ".join(f"{count:,} {reason}" for reason, count in meta.skipped if count) or "none"
    return f"{counts}; {meta.dtype}; documents skipped: {skipped}; {tokens_per_s / 1e6:.2f}M tokens/s"


@contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    """Hold a lock on a folder; it is released with the process, however that ends."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise ConfigError(
            f"{folder}: another preparation is writing this dataset right now; wait for it, or end it and run again "
            "(it will go on where that one stopped)"
        ) from None
    finally:
        os.close(handle)
