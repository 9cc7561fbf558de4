"""Each component against its definition, written out."""

from __future__ import annotations

import math

import pytest
import torch
from model.small_models import LLAMA, build, run_config, tokens
from torch import Tensor

from mfubench.model import build_model
from mfubench.model.components import Mlp, SwiGlu, apply_rope, make_mlp, make_norm, rope_tables

CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def random_input(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def randomized(module: torch.nn.Module) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    return module


def test_rms_norm() -> None:
    norm = randomized(make_norm(run_config({**LLAMA, "rms_norm_eps": 0.3}).model, 48))
    x = random_input(2, 5, 48)
    expected = x / torch.sqrt((x * x).mean(-1, keepdim=True) + 0.3) * norm.weight
    torch.testing.assert_close(norm(x), expected, **CLOSE)
    assert [name for name, _ in norm.named_parameters()] == ["weight"]


@pytest.mark.parametrize("bias", [False, True])
def test_layer_norm(bias: bool) -> None:
    model = run_config({**LLAMA, "norm": "layernorm", "norm_bias": bias, "rms_norm_eps": 0.3}).model
    norm = randomized(make_norm(model, 48))
    x = random_input(2, 5, 48)
    centred = x - x.mean(-1, keepdim=True)
    expected = centred / torch.sqrt((centred * centred).mean(-1, keepdim=True) + 0.3) * norm.weight
    if bias:
        expected = expected + norm.bias
    torch.testing.assert_close(norm(x), expected, **CLOSE)
    assert [name for name, _ in norm.named_parameters()] == ["weight", "bias"][: 1 + bias]


def test_norm_statistics_are_float32_in_bfloat16() -> None:
    """Rounded once, at the end: 2,000 summed squares in bfloat16 would be off by percents."""
    norm = make_norm(run_config(LLAMA).model, 2000).bfloat16()
    x = (random_input(4, 2000) + 3).bfloat16()
    exact = x.double() / torch.sqrt((x.double() ** 2).mean(-1, keepdim=True) + 1e-5)
    torch.testing.assert_close(norm(x).double(), exact, rtol=2**-8, atol=0)


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
def test_rope_rotates_each_pair_by_its_angle(theta: float) -> None:
    D, T = 8, 6
    cos, sin = rope_tables(T, D, theta, torch.device("cpu"))
    x = random_input(2, T, 3, D)
    found = apply_rope(x, cos, sin)
    for t in range(T):
        for i in range(D // 2):
            angle = t / theta ** (2 * i / D)
            first, second = x[:, t, :, i], x[:, t, :, i + D // 2]
            expected = (
                first * math.cos(angle) - second * math.sin(angle),
                second * math.cos(angle) + first * math.sin(angle),
            )
            torch.testing.assert_close(found[:, t, :, i], expected[0], **CLOSE)
            torch.testing.assert_close(found[:, t, :, i + D // 2], expected[1], **CLOSE)


def test_rope_scores_depend_on_distance_alone() -> None:
    cos, sin = rope_tables(50, 16, 10_000.0, torch.device("cpu"))
    q, k = (random_input(1, 1, 1, 16).expand(1, 50, 1, 16) for _ in range(2))
    scores = apply_rope(q, cos, sin)[0, :, 0] @ apply_rope(k, cos, sin)[0, :, 0].T
    for distance in (0, 3, 20):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[0].expand_as(diagonal), rtol=1e-4, atol=1e-4)


def test_rope_is_computed_in_float32() -> None:
    """At position 2,000 a bfloat16 angle would be off by whole turns."""
    cos, sin = rope_tables(2001, 16, 10_000.0, torch.device("cpu"))
    assert cos.dtype == sin.dtype == torch.float32
    x = random_input(1, 2001, 1, 16).bfloat16()
    exact = apply_rope(x.double(), cos, sin)
    found = apply_rope(x, cos, sin)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), exact.double(), rtol=2**-8, atol=1e-6)


def test_tables_stay_float32_in_a_bfloat16_model() -> None:
    decoder = build_model(run_config(LLAMA, dtype="bfloat16"), device="cpu")
    assert decoder.cos.dtype == decoder.sin.dtype == torch.float32
    assert {parameter.dtype for parameter in decoder.parameters()} == {torch.bfloat16}
    assert not [name for name in decoder.state_dict() if name in ("cos", "sin")]


DEFINITIONS = {
    "gelu": lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "relu": lambda x: x.clamp(min=0),
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", DEFINITIONS)
def test_mlp(name: str, bias: bool) -> None:
    mlp = randomized(make_mlp(run_config({**LLAMA, "mlp": name, "mlp_bias": bias}).model))
    assert isinstance(mlp, Mlp)
    x = random_input(2, 5, 48)
    inner, outer = x @ mlp.up.weight.T, 0.0
    if bias:
        inner, outer = inner + mlp.up.bias, mlp.down.bias
    expected = DEFINITIONS[name](inner) @ mlp.down.weight.T + outer
    torch.testing.assert_close(mlp(x), expected, rtol=1e-4, atol=1e-4)


def test_swiglu_gate_comes_first() -> None:
    mlp = randomized(make_mlp(run_config(LLAMA).model))
    assert isinstance(mlp, SwiGlu)
    x = random_input(2, 5, 48)
    gate, up = x @ mlp.gate_up.weight[:80].T, x @ mlp.gate_up.weight[80:].T
    expected = (gate * torch.sigmoid(gate) * up) @ mlp.down.weight.T
    torch.testing.assert_close(mlp(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("position", ["learned", "rope", "none"])
def test_position_kinds(position: str) -> None:
    """Without positions (and without the causal mask's help) a permuted context gives the same last state."""
    decoder = build({**LLAMA, "position": position, "num_hidden_layers": 1})
    batch = tokens(1, 9)
    swapped = torch.cat((batch[:, [3, 0, 7, 1, 2, 6, 5, 4]], batch[:, 8:]), dim=1)
    same = torch.allclose(decoder.logits(batch)[:, -1], decoder.logits(swapped)[:, -1], rtol=1e-4, atol=1e-4)
    assert same == (position == "none")


def test_learned_positions_are_added_once() -> None:
    decoder = build({**LLAMA, "position": "learned"})
    seen = []
    decoder.blocks[0].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    batch = tokens(2, 9)
    decoder.hidden_states(batch)
    expected = decoder.token_embedding.weight[batch] + decoder.position_embedding.weight[:9]
    torch.testing.assert_close(seen[0], expected)


def test_pre_and_post_norm() -> None:
    """pre: x + f(norm(x)); post: norm(x + f(x)); the final norm stands in both."""
    x = random_input(2, 5, 48)
    cos, sin = rope_tables(5, 8, 10_000.0, torch.device("cpu"))
    for position in ("pre", "post"):
        block = build({**LLAMA, "norm_position": position}).blocks[0]
        if position == "pre":
            middle = x + block.attention(block.attention_norm(x), cos, sin)
            expected = middle + block.mlp(block.mlp_norm(middle))
        else:
            middle = block.attention_norm(x + block.attention(x, cos, sin))
            expected = block.mlp_norm(middle + block.mlp(middle))
        found, update = block(x, None, cos, sin)
        assert update is None
        torch.testing.assert_close(found, expected)
