"""What a run prints before it starts: the architecture, its arithmetic, and what to expect of the card."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mfubench.config import ModelConfig, RunConfig
from mfubench.flops import CONVENTIONS, FlopTerms, count_parameters, flop_terms, flops_per_token

if TYPE_CHECKING:
    from mfubench.hardware import Peak

NAMES = {
    "layernorm": "LayerNorm",
    "rmsnorm": "RMSNorm",
    "learned": "learned positions",
    "rope": "RoPE",
    "none": "no positions",
    "gelu": "GELU",
    "silu": "SiLU",
    "relu": "ReLU",
    "swiglu": "SwiGLU",
}


def architecture(model: ModelConfig) -> str:
    """One line: `18L-18H-2304D-6144ff RoPE RMSNorm SwiGLU`, and what differs from the plain case."""
    heads = f"{model.num_attention_heads}H"
    if model.num_key_value_heads != model.num_attention_heads:
        heads += f"/{model.num_key_value_heads}KV"
    if model.head_dim * model.num_attention_heads != model.hidden_size:
        heads += f"x{model.head_dim}"
    parts = [f"{model.num_hidden_layers}L-{heads}-{model.hidden_size}D-{model.intermediate_size}ff"]
    parts += [NAMES[model.position], NAMES[model.norm], NAMES[model.mlp]]
    if model.norm_position == "post":
        parts.append("post-norm")
    if model.qk_norm:
        parts.append("q/k-norm")
    if model.tie_word_embeddings:
        parts.append("tied embeddings")
    return " ".join(parts)


def attention_to_mlp_ratio(model: ModelConfig, seq_len: int) -> float:
    """FLOPs of the attention layers (projections and scores, full attention) over those of the MLPs."""
    counts, terms = count_parameters(model), flop_terms(model, seq_len)
    return (6 * counts.attention + terms.attention) / (6 * counts.mlp)


def tokens_per_s_at(mfu: float, terms: FlopTerms, peak_tflops: float) -> float:
    """Tokens/s of one GPU at this MFU (a fraction, palm) of a peak in dense TFLOP/s."""
    return mfu * peak_tflops * 1e12 / flops_per_token(terms, "palm")


def banner(config: RunConfig, peak: Peak | None, note: str = "") -> str:
    """Several lines: architecture, parameters, FLOPs a token by term and convention, peak and the tokens/s at 50 % MFU.

    `peak` is that of one device for the run's arithmetic; None where there is none, and `note` then says why.
    """
    model, terms, counts = config.model, flop_terms(config.model, config.seq_len), count_parameters(config.model)
    conventions = ", ".join(f"{name} {flops_per_token(terms, name) / 1e9:.4g}" for name in CONVENTIONS)
    lines = [
        f"{model.name}: {architecture(model)}",
        f"parameters     {counts.total:,}, {counts.matmul:,} of them in matmuls",
        f"GFLOP a token  {conventions}; 6N {6 * counts.total / 1e9:.4g} + attention {terms.attention / 1e9:.4g} "
        f"at {config.seq_len} tokens",
        f"attention/FFN  {attention_to_mlp_ratio(model, config.seq_len):.2f} in FLOPs",
        f"batch          {config.micro_batch_size} x {config.gradient_accumulation_steps} accumulated x "
        f"{config.world_size} processes = {config.global_batch_size} sequences = {config.tokens_per_step:,} tokens",
    ]
    if peak is None:
        lines.append(f"peak           unknown: {note}")
    else:
        kind = "measured" if peak.measured else "dense"
        half = tokens_per_s_at(0.5, terms, peak.tflops)
        lines.append(f"peak           {peak.tflops:,.4g} TFLOP/s {kind} {peak.dtype}, {peak.source}")
        lines.append(f"50 % MFU       {half:,.0f} tokens/s per device (palm), {half * config.world_size:,.0f} over all")
    return "\n".join(lines)
