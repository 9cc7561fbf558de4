"""The same mathematics everywhere: one global batch, split in every way, gives the losses and gradient norms of one."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from train.train_runs import ACCUMULATE, environment, grad_norms, losses, run_arguments, run_here, run_many, tiny_config

from mfubench.run_log import read_run_log

RELATIVE = 1e-5


@pytest.fixture(scope="session")
def reference(data, tmp_path_factory):
    """One process, one micro-batch, nothing compiled."""
    log = run_here(tiny_config(parallelism="none"), data, tmp_path_factory.mktemp("reference"))
    assert len(log.steps) == 20
    assert losses(log)[-1] < 0.8 * losses(log)[0]
    return log


def assert_same(log, reference):
    assert losses(log) == pytest.approx(losses(reference), rel=RELATIVE)
    assert grad_norms(log) == pytest.approx(grad_norms(reference), rel=RELATIVE)
    assert [step.learning_rate for step in log.steps] == [step.learning_rate for step in reference.steps]


@pytest.mark.parametrize(
    "options",
    [
        {"micro_batch_size": 2, "gradient_accumulation_steps": 4},
        {"micro_batch_size": 1, "gradient_accumulation_steps": 8},
        {"loader": {"kind": "dataloader", "num_workers": 2}},
        {"compile": "block", "compile_backend": "aot_eager", "micro_batch_size": 4, "gradient_accumulation_steps": 2},
        {"compile": "model", "compile_backend": "aot_eager"},
        {"activation_checkpointing": "full", "micro_batch_size": 4, "gradient_accumulation_steps": 2},
        {"activation_checkpointing": "selective"},
        {"activation_checkpointing": "selective", "compile": "block", "compile_backend": "aot_eager"},
        {"loss": "chunked"},
    ],
    ids=str,
)
def test_one_process(options, reference, data, tmp_path):
    assert_same(run_here(tiny_config(**options), data, tmp_path), reference)


@pytest.mark.slow
def test_inductor(reference, data, tmp_path):
    assert_same(run_here(tiny_config(compile="block"), data, tmp_path), reference)


PARALLELISMS = ("ddp", "zero1", "fsdp")
AOT_EAGER = {"compile": "block", "compile_backend": "aot_eager"}


def assert_equal_weights(folder, world_size: int) -> None:
    """All ranks of a run ended with the same weights, bit for bit."""
    first, *others = (torch.load(folder / f"weights-{rank}.pt") for rank in range(world_size))
    for other in others:
        assert first.keys() == other.keys()
        assert all(torch.equal(first[name], other[name]) for name in first)


def test_two_processes(reference, data, tmp_path):
    """Accumulated and compiled as in a real run; and five steps in bfloat16, whose masters are apart."""
    configs = {}
    for parallelism in PARALLELISMS:
        options = {"world_size": 2, "parallelism": parallelism, "micro_batch_size": 2, "gradient_accumulation_steps": 2}
        configs[parallelism] = tiny_config(**options, **AOT_EAGER)
        configs[f"{parallelism}-bfloat16"] = tiny_config(**options, dtype="bfloat16", max_iters=5)
    logs = run_many(configs, data, tmp_path)
    for key, log in logs.items():
        assert (log.status, log.used["parallelism"].used) == ("ok", configs[key].parallelism)
        assert log.used["compile"].used == configs[key].compile
        assert [len(times) for times in log.rank_step_times_s] == [len(log.steps)] * 2
        assert_equal_weights(tmp_path / key, 2)
    for parallelism in PARALLELISMS:
        assert_same(logs[parallelism], reference)
        assert losses(logs[f"{parallelism}-bfloat16"]) == pytest.approx(losses(logs["ddp-bfloat16"]), rel=5e-3)
        assert losses(logs[f"{parallelism}-bfloat16"]) == pytest.approx(losses(reference)[:5], rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_every_parallelism_world_size_split_loader_and_compilation(world_size, reference, data, tmp_path):
    share = 8 // world_size
    configs = {}
    for parallelism in PARALLELISMS:
        common = {"world_size": world_size, "parallelism": parallelism}
        configs[parallelism] = tiny_config(micro_batch_size=share, **common)
        configs[f"{parallelism}-matmuls"] = tiny_config(micro_batch_size=share, **common, kernels=ACCUMULATE)
        if share > 1:
            configs[f"{parallelism}-accumulated"] = tiny_config(
                micro_batch_size=1, gradient_accumulation_steps=share, **common, **AOT_EAGER
            )
        if world_size == 2:
            loader = {"kind": "dataloader", "num_workers": 1}
            configs[f"{parallelism}-whole"] = tiny_config(
                micro_batch_size=share, **common, compile="model", compile_backend="aot_eager", loader=loader
            )
    for key, log in run_many(configs, data, tmp_path).items():
        assert log.used["parallelism"].used == configs[key].parallelism, key
        assert log.used["compile"].used == configs[key].compile, key
        assert_same(log, reference)
        assert_equal_weights(tmp_path / key, world_size)


MODELS = {
    "tied": {"tie_word_embeddings": True},
    "learned": {"position": "learned", "norm": "layernorm", "mlp": "gelu", "tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True, "norm": "layernorm", "norm_bias": True},
    "qwen": {"qk_norm": True, "head_dim": 16},
}


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_other_architectures(model, data, tmp_path):
    reference = run_here(tiny_config(model=model, parallelism="none"), data, tmp_path / "reference")
    common = {"model": model, "world_size": 2, "micro_batch_size": 2, "gradient_accumulation_steps": 2}
    configs = {
        f"{parallelism}-{name}": tiny_config(parallelism=parallelism, kernels=kernels, **common)
        for parallelism in PARALLELISMS
        for name, kernels in (("plain", {}), ("matmuls", ACCUMULATE))
    }
    for log in run_many(configs, data, tmp_path).values():
        assert_same(log, reference)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_trains_like_float32(dtype, reference, data, tmp_path):
    log = run_here(tiny_config(dtype=dtype, micro_batch_size=4, gradient_accumulation_steps=2), data, tmp_path)
    assert losses(log) == pytest.approx(losses(reference), rel=0.02)
    assert grad_norms(log)[0] == pytest.approx(grad_norms(reference)[0], rel=0.02)


@pytest.mark.slow
def test_a_rank_may_also_be_started_by_torchrun(reference, data, tmp_path):
    config = tiny_config(world_size=2, micro_batch_size=4)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "mfubench.train.worker"]
    command = [sys.executable, *torchrun, *run_arguments(config, data, tmp_path)]
    subprocess.run(command, env=environment(), check=True, timeout=120)
    assert_same(read_run_log(tmp_path / "run.json"), reference)
