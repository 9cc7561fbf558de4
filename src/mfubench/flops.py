"""FLOPs of a training token, and the MFU conventions built on them. Pure arithmetic, no torch.

Three named conventions; a figure without its convention is a defect:

- `palm` (the headline): 6 N + 12 L H Q T, N = all parameters, full attention (PaLM, arXiv 2204.02311, appendix B).
- `matmul`: as palm, but N = only parameters that take part in a matmul (torchtitan, nanochat).
- `causal`: as matmul, with attention halved: what causal kernels really execute (llm.c, Megatron since 2025).

and two more ratios: `hfu` (executed FLOPs, recomputation included, over the datasheet peak) and `mamfu` (causal FLOPs
over the matmul rate measured on that very card).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mfubench.config import ModelConfig, RunConfig

Convention = Literal["palm", "matmul", "causal"]
CONVENTIONS: tuple[Convention, ...] = ("palm", "matmul", "causal")


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters of a model by what they do in a step, in units."""

    token_embedding: int  # looked up, not multiplied; 0 where it is tied to the head, which counts the matrix
    position_embedding: int  # looked up and added
    attention: int  # q, k, v and output projections, all layers, biases left out
    mlp: int  # gate/up/down or up/down, all layers, biases left out
    lm_head: int  # the output projection; the one matrix of a tied model
    other: int  # norms, q/k-norms and biases: elementwise

    @property
    def total(self) -> int:
        return self.token_embedding + self.position_embedding + self.attention + self.mlp + self.lm_head + self.other

    @property
    def matmul(self) -> int:
        """Parameters that take part in a matmul: each costs 2 FLOPs a token forward and 4 backward."""
        return self.attention + self.mlp + self.lm_head


def count_parameters(model: ModelConfig) -> ParameterCounts:
    """Count the parameters of an architecture from its dimensions alone."""
    m = model
    q_width = m.num_attention_heads * m.head_dim  # H*Q, which need not be hidden_size (Qwen3-0.6B: 2048, not 1024)
    kv_width = m.num_key_value_heads * m.head_dim
    up_matrices = 2 if m.mlp == "swiglu" else 1  # gate and up, or up alone

    attention = m.hidden_size * (q_width + 2 * kv_width) + q_width * m.hidden_size
    mlp = (up_matrices + 1) * m.hidden_size * m.intermediate_size

    norms = 2 * m.num_hidden_layers + 1  # two a block and the final one
    other = norms * m.hidden_size * (2 if m.norm_bias else 1)
    if m.qk_norm:
        other += m.num_hidden_layers * 2 * m.head_dim
    if m.attention_bias:
        other += m.num_hidden_layers * (q_width + 2 * kv_width + m.hidden_size)
    if m.mlp_bias:
        other += m.num_hidden_layers * (up_matrices * m.intermediate_size + m.hidden_size)

    embedding = m.vocab_size * m.hidden_size
    return ParameterCounts(
        token_embedding=0 if m.tie_word_embeddings else embedding,
        position_embedding=m.max_position_embeddings * m.hidden_size if m.position == "learned" else 0,
        attention=m.num_hidden_layers * attention,
        mlp=m.num_hidden_layers * mlp,
        lm_head=embedding,
        other=other,
    )


@dataclass(frozen=True)
class FlopTerms:
    """What the conventions are made of: kept raw in every run log, judged in analysis."""

    parameters: int
    matmul_parameters: int
    attention_mlp_parameters: int  # of the blocks: what activation checkpointing runs again
    num_hidden_layers: int
    attention_width: int  # H*Q = num_attention_heads * head_dim; key/value heads repeat, so GQA changes nothing
    seq_len: int

    @property
    def attention(self) -> int:
        """Score and value products of full attention, FLOPs a token, forward and backward.

        Forward, for one token and one layer: q.k over T keys is 2*H*Q*T, probabilities times v again 2*H*Q*T;
        the backward pass costs twice the forward: 3 * 4 * H*Q*T = 12 H Q T a layer.
        """
        return 12 * self.num_hidden_layers * self.attention_width * self.seq_len


def flop_terms(model: ModelConfig, seq_len: int) -> FlopTerms:
    counts = count_parameters(model)
    return FlopTerms(
        parameters=counts.total,
        matmul_parameters=counts.matmul,
        attention_mlp_parameters=counts.attention + counts.mlp,
        num_hidden_layers=model.num_hidden_layers,
        attention_width=model.num_attention_heads * model.head_dim,
        seq_len=seq_len,
    )


def flops_per_token(terms: FlopTerms, convention: Convention) -> float:
    """FLOPs to train on one token (forward and backward, no recomputation).

    A parameter of a matmul costs one multiply and one add forward, and twice that backward (gradient of the input
    and of the weight): 6 a token.
    """
    if convention == "palm":
        return 6 * terms.parameters + terms.attention
    if convention == "matmul":
        return 6 * terms.matmul_parameters + terms.attention
    if convention == "causal":
        # token t attends to t+1 of T keys: (T+1)/2T of full attention on average, written as the usual half
        return 6 * terms.matmul_parameters + terms.attention / 2
    raise ValueError(f"unknown MFU convention {convention!r}; use one of {', '.join(CONVENTIONS)}")


def repeats_down(config: RunConfig, weight_gradient: str) -> bool:
    """Whether full checkpointing runs a block's last matmul again, the MLP's down projection.

    Torch stops where all is there that the backward pass needs, compiled or not: before that matmul, unless a norm
    follows it (post-norm), or it adds up its own weight's gradient: such a matmul keeps its inputs once it has run.
    weight_gradient: what ran of kernels.weight_gradient.
    """
    return config.model.norm_position != "pre" or weight_gradient == "accumulate"


def executed_flops_per_token(terms: FlopTerms, config: RunConfig, weight_gradient: str | None = None) -> float:
    """Causal FLOPs plus what activation checkpointing computes twice: the numerator of HFU.

    `full` runs each block's forward again: 2 FLOPs a block parameter, but for one that `repeats_down` leaves out, and
    1/3 of causal attention. `selective` keeps matmul and attention outputs and repeats elementwise work only, which is
    not counted. weight_gradient: what ran of kernels.weight_gradient; None: what `config` says.
    """
    executed = flops_per_token(terms, "causal")
    if config.activation_checkpointing == "full":
        model = config.model
        down = model.num_hidden_layers * model.intermediate_size * model.hidden_size
        left_out = 0 if repeats_down(config, weight_gradient or config.kernels.weight_gradient) else down
        executed += 2 * (terms.attention_mlp_parameters - left_out) + terms.attention / 2 / 3
    return executed


def mfu(tokens_per_s_per_gpu: float, flops_a_token: float, peak_tflops: float) -> float:
    """Model FLOPs utilisation of one GPU, a fraction: achieved over peak (dense TFLOP/s)."""
    return tokens_per_s_per_gpu * flops_a_token / (peak_tflops * 1e12)
