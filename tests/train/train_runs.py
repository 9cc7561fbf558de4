"""A tiny dataset, a tiny run, and ways to start it: in this process, by the launcher, or many in one set of ranks."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from mfubench.config import ModelConfig, RunConfig
from mfubench.run_log import RunLog, read_run_log

VOCABULARY = 97
SCRIPTS = Path(__file__).parent / "scripts"
ACCUMULATE = {"weight_gradient": "accumulate"}  # kernels: matmuls add to whole gradients themselves


def write_dataset(folder: Path, train_tokens: int = 20_000, val_tokens: int = 2_000, seed: int = 0) -> Path:
    """A prepared dataset of tokens that are worth learning: noisy arithmetic progressions."""
    generator = np.random.default_rng(seed)
    splits = {}
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", train_tokens), ("val", val_tokens)):
        tokens = (np.arange(count) * 3 + generator.integers(0, 5, count)) % VOCABULARY
        stored = tokens.astype(np.uint16).tobytes()
        (folder / f"{split}.bin").write_bytes(stored)
        shard = {"file": f"{split}.bin", "tokens": count, "sha256": hashlib.sha256(stored).hexdigest()}
        splits[split] = {"tokens": count, "documents": 1, "shards": [shard]}
    tokenizer = {"name": "none", "sha256": "0" * 64, "vocab_size": VOCABULARY, "eos_id": 0, "encoder": "tokenizers"}
    meta = {
        "schema_version": 1,
        "name": "tiny",
        "source": {"name": "arithmetic progressions"},
        "config": {},
        "tokenizer": tokenizer,
        "dtype": "uint16",
        "splits": splits,
        "text_bytes": 0,
        "skipped": {},
    }
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


def tiny_config(**overrides) -> RunConfig:
    """Float32, global batch 8 by default, a learning rate at which weights really move."""
    model = {
        "name": "tiny",
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    } | overrides.pop("model", {})
    values = {
        "name": "test/tiny",
        "model": ModelConfig(**model),
        "dataset": "tiny",
        "seq_len": 16,
        "micro_batch_size": 8,
        "max_iters": 20,
        "dtype": "float32",
        "device": "cpu",
        "parallelism": "ddp",
        "optimizer": {"learning_rate": 0.01, "min_learning_rate": 0.001, "warmup_iters": 4, "lr_decay_iters": 20},
        "measurement": {"profile": "none", "warmup_steps": 1},
    }
    return RunConfig.model_validate(values | overrides)


def run_arguments(config: RunConfig, data: Path, work: Path, *extra: str) -> list[str]:
    output = work / "run.json"
    return ["--config", config.to_json(), "--data", str(data), "--work", str(work), "--output", str(output), *extra]


def environment(**variables: str) -> dict[str, str]:
    paths = os.pathsep.join(filter(None, (str(SCRIPTS), os.environ.get("PYTHONPATH"))))
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths, **variables}


def start_run(config: RunConfig, data: Path, work: Path, *extra: str, script: str = "", **variables: str):
    """The launcher as a process of its own; `script` (below scripts/) stands in for the worker."""
    module = [str(SCRIPTS / "launch_with.py"), script] if script else ["-m", "mfubench.train.launch"]
    command = [sys.executable, *module, *run_arguments(config, data, work, *extra)]
    return subprocess.Popen(command, env=environment(**variables), stderr=subprocess.PIPE, text=True)


def finish_run(process, timeout_s: float = 300) -> tuple[int, str]:
    """Exit code and standard error of a launcher."""
    _, stderr = process.communicate(timeout=timeout_s)
    return process.returncode, stderr


def run(config: RunConfig, data: Path, work: Path, *extra: str, **options) -> RunLog:
    """Run to the end in processes of their own, and read the run JSON."""
    code, stderr = finish_run(start_run(config, data, work, *extra, **options))
    assert code == 0, stderr
    return read_run_log(work / "run.json")


def run_here(config: RunConfig, data: Path, work: Path, *extra: str) -> RunLog:
    """Run in this process (one rank): quick, since torch is loaded already."""
    from mfubench.train.launch import main

    code = main(run_arguments(config, data, work, *extra))
    assert code == 0, (work / "failure.json").read_text() if (work / "failure.json").exists() else code
    return read_run_log(work / "run.json")


def run_many(configs: dict[str, RunConfig], data: Path, work: Path, timeout_s: float = 600) -> dict[str, RunLog]:
    """Train one run after the other in one set of gloo ranks, which are started once."""
    work.mkdir(parents=True, exist_ok=True)
    world_sizes = {config.world_size for config in configs.values()}
    assert len(world_sizes) == 1
    (work / "configs.json").write_text(json.dumps({key: config.to_json() for key, config in configs.items()}))
    world_size = world_sizes.pop()
    processes = []
    for rank in range(world_size):
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
        variables = {key: str(value) for key, value in places.items()} | {"MFUBENCH_RENDEZVOUS": str(work / "address")}
        command = [sys.executable, str(SCRIPTS / "train_many.py"), str(work), str(data)]
        with open(work / f"rank-{rank}.log", "wb") as log:
            processes.append(subprocess.Popen(command, env=environment(**variables), stdout=log, stderr=log))
    try:
        codes = [process.wait(timeout=timeout_s) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0] * world_size, (work / f"rank-{codes.index(max(codes, key=abs))}.log").read_text()[-3000:]
    return {key: read_run_log(work / key / "run.json") for key in configs}


def losses(log: RunLog) -> list[float]:
    return [step.loss for step in log.steps]


def grad_norms(log: RunLog) -> list[float]:
    return [step.grad_norm for step in log.steps]
