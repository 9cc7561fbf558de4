"""nanoGPT's train.py, run as it is from a checkout; its command line sets the shape and the batch.

Its vocabulary is its own default, GPT-2's padded to 50,304 rows for speed. It reads the shared tokens by itself, from
random places of train.bin. float32 weights under bfloat16 autocast, fused AdamW, torch.compile, DDP on several cards.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import torch

from benchmarks.peers.driving import ENDLESS, checkout_version, drive
from benchmarks.peers.job import Job, MissingPeer
from mfubench.data.meta import DatasetMeta, read_meta

PADDED_VOCABULARY = 50304
FILES = ("train.py", "model.py", "configurator.py")


def version(job: Job) -> str:
    if job.checkout is None:
        raise MissingPeer("nanoGPT is no package: git clone https://github.com/karpathy/nanoGPT, then --nanogpt PATH")
    folder = Path(job.checkout)
    if absent := [file for file in FILES if not (folder / file).is_file()]:
        raise MissingPeer(f"{folder} is no checkout of nanoGPT: it has no {', '.join(absent)}")
    return checkout_version(folder, *FILES)


def check(job: Job) -> None:
    """Raises MissingPeer where nanoGPT has no such model or cannot read these tokens."""
    model = job.run.model
    gpt2 = model.norm == "layernorm" and model.position == "learned" and model.mlp == "gelu"
    if not gpt2 or model.intermediate_size != 4 * model.hidden_size:
        raise MissingPeer(f"nanoGPT trains GPT-2's block; {model.name} is another")
    meta = read_meta(DatasetMeta, Path(job.data))
    if meta.dtype != "uint16" or not all((Path(job.data) / f"{split}.bin").is_file() for split in ("train", "val")):
        raise MissingPeer(f"nanoGPT reads train.bin and val.bin of 16-bit tokens; {job.data} holds {meta.dtype} shards")


def arguments(job: Job, device: torch.device) -> list[str]:
    run, model = job.run, job.run.model
    values = {
        "n_layer": model.num_hidden_layers,
        "n_head": model.num_attention_heads,
        "n_embd": model.hidden_size,
        "block_size": run.seq_len,
        "batch_size": run.micro_batch_size,
        "gradient_accumulation_steps": run.gradient_accumulation_steps * run.world_size,  # it divides by the ranks
        "bias": model.attention_bias,
        "dataset": str(Path(job.data).resolve()),  # joined to its data/, which an absolute path replaces
        "out_dir": str(job.folder / "nanogpt"),
        "max_iters": ENDLESS,
        "eval_interval": ENDLESS,
        "eval_iters": 1,
        "always_save_checkpoint": False,
        "log_interval": 10,  # with its default of 1 it would wait for the device in every step
        "learning_rate": run.optimizer.learning_rate,
        "weight_decay": run.optimizer.weight_decay,
        "beta1": run.optimizer.beta1,
        "beta2": run.optimizer.beta2,
        "grad_clip": run.optimizer.grad_clip,
        "compile": bool(job.settings.get("compile", True)),
    }
    if device.type == "cpu":
        values |= {"device": "cpu", "dtype": "float32", "backend": "gloo"}
    return [f"--{key}={value}" for key, value in values.items()]


def train(job: Job, device: torch.device) -> None:
    check(job)
    assert job.checkout is not None
    folder = Path(job.checkout).resolve()
    os.chdir(folder)  # it runs configurator.py by its name alone
    sys.path.insert(0, str(folder))
    sys.argv = ["train.py", *arguments(job, device)]
    runpy.run_path("train.py", run_name="__main__")


if __name__ == "__main__":
    drive(version, train)
