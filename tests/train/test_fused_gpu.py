"""Whole runs with every own kernel on real cards: `pytest -m "gpu or multigpu" tests/train/test_fused_gpu.py`."""

from __future__ import annotations

import pytest
import torch
from train.test_gpu import FLOAT32, assert_graphs, assert_same, gpu_config, needs_cards
from train.train_runs import losses, run_many

CARDS = torch.cuda.device_count()
KERNELS = {
    **{"norm": "fused", "rope": "fused", "swiglu": "fused", "cross_entropy": "fused"},
    **{"weight_gradient": "accumulate", "adamw": "fused"},
}
FUSED = {"kernels": KERNELS, "requires": tuple(KERNELS)}
GPT2 = {
    **{"norm": "layernorm", "position": "learned", "mlp": "gelu", "tie_word_embeddings": True},
    **{"num_key_value_heads": 4, "vocab_size": 1025},  # as 50,257: not a multiple of 8
}
QWEN3 = {"qk_norm": True, "tie_word_embeddings": True}

pytestmark = pytest.mark.skipif(CARDS == 0, reason="needs a CUDA device")


def with_model(config, **options):
    return config.model_copy(update={"model": config.model.model_copy(update=options)})


@pytest.mark.gpu
def test_float32_runs_are_the_same_mathematics(data, tmp_path):
    configs = {
        "plain": gpu_config(**FLOAT32),
        "fused": gpu_config(**FLOAT32, **FUSED),
        "fused-compiled": gpu_config(compile="block", **FLOAT32, **FUSED),
        "fused-graphs": gpu_config(cuda_graphs=True, **FLOAT32, **FUSED),
        "fused-compiled-graphs": gpu_config(compile="block", cuda_graphs=True, **FLOAT32, **FUSED),
        "fused-model": gpu_config(compile="model", **FLOAT32, **FUSED),
        "fused-chunked": gpu_config(compile="block", **FLOAT32 | {"loss": "chunked"}, **FUSED),
        "fused-selective": gpu_config(activation_checkpointing="selective", compile="block", **FLOAT32, **FUSED),
        "fused-full": gpu_config(activation_checkpointing="full", **FLOAT32, **FUSED),
    }
    for key, kernel in KERNELS.items():
        options = {"kernels": {key: kernel}, "requires": (key,)}
        configs[f"only-{key}"] = gpu_config(compile="block", **FLOAT32, **options)
    logs = run_many(configs, data, tmp_path, timeout_s=540)
    for key, log in logs.items():
        assert_same(log, logs["plain"], 3e-5)
        if "graphs" in key:
            assert_graphs(log)


@pytest.mark.gpu
def test_half_precision_with_q_k_norm_and_tied_embeddings(data, tmp_path):
    configs = {}
    for dtype in ("bfloat16", "float16"):
        for name, options in {
            "plain": {},
            "fused": FUSED,
            "fused-graphs": FUSED | {"compile": "block", "cuda_graphs": True},
        }.items():
            configs[f"{dtype}-{name}"] = with_model(gpu_config(dtype=dtype, **options), **QWEN3)
    logs = run_many(configs, data, tmp_path, timeout_s=540)
    for key, log in logs.items():
        assert_same(log, logs[f"{key.split('-')[0]}-plain"], 0.02)
        assert losses(log)[-1] < 0.97 * losses(log)[0]
        if "graphs" in key:
            assert_graphs(log)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gpt2_takes_what_its_model_has(dtype, data, tmp_path):
    same = FLOAT32 if dtype == "float32" else {"dtype": dtype}
    fused = {"kernels": dict.fromkeys(KERNELS, "auto"), "requires": tuple(KERNELS)}
    configs = {
        "plain": gpu_config(**same),
        "fused": gpu_config(**same, **fused),
        "fused-graphs": gpu_config(compile="block", cuda_graphs=True, **same, **fused),
        "fused-selective": gpu_config(activation_checkpointing="selective", compile="block", **same, **fused),
        "fused-full": gpu_config(activation_checkpointing="full", **same, **fused),
    }
    if dtype == "bfloat16":  # fa4 knows no float32
        fa4 = {"attention": "fa4", **same, **fused}
        configs["fa4"] = gpu_config(compile="block", cuda_graphs=True, **fa4)
        configs["fa4-selective"] = gpu_config(activation_checkpointing="selective", compile="block", **fa4)
    configs = {name: with_model(config, **GPT2) for name, config in configs.items()}
    logs = run_many(configs, data, tmp_path, timeout_s=540)
    for key, log in logs.items():
        assert_same(log, logs["plain"], 3e-5 if dtype == "float32" else 0.02)
        if key != "plain":
            assert log.used["norm"].used == "fused", log.used["norm"].reason
            assert log.used["weight_gradient"].used == "accumulate", log.used["weight_gradient"].reason
            assert log.used["swiglu"].used == "plain"
            joined = log.used["attention"].used == "fa4"
            assert log.used["rope"].used == ("fused" if joined else "plain"), log.used["rope"].reason
        if "graphs" in key:
            assert_graphs(log)


@pytest.mark.multigpu
@pytest.mark.parametrize("world_size", [pytest.param(2, marks=needs_cards(2)), pytest.param(4, marks=needs_cards(4))])
def test_every_parallelism_equals_the_plain_form(world_size, data, tmp_path):
    configs = {}
    for parallelism in ("ddp", "zero1", "fsdp"):
        options = {"parallelism": parallelism, "compile": "block", **FLOAT32}
        configs[f"{parallelism}-plain"] = gpu_config(world_size, 4, **options)
        configs[f"{parallelism}-fused"] = gpu_config(world_size, 4, **options, **FUSED)
        if parallelism != "fsdp":  # it allocates in each step
            configs[f"{parallelism}-graphs"] = gpu_config(world_size, 4, cuda_graphs=True, **options, **FUSED)
    logs = run_many(configs, data, tmp_path, timeout_s=540)
    for key, log in logs.items():
        assert_same(log, logs["ddp-plain"], 3e-5)
        if "graphs" in key:
            assert_graphs(log)
