"""Text file to token file: mfubench beside the usual route, in one run, on the same text, with the same ids.

    python benchmarks/prepare_data.py [--quick] [--json] [--text FILE.jsonl] [--tokenizers llama3,qwen3]

Usual route: datasets' json loader, `map(batched=True, num_proc=2)`, and a memory-mapped writer, with the Hugging Face
tokenizer for LLaMA-2, LLaMA-3 and Qwen3 and tiktoken for GPT-2. Both routes run as a whole, from a jsonl file to a .bin
of token ids with an end-of-document id after each document, on two processes; imports are timed in neither. The two
files must be equal byte for byte.

in_memory_fraction: tokens/s of mfubench's whole pipeline over those of its encoder alone, on texts that already lie in
the memory of two processes.

Text: 220 MB of the Python source of the packages that are installed here (distinct files, nothing repeated), or --text.
--quick takes 20 MB, of which the usual route gets the first 6 MB where it is slow (its ids are then compared with the
beginning of ours): start-up weighs more in such figures, those to quote are the full run's.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import random
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import real_tokenizers

from mfubench.data.config import LocalDataset
from mfubench.data.encoder import load_encoder
from mfubench.data.meta import TokenizerMeta, read_meta
from mfubench.data.prepare import prepare_dataset
from mfubench.machine import cpu_name

PROCESSES = 2
FULL_BYTES, QUICK_BYTES = 220 * 10**6, 20 * 10**6
QUICK_USUAL_BYTES = {"gpt2": QUICK_BYTES, "llama2": 6 * 10**6, "llama3": 6 * 10**6, "qwen3": 6 * 10**6}


def write_text(path: Path, size: int) -> int:
    """A jsonl file of about `size` bytes of text; returns the bytes of text in it."""
    root = Path(sysconfig.get_paths()["purelib"])
    files = sorted(root.rglob("*.py"))
    random.Random(0).shuffle(files)  # so that a part of it is as varied as the whole
    total = 0
    with path.open("w", encoding="utf-8") as out:
        for file in files:
            try:
                text = file.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue
            if text:
                out.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
                total += len(text.encode())
            if total >= size:
                return total
    return total


def first_lines(text: Path, size: int, out: Path) -> Path:
    """The first lines of a file, about `size` bytes."""
    with text.open("rb") as lines, out.open("wb") as part:
        while part.tell() < size and (line := lines.readline()):
            part.write(line)
    return out


def ours(text: Path, tokenizer: Path, out: Path) -> float:
    """Seconds of mfubench's pipeline; leaves out/train.bin."""
    config = LocalDataset(source="local", paths=(str(text),), tokenizer=tokenizer.name, val_fraction=0.0)
    t0 = time.perf_counter()
    prepare_dataset(config, tokenizer, out, PROCESSES)
    return time.perf_counter() - t0


def usual(text: Path, tokenizer: Path, out: Path) -> float:
    """Seconds of the usual route; leaves out/train.bin."""
    import datasets
    import tiktoken
    import transformers

    datasets.disable_progress_bars()
    meta = read_meta(TokenizerMeta, tokenizer)
    dtype = np.uint16 if meta.vocab_size <= 2**16 else np.uint32
    out.mkdir()
    t0 = time.perf_counter()
    tokenize: Callable[[dict[str, list[str]]], dict[str, Any]]
    if tokenizer.name == "gpt2":
        encoding = tiktoken.get_encoding("gpt2")

        def tokenize(batch: dict[str, list[str]]) -> dict[str, Any]:
            ids = [[*encoding.encode_ordinary(text), encoding.eot_token] for text in batch["text"]]
            return {"ids": ids, "len": [len(one) for one in ids]}
    else:
        # split_special_tokens: text that spells a special token is text, in both routes
        fast = transformers.AutoTokenizer.from_pretrained(str(tokenizer), split_special_tokens=True)

        def tokenize(batch: dict[str, list[str]]) -> dict[str, Any]:
            encoded = fast(batch["text"], add_special_tokens=False, return_attention_mask=False)["input_ids"]
            ids = [[*one, meta.eos_id] for one in encoded]
            return {"ids": ids, "len": [len(one) for one in ids]}

    rows = datasets.load_dataset("json", data_files=str(text), split="train", cache_dir=str(out / "cache"))
    rows = rows.map(tokenize, batched=True, remove_columns=["text"], num_proc=PROCESSES)
    tokens = int(np.sum(rows["len"], dtype=np.uint64))
    memory = np.memmap(out / "train.bin", dtype=dtype, mode="w+", shape=(tokens,))
    position, batches = 0, min(1024, len(rows))
    for i in range(batches):
        batch = rows.shard(num_shards=batches, index=i, contiguous=True).with_format("numpy")
        ids = np.concatenate(batch["ids"])
        memory[position : position + len(ids)] = ids
        position += len(ids)
    memory.flush()
    return time.perf_counter() - t0


def encode_share(text: Path, tokenizer: Path, share: int, ready: Any, results: Any) -> None:
    """In-memory speed: every PROCESSES-th document, loaded before the clock starts."""
    encoder = load_encoder(tokenizer)
    with text.open(encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for i, line in enumerate(lines) if i % PROCESSES == share]
    batches: list[list[str]] = [[]]
    for one in texts:
        if sum(map(len, batches[-1])) > 2**20:
            batches.append([])
        batches[-1].append(one)
    ready.wait()
    t0 = time.perf_counter()
    tokens = sum(len(ids) + 1 for batch in batches for ids in encoder.encode_batch(batch))
    results.put((tokens, time.perf_counter() - t0))


def in_memory(text: Path, tokenizer: Path) -> float:
    """Tokens/s of the encoder alone on PROCESSES processes."""
    context = multiprocessing.get_context("spawn")
    ready, results = context.Barrier(PROCESSES), context.Queue()
    workers = [
        context.Process(target=encode_share, args=(text, tokenizer, share, ready, results))
        for share in range(PROCESSES)
    ]
    for worker in workers:
        worker.start()
    shares = [results.get() for _ in workers]
    for worker in workers:
        worker.join()
    return sum(tokens for tokens, _ in shares) / max(seconds for _, seconds in shares)


def usual_in_own_process(text: Path, tokenizer: Path, out: Path) -> float:
    """A fresh interpreter, so that neither route meets the other's threads and caches."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=_put_usual, args=(text, tokenizer, out, results))
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(f"the usual route failed on {tokenizer.name} (exit code {process.exitcode})")
    return results.get()


def _put_usual(text: Path, tokenizer: Path, out: Path, results: Any) -> None:
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 2)  # its progress bars and warnings
        results.put(usual(text, tokenizer, out))


def compare(text: Path, usual_text: Path, tokenizer: Path, folder: Path) -> dict[str, Any]:
    """One row of the result; raises SystemExit where the two routes differ in a single id."""
    ours_s = ours(text, tokenizer, folder / "ours")
    usual_s = usual_in_own_process(usual_text, tokenizer, folder / "usual")
    in_memory_tokens_per_s = in_memory(text, tokenizer)
    meta = read_meta(TokenizerMeta, tokenizer)
    dtype = np.uint16 if meta.vocab_size <= 2**16 else np.uint32
    mine, theirs = (np.memmap(folder / route / "train.bin", dtype=dtype, mode="r") for route in ("ours", "usual"))
    if not np.array_equal(mine[: len(theirs)], theirs) or (text == usual_text and len(mine) != len(theirs)):
        raise SystemExit(f"{tokenizer.name}: the two routes gave different token files")
    tokens_per_s, usual_tokens_per_s = len(mine) / ours_s, len(theirs) / usual_s
    return {
        "tokenizer": tokenizer.name,
        "encoder": meta.encoder,
        "tokens": len(mine),
        "usual_tokens": len(theirs),
        "tokens_per_s": tokens_per_s,
        "usual_tokens_per_s": usual_tokens_per_s,
        "ratio": tokens_per_s / usual_tokens_per_s,
        "in_memory_tokens_per_s": in_memory_tokens_per_s,
        "in_memory_fraction": tokens_per_s / in_memory_tokens_per_s,
        "same_ids": True,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="less text, about a minute")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    parser.add_argument("--text", type=Path, help="a jsonl file with a `text` key instead of installed source")
    parser.add_argument("--tokenizers", default=",".join(real_tokenizers.NAMES))
    arguments = parser.parse_args()
    names = arguments.tokenizers.split(",")

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        try:
            tokenizers = real_tokenizers.lay_out(folder / "tokenizers", names)
        except real_tokenizers.Unavailable as reason:
            raise SystemExit(f"the real tokenizers cannot be had: {reason}") from None
        os.environ["TIKTOKEN_CACHE_DIR"] = str(real_tokenizers.tiktoken_cache())
        text = arguments.text or folder / "text.jsonl"
        if arguments.text is None:
            write_text(text, QUICK_BYTES if arguments.quick else FULL_BYTES)
        rows = []
        for name in names:
            (folder / name).mkdir()
            usual_text = text
            if arguments.quick and QUICK_USUAL_BYTES[name] < QUICK_BYTES:
                usual_text = first_lines(text, QUICK_USUAL_BYTES[name], folder / name / "text.jsonl")
            rows.append(compare(text, usual_text, tokenizers[name], folder / name))
            if not arguments.json:
                print_row(rows[-1])
        if arguments.json:
            measured = {"text_bytes": text.stat().st_size, "processes": PROCESSES, "results": rows}
            print(json.dumps(describe_machine() | measured, indent=2))


def describe_machine() -> dict[str, Any]:
    """What the figures belong to."""
    packages = ("tiktoken", "tokenizers", "transformers", "datasets", "numpy")
    return {
        "command": " ".join(["python", "benchmarks/prepare_data.py", *sys.argv[1:]]),
        "processor": cpu_name(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in packages},
    }


def print_row(row: dict[str, Any]) -> None:
    print(
        f"{row['tokenizer']:8} {row['tokens'] / 1e6:7.1f}M tokens  {row['tokens_per_s'] / 1e6:6.2f}M tokens/s  usual "
        f"{row['usual_tokens_per_s'] / 1e6:5.2f}M  ratio {row['ratio']:5.2f}  in memory "
        f"{row['in_memory_tokens_per_s'] / 1e6:6.2f}M  fraction {row['in_memory_fraction']:.2f}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
