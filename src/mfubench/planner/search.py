"""The search behind `mfubench plan search`: every allowed shape of every width, counted at once with numpy."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from mfubench.config import ConfigError, ModelConfig
from mfubench.flops import CONVENTIONS, flop_terms, flops_per_token
from mfubench.planner.design import Design, PlanConfig, effective_tokens, find_law

# Whether models can be trained on the machine at hand: of a ModelConfig or of a grid of them (see `shapes`).
Fits = Callable[[ModelConfig], Any]


def search(plan: PlanConfig, count: int = 5, fits: Fits | None = None) -> list[Design]:
    """The `count` designs of lowest loss, best first, one a width. Raises ConfigError where the plan allows none."""
    designs = []
    tried = 0
    for hidden_size in plan.hidden_sizes or widths():
        grid = shapes(plan, hidden_size)
        tried += grid.num_hidden_layers.size
        design = best_design(plan, grid, fits) if grid.num_hidden_layers.size else None
        if design is not None:
            designs.append(design)
    if not designs:
        raise ConfigError(
            f"plan: none of {tried} shapes is allowed: widen ratio_min/ratio_max, the aspect or MLP ratios, "
            "or plan for a card with more memory"
        )
    return sorted(designs, key=lambda design: design.loss)[:count]


def widths(largest: int = 20_480) -> list[int]:
    """Hidden sizes that fill matmul tiles of 128 x 256: multiples of 256, of 1,024 from 8,192 on."""
    return [*range(256, 8192, 256), *range(8192, largest + 1, 1024)]


def shapes(plan: PlanConfig, hidden_size: int) -> SimpleNamespace:
    """All allowed models of one width: arrays [shape] and scalars under the keys of ModelConfig.

    `count_parameters` is plain arithmetic on those keys, so that it counts a grid as it counts a model.
    """
    deepest, shallowest = hidden_size / plan.aspect_min, hidden_size / plan.aspect_max
    layers = plan.layers or range(max(1, math.ceil(shallowest)), 1 + math.floor(deepest))

    multiple = plan.mlp_multiple
    narrowest = math.ceil(hidden_size * plan.mlp_ratio_min / multiple) * multiple
    intermediate_sizes = range(narrowest, 1 + math.floor(hidden_size * plan.mlp_ratio_max), multiple)

    # rows of (head size, key/value heads, position of the head size in the plan's order of preference)
    heads = np.array(
        [
            (head_dim, hidden_size // head_dim // group, position)
            for position, head_dim in enumerate(plan.head_dims)
            for group in plan.query_groups
            if hidden_size % (head_dim * group) == 0
        ],
        dtype=np.int64,
    ).reshape(-1, 3)
    axes = np.meshgrid(np.array(layers), np.array(intermediate_sizes), np.arange(len(heads)), indexing="ij")
    num_hidden_layers, intermediate_size, head_row = (axis.ravel().astype(np.int64) for axis in axes)
    head_dim, num_key_value_heads, preference = heads[head_row].T
    return SimpleNamespace(
        vocab_size=plan.vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=hidden_size // head_dim,
        num_key_value_heads=num_key_value_heads,
        head_dim=head_dim,
        max_position_embeddings=plan.seq_len,
        norm="rmsnorm",
        position="rope",
        mlp=plan.mlp,
        qk_norm=plan.qk_norm,
        attention_bias=False,
        mlp_bias=False,
        norm_bias=False,
        tie_word_embeddings=plan.tie_word_embeddings,
        head_dim_preference=preference,
    )


def isoflop_curve(plan: PlanConfig, bins: int = 200) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """The lowest loss at each size for the plan's budget: (parameters, tokens, loss), each [size], sizes rising.

    Sizes are bins of equal width in log N over a factor of 100 around the textbook optimum; each bin's best shape.
    """
    law = find_law(plan.law)
    centre, _ = law.optimum(plan.compute)
    edges = np.geomspace(centre / 10, centre * 10, bins + 1)
    best = np.full((3, bins), np.inf)
    for hidden_size in plan.hidden_sizes or widths():
        grid = shapes(plan, hidden_size)
        if not grid.num_hidden_layers.size:
            continue
        parameters, tokens, losses = evaluate_grid(plan, grid)
        place = np.searchsorted(edges, parameters) - 1
        for one in np.unique(place[(place >= 0) & (place < bins) & np.isfinite(losses)]):
            rows = np.flatnonzero(place == one)
            row = rows[np.argmin(losses[rows])]
            if losses[row] < best[2, one]:
                best[:, one] = parameters[row], tokens[row], losses[row]
    parameters, tokens, losses = best[:, np.isfinite(best[2])]
    return parameters, tokens, losses


def evaluate_grid(plan: PlanConfig, grid: SimpleNamespace) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Parameters, affordable tokens and loss of each shape, each [shape]; an infinite loss is outside ratio_min."""
    terms = flop_terms(cast(ModelConfig, grid), plan.seq_len)
    parameters = np.asarray(terms.parameters)
    tokens = affordable_tokens(plan, parameters, np.asarray(flops_per_token(terms, plan.convention)))
    worth = tokens if plan.unique_tokens is None else effective_tokens(tokens, plan.unique_tokens)
    losses = find_law(plan.law).loss(parameters, worth)
    return parameters, tokens, np.where(tokens >= (plan.ratio_min or 0.0) * parameters, losses, np.inf)


def best_design(plan: PlanConfig, grid: SimpleNamespace, fits: Fits | None) -> Design | None:
    """The row of lowest loss; of losses that are equal for all the law can tell, the preferred head size's."""
    parameters, tokens, losses = evaluate_grid(plan, grid)
    if fits is not None:
        losses = np.where(fits(cast(ModelConfig, grid)), losses, np.inf)
    if not np.isfinite(losses).any():
        return None
    equal = np.flatnonzero(losses <= losses.min() + plan.indifference)
    preferred = equal[grid.head_dim_preference[equal] == grid.head_dim_preference[equal].min()]
    row = int(preferred[np.argmin(losses[preferred])])
    model = build_model(grid, row)
    row_terms = flop_terms(model, plan.seq_len)
    return Design(
        model=model,
        parameters=int(parameters[row]),
        tokens=float(tokens[row]),
        epochs=None if plan.unique_tokens is None else float(tokens[row]) / plan.unique_tokens,
        loss=float(losses[row]),
        flops_per_token={name: flops_per_token(row_terms, name) for name in CONVENTIONS},
        seq_len=plan.seq_len,
    )


def affordable_tokens(plan: PlanConfig, parameters: NDArray[Any], flops_a_token: NDArray[Any]) -> NDArray[Any]:
    """Tokens that the budget, the data and ratio_max allow, [shape]."""
    tokens = plan.compute / flops_a_token
    if plan.unique_tokens is not None:
        tokens = np.minimum(tokens, plan.unique_tokens * plan.max_epochs)
    if plan.ratio_max is not None:
        # a shape that could read more than the band allows leaves compute unspent: a larger one beats it
        tokens = np.minimum(tokens, plan.ratio_max * parameters)
    return tokens


def build_model(grid: SimpleNamespace, row: int) -> ModelConfig:
    """One row of a grid as a model, named layers x width."""
    keys: dict[str, Any] = {
        key: int(value[row]) if isinstance(value, np.ndarray) else value
        for key, value in vars(grid).items()
        if key in ModelConfig.model_fields
    }
    return ModelConfig(name=f"{keys['num_hidden_layers']}x{keys['hidden_size']}", **keys)
