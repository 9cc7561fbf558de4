"""Build what a run trains: flags and seeds, the compile cache, the model under its parallelism, the data."""

from __future__ import annotations

import hashlib
import os
import resource
from dataclasses import asdict
from pathlib import Path

import psutil
import torch
from torch import nn

from mfubench.cache import cache_root, writable_folder
from mfubench.config import ConfigError, RunConfig
from mfubench.data.meta import MORE_VALIDATION
from mfubench.data.reader import TokenDataset
from mfubench.flops import flop_terms
from mfubench.model import Decoder, build_model
from mfubench.run_log import Dataset, Parameters, RunFlopTerms
from mfubench.train.choices import Resolved
from mfubench.train.fsdp import FsdpEngine, keeps_weights
from mfubench.train.loader import count_sequences
from mfubench.train.modules import (
    accumulate_weight_gradients,
    checkpoint_activations,
    compile_model,
    convert_to_float8,
)
from mfubench.train.parallel import Engine, FlatEngine
from mfubench.train.process import Process


def keep_kernels(process: Process) -> None:
    """Let Triton and quack keep what they compile in this project's cache, before the first kernel is tried.

    Raises ConfigError where the cache cannot be written to.
    """
    if process.on_cuda:
        for name in ("triton", "quack"):
            os.environ.setdefault(f"{name.upper()}_CACHE_DIR", str(writable_folder(cache_root() / name)))


def set_flags(config: RunConfig, resolved: Resolved, process: Process) -> None:
    """Process-wide state that changes numbers or speed: matmul precision, seed, compile cache.

    Raises ConfigError where the run compiles and its cache cannot be written to.
    """
    tf32 = resolved.is_on("tf32")
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32
    torch.manual_seed(config.seed)
    if resolved.used["compile"].used != "none" and config.compile_backend == "inductor":
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(writable_folder(inductor_cache(config, resolved)))


def inductor_cache(config: RunConfig, resolved: Resolved) -> Path:
    """A compile cache folder for this combination of kernels.

    torch keys its cached graphs by what it traces, and does not see which attention kernel or backend flag was set
    when it compiled: with one folder for all, an ablation's second arm would run the kernels of its first.
    """
    kernels = ("norm", "rope", "swiglu", "gelu", "cross_entropy", "weight_gradient")
    names = ("attention", "compile", "loss", "dtype", "tf32", "fp8", *kernels)
    choices = {name: resolved.used[name].used for name in names}
    compiler = (config.compile_mode, config.compile_backend, config.activation_checkpointing, torch.__version__)
    return cache_root() / "inductor" / hashlib.sha256(repr((choices, compiler)).encode()).hexdigest()[:16]


def cap_memory(gib: float, process: Process) -> None:
    """Make allocations beyond `gib` fail: of the CUDA allocator, or of this process as a whole on a CPU.

    A CPU process is limited in its data segment, which holds more than is resident; it may grow by what is left
    between its resident memory now (Python and torch) and the cap. Raises MemoryError where nothing is left.
    """
    if process.on_cuda:
        total = torch.cuda.get_device_properties(process.device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, gib * 2**30 / total), process.device)
        return
    now = psutil.Process().memory_info()
    left = int(gib * 2**30) - now.rss
    if left <= 0:
        held_gib = now.rss / 2**30
        raise MemoryError(f"memory_cap_gib: {gib}: the process held {held_gib:.2f} GiB before it built the model")
    limit = now.data + left
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def build_engine(config: RunConfig, resolved: Resolved, process: Process) -> tuple[Decoder, Engine]:
    """The model on its device under its parallelism, with float32 masters of its parameters."""
    sharded = resolved.used["parallelism"].used == "fsdp"
    model = build_model(
        config,
        device="meta" if sharded else process.device,
        attention=resolved.attention,
        loss=resolved.loss,
        operations=resolved.operations,
        dtype=torch.float32 if sharded else resolved.dtype,
    )
    if resolved.is_on("fp8"):
        convert_to_float8(model)
    if config.activation_checkpointing != "none":
        checkpoint_activations(model, config.activation_checkpointing)
    accumulation = config.gradient_accumulation_steps
    engine: FlatEngine | FsdpEngine
    if sharded:
        engine = FsdpEngine(
            model,
            dtype=resolved.dtype,
            process=process,
            gradient_accumulation_steps=accumulation,
            keeps_weights=keeps_weights(config, resolved.dtype, process.device),
            communication=config.communication,
            exchange=resolved.used["reduction"].used == "exchange",
        )
        resolved.used["parallelism"].reason = engine.description
    else:
        engine = FlatEngine(
            model,
            model.initial_parameters(process.device),
            process=process,
            gradient_accumulation_steps=accumulation,
            shard=resolved.used["parallelism"].used == "zero1",
            communication=config.communication,
            exchange=resolved.used["reduction"].used == "exchange",
        )
        if engine.sharded and config.communication.overlap_gather:
            whole = resolved.used["compile"].used == "model"
            engine.overlap_gathers(model, whole)
            when = "before the forward pass, which is compiled as a whole" if whole else "while the forward pass runs"
            resolved.used["parallelism"].reason = f"updated weights are gathered {when}"
    if resolved.used["weight_gradient"].used == "accumulate":
        accumulate_weight_gradients(model, engine, resolved)
    compile_model(model, config, resolved)
    return model, engine


def count_parameters(model: Decoder) -> Parameters:
    """Parameters of the module that runs; `matmul` leaves out tables that are looked up and vectors."""
    sizes = {id(p): p.numel() for p in model.parameters()}
    multiplied = {id(m.weight): m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear)}
    return Parameters(
        total=sum(sizes.values()),
        trainable=sum(p.numel() for p in model.parameters() if p.requires_grad),
        matmul=sum(multiplied.values()),
    )


def run_flop_terms(config: RunConfig) -> RunFlopTerms:
    return RunFlopTerms(**asdict(flop_terms(config.model, config.seq_len)))


def open_data(folder: Path, config: RunConfig) -> tuple[TokenDataset, TokenDataset | None, Dataset]:
    """Training tokens, validation tokens where there are any, and their description.

    Raises ConfigError where there is no such folder, where files are damaged, where the training tokens make no
    sequence, where the model has fewer rows than the data has ids, or where an evaluation is asked for and there is
    nothing to evaluate on.
    """
    if not folder.exists():
        raise ConfigError(
            f"{folder}: there is no such folder; `snakemake --cores all datasets` prepares the datasets of the study "
            "(config/config.yaml, or --configfile FILE) below resources/datasets/"
        )
    train = TokenDataset.open(folder, "train")
    if not config.evaluation.only:
        count_sequences(train, config.seq_len)  # refused here, before a model of that length is built
    val = TokenDataset.open(folder, "val") if "val" in train.meta.splits else None
    if config.evaluation.asked_for and (val is None or val.num_tokens <= config.seq_len):
        raise ConfigError(
            f"{folder}: evaluation is asked for, but val holds fewer than seq_len + 1 tokens; {MORE_VALIDATION}"
        )
    if train.vocab_size > config.model.vocab_size:
        raise ConfigError(
            f"{folder}: tokens reach up to id {train.vocab_size - 1}, but the model has only vocab_size "
            f"{config.model.vocab_size} rows; set model.vocab_size to at least {train.vocab_size}"
        )
    return train, val, train.meta.description
