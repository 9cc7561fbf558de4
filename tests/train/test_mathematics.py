"""The same mathematics everywhere: one global batch, split in every way, gives the losses and gradient norms of one."""

from __future__ import annotations

import pytest
import torch
from train.train_runs import grad_norms, losses, run_here, run_many, tiny_config

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


def splits(world_size: int, whole: bool) -> dict:
    """Every parallelism, with and without accumulation, compiled (by blocks, as a whole) and not, with either loader."""
    share = 8 // world_size
    configs = {}
    for parallelism in ("ddp", "zero1", "fsdp"):
        common = {"world_size": world_size, "parallelism": parallelism}
        compiled = {"compile": "block", "compile_backend": "aot_eager"}
        loader = {"loader": {"kind": "dataloader", "num_workers": 1}}
        configs[parallelism] = tiny_config(micro_batch_size=share, **common)
        if share > 1:
            configs[f"{parallelism}-accumulated"] = tiny_config(
                micro_batch_size=1, gradient_accumulation_steps=share, **common, **compiled
            )
        if whole:
            configs[f"{parallelism}-whole"] = tiny_config(
                micro_batch_size=share, compile="model", compile_backend="aot_eager", **common, **loader
            )
    return configs


@pytest.mark.parametrize(
    ("world_size", "whole"),
    [
        (2, False),
        pytest.param(2, True, marks=pytest.mark.slow),
        pytest.param(4, False, marks=pytest.mark.slow),
        pytest.param(8, False, marks=pytest.mark.slow),
    ],
)
def test_several_processes(world_size, whole, reference, data, tmp_path):
    configs = splits(world_size, whole)
    logs = run_many(configs, data, tmp_path)
    for key, log in logs.items():
        assert log.status == "ok"
        assert log.used["parallelism"].used == configs[key].parallelism, key
        assert log.used["compile"].used == configs[key].compile, key
        assert_same(log, reference)
        assert len(log.rank_step_times_s) == world_size
        assert all(len(times) == 20 for times in log.rank_step_times_s)


def test_all_ranks_hold_equal_weights_after_five_steps(data, tmp_path):
    configs = {
        f"{parallelism}-{dtype}": tiny_config(
            world_size=2, micro_batch_size=4, parallelism=parallelism, max_iters=5, dtype=dtype
        )
        for parallelism in ("ddp", "zero1", "fsdp")
        for dtype in ("float32", "bfloat16")
    }
    run_many(configs, data, tmp_path)
    for key, config in configs.items():
        first, second = (torch.load(tmp_path / key / f"weights-{rank}.pt") for rank in range(2))
        expected = torch.load(tmp_path / f"ddp-{config.dtype}" / "weights-0.pt")
        tolerance = {"rtol": 1e-4, "atol": 1e-5} if config.dtype == "float32" else {"rtol": 0.02, "atol": 2e-3}
        assert first.keys() == second.keys() == expected.keys()
        for name in first:
            assert torch.equal(first[name], second[name]), (key, name)
            torch.testing.assert_close(first[name].to(expected[name].dtype), expected[name], **tolerance)


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
    configs = {
        parallelism: tiny_config(
            model=model, world_size=2, micro_batch_size=2, gradient_accumulation_steps=2, parallelism=parallelism
        )
        for parallelism in ("ddp", "zero1", "fsdp")
    }
    for log in run_many(configs, data, tmp_path).values():
        assert_same(log, reference)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_trains_like_float32(dtype, reference, data, tmp_path):
    log = run_here(tiny_config(dtype=dtype, micro_batch_size=4, gradient_accumulation_steps=2), data, tmp_path)
    assert losses(log) == pytest.approx(losses(reference), rel=0.02)
    assert grad_norms(log)[0] == pytest.approx(grad_norms(reference)[0], rel=0.02)
