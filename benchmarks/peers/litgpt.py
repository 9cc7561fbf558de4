"""LitGPT's pretraining: `litgpt.pretrain.setup` with a data module that reads the shared tokens.

bfloat16 autocast over float32 weights (its `bf16-mixed`), torch.compile and fused AdamW, as it does by itself.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from benchmarks.peers.driving import ENDLESS, MicroBatches, drive, package_version
from benchmarks.peers.job import Job, MissingPeer


def version(job: Job) -> str:
    if job.checkout is not None:
        sys.path.insert(0, job.checkout)
        package_version("lightning")
        return f"checkout {Path(job.checkout).name}"
    return package_version("litgpt")


def model_config(job: Job) -> Any:
    from litgpt import Config

    model = job.run.model
    if model.position != "rope" or model.norm != "rmsnorm" or model.mlp != "swiglu":
        raise MissingPeer(f"LitGPT has no model of the kind of {model.name}")
    return Config(
        name=model.name,
        block_size=job.run.seq_len,
        n_layer=model.num_hidden_layers,
        n_embd=model.hidden_size,
        n_head=model.num_attention_heads,
        n_query_groups=model.num_key_value_heads,
        head_size=model.head_dim,
        intermediate_size=model.intermediate_size,
        vocab_size=model.vocab_size,
        padded_vocab_size=model.vocab_size,
        norm_class_name="RMSNorm",
        norm_eps=model.rms_norm_eps,
        norm_qk=model.qk_norm,
        mlp_class_name="LLaMAMLP",
        parallel_residual=False,
        bias=model.mlp_bias,
        rotary_percentage=1.0,
        rope_base=int(model.rope_theta),
    )


def data_module(job: Job) -> Any:
    from litgpt.data import DataModule

    class SharedTokens(DataModule):
        def connect(self, tokenizer: Any = None, batch_size: int = 1, max_seq_length: int | None = None) -> None:
            """The job has said all of it."""

        def train_dataloader(self) -> DataLoader:
            return DataLoader(MicroBatches(job), batch_size=None, num_workers=1, pin_memory=torch.cuda.is_available())

        def val_dataloader(self) -> DataLoader:
            return DataLoader(MicroBatches(job), batch_size=None)

    return SharedTokens()


def train(job: Job, device: torch.device) -> None:
    if not job.settings.get("compile", True):
        torch._dynamo.config.disable = True  # it compiles in any case
    from litgpt.args import EvalArgs, TrainArgs
    from litgpt.pretrain import setup

    run = job.run
    options = {
        "lr": run.optimizer.learning_rate,
        "betas": (run.optimizer.beta1, run.optimizer.beta2),
        "eps": run.optimizer.eps,
        "weight_decay": run.optimizer.weight_decay,
    }
    setup(
        run.model.name,
        model_config=model_config(job),
        out_dir=job.folder / "litgpt",
        precision="bf16-mixed" if device.type == "cuda" else "32-true",
        data=data_module(job),
        train=TrainArgs(
            save_interval=None,
            log_interval=10,
            global_batch_size=run.global_batch_size,
            micro_batch_size=run.micro_batch_size,
            max_tokens=ENDLESS * run.tokens_per_step,
            max_norm=run.optimizer.grad_clip,
            min_lr=run.optimizer.min_learning_rate,
            lr_warmup_steps=run.optimizer.warmup_iters,
            tie_embeddings=run.model.tie_word_embeddings,
        ),
        eval=EvalArgs(interval=ENDLESS, max_iters=1, initial_validation=False, final_validation=False),
        optimizer={"class_path": "torch.optim.AdamW", "init_args": options},
        devices=run.world_size,
        logger_name="csv",
        seed=run.seed,
    )


if __name__ == "__main__":
    drive(version, train)
