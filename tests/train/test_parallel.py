"""The flat buffers against autograd's own gradients, and the optimizer against torch's textbook use of it."""

from __future__ import annotations

import itertools

import pytest
import torch
from train.train_runs import tiny_config

from mfubench.model import build_model
from mfubench.train.buckets import ALIGNMENT, plan_buckets
from mfubench.train.gradients import GradientMeter
from mfubench.train.optimizer import Optimizer, learning_rate_at
from mfubench.train.parallel import FlatEngine
from mfubench.train.process import Process
from mfubench.train.step import TrainStep

ALONE = Process(rank=0, world_size=1, local_rank=0, device=torch.device("cpu"))
A, B, T = 3, 2, 16


def model_and_engine(dtype=torch.float32, **model_options):
    config = tiny_config(model=model_options, gradient_accumulation_steps=A, micro_batch_size=B)
    torch.manual_seed(config.seed)
    model = build_model(config, device="cpu", dtype=dtype)
    initial = model.initial_parameters(ALONE.device)
    return config, model, FlatEngine(model, initial, process=ALONE, gradient_accumulation_steps=A, shard=False)


def batches():
    tokens = torch.randint(97, (A, B, T + 1), generator=torch.Generator().manual_seed(1))
    return tokens[..., :-1].contiguous(), tokens[..., 1:].contiguous()


def autograd_gradients(config, inputs, labels, dtype=torch.float32):
    """Mean gradient over the micro-batches from a plain model, accumulated in float32."""
    torch.manual_seed(config.seed)
    model = build_model(config, device="cpu", dtype=dtype)
    total = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
    for micro in range(A):
        model.zero_grad()
        model(inputs[micro], labels[micro]).backward()
        for name, p in model.named_parameters():
            total[name] += p.grad.float()
    return {name: gradient / A for name, gradient in total.items()}


def engine_gradients(engine):
    return {
        name: engine.gradient[slot.start : slot.start + slot.numel].view(slot.parameter.shape)
        for name, slot in engine.slots.items()
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
def test_main_gradient_is_the_float32_sum_over_micro_batches(dtype, tied):
    config, model, engine = model_and_engine(dtype, tie_word_embeddings=tied)
    inputs, labels = batches()
    step = TrainStep(model, engine, Optimizer(engine, config.optimizer, process=ALONE, scale_loss=False))
    for _ in range(2):  # the second time must not add to the first
        step.forward_backward(inputs, labels)
    expected = autograd_gradients(config, inputs, labels, dtype)
    found = engine_gradients(engine)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient / engine.divisor, expected[name], rtol=1e-5, atol=1e-7)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("clip", [0.0, 0.05, 100.0])
def test_one_step_is_clip_grad_norm_and_adamw(clip):
    config, model, engine = model_and_engine()
    options = config.optimizer.model_copy(update={"grad_clip": clip})
    optimizer = Optimizer(engine, options, process=ALONE, scale_loss=False)
    optimizer.set_learning_rate(0.01)
    inputs, labels = batches()

    torch.manual_seed(config.seed)
    plain = build_model(config, device="cpu")
    plain_optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in plain.parameters() if p.dim() >= 2], "weight_decay": options.weight_decay},
            {"params": [p for p in plain.parameters() if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=0.01,
        betas=(options.beta1, options.beta2),
        eps=options.eps,
    )
    for _ in range(3):
        _, grad_norm = TrainStep(model, engine, optimizer)(inputs, labels)
        plain_optimizer.zero_grad()
        for micro in range(A):
            (plain(inputs[micro], labels[micro]) / A).backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), clip or float("inf"))
        plain_optimizer.step()
        torch.testing.assert_close(grad_norm, norm, rtol=1e-5, atol=0)
    for (name, parameter), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        # Adam divides by a gradient's own size: rounding of the smallest ones is what the tolerance allows for
        torch.testing.assert_close(parameter, expected, rtol=1e-3, atol=3e-4, msg=name)


def test_bfloat16_keeps_float32_masters():
    config, model, engine = model_and_engine(torch.bfloat16)
    optimizer = Optimizer(engine, config.optimizer, process=ALONE, scale_loss=False)
    optimizer.set_learning_rate(1e-6)  # far below a bfloat16's resolution of most weights
    before = engine.masters.clone()
    TrainStep(model, engine, optimizer)(*batches())
    assert engine.masters.dtype == torch.float32
    changed = (engine.masters != before).sum() / (before != 0).sum()
    assert changed > 0.9
    assert torch.equal(engine.compute, engine.masters.to(torch.bfloat16))
    for parameter in model.parameters():
        assert parameter.dtype == torch.bfloat16
        assert parameter.untyped_storage().data_ptr() == engine.compute.untyped_storage().data_ptr()


def test_float16_skips_the_step_and_halves_the_scale_when_a_gradient_overflows():
    config, model, engine = model_and_engine(torch.float16)
    optimizer = Optimizer(engine, config.optimizer, process=ALONE, scale_loss=True)
    optimizer.set_learning_rate(0.01)
    step = TrainStep(model, engine, optimizer)
    optimizer.scale.fill_(2.0**40)
    before = engine.masters.clone()
    step(*batches())
    assert torch.equal(engine.masters, before)
    assert optimizer.scale.item() == 2.0**39
    assert optimizer.state("step")[0].item() == 0
    optimizer.scale.fill_(1024.0)
    _, grad_norm = step(*batches())
    assert grad_norm.isfinite()
    assert not torch.equal(engine.masters, before)
    assert optimizer.state("step")[0].item() == 1


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_buckets_hold_every_parameter_once_in_backward_order(world_size):
    config = tiny_config(model={"tie_word_embeddings": True})
    model = build_model(config, device="meta")
    buckets = plan_buckets(model, world_size)
    names = [slot.name for bucket in buckets for slot in bucket.slots]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    matrices = [slot.name for bucket in buckets if bucket.decay for slot in bucket.slots]
    assert matrices[-1] == "token_embedding.weight"  # tied: its gradient is complete last
    assert matrices.index("blocks.1.mlp.down.weight") < matrices.index("blocks.0.attention.qkv.weight")
    assert len(buckets) > 4
    position = 0
    for bucket in buckets:
        assert bucket.start == position
        assert (bucket.end - bucket.start) % (ALIGNMENT * world_size) == 0
        assert all((slot.parameter.dim() >= 2) == bucket.decay for slot in bucket.slots)
        for slot in bucket.slots:
            assert slot.start % ALIGNMENT == 0
            assert position <= slot.start and slot.start + slot.numel <= bucket.end
            position = slot.start + slot.numel
        position = bucket.end


def test_a_parameter_without_gradient_is_an_error_not_a_stale_gradient():
    config, model, engine = model_and_engine()
    unused = model.final_norm.weight
    model.final_norm.forward = lambda hidden: torch.nn.functional.rms_norm(hidden, hidden.shape[-1:])
    step = TrainStep(model, engine, Optimizer(engine, config.optimizer, process=ALONE, scale_loss=False))
    assert unused.requires_grad
    with pytest.raises(RuntimeError, match=r"no gradient reached.*final_norm"):
        step.forward_backward(*batches())


def test_gradient_statistics_are_those_before_clipping():
    config, model, engine = model_and_engine()
    options = config.optimizer.model_copy(update={"grad_clip": 0.01})
    optimizer = Optimizer(engine, options, process=ALONE, scale_loss=False)
    optimizer.set_learning_rate(0.01)
    inputs, labels = batches()
    expected = autograd_gradients(config, inputs, labels)
    TrainStep(model, engine, optimizer)(inputs, labels)
    meter = GradientMeter(engine, optimizer, ALONE)
    meter.measure(0)
    (record,) = meter.collect()
    assert list(record.layers) == ["blocks.0", "blocks.1", "final_norm", "lm_head", "token_embedding"]
    for layer, values in record.layers.items():
        whole = torch.cat([g.flatten() for name, g in expected.items() if name.startswith(layer + ".")])
        assert values["mean"] == pytest.approx(whole.mean().item(), rel=1e-3, abs=1e-8)
        assert values["max"] == pytest.approx(whole.abs().max().item(), rel=1e-4)
        assert values["std"] == pytest.approx(whole.std(correction=0).item(), rel=1e-4)
    assert meter.collect() == []


def test_learning_rate_warms_up_and_falls_along_a_cosine():
    options = tiny_config(
        optimizer={"learning_rate": 1.0, "min_learning_rate": 0.1, "warmup_iters": 4, "lr_decay_iters": 12}
    ).optimizer
    rates = [learning_rate_at(step, options) for step in range(15)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[8] == pytest.approx(0.55)
    assert rates[12:] == [0.1, 0.1, 0.1]
    assert all(left > right for left, right in itertools.pairwise(rates[4:13]))
