"""SwiGLU in its matmuls: the layer, its gradients and where they go. On a CPU step by step what quack computes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from model.small_models import LLAMA, QWEN3, run_config, tokens
from torch import Tensor

from mfubench.config import KernelsConfig
from mfubench.model import build_model
from mfubench.model.components import swiglu
from mfubench.model.fused.swiglu_matmul import swiglu_mlp
from mfubench.model.operations import PLAIN, TOLERANCE, resolve_operations, try_swiglu_mlp
from mfubench.model.weight_gradient import MainGradient
from mfubench.presets import load_model

IN_MATMULS = replace(PLAIN, swiglu_mlp=swiglu_mlp)


def layer(N: int, H: int, width: int, dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    """inputs [2, N, H], gate_up [2I, H], down [H, I], gradient [2, N, H]."""
    generator = torch.Generator().manual_seed(0)
    shapes = {(2, N, H): 1.0, (2 * width, H): H**-0.5, (H, width): width**-0.5}
    drawn = [scale * torch.randn(shape, generator=generator) for shape, scale in shapes.items()]
    return tuple(x.to(device, dtype) for x in (*drawn, torch.randn((2, N, H), generator=generator)))


def plain(inputs: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    return F.linear(swiglu(F.linear(inputs, gate_up)), down)


def off(found: Tensor, expected: Tensor) -> float:
    return ((found.float() - expected.float()).abs().max() / expected.float().abs().max()).item()


def check(sizes: tuple[int, int, int], dtype: torch.dtype, device: str, accumulating: bool, overwrite: bool) -> None:
    *leaves, grad = layer(*sizes, dtype, device)
    exact = [x.float().clone().requires_grad_() for x in leaves]
    expected = plain(*exact)
    expected.backward(grad.float())
    inputs, gate_up, down = (x.requires_grad_() for x in leaves)
    before = torch.nan if overwrite else 0.5
    mains = [
        MainGradient(
            torch.full(weight.shape, before, device=device),
            torch.tensor(overwrite),
            torch.empty(0, device=device, requires_grad=True),
        )
        for weight in (gate_up, down)
    ]
    found = swiglu_mlp(inputs, gate_up, down, *(mains if accumulating else (None, None)))
    found.backward(grad)
    gradients: list[Tensor | None] = [gate_up.grad, down.grad]
    if accumulating:
        assert gradients == [None, None] and all(main.ticket.grad is not None for main in mains)
        gradients = [main.total - (0 if overwrite else before) for main in mains]
    pairs = [(found, expected), (inputs.grad, exact[0].grad)]
    pairs += list(zip(gradients, [exact[1].grad, exact[2].grad], strict=True))
    for i, (x, y) in enumerate(pairs):
        assert off(x, y) <= 4 * TOLERANCE[dtype], f"tensor {i} is off by {off(x, y):.3g} of its largest value"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("accumulating", "overwrite"), [(False, True), (True, True), (True, False)], ids=["gradients", "first", "added"]
)
def test_layer_and_gradients_are_those_of_the_plain_layer(
    dtype: torch.dtype, accumulating: bool, overwrite: bool
) -> None:
    check((5, 24, 36), dtype, "cpu", accumulating, overwrite)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["llama2-1.36b", "qwen3-1.8b", "llama3-1.5b"])
@pytest.mark.parametrize("accumulating", [False, True])
@pytest.mark.parametrize("overwrite", [True, False])
def test_on_a_card_with_the_sizes_of_models(name: str, accumulating: bool, overwrite: bool) -> None:
    model = load_model(name)
    chosen, reason = try_swiglu_mlp(model, torch.device("cuda"), torch.bfloat16, in_place=True)
    if chosen is None:
        pytest.skip(str(reason))
    check((1024, model.hidden_size, model.intermediate_size), torch.bfloat16, "cuda", accumulating, overwrite)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("architecture", [LLAMA, QWEN3], ids=["llama", "qwen3"])
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
    model = run_config(LLAMA).model
    _, choices = resolve_operations(KernelsConfig(swiglu="matmul"), model=model, device="cpu", dtype=torch.bfloat16)
    assert choices["swiglu"].used == "plain" and "CUDA" in (choices["swiglu"].reason or "")
    refused = {
        "bias": try_swiglu_mlp(model.model_copy(update={"mlp_bias": True}), torch.device("cuda"), torch.bfloat16, True),
        "fp8": try_swiglu_mlp(model, torch.device("cuda"), torch.bfloat16, False),
        "half precision": try_swiglu_mlp(model, torch.device("cuda"), torch.float32, True),
    }
    for why, (function, reason) in refused.items():
        assert function is None and why in (reason or "")
