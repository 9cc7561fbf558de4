"""The project's AdamW kernel against torch's fused AdamW."""

from __future__ import annotations

import pytest
import torch
from train.train_runs import tiny_config
from triton_devices import DEVICES, INTERPRETED, run_interpreted

from mfubench.model import build_model
from mfubench.train.choices import resolve
from mfubench.train.gradients import GradientMeter
from mfubench.train.optimizer import Optimizer
from mfubench.train.parallel import FlatEngine
from mfubench.train.process import Process


def test_all_of_this_under_the_interpreter():
    run_interpreted(__file__)


def engine_and_optimizer(device: str, dtype: torch.dtype, fused: bool):
    process = Process(rank=0, world_size=1, local_rank=0, device=torch.device(device))
    small = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = tiny_config(attention="eager", loss="full", model=small)
    torch.manual_seed(config.seed)
    model = build_model(config, device=device, dtype=dtype)
    initial = model.initial_parameters(process.device)
    engine = FlatEngine(model, initial, process=process, gradient_accumulation_steps=2, shard=False)
    options = config.optimizer.model_copy(update={"grad_clip": 0.05})
    optimizer = Optimizer(engine, options, process=process, scale_loss=dtype == torch.float16, fused=fused)
    optimizer.set_learning_rate(0.01)
    return engine, optimizer, GradientMeter(engine, optimizer, process)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_updates_equal_those_of_torch(device, dtype):
    """The same gradients to both, three times; with a loss scale, the second are not finite and change nothing."""
    plain, fused = (engine_and_optimizer(device, dtype, choice) for choice in (False, True))
    generator = torch.Generator().manual_seed(0)
    for number in range(3):
        gradient = torch.randn(plain[0].gradient.shape, generator=generator).to(device)
        if number == 1 and dtype == torch.float16:
            gradient[7] = torch.inf
        norms = []
        for engine, optimizer, meter in (plain, fused):
            engine.gradient.copy_(gradient)
            norms.append(optimizer.step())
            engine.publish(rounded=optimizer.rounds)
            meter.measure(number)
        assert torch.equal(*norms)
        assert_same_state(plain, fused, dtype)
        if norms[0].isfinite():
            assert_same_statistics(plain, fused)
        else:
            assert all(meter.collect() for _, _, meter in (plain, fused))
    assert plain[1].state("step")[0].item() == (2 if dtype == torch.float16 else 3)
    assert not torch.equal(fused[0].masters, engine_and_optimizer(device, dtype, True)[0].masters)


def assert_same_state(plain, fused, dtype):
    close = {"rtol": 1e-6, "atol": 1e-7}
    for kind in ("step", "exp_avg", "exp_avg_sq"):
        torch.testing.assert_close(fused[1].state(kind), plain[1].state(kind), **close)
    torch.testing.assert_close(fused[0].masters, plain[0].masters, **close)
    rounding = 2**-7 if INTERPRETED else 0  # the interpreter cuts float32 off where a card rounds to bfloat16
    torch.testing.assert_close(fused[0].compute, fused[0].masters.to(dtype), rtol=rounding, atol=0)
    assert torch.equal(fused[1].scale, plain[1].scale)


def assert_same_statistics(plain, fused):
    (found,), (expected,) = fused[2].collect(), plain[2].collect()
    for layer, values in expected.layers.items():
        for name, value in values.items():
            assert found.layers[layer][name] == pytest.approx(value, rel=1e-4, abs=1e-7)


def test_without_cuda_torch_updates_and_the_reason_is_kept():
    process = Process(rank=0, world_size=1, local_rank=0, device=torch.device("cpu"))
    for asked in ("auto", "fused"):
        choice = resolve(tiny_config(kernels={"adamw": asked}), process).used["adamw"]
        assert (choice.requested, choice.used) == (asked, "plain")
        assert choice.reason == "Triton's kernels need a CUDA device, not cpu"
    assert resolve(tiny_config(), process).used["adamw"].reason is None
