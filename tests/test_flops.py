"""FLOP formulas against exact counts: parameters of the module, and FLOPs that torch counts while it runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from mfubench.cli import app
from mfubench.config import ModelConfig, RunConfig
from mfubench.flops import (
    CONVENTIONS,
    count_parameters,
    executed_flops_per_token,
    flop_terms,
    flops_per_token,
    mfu,
)
from mfubench.model import build_model
from mfubench.model.weight_gradient import Linear, MainGradient
from mfubench.presets import load_model, preset_names
from mfubench.train.modules import checkpoint_activations

# Parameters and palm GFLOP a token at 2,048 tokens, worked out by hand.
EXACT = {
    "gpt2-1.36b": (1_267_213_824, 8.6225),
    "llama2-1.36b": (1_294_159_104, 8.7842),
    "llama3-1.5b": (1_544_628_224, 10.1737),
    "llama3-2.2b": (2_224_154_624, 14.8549),
    "qwen3-1.8b": (1_830_395_904, 12.1903),
    "llama3-8b": (8_030_261_248, 51.4028),
    "llama2-c1": (1_364_297_728, None),
    "llama2-c2": (1_357_864_704, None),
    "llama2-c3": (1_357_860_096, None),
}

BASE = {"name": "odd", "vocab_size": 40, "hidden_size": 24, "intermediate_size": 56, "num_hidden_layers": 3}
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {"num_attention_heads": 4},
    "gqa": {"num_attention_heads": 6, "num_key_value_heads": 2},
    "head-dim": {"num_attention_heads": 2, "head_dim": 20},
    "gqa-head-dim-qk-norm": {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 10, "qk_norm": True},
    "tied": {"num_attention_heads": 4, "tie_word_embeddings": True},
    "biased": {
        "num_attention_heads": 4,
        "attention_bias": True,
        "mlp_bias": True,
        "norm": "layernorm",
        "norm_bias": True,
    },
    "gpt2": {
        "num_attention_heads": 3,
        "norm": "layernorm",
        "position": "learned",
        "mlp": "gelu",
        "tie_word_embeddings": True,
    },
    "gpt2-biased": {
        **{"num_attention_heads": 3, "norm": "layernorm", "position": "learned", "mlp": "gelu"},
        **{"attention_bias": True, "mlp_bias": True, "norm_bias": True},
    },
    "post-norm-relu": {"num_attention_heads": 4, "norm_position": "post", "mlp": "relu", "position": "none"},
    "silu": {"num_attention_heads": 4, "mlp": "silu"},
}


def run_of(model: ModelConfig, **overrides: Any) -> RunConfig:
    values = {"name": "smoke/flops", "dataset": "none", "seq_len": 16, "micro_batch_size": 2, "max_iters": 1}
    return RunConfig(**{**values, "dtype": "float32", "attention": "eager", "loss": "full", **overrides}, model=model)


def counted_flops_per_token(config: RunConfig, compiled: bool = False, accumulating: bool = False) -> float:
    """Forward and backward of one micro-batch, counted by torch while it runs; eager attention computes all T x T.

    accumulating: the layers' matmuls add their weights' gradients to main gradients, as an engine has them do.
    """
    torch.manual_seed(0)
    decoder = build_model(config, device="cpu")
    for layer in decoder.modules():
        if accumulating and isinstance(layer, Linear):
            ticket = torch.zeros(0, requires_grad=True)
            layer.main = MainGradient(torch.zeros(layer.weight.shape), torch.tensor(True), ticket)
    inputs, labels = torch.randint(0, config.model.vocab_size, (2, config.micro_batch_size, config.seq_len))
    if config.activation_checkpointing != "none":
        checkpoint_activations(decoder, config.activation_checkpointing)
    if compiled:
        torch._dynamo.reset()
        for block in decoder.blocks:
            block.forward = torch.compile(block.forward, backend="aot_eager", dynamic=False)
        decoder(inputs, labels).backward()
    with FlopCounterMode(display=False) as counter:
        decoder(inputs, labels).backward()
    return counter.get_total_flops() / inputs.numel()


@pytest.mark.parametrize("name", EXACT)
def test_parameters_of_presets(name: str) -> None:
    parameters, gigaflops = EXACT[name]
    model = load_model(name)
    assert count_parameters(model).total == parameters
    if gigaflops is not None:
        assert flops_per_token(flop_terms(model, 2048), "palm") / 1e9 == pytest.approx(gigaflops, abs=5e-5)


def test_qwen_with_unpadded_rows() -> None:
    model = load_model("qwen3-1.8b", {"vocab_size": 151_643})
    assert count_parameters(model).total == 1_829_195_776
    assert flops_per_token(flop_terms(model, 2048), "palm") / 1e9 == pytest.approx(12.1831, abs=5e-5)


@pytest.mark.parametrize("name", preset_names())
def test_parameters_equal_the_module(name: str) -> None:
    """Counted from the module on the meta device, which takes no memory."""
    model = load_model(name)
    decoder = build_model(run_of(model), device="meta")
    counts = count_parameters(model)
    assert sum(parameter.numel() for parameter in decoder.parameters()) == counts.total
    assert all(parameter.is_meta for parameter in decoder.parameters())
    linear = [module.weight for module in decoder.modules() if isinstance(module, torch.nn.Linear)]
    assert sum(weight.numel() for weight in linear) == counts.matmul


@pytest.mark.parametrize("shape", SHAPES)
def test_parameter_terms_equal_the_module(shape: str) -> None:
    model = ModelConfig(**{**BASE, "max_position_embeddings": 16, **SHAPES[shape]})
    decoder = build_model(run_of(model), device="meta")
    counts = count_parameters(model)
    sizes = {name: parameter.numel() for name, parameter in decoder.named_parameters()}
    matrices = {name: size for name, size in sizes.items() if decoder.get_parameter(name).dim() > 1}
    assert counts.total == sum(sizes.values())
    assert counts.attention == sum(size for name, size in matrices.items() if ".attention." in name)
    assert counts.mlp == sum(size for name, size in matrices.items() if ".mlp." in name)
    assert counts.position_embedding == matrices.get("position_embedding.weight", 0)
    assert counts.lm_head + counts.token_embedding == sum(
        matrices.get(name, 0) for name in ("token_embedding.weight", "lm_head.weight")
    )
    assert counts.other == sum(size for name, size in sizes.items() if name not in matrices)


@pytest.mark.parametrize("shape", SHAPES)
def test_formula_equals_torch_count(shape: str) -> None:
    """`matmul` is exactly what runs without a causal kernel; the other conventions differ by their definitions."""
    config = run_of(ModelConfig(**{**BASE, "max_position_embeddings": 16, **SHAPES[shape]}))
    terms = flop_terms(config.model, config.seq_len)
    counted = counted_flops_per_token(config)
    assert flops_per_token(terms, "matmul") == counted
    counts = count_parameters(config.model)
    looked_up = counts.token_embedding + counts.position_embedding + counts.other
    assert flops_per_token(terms, "palm") == counted + 6 * looked_up
    attention = 12 * config.model.num_hidden_layers * config.model.num_attention_heads * config.model.head_dim * 16
    assert flops_per_token(terms, "causal") == counted - attention / 2


@pytest.mark.parametrize("shape", SHAPES)
def test_recomputation_equals_torch_count(shape: str) -> None:
    """HFU's numerator with every block checkpointed: what torch counts, less the half that causal kernels skip."""
    model = ModelConfig(**{**BASE, "max_position_embeddings": 16, **SHAPES[shape]})
    config = run_of(model, activation_checkpointing="full")
    terms = flop_terms(model, config.seq_len)
    skipped = (terms.attention + terms.attention / 3) / 2  # of forward, backward, and the forward repeated
    counted = counted_flops_per_token(config)
    assert executed_flops_per_token(terms, config) == pytest.approx(counted - skipped, rel=1e-12)


@pytest.mark.parametrize(("kind", "repeats"), [("none", False), ("selective", False), ("full", True)])
def test_compiled_recomputation_equals_eager(kind: str, repeats: bool) -> None:
    """As a run does it: blocks checkpointed, then compiled."""
    config = run_of(ModelConfig(**{**BASE, "max_position_embeddings": 16, **SHAPES["gqa"]}))
    terms = flop_terms(config.model, config.seq_len)
    checkpointed_config = config.model_copy(update={"activation_checkpointing": kind})
    expected = executed_flops_per_token(terms, checkpointed_config) + terms.attention / 2
    if repeats:
        expected += terms.attention / 6
    assert counted_flops_per_token(checkpointed_config, compiled=True) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("compiled", [False, True])
def test_matmuls_that_add_up_their_weights_gradients_are_all_repeated(compiled: bool) -> None:
    """Torch stops the second forward pass before a last matmul of its own, and after one of an autograd function.

    What it counts of the rest cancels out: it does not know the operator that adds up.
    """
    config = run_of(ModelConfig(**{**BASE, "max_position_embeddings": 16, **SHAPES["gqa"]}))
    terms = flop_terms(config.model, config.seq_len)
    repeating = config.model_copy(update={"activation_checkpointing": "full"})
    counted = [counted_flops_per_token(one, compiled, accumulating=True) for one in (config, repeating)]
    expected = [executed_flops_per_token(terms, one, "accumulate") for one in (config, repeating)]
    skipped = terms.attention / 6  # eager attention computes all T x T of the repeated forward pass
    assert counted[1] - counted[0] == pytest.approx(expected[1] - expected[0] + skipped, rel=1e-12)
    assert expected[1] - executed_flops_per_token(terms, repeating, "plain") == 2 * 3 * 56 * 24  # down, forward


@pytest.mark.parametrize("checkpointing", ["none", "selective"])
def test_nothing_is_recomputed(checkpointing: str) -> None:
    config = run_of(load_model("llama2-tiny"), activation_checkpointing=checkpointing)
    terms = flop_terms(config.model, config.seq_len)
    assert executed_flops_per_token(terms, config) == flops_per_token(terms, "causal")


def test_conventions_are_ordered() -> None:
    for name in preset_names():
        terms = flop_terms(load_model(name), 2048)
        palm, matmul, causal = (flops_per_token(terms, convention) for convention in CONVENTIONS)
        assert palm > matmul > causal


def test_the_command_says_of_which_convention_its_sums_are() -> None:
    shown = " ".join(CliRunner().invoke(app, ["flops", "llama2-1.36b"], catch_exceptions=False).output.split())
    assert "(matmul)" in shown and "The components add up to matmul" in shown
    sums = [f"{flops_per_token(flop_terms(load_model('llama2-1.36b'), 2048), name) / 1e6:,.1f}" for name in CONVENTIONS]
    assert sums == ["8,784.2", "8,341.3", "7,831.7"]
    assert [shown.count(number) for number in sums] == [1, 2, 1]  # the components', and each convention's


def test_published_run() -> None:
    """54,830 tokens/s of llama2-1.36b on an H100 (989.4 TFLOP/s dense) are 48.7 % in the palm convention."""
    terms = flop_terms(load_model("llama2-1.36b"), 2048)
    assert mfu(54_830, flops_per_token(terms, "palm"), 989.4) == pytest.approx(0.487, abs=5e-4)


def test_unknown_convention() -> None:
    with pytest.raises(ValueError, match="unknown MFU convention 'nanogpt'; use one of palm, matmul, causal"):
        flops_per_token(flop_terms(load_model("llama2-tiny"), 16), "nanogpt")  # type: ignore[arg-type]
