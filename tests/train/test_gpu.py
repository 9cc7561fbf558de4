"""The engine on real cards: `pytest -m "gpu or multigpu" tests/train/test_gpu.py`."""

from __future__ import annotations

import pytest
import torch
from train.train_runs import finish_run, grad_norms, losses, run, run_many, start_run, tiny_config

from mfubench.run_log import read_run_log
from mfubench.train import failures

CARDS = torch.cuda.device_count()
GLOBAL_BATCH = 32

pytestmark = pytest.mark.skipif(CARDS == 0, reason="needs a CUDA device")


def gpu_config(world_size: int = 1, accumulation: int = 8, **overrides):
    """A small model in real dtypes; any world size and accumulation see the same global batch."""
    model = {
        "vocab_size": 1024,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
    }
    values = {
        "model": model,
        "seq_len": 128,
        "device": "cuda",
        "dtype": "bfloat16",
        "world_size": world_size,
        "gradient_accumulation_steps": accumulation,
        "micro_batch_size": GLOBAL_BATCH // accumulation // world_size,
        "parallelism": "none" if world_size == 1 else "ddp",
        # Kernels on a card add in an order of their own, and Adam's first steps turn the rounding error of a gradient
        # near zero into a whole step: at a learning rate of 3e-3 two equal runs part after eight steps, at 3e-4 not.
        "optimizer": {"learning_rate": 3e-4, "min_learning_rate": 3e-5, "warmup_iters": 4, "lr_decay_iters": 20},
    }
    return tiny_config(**values | overrides)


FLOAT32 = {"dtype": "float32", "tf32": False, "attention": "sdpa", "loss": "full"}


def assert_same(found, expected, relative: float) -> None:
    assert found.status == expected.status == "ok"
    assert losses(found) == pytest.approx(losses(expected), rel=relative)
    assert grad_norms(found) == pytest.approx(grad_norms(expected), rel=relative)


def assert_graphs(log) -> None:
    assert log.used["cuda_graphs"].used == "true", log.used["cuda_graphs"].reason


@pytest.mark.gpu
def test_float32_splits_compile_and_graphs_are_the_same_mathematics(data, tmp_path):
    configs = {
        "reference": gpu_config(accumulation=1, **FLOAT32),
        "accumulated": gpu_config(accumulation=8, **FLOAT32),
        "graphs": gpu_config(accumulation=8, cuda_graphs=True, **FLOAT32),
        "compiled": gpu_config(accumulation=8, compile="block", **FLOAT32),
        "compiled-graphs": gpu_config(accumulation=8, compile="block", cuda_graphs=True, **FLOAT32),
        "whole-model-graphs": gpu_config(accumulation=8, compile="model", cuda_graphs=True, **FLOAT32),
        "dataloader": gpu_config(accumulation=8, loader={"kind": "dataloader", "num_workers": 2}, **FLOAT32),
        "dataloader-graphs": gpu_config(
            accumulation=8, cuda_graphs=True, loader={"kind": "dataloader", "num_workers": 2}, **FLOAT32
        ),
        "checkpointed": gpu_config(accumulation=8, activation_checkpointing="full", **FLOAT32),
        "selective": gpu_config(accumulation=8, activation_checkpointing="selective", compile="block", **FLOAT32),
    }
    logs = run_many(configs, data, tmp_path, timeout_s=540)
    assert losses(logs["reference"])[-1] < 0.95 * losses(logs["reference"])[0]
    for key, log in logs.items():
        assert_same(log, logs["reference"], 3e-5 if "compiled" in key or "whole" in key or key == "selective" else 1e-5)
        assert log.used["compile"].used == configs[key].compile
        if "graphs" in key:
            assert_graphs(log)


@pytest.mark.gpu
def test_half_precision_with_and_without_graphs(data, tmp_path):
    configs = {
        f"{dtype}-{graphs}": gpu_config(dtype=dtype, cuda_graphs=graphs)
        for dtype in ("bfloat16", "float16")
        for graphs in (False, True)
    }
    configs["float32"] = gpu_config(**FLOAT32)
    logs = run_many(configs, data, tmp_path)
    for dtype in ("bfloat16", "float16"):
        assert_graphs(logs[f"{dtype}-True"])
        # attention's backward pass adds in an order of its own each time
        assert_same(logs[f"{dtype}-True"], logs[f"{dtype}-False"], 0.02)
        assert losses(logs[f"{dtype}-False"]) == pytest.approx(losses(logs["float32"]), rel=0.02)


@pytest.mark.gpu
def test_graphs_follow_the_learning_rate_and_new_batches(data, tmp_path):
    """With a learning rate of zero at first, weights must stand still and then move; losses differ by batch."""
    optimizer = {"learning_rate": 0.01, "min_learning_rate": 0.01, "warmup_iters": 0, "lr_decay_iters": 20}
    still = optimizer | {"learning_rate": 1e-30, "min_learning_rate": 1e-30}
    configs = {
        "moving": gpu_config(cuda_graphs=True, **FLOAT32 | {"optimizer": optimizer}),
        "still": gpu_config(cuda_graphs=True, **FLOAT32 | {"optimizer": still}),
        "still-eager": gpu_config(**FLOAT32 | {"optimizer": still}),
    }
    logs = run_many(configs, data, tmp_path)
    assert losses(logs["still"]) == pytest.approx(losses(logs["still-eager"]), rel=1e-6)
    assert len(set(losses(logs["still"]))) == 20
    assert losses(logs["moving"])[-1] < 0.8 * losses(logs["still"])[-1]


@pytest.mark.gpu
def test_time_memory_and_environment_of_a_gpu_run(data, tmp_path):
    measurement = {"profile": "kernels", "warmup_steps": 2, "preheat_s": 1.0}
    log = run(gpu_config(compile="block", max_iters=30, measurement=measurement), data, tmp_path)
    assert log.steps[0].phase == "compile"
    assert [step.phase for step in log.steps[4:]] == ["measured"] * 26
    assert log.kernels.attention and log.kernels.matmul
    inside = [phase for phase in log.phases if phase.kind not in ("setup", "sample") and phase.after_step > 0]
    accounted = sum(step.step_time_s for step in log.steps) + sum(phase.time_s for phase in inside)
    assert accounted == pytest.approx(log.wall.training_s, rel=0.03)
    assert log.memory[0].peak_allocated_gib > 0 and log.memory[0].allocator_retries == 0
    (gpu,) = log.environment.gpus
    assert gpu.uuid.startswith("GPU-") and gpu.memory_gib > 1
    assert log.environment.cudnn and log.environment.nccl and log.environment.driver
    assert log.telemetry["gpus"]


@pytest.mark.gpu
def test_a_memory_cap_on_the_card_is_out_of_memory(data, tmp_path):
    small = run(gpu_config(memory_cap_gib=4.0, max_iters=2), data, tmp_path / "small")
    assert small.status == "ok"
    assert small.memory[0].peak_reserved_gib <= 4.0
    large = run(
        gpu_config(memory_cap_gib=1.0, max_iters=2, accumulation=1, micro_batch_size=2048, loss="full"),
        data,
        tmp_path / "large",
    )
    assert large.status == "oom", large.reason


@pytest.mark.gpu
def test_a_resumed_run_goes_on(data, tmp_path):
    options = {**FLOAT32, "attention": "eager"}
    whole = run(gpu_config(**options), data, tmp_path / "whole")
    run(gpu_config(max_iters=9, checkpoint={"at_end": True}, **options), data, tmp_path / "parts")
    resumed = run(gpu_config(**options), data, tmp_path / "parts")
    assert [resume.step for resume in resumed.resumes] == [9]
    assert losses(resumed) == pytest.approx(losses(whole), rel=1e-5)


@pytest.mark.gpu
def test_fp8_is_used_or_says_why_not(data, tmp_path):
    log = run(gpu_config(fp8=True, compile="block"), data, tmp_path)
    choice = log.used["fp8"]
    assert choice.used == "true" or choice.reason
    assert losses(log)[-1] < 0.97 * losses(log)[0]


def needs_cards(count: int):
    return pytest.mark.skipif(count > CARDS, reason=f"needs {count} CUDA devices, {CARDS} are here")


@pytest.fixture(scope="module")
def one_card(data, tmp_path_factory):
    """Losses of one card with the global batch of all the others."""
    return run_many({"one": gpu_config(**FLOAT32)}, data, tmp_path_factory.mktemp("one-card"))["one"]


@pytest.mark.multigpu
@pytest.mark.parametrize("world_size", [pytest.param(2, marks=needs_cards(2)), pytest.param(4, marks=needs_cards(4))])
def test_every_parallelism_equals_one_card(world_size, one_card, data, tmp_path):
    configs = {}
    for parallelism in ("ddp", "zero1", "fsdp"):
        for accumulation in (1, 8):
            options = {"parallelism": parallelism, **FLOAT32}
            configs[f"{parallelism}-{accumulation}"] = gpu_config(world_size, accumulation, **options)
        configs[f"{parallelism}-compiled"] = gpu_config(world_size, 4, compile="block", **options)
        if parallelism != "fsdp":
            configs[f"{parallelism}-graphs"] = gpu_config(world_size, 8, cuda_graphs=True, **options)
    logs = run_many(configs, data, tmp_path, timeout_s=540)
    for key, log in logs.items():
        assert_same(log, one_card, 3e-5 if "compiled" in key else 1e-5)
        assert log.used["parallelism"].used == configs[key].parallelism
        if "graphs" in key:
            assert_graphs(log)
    for key in configs:
        weights = [torch.load(tmp_path / key / f"weights-{rank}.pt", map_location="cpu") for rank in range(world_size)]
        for other in weights[1:]:
            assert all(torch.equal(weights[0][name], other[name]) for name in weights[0]), key


@pytest.mark.multigpu
@pytest.mark.parametrize("world_size", [pytest.param(2, marks=needs_cards(2)), pytest.param(4, marks=needs_cards(4))])
def test_graphs_with_ddp_in_bfloat16_are_used_not_fallen_back(world_size, data, tmp_path):
    options = {"compile": "block", "requires": ("cuda_graphs", "compile", "parallelism")}
    configs = {
        "eager": gpu_config(world_size, 8, **options),
        "graphs": gpu_config(world_size, 8, cuda_graphs=True, **options),
        "zero1-graphs": gpu_config(world_size, 8, cuda_graphs=True, parallelism="zero1", **options),
    }
    logs = run_many(configs, data, tmp_path, timeout_s=540)
    for key in ("graphs", "zero1-graphs"):
        assert_graphs(logs[key])
        assert_same(logs[key], logs["eager"], 0.02)
        assert [step.learning_rate for step in logs[key].steps] == [step.learning_rate for step in logs["eager"].steps]


@pytest.mark.multigpu
@needs_cards(2)
def test_out_of_memory_of_one_card_ends_all(data, tmp_path):
    process = start_run(gpu_config(2), data, tmp_path, script="planted.py", PLANT="oom", PLANT_RANK="1")
    code, stderr = finish_run(process)
    assert code == 0, stderr
    log = read_run_log(tmp_path / "run.json")
    assert log.status == "oom" and log.reason.startswith("rank 1")
    cause = failures.read_failures(tmp_path)[0]
    assert max((tmp_path / "ranks" / f"rank-{rank}.log").stat().st_mtime for rank in range(2)) - cause.at < 10


@pytest.mark.multigpu
@needs_cards(2)
def test_a_hung_collective_of_cards_ends_with_stacks(data, tmp_path):
    process = start_run(
        gpu_config(2), data, tmp_path, script="planted.py", PLANT="hang", PLANT_RANK="1", MFUBENCH_TIMEOUT_S="20"
    )
    code, _ = finish_run(process, timeout_s=240)
    assert code == 1
    stacks = [(tmp_path / "ranks" / f"stacks-{rank}.txt").read_text() for rank in range(2)]
    assert "planted.py" in stacks[1] and "train" in stacks[0]


@pytest.mark.multigpu
@needs_cards(2)
def test_a_checkpoint_of_two_cards_loads_on_one(one_card, data, tmp_path):
    run(gpu_config(2, parallelism="zero1", max_iters=8, checkpoint={"at_end": True}, **FLOAT32), data, tmp_path)
    log = run(gpu_config(**FLOAT32), data, tmp_path)
    assert [resume.step for resume in log.resumes] == [8]
    assert losses(log) == pytest.approx(losses(one_card), rel=1e-5)
