"""Activations in the matmuls beside them: the layer, its gradients and where they go. On a CPU step by step what quack
computes."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from model.small_models import GPT2, LLAMA, QWEN3, run_config, tokens
from torch import Tensor

from mfubench.config import KernelsConfig, ModelConfig
from mfubench.model import build_model
from mfubench.model.components import make_mlp
from mfubench.model.fused.mlp_matmul import fewest_waves, mlp_in_matmuls
from mfubench.model.operations import PLAIN, TOLERANCE, resolve_operations, try_in_matmuls
from mfubench.model.weight_gradient import Linear, MainGradient
from mfubench.presets import load_model

IN_MATMULS = replace(PLAIN, mlp_in_matmuls=mlp_in_matmuls)


def off(found: Tensor | None, expected: Tensor | None) -> float:
    assert found is not None and expected is not None
    return ((found.float() - expected.float()).abs().max() / expected.float().abs().max()).item()


def keep_apart(layer: Linear, overwrite: bool, before: float) -> MainGradient:
    """A main gradient for the layer's weight, with something in it."""
    weight = layer.weight
    total = torch.full(weight.shape, torch.nan if overwrite else before, device=weight.device)
    layer.main = MainGradient(total, torch.tensor(overwrite), torch.empty(0, device=weight.device, requires_grad=True))
    return layer.main


def check(model: ModelConfig, N: int, dtype: torch.dtype, device: str, accumulating: bool, overwrite: bool) -> None:
    """The layer in `dtype`, of [2, N, hidden], against the plain one in float32 with the same weights."""
    torch.manual_seed(0)
    layer = make_mlp(model, in_matmuls=mlp_in_matmuls).to(device, dtype)
    exact = copy.deepcopy(layer).float()
    exact.in_matmuls = None
    inputs, grad = (torch.randn(2, N, model.hidden_size).to(device, dtype) for _ in range(2))
    leaves = inputs.clone().requires_grad_(), inputs.float().requires_grad_()
    linears = [module for module in layer.children() if isinstance(module, Linear)]
    mains = [keep_apart(linear, overwrite, 0.5) for linear in linears] if accumulating else []
    outputs = layer(leaves[0]), exact(leaves[1])
    outputs[0].backward(grad)
    outputs[1].backward(grad.float())
    found = {name: parameter.grad for name, parameter in layer.named_parameters()}
    for linear, main in zip(linears, mains, strict=False):
        (name,) = [name for name, parameter in layer.named_parameters() if parameter is linear.weight]
        assert found[name] is None and main.ticket.grad is not None
        found[name] = main.total - (0 if overwrite else 0.5)
    pairs = {"output": outputs, "input": (leaves[0].grad, leaves[1].grad)}
    pairs |= {name: (found[name], parameter.grad) for name, parameter in exact.named_parameters()}
    for name, (x, y) in pairs.items():
        assert off(x, y) <= 4 * TOLERANCE[dtype], f"{name} is off by {off(x, y):.3g} of its largest value"


WAYS = pytest.mark.parametrize(
    ("accumulating", "overwrite"), [(False, True), (True, True), (True, False)], ids=["gradients", "first", "added"]
)


@WAYS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "architecture",
    [LLAMA, GPT2, {**GPT2, "mlp_bias": False}, {**LLAMA, "mlp": "gelu"}],
    ids=["swiglu", "gelu-biased", "gelu", "gelu-of-llama"],
)
def test_layer_and_gradients_are_those_of_the_plain_layer(
    architecture: dict, dtype: torch.dtype, accumulating: bool, overwrite: bool
) -> None:
    check(run_config(architecture).model, 5, dtype, "cpu", accumulating, overwrite)


@WAYS
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["llama2-1.36b", "qwen3-1.8b", "llama3-1.5b", "gpt2-1.36b"])
def test_on_a_card_with_the_sizes_of_models(name: str, accumulating: bool, overwrite: bool) -> None:
    model = load_model(name)
    chosen, reason = try_in_matmuls(model.mlp, model, torch.device("cuda"), torch.bfloat16, in_place=True)
    if chosen is None:
        pytest.skip(str(reason))
    check(model, 1024, torch.bfloat16, "cuda", accumulating, overwrite)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("architecture", [LLAMA, QWEN3, GPT2], ids=["llama", "qwen3", "gpt2"])
def test_a_whole_model(architecture: dict, backend: str | None) -> None:
    config = run_config(architecture)
    results = []
    for operations in (IN_MATMULS, PLAIN):
        torch.manual_seed(0)
        model = build_model(config, device="cpu", operations=operations)
        if backend is not None:
            torch._dynamo.reset()
            for block in model.blocks:
                block.forward = torch.compile(block.forward, backend=backend, dynamic=False, fullgraph=True)
        batch = tokens(2, 10)
        loss = model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        results.append((loss, {name: parameter.grad for name, parameter in model.named_parameters()}))
        with torch.no_grad():
            torch.testing.assert_close(model(batch[:, :-1], batch[:, 1:]), loss.detach(), rtol=1e-5, atol=0)
    (loss, gradients), (expected_loss, expected) = results
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=0)
    for name, gradient in gradients.items():
        assert off(gradient, expected[name]) < 1e-4, name


def test_what_cannot_have_it_says_why() -> None:
    llama, gpt2, cuda = run_config(LLAMA).model, run_config(GPT2).model, torch.device("cuda")
    asked = KernelsConfig(swiglu="matmul", gelu="matmul")
    for model, kind, other in ((llama, "swiglu", "gelu"), (gpt2, "gelu", "swiglu")):
        operations, choices = resolve_operations(asked, model=model, device="cpu", dtype=torch.bfloat16)
        assert operations.mlp_in_matmuls is None
        assert choices[kind].used == "plain" and "CUDA" in (choices[kind].reason or "")
        assert choices[other].used == "plain" and "the model's MLP is" in (choices[other].reason or "")
    refused = {
        "bias": try_in_matmuls("swiglu", llama.model_copy(update={"mlp_bias": True}), cuda, torch.bfloat16, True),
        "fp8": try_in_matmuls("swiglu", llama, cuda, torch.bfloat16, False),
        "half precision": try_in_matmuls("gelu", gpt2, cuda, torch.float32, True),
    }
    for why, (function, reason) in refused.items():
        assert function is None and why in (reason or "")


def test_waves_of_tiles() -> None:
    """132 multiprocessors: 16,384 x 2,304 are 6 waves of 256 x 192 or 9 of 256 x 128, as long; 2,048 6 and 8."""
    wide, narrow = (256, 192, False, 2, 1), (256, 128, False, 1, 2)
    assert fewest_waves((wide, narrow), 16_384, 2304, 132) == wide
    assert fewest_waves((narrow, wide), 16_384, 2304, 132) == narrow
    assert fewest_waves((wide, narrow), 16_384, 2048, 132) == narrow
