"""Compute-optimal design: which model, on how many tokens, has the lowest predicted loss for a compute budget.

Loss follows a Chinchilla law L(N, D) = E + A / N^alpha + B / D^beta (N all parameters, D training tokens). What a
design costs is counted for its exact shape by one of the conventions of `flops` and never as 6 N D: at 1-2B parameters
with a large vocabulary the two differ by a third. Tokens are continuous: D = compute / FLOPs per token.

The law sees N and D alone. It takes a wide and a deep model of one size for equally good and an embedding row for as
useful as any other parameter; `PlanConfig` therefore keeps the search (`planner.search`) inside proportions that real
models have. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, model_validator

from mfubench.config import ConfigError, ModelConfig, Strict
from mfubench.flops import CONVENTIONS, Convention, flop_terms, flops_per_token

LawName = Literal["hoffmann", "besiroglu"]
Count = Annotated[int, Field(ge=1)]
LARGEST = 1e18  # of anything planned: tokens, hours, money. Beyond, FLOPs leave what a float holds


# --- loss ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LossLaw:
    """L(N, D) = irreducible + parameter_factor / N^parameter_exponent + token_factor / D^token_exponent, in nats."""

    name: LawName
    irreducible: float
    parameter_factor: float
    token_factor: float
    parameter_exponent: float
    token_exponent: float
    source: str

    def loss(self, parameters: Any, tokens: Any) -> Any:
        """Predicted loss, nats a token; numbers or arrays."""
        return (
            self.irreducible
            + self.parameter_factor / parameters**self.parameter_exponent
            + self.token_factor / tokens**self.token_exponent
        )

    def optimum(self, compute: float) -> tuple[float, float]:
        """Parameters and tokens of the lowest loss where cost is 6 N D: the textbook optimum, a landmark only.

        With D = C / 6N, dL/dN = 0 gives alpha A N^-alpha = beta B D^-beta (Hoffmann et al., eq. 4).
        """
        product = compute / 6
        exponents = self.parameter_exponent + self.token_exponent
        balance = self.parameter_exponent * self.parameter_factor / (self.token_exponent * self.token_factor)
        parameters = balance ** (1 / exponents) * product ** (self.token_exponent / exponents)
        return parameters, product / parameters


LAWS: dict[str, LossLaw] = {
    law.name: law
    for law in (
        LossLaw("hoffmann", 1.69, 406.4, 410.7, 0.34, 0.28, "Hoffmann et al. 2022, arXiv 2203.15556, approach 3"),
        LossLaw("besiroglu", 1.8172, 482.01, 2085.43, 0.3478, 0.3658, "Besiroglu et al. 2024, arXiv 2404.10102"),
    )
}


def find_law(name: str) -> LossLaw:
    """The law called `name`. Raises ConfigError naming the ones there are."""
    if name not in LAWS:
        raise ConfigError(f"law: found {name!r}; known laws: {', '.join(LAWS)}")
    return LAWS[name]


def require_positive(**values: float) -> None:
    """Raises ConfigError for a value that is no positive number, or beyond what anything could be of."""
    for name, value in values.items():
        if not 0 < value <= LARGEST:
            raise ConfigError(f"{name}: found {value}; must be a positive number, {LARGEST:g} at most")


def effective_tokens(tokens: Any, unique_tokens: float) -> Any:
    """What `tokens` read from `unique_tokens` are worth in fresh ones.

    U + U R* (1 - exp(-R / R*)) with R = D / U - 1 repetitions and R* = 15.39 (Muennighoff et al. 2023, arXiv
    2305.16264, eq. 5): four epochs are nearly as good as fresh tokens, forty add nothing more.
    """
    decay = 15.387756
    repetitions = np.maximum(tokens / unique_tokens - 1, 0.0)
    fresh = np.minimum(tokens, unique_tokens)
    return fresh + unique_tokens * decay * (1 - np.exp(-repetitions / decay))


# --- what to search --------------------------------------------------------------------------------------------------


class PlanConfig(Strict):
    """A compute budget and the models that may be built with it. Equal values of `_min` and `_max` fix a proportion."""

    compute: float = Field(gt=0, description="FLOPs, counted by `convention`")
    vocab_size: int = Field(ge=2)
    seq_len: int = Field(2048, ge=1)
    law: LawName = "hoffmann"
    convention: Convention = "matmul"

    ratio_min: float | None = Field(None, gt=0, description="tokens per parameter at least")
    ratio_max: float | None = Field(None, gt=0, description="tokens per parameter at most")
    unique_tokens: float | None = Field(None, gt=0, description="tokens in the data set; null: more than enough")
    max_epochs: float = Field(1.0, gt=0, description="how often the data may be read")

    layers: tuple[Count, ...] = Field((), strict=False, description="numbers of layers allowed; empty: by aspect ratio")
    hidden_sizes: tuple[Count, ...] = Field((), strict=False, description="widths allowed; empty: multiples of 256")
    head_dims: tuple[Count, ...] = Field(
        (128, 64), strict=False, min_length=1, description="an earlier one is kept where the loss is `indifference` off"
    )
    query_groups: tuple[Count, ...] = Field(
        (1, 2, 4, 8), strict=False, min_length=1, description="query heads per key/value head; 1 is MHA"
    )
    aspect_min: float = Field(64.0, gt=0, description="hidden_size / layers: Qwen3-1.7B 73, LLaMA-2 and -3 128")
    aspect_max: float = Field(128.0, gt=0)
    mlp: Literal["gelu", "silu", "relu", "swiglu"] = "swiglu"
    mlp_ratio_min: float = Field(2.5, gt=0, description="intermediate_size / hidden_size: LLaMA-2 2.7, LLaMA-3 3.5")
    mlp_ratio_max: float = Field(4.0, gt=0)
    mlp_multiple: int = Field(256, ge=1, description="intermediate_size is a multiple of this: whole matmul tiles")
    tie_word_embeddings: bool = False
    qk_norm: bool = False
    indifference: float = Field(5e-4, ge=0, description="losses this close are equal: the law is no better than 0.01")

    @model_validator(mode="after")
    def check_bands(self) -> PlanConfig:
        for low, high in (("ratio_min", "ratio_max"), ("aspect_min", "aspect_max"), ("mlp_ratio_min", "mlp_ratio_max")):
            least, most = getattr(self, low), getattr(self, high)
            if least is not None and most is not None and least > most:
                raise ValueError(f"{low} {least} is above {high} {most}")
        if odd := [size for size in self.head_dims if size % 2]:
            raise ValueError(f"head_dims: {odd[0]} is odd; RoPE rotates pairs, so a head size must be even")
        return self


@dataclass(frozen=True)
class Design:
    """A model and the tokens to train it on."""

    model: ModelConfig
    parameters: int
    tokens: float
    epochs: float | None  # null where the data set's size was not given
    loss: float
    flops_per_token: dict[str, float]  # by convention
    seq_len: int

    @property
    def tokens_per_parameter(self) -> float:
        return self.tokens / self.parameters

    def cost(self, convention: Convention) -> float:
        """FLOPs of the whole training."""
        return self.flops_per_token[convention] * self.tokens


def evaluate(model: ModelConfig, tokens: float, seq_len: int, law: LossLaw) -> Design:
    """One given design: its loss and its cost by every convention.

    Raises ConfigError where the model has too few positions.
    """
    model.check_seq_len(seq_len)
    terms = flop_terms(model, seq_len)
    return Design(
        model=model,
        parameters=terms.parameters,
        tokens=tokens,
        epochs=None,
        loss=float(law.loss(terms.parameters, tokens)),
        flops_per_token={name: flops_per_token(terms, name) for name in CONVENTIONS},
        seq_len=seq_len,
    )
