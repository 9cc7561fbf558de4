"""torchtitan's Trainer: its model, FSDP2, compiled blocks and loss, as its own configuration would set them.

Its extension points are used: a TrainSpec of our shape, with a data loader that reads the shared tokens. float32
masters, bfloat16 compute, no activation checkpointing. Version 0.2 (the package, or a checkout on the job).
"""

from __future__ import annotations

import dataclasses
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers.driving import ENDLESS, MicroBatches, drive, package_version
from benchmarks.peers.job import Job, MissingPeer
from mfubench.config import ModelConfig

CASE = "mfubench"  # name of the registered TrainSpec and of its one flavour
SERIES = "0.2."


def version(job: Job) -> str:
    if job.checkout is not None:
        found = (Path(job.checkout) / "assets" / "version.txt").read_text(encoding="utf-8").strip()
        sys.path.insert(0, job.checkout)
    else:
        found = package_version("torchtitan")
    if not found.startswith(SERIES):
        raise MissingPeer(f"torchtitan {found} is here; this driver speaks to {SERIES}x: pip install torchtitan==0.2.2")
    return found


def mlp_width(model: ModelConfig) -> tuple[int, float]:
    """`multiple_of` and `ffn_dim_multiplier`: it takes int(factor * int(8 / 3 * dim)), rounded up to the multiple."""
    multiple = model.intermediate_size & -model.intermediate_size  # largest power of two that divides it
    return multiple, (model.intermediate_size - multiple / 2) / int(8 * model.hidden_size / 3)


def llama_arguments(model: ModelConfig) -> Any:
    from torchtitan.models.llama3 import TransformerModelArgs

    multiple, factor = mlp_width(model)
    return TransformerModelArgs(
        dim=model.hidden_size,
        n_layers=model.num_hidden_layers,
        n_heads=model.num_attention_heads,
        n_kv_heads=model.num_key_value_heads,
        vocab_size=model.vocab_size,
        multiple_of=multiple,
        ffn_dim_multiplier=factor,
        norm_eps=model.rms_norm_eps,
        rope_theta=model.rope_theta,
    )


def qwen_arguments(model: ModelConfig) -> Any:
    from torchtitan.models.qwen3 import qwen3_args

    return type(next(iter(qwen3_args.values())))(
        dim=model.hidden_size,
        n_layers=model.num_hidden_layers,
        n_heads=model.num_attention_heads,
        n_kv_heads=model.num_key_value_heads,
        head_dim=model.head_dim,
        hidden_dim=model.intermediate_size,
        vocab_size=model.vocab_size,
        norm_eps=model.rms_norm_eps,
        rope_theta=model.rope_theta,
        qk_norm=True,
        enable_weight_tying=model.tie_word_embeddings,
    )


def spec_of(job: Job) -> Any:
    model = job.run.model
    if model.position != "rope" or model.norm != "rmsnorm" or model.mlp != "swiglu":
        raise MissingPeer(f"torchtitan has no model of the kind of {model.name}")
    if model.qk_norm:
        from torchtitan.models.qwen3 import get_train_spec

        arguments = qwen_arguments(model)
    else:
        from torchtitan.models.llama3 import get_train_spec

        arguments = llama_arguments(model)
    return dataclasses.replace(
        get_train_spec(),
        model_args={CASE: arguments},
        build_dataloader_fn=lambda **_: make_loader(job),
        build_tokenizer_fn=None,
        build_validator_fn=None,
        state_dict_adapter=None,
    )


def make_loader(job: Job) -> Any:
    from torchtitan.components.dataloader import BaseDataLoader

    class Loader(BaseDataLoader):
        def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
            for tokens in MicroBatches(job):
                yield {"input": tokens[:, :-1].contiguous()}, tokens[:, 1:].contiguous()

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            """Nothing is resumed."""

    return Loader()


def job_config(job: Job) -> Any:
    from torchtitan.config import JobConfig

    run, config = job.run, JobConfig()
    config.job.dump_folder = str(job.folder / "torchtitan")
    config.model.name = config.model.flavor = CASE
    config.metrics.disable_color_printing = True
    config.optimizer.lr = run.optimizer.learning_rate
    config.optimizer.beta1, config.optimizer.beta2 = run.optimizer.beta1, run.optimizer.beta2
    config.optimizer.weight_decay = run.optimizer.weight_decay
    config.training.local_batch_size = run.micro_batch_size
    config.training.global_batch_size = run.global_batch_size
    config.training.seq_len = run.seq_len
    config.training.max_norm = run.optimizer.grad_clip
    config.training.steps = ENDLESS
    config.parallelism.data_parallel_replicate_degree = 1
    config.parallelism.data_parallel_shard_degree = -1
    config.activation_checkpoint.mode = "none"
    config.compile.enable = bool(job.settings.get("compile", True))
    config.compile.components = ["model", "loss"]
    return config


def train(job: Job, device: torch.device) -> None:
    if device.type != "cuda":
        raise MissingPeer("torchtitan trains on GPUs only")
    run_trainer(job)


def run_trainer(job: Job) -> None:
    set_rank_variables()
    from torchtitan.protocols.train_spec import register_train_spec
    from torchtitan.tools.logging import init_logger
    from torchtitan.train import Trainer

    init_logger()
    register_train_spec(CASE, spec_of(job))
    Trainer(job_config(job)).train()


def set_rank_variables() -> None:
    """torchtitan wants a process group also for one process that no torchrun has started."""
    if "RANK" in os.environ:
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


if __name__ == "__main__":
    drive(version, train)
