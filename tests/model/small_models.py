"""Small models for the tests of this folder, and one way to build them."""

from __future__ import annotations

from typing import Any

import torch

from mfubench.config import ModelConfig, RunConfig
from mfubench.model import Decoder, build_model

VOCAB = 96  # a multiple of nothing that matters
COMMON = {"vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 40}

GPT2 = {
    **COMMON,
    "intermediate_size": 100,
    "num_attention_heads": 3,
    "norm": "layernorm",
    "position": "learned",
    "mlp": "gelu",
    "tie_word_embeddings": True,
}
LLAMA = {**COMMON, "intermediate_size": 80, "num_attention_heads": 6}
QWEN3 = {
    **LLAMA,
    "num_key_value_heads": 2,
    "head_dim": 16,  # 6 x 16 = 96: twice hidden_size
    "qk_norm": True,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "gpt2-biased": {**GPT2, "attention_bias": True, "mlp_bias": True, "norm_bias": True},
    "gpt2-untied-relu": {**GPT2, "tie_word_embeddings": False, "mlp": "relu"},
    "llama-mha": LLAMA,
    "llama-gqa": {**LLAMA, "num_key_value_heads": 2, "rope_theta": 500_000.0, "rms_norm_eps": 1e-6},
    "llama-tied-biased": {**LLAMA, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "qwen3": QWEN3,
    "qwen3-tied-biased": {**QWEN3, "attention_bias": True, "tie_word_embeddings": True},
}


def run_config(model: dict[str, Any] | ModelConfig, **overrides: Any) -> RunConfig:
    """A run of a small model in float32."""
    if not isinstance(model, ModelConfig):
        model = ModelConfig(**{"name": "small", **model})
    values = {"name": "smoke/small", "dataset": "none", "seq_len": 24, "micro_batch_size": 2, "max_iters": 1}
    return RunConfig(**{**values, "dtype": "float32", "attention": "eager", "loss": "full", **overrides}, model=model)


def build(model: dict[str, Any] | ModelConfig, **overrides: Any) -> Decoder:
    """The model on a CPU, every parameter random (norms and biases too, so that a swapped one shows)."""
    torch.manual_seed(0)
    decoder = build_model(run_config(model, **overrides), device="cpu")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
            else:
                parameter.mul_(8)  # larger than initial weights, so that attention is not nearly uniform
    return decoder


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(2))
