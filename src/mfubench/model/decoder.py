"""The decoder: embeddings, blocks, head, and the loss inside, from hidden states and the head's weight.

Read top to bottom: `Attention`, `Block`, `Decoder`, `build_model`. q, k and v are one merged weight (rows: all query
heads, all key heads, all value heads), gate and up another; import and export of checkpoints split them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from mfubench.config import ModelConfig, RunConfig
from mfubench.model.attention import resolve_attention
from mfubench.model.attention_kernels import AttentionFunction, eager
from mfubench.model.components import make_mlp, make_norm, rope_tables
from mfubench.model.loss import LossFunction, full_loss, resolve_loss
from mfubench.model.operations import PLAIN, Operations
from mfubench.model.weight_gradient import Linear

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Attention(nn.Module):
    """Causal self-attention: MHA or GQA, with Qwen3's q/k-norm and RoPE where the model has them."""

    def __init__(self, model: ModelConfig, attention: AttentionFunction, operations: Operations):
        super().__init__()
        self.query_heads, self.key_heads, self.head_dim = (
            model.num_attention_heads,
            model.num_key_value_heads,
            model.head_dim,
        )
        q_width, kv_width = self.query_heads * self.head_dim, self.key_heads * self.head_dim
        self.qkv = Linear(model.hidden_size, q_width + 2 * kv_width, bias=model.attention_bias)
        self.output = Linear(q_width, model.hidden_size, bias=model.attention_bias)
        self.norm_eps = model.rms_norm_eps
        self.q_norm = nn.RMSNorm(self.head_dim, eps=self.norm_eps) if model.qk_norm else None
        self.k_norm = nn.RMSNorm(self.head_dim, eps=self.norm_eps) if model.qk_norm else None
        self.split_heads = operations.split_heads
        self.attention = attention
        self.packed_attention = operations.packed_attention

    def forward(self, hidden: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
        B, T, _ = hidden.shape
        attended = self.attend(self.qkv(hidden), cos, sin)  # [B, T, query_heads, D]
        return self.output(attended.reshape(B, T, self.query_heads * self.head_dim))

    def attend(self, qkv: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
        """qkv [B, T, (query_heads + 2 key_heads) D] -> [B, T, query_heads, D]."""
        if self.packed_attention is not None:
            return self.packed_attention(qkv, cos, sin, self.query_heads, self.key_heads)
        query, key, value = self.split_heads(
            qkv,
            cos,
            sin,
            self.q_norm.weight if self.q_norm is not None else None,
            self.k_norm.weight if self.k_norm is not None else None,
            self.norm_eps,
            self.query_heads,
            self.key_heads,
        )
        return self.attention(query, key, value)


class Block(nn.Module):
    """One layer. pre: x + f(norm(x)), as GPT-2 and Llama; post: norm(x + f(x)), as the original transformer.

    A fused norm adds to the residual stream what came before it. A block with one leaves its last addition to the next
    norm: that of the next block, or the final one.
    """

    def __init__(self, model: ModelConfig, attention: AttentionFunction, operations: Operations = PLAIN):
        super().__init__()
        self.attention_norm = make_norm(model, model.hidden_size)
        self.attention = Attention(model, attention, operations)
        self.mlp_norm = make_norm(model, model.hidden_size)
        self.mlp = make_mlp(model, operations.swiglu, operations.swiglu_linear, operations.mlp_in_matmuls)
        self.norm_first = model.norm_position == "pre"
        self.operations = operations

    def forward(
        self, hidden: Tensor, update: Tensor | None, cos: Tensor | None, sin: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """hidden [B, T, hidden], and an update of the same shape that is still to be added to it, or None: in and out.

        cos, sin [T, D/2] float32, or None without RoPE.
        """
        if not self.norm_first:
            hidden = self.attention_norm(hidden + self.attention(hidden, cos, sin))
            return self.mlp_norm(hidden + self.mlp(hidden)), None
        hidden, normed = self.operations.add_and_norm(hidden, update, self.attention_norm)
        hidden, normed = self.operations.add_and_norm(hidden, self.attention(normed, cos, sin), self.mlp_norm)
        update = self.mlp(normed)
        return (hidden + update, None) if self.operations.add_norm is None else (hidden, update)


class Head(Linear):
    """The projection onto the vocabulary, and the loss of it in one call, around which fsdp can gather the weight."""

    def mean_loss(self, hidden: Tensor, labels: Tensor, loss: LossFunction) -> Tensor:
        """Mean cross-entropy of hidden states [N, hidden] against labels [N], a float32 scalar."""
        main = (self.main,) if self.main is not None else ()
        return loss(hidden, self.weight, labels, *main)


class Decoder(nn.Module):
    """A decoder-only transformer that returns its loss.

    `context` is the longest sequence it takes. Build it with `build_model`, which also initialises it; the
    constructor alone leaves PyTorch's own initial values.
    """

    cos: Tensor | None
    sin: Tensor | None

    def __init__(
        self,
        model: ModelConfig,
        context: int,
        attention: AttentionFunction,
        loss: LossFunction,
        operations: Operations = PLAIN,
    ):
        super().__init__()
        self.config = model
        self.context = context
        self.token_embedding = nn.Embedding(model.vocab_size, model.hidden_size)
        self.position_embedding = (
            nn.Embedding(model.max_position_embeddings, model.hidden_size) if model.position == "learned" else None
        )
        self.blocks = nn.ModuleList(Block(model, attention, operations) for _ in range(model.num_hidden_layers))
        self.final_norm = make_norm(model, model.hidden_size)
        self.lm_head = Head(model.hidden_size, model.vocab_size, bias=False)
        self.loss = loss
        self.operations = operations
        self.register_buffer("cos", None, persistent=False)
        self.register_buffer("sin", None, persistent=False)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Make the head's weight the embedding's (again) where the model ties them."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.token_embedding.weight

    def hidden_states(self, input_ids: Tensor) -> Tensor:
        """Final, normalised hidden states [B, T, hidden] of token ids [B, T]."""
        T = input_ids.shape[1]
        hidden = self.token_embedding(input_ids)  # [B, T, hidden]
        if self.position_embedding is not None:
            hidden = hidden + self.position_embedding.weight[:T]
        cos = self.cos[:T] if self.cos is not None else None
        sin = self.sin[:T] if self.sin is not None else None
        update = None
        for block in self.blocks:
            hidden, update = block(hidden, update, cos, sin)
        return self.operations.add_and_norm(hidden, update, self.final_norm)[1]

    def logits(self, input_ids: Tensor) -> Tensor:
        """Scores of the next token, [B, T, V], in the parameters' dtype."""
        return self.lm_head(self.hidden_states(input_ids))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Mean cross-entropy of labels [B, T] (already shifted: labels[t] follows input_ids[t]), float32 scalar."""
        hidden = self.hidden_states(input_ids)
        return self.lm_head.mean_loss(hidden.flatten(0, 1), labels.flatten(), self.loss)

    @torch.no_grad()
    def generate(self, input_ids: Tensor, max_new_tokens: int, generator: torch.Generator | None = None) -> Tensor:
        """Sample `max_new_tokens` tokens after the prompts [B, T]; returns prompts and samples, [B, T + new].

        No cache: each token is a forward pass over one window of constant length (so that a compiled model keeps its
        shapes), padded on the right, where a causal model does not look.
        """
        B, T = input_ids.shape
        total = T + max_new_tokens
        window = min(total, self.context)
        tokens = torch.zeros(B, total, dtype=torch.int64, device=input_ids.device)
        tokens[:, :T] = input_ids
        for position in range(T, total):
            start = max(0, position - window)
            hidden = self.hidden_states(tokens[:, start : start + window])
            probabilities = self.lm_head(hidden[:, position - 1 - start]).float().softmax(dim=-1)  # [B, V]
            tokens[:, position] = torch.multinomial(probabilities, 1, generator=generator)[:, 0]
        return tokens

    def initial_parameters(self, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """Name and initial value (float32, whole) of each parameter, drawn on `device`.

        N(0, initializer_range); the projections onto the residual stream scaled by 1/sqrt(2 * layers) (GPT-2); norms
        1, biases 0. Each tensor has a generator of its own, seeded from torch's seed and the tensor's name, so that
        the values depend neither on the order of building nor on how the parameters are spread over processes.
        """
        residual_scale = (2 * self.config.num_hidden_layers) ** -0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                yield name, torch.full(parameter.shape, float(name.endswith("weight")), device=device)
                continue
            digest = hashlib.sha256(f"{torch.initial_seed()} {name}".encode()).digest()
            generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)
            scale = residual_scale if name.endswith(("output.weight", "down.weight")) else 1.0
            value = torch.randn(parameter.shape, generator=generator, device=device)
            yield name, value.mul_(self.config.initializer_range * scale)

    @torch.no_grad()
    def initialize(self) -> None:
        """Fill the parameters with their initial values and build the RoPE tables, on the device they are on."""
        self.build_rope_tables()
        parameters = dict(self.named_parameters())
        for name, value in self.initial_parameters(self.token_embedding.weight.device):
            parameters[name].copy_(value)

    def load_parameters(self, values: Mapping[str, Tensor]) -> None:
        """Copy in parameters by name, all of them; a tied head needs no entry of its own."""
        if self.config.tie_word_embeddings:
            values = {**values, "lm_head.weight": values["token_embedding.weight"]}
        self.load_state_dict(values)

    def build_rope_tables(self) -> None:
        """(Re)compute the RoPE tables: float32 whatever the parameters are, shared by all blocks."""
        if self.config.position == "rope":
            device = self.token_embedding.weight.device
            self.cos, self.sin = rope_tables(self.context, self.config.head_dim, self.config.rope_theta, device)


def build_model(
    config: RunConfig,
    *,
    device: torch.device | str,
    attention: AttentionFunction | None = None,
    loss: LossFunction | None = None,
    operations: Operations = PLAIN,
    dtype: torch.dtype | None = None,
) -> Decoder:
    """Build and initialise the decoder of a run on `device` ("meta": shapes alone, no memory, no values).

    `dtype` is that of the parameters and of the computation; left out, the run's. Without `attention` or `loss` they
    are resolved here; a run that records its choices resolves them itself and hands the functions in, `operations` too.
    """
    device = torch.device(device)
    dtype = dtype or DTYPES[config.dtype]
    model = config.model
    if device.type == "meta":
        attention, loss = attention or eager, loss or full_loss
    if attention is None:
        attention, _ = resolve_attention(
            config.attention,
            device=device,
            dtype=dtype,
            num_attention_heads=model.num_attention_heads,
            num_key_value_heads=model.num_key_value_heads,
            head_dim=model.head_dim,
            seq_len=config.seq_len,
            batch_size=config.micro_batch_size,
        )
    if loss is None:
        loss, _ = resolve_loss(config.loss, device=device, vocab_size=model.vocab_size)
    # RoPE has no longest position; learned positions have (RunConfig has checked seq_len against it)
    longest = model.max_position_embeddings
    context = longest if model.position == "learned" else max(config.seq_len, longest)
    with torch.device("meta"):
        decoder = Decoder(model, context, attention, loss, operations).to(dtype)
    if device.type != "meta":
        decoder.to_empty(device=device)
        decoder.tie_weights()  # to_empty makes two parameters of one
        decoder.initialize()
    else:
        decoder.build_rope_tables()
    return decoder
