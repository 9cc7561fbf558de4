"""The banner and `mfubench flops`: what a person reads before the first step."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from mfubench.banner import architecture, attention_to_mlp_ratio, banner, tokens_per_s_at
from mfubench.cli import app
from mfubench.config import ConfigError, RunConfig
from mfubench.experiments import build_run
from mfubench.flops import flop_terms
from mfubench.presets import load_model

RUN = {"name": "smoke/x", "dataset": "text", "seq_len": 2048, "micro_batch_size": 8, "max_iters": 1, "world_size": 2}
H100 = SimpleNamespace(tflops=989.4, dtype="bf16", source="h100-sxm: datasheet", measured=False)


@pytest.mark.parametrize(
    ("preset", "overrides", "expected"),
    [
        ("llama2-1.36b", {}, "18L-18H-2304D-6144ff RoPE RMSNorm SwiGLU"),
        ("gpt2-1.36b", {}, "18L-18H-2304D-9216ff learned positions LayerNorm GELU tied embeddings"),
        ("qwen3-1.8b", {}, "24L-16H/8KV-2048D-6144ff RoPE RMSNorm SwiGLU q/k-norm"),
        ("qwen3-tiny", {"norm_position": "post"}, "4L-4H/2KVx64-128D-384ff RoPE RMSNorm SwiGLU post-norm q/k-norm"),
    ],
)
def test_architecture(preset: str, overrides: dict, expected: str) -> None:
    assert architecture(load_model(preset, overrides)) == expected


def test_attention_to_mlp_ratio() -> None:
    """llama2-1.36b by hand: (6 * 4 * 2304^2 + 12 * 2304 * 2048) / (6 * 3 * 2304 * 6144) = 0.7222."""
    assert attention_to_mlp_ratio(load_model("llama2-1.36b"), 2048) == pytest.approx(0.7222, abs=1e-4)


def test_half_of_the_peak() -> None:
    """0.5 * 989.4e12 / 8.784170496e9 = 56,317 tokens/s."""
    terms = flop_terms(load_model("llama2-1.36b"), 2048)
    assert tokens_per_s_at(0.5, terms, 989.4) == pytest.approx(56_317, abs=1)


def test_banner_says_it_all() -> None:
    text = banner(RunConfig(**RUN, model=load_model("llama2-1.36b"), gradient_accumulation_steps=4), H100)
    for part in (
        "llama2-1.36b: 18L-18H-2304D-6144ff RoPE RMSNorm SwiGLU",
        "1,294,159,104",
        "palm 8.784",
        "6N 7.765 + attention 1.019",
        "0.72",
        "8 x 4 accumulated x 2 processes = 64 sequences = 131,072 tokens",
        "989.4 TFLOP/s dense bf16, h100-sxm: datasheet",
        "56,317 tokens/s per device (palm), 112,634 over all",
    ):
        assert part in text


def test_banner_without_a_peak() -> None:
    text = banner(RunConfig(**RUN, model=load_model("llama2-tiny", {"max_position_embeddings": 2048})), None, "no row")
    assert "unknown: no row" in text and "50 % MFU" not in text


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["flops", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_flops_json() -> None:
    """matmul: palm less 6 x (32,000 x 2,304 embedding + 37 x 2,304 norms); causal: less 6 x 18 x 2,304 x 2,048."""
    found = json.loads(run("llama2-1.36b", "--json"))
    assert found == {
        "model": "llama2-1.36b",
        "seq_len": 2048,
        "parameters": 1_294_159_104,
        "flops_per_token": {"palm": 8_784_170_496, "matmul": 8_341_291_008, "causal": 7_831_683_072},
    }
    assert list(found) == ["model", "seq_len", "parameters", "flops_per_token"]


def test_flops_with_overrides() -> None:
    plain = json.loads(run("llama2-1.36b", "--json", "--seq-len", "4096"))
    fewer = json.loads(run("llama2-1.36b", "num_hidden_layers=9", "--json"))
    prefixed = json.loads(run("llama2-1.36b", "model.num_hidden_layers=9", "--json"))
    assert plain["flops_per_token"]["palm"] == 8_784_170_496 + 12 * 18 * 2304 * 2048
    assert fewer == prefixed and fewer["parameters"] < plain["parameters"]
    with pytest.raises(ConfigError, match="num_hidden_layers is given twice"):
        run("llama2-1.36b", "model.num_hidden_layers=9", "num_hidden_layers=8")


def test_flops_of_sequences_that_the_model_has_no_positions_for() -> None:
    """Refused in the words of a run; by itself the command takes what there is, and RoPE has no end."""
    long = {"seq_len": 257, "micro_batch_size": 1, "max_iters": 1}
    with pytest.raises(ConfigError, match=r"^seq_len 257 is above the model's 256 learned positions") as refused:
        run("gpt2-tiny", "--seq-len", "257")
    with pytest.raises(ConfigError) as of_a_run:
        build_run(({"name": "by-hand/run", "model": "gpt2-tiny", "dataset": "x", **long},), "train")
    assert str(of_a_run.value) == f"train: {refused.value}"
    assert json.loads(run("gpt2-tiny", "--json"))["seq_len"] == 256
    assert "attention scores at 100000" in run("llama2-tiny", "--seq-len", "100000")


def test_flops_for_people() -> None:
    text = run("qwen3-1.8b")
    for part in ("1,830,395,904", "12,190.3", "10,322.7", "9,718.7", "attention/FFN 0.56", "52.7%"):
        assert part in text
