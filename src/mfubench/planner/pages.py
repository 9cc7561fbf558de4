"""The tables of docs/plan.md and docs/prediction.md, computed: `python -m mfubench.planner.pages` rewrites them.

A page marks a table by `<!-- table NAME -->` and `<!-- end -->`; whatever stands between is replaced. A test checks
that the pages are what the code says.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from mfubench.analysis.expectations import load_expectations
from mfubench.analysis.figures.style import LIGHT
from mfubench.analysis.units import format_digits
from mfubench.config import ModelConfig, Parallelism
from mfubench.flops import CONVENTIONS, count_parameters, flop_terms, flops_per_token
from mfubench.planner.design import LAWS, Design, PlanConfig, evaluate, find_law
from mfubench.planner.figures import draw_isoflops, draw_loss_surface, scientific
from mfubench.planner.machine import Machine
from mfubench.planner.search import search
from mfubench.prediction.pages import (
    eight_table,
    expectation_table,
    limit_table,
    measured_table,
    peak_table,
    profile_table,
    reading_table,
    reported_table,
    scaling_table,
    span,
)
from mfubench.presets import CONFIG_DIR, load_model

DOCS = CONFIG_DIR.parent / "docs"
BUDGET = 1.36e21  # FLOPs: what the founding training guide states for its three designs
SEQ_LEN = 2048

# Preset, what the founding design had otherwise, its tokens.
FOUNDING_DESIGNS: dict[str, tuple[dict[str, object], float]] = {
    "llama3-1.5b": ({}, 101.909e9),
    "llama3-2.2b": ({}, 61.545e9),
    "qwen3-1.8b": ({"vocab_size": 151_643, "qk_norm": False}, 81.727e9),
    "llama2-1.36b": ({}, 84.72e9),
}

# Machines to price on, US dollars a GPU and hour (an example of rented prices; give your own with
# --price-per-gpu-hour), and how the weights and optimizer are spread.
MACHINES = {
    "8 x B200": Machine("NVIDIA B200", 8, price_per_gpu_hour=5.0),
    "8 x H100 SXM": Machine("NVIDIA H100 80GB HBM3", 8, price_per_gpu_hour=2.5),
    "8 x A100 SXM 80GB": Machine("NVIDIA A100-SXM4-80GB", 8, price_per_gpu_hour=1.5),
    "2 x RTX A6000": Machine("NVIDIA RTX A6000", 2, price_per_gpu_hour=0.5, parallelism="zero1"),
}


def founding_designs() -> list[Design]:
    law = find_law("hoffmann")
    return [
        evaluate(load_model(preset, overrides), tokens, SEQ_LEN, law)
        for preset, (overrides, tokens) in FOUNDING_DESIGNS.items()
    ]


def markdown(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(header), *(list(row) for row in rows)]
    text = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([text[0], "|" + "---|" * len(lines[0]), *text[1:]])


# --- docs/plan.md ----------------------------------------------------------------------------------------------------


def cost_table() -> str:
    """What each founding design costs, by every stated convention."""
    rows = []
    for design in founding_designs():
        rows.append(
            [
                design.model.name,
                f"{design.parameters:,}",
                f"{design.tokens / 1e9:g}B",
                f"{design.tokens_per_parameter:.1f}",
                *(f"{law.loss(design.parameters, design.tokens):.5f}" for law in LAWS.values()),
                scientific(6 * design.parameters * design.tokens),
                *(scientific(design.cost(convention)) for convention in CONVENTIONS),
                scientific(mistaken_cost(design.model) * design.tokens),
            ]
        )
    header = ["design", "N", "D", "D/N", *(f"loss, {name}" for name in LAWS), "6ND", *CONVENTIONS, "the mistaken count"]
    return markdown(header, rows)


def mistaken_cost(model: ModelConfig) -> float:
    """FLOPs a token where scores cost 2 heads S^2 H (the width for the head size, values left out) and no lm_head."""
    counts = count_parameters(model)
    scores = 2 * model.num_attention_heads * SEQ_LEN * model.hidden_size * model.num_hidden_layers
    return 3 * (2 * (counts.attention + counts.mlp) + scores)


def budget_table() -> str:
    """What the stated budget would have bought the 1.5B model."""
    model = load_model("llama3-1.5b")
    terms = flop_terms(model, SEQ_LEN)
    rows = []
    for convention in CONVENTIONS:
        tokens = BUDGET / flops_per_token(terms, convention)
        loss = find_law("hoffmann").loss(terms.parameters, tokens)
        rows.append([f"`{convention}`", f"{tokens / 1e9:.1f}B", f"{loss:.3f}"])
    return markdown(["cost", "tokens", "loss, hoffmann"], rows)


def design_table() -> str:
    """The designs that the matmul cost chooses, beside the founding ones."""
    spent = founding_designs()[0].cost("matmul")
    plans = {
        "LLaMA-3 vocabulary": PlanConfig(compute=BUDGET, vocab_size=128_256),
        "… at what the 1.5B design really costs": PlanConfig(compute=spent, vocab_size=128_256),
        "… with D/N from 18 to 22": PlanConfig(compute=BUDGET, vocab_size=128_256, ratio_min=18.0, ratio_max=22.0),
        "Qwen3 vocabulary, q/k-norm": PlanConfig(compute=BUDGET, vocab_size=151_936, qk_norm=True),
        "LLaMA-2 vocabulary": PlanConfig(compute=BUDGET, vocab_size=32_000),
        "LLaMA-3 vocabulary, 60B tokens, 2 epochs at most": PlanConfig(
            compute=BUDGET, vocab_size=128_256, unique_tokens=60e9, max_epochs=2.0
        ),
    }
    rows = []
    for name, plan in plans.items():
        for law in LAWS.values():
            best = search(plan.model_copy(update={"law": law.name}), count=1)[0]
            model = best.model
            shape = (
                f"{model.num_hidden_layers} x {model.hidden_size}, {model.num_attention_heads}/"
                f"{model.num_key_value_heads}/{model.head_dim}, {model.intermediate_size}"
            )
            size = [f"{best.parameters / 1e9:.2f}B", f"{best.tokens / 1e9:.1f}B", f"{best.tokens_per_parameter:.0f}"]
            rows.append([name, scientific(plan.compute), law.name, shape, *size, f"{best.loss:.3f}"])
    header = ["plan", "FLOPs", "law", "layers x width, heads/kv/dim, MLP", "N", "D", "D/N", "loss"]
    return markdown(header, rows)


def price_table() -> str:
    """Founding designs and the best ones at the stated budget, on four machines."""
    best = search(PlanConfig(compute=BUDGET, vocab_size=128_256), count=1)[0]
    rows = []
    for design in [*founding_designs(), best]:
        for name, machine in MACHINES.items():
            price = machine.price(design)
            assert price.money is not None
            rows.append(
                [
                    f"{design.model.name} on {design.tokens / 1e9:.0f}B",
                    name,
                    f"{100 * price.mfu:.0f} % ± {100 * price.error_fraction * price.mfu:.0f}",
                    f"{price.tokens_per_s:,.0f}",
                    f"{price.hours:,.0f} ± {price.error_fraction * price.hours:,.0f}",
                    f"{price.energy_kwh / 1000:.2f}",
                    f"{price.money:,.0f}",
                ]
            )
    return markdown(["design", "machine", "MFU, palm", "tokens/s", "hours", "MWh", "dollars"], rows)


def claim_table() -> str:
    """Hours that the founding training guide expects for its designs, the MFU they imply, and the prediction."""
    rows = []
    for design in founding_designs():
        expectations = load_expectations(design.model.name)
        for one in expectations.expectations:
            if one.hours is None or one.case is not None or one.tokens is None:
                continue
            machine = expectations.machines[one.machine]
            parallelism: Parallelism = "zero1" if "A6000" in machine.card else "ddp"
            rented = Machine(machine.card, machine.world_size, parallelism=parallelism)
            price = rented.price(replace(design, tokens=float(one.tokens)))
            low, high = (price.hours * price.mfu / hours for hours in reversed(one.hours))
            rows.append(
                [
                    f"{design.model.name} on {one.tokens / 1e9:.0f}B",
                    f"{machine.world_size} x {machine.card.removeprefix('NVIDIA ')}",
                    span(*one.hours, format_digits),
                    span(low, high, lambda value: f"{100 * value:.0f}", " %"),
                    f"{format_digits(price.hours)} ± {format_digits(price.error_fraction * price.hours, 2)}",
                ]
            )
    return markdown(["design", "machine", "expected hours", "which is an MFU of", "predicted hours"], rows)


# --- pages -----------------------------------------------------------------------------------------------------------

PAGES: Mapping[str, Mapping[str, Callable[[], str]]] = {
    "plan.md": {
        "costs": cost_table,
        "budget": budget_table,
        "designs": design_table,
        "prices": price_table,
        "claims": claim_table,
    },
    "prediction.md": {
        "measured": measured_table,
        "peaks": peak_table,
        "limits": limit_table,
        "scaling": scaling_table,
        "eight": eight_table,
        "readings": reading_table,
        "profile": profile_table,
        "reported": reported_table,
        "expectations": expectation_table,
    },
}


def fill(text: str, tables: Mapping[str, Callable[[], str]]) -> str:
    """`text` with every marked table computed anew. Raises KeyError for a mark that no function belongs to."""

    def compute(match: re.Match[str]) -> str:
        return f"<!-- table {match[1]} -->\n{tables[match[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- table (\w+) -->\n.*?<!-- end -->", compute, text, flags=re.DOTALL)


def main() -> None:
    """Rewrite the tables of both pages and draw the figures of docs/plan.md."""
    for name, tables in PAGES.items():
        path = DOCS / name
        path.write_text(fill(path.read_text(encoding="utf-8"), tables), encoding="utf-8")
    plan = PlanConfig(compute=BUDGET, vocab_size=128_256)
    for name, draw in (("plan-isoflops", draw_isoflops), ("plan-loss-surface", draw_loss_surface)):
        figure = draw(plan, founding_designs()[:3], LIGHT)
        figure.savefig(DOCS / "figures" / f"{name}.png", metadata={"Software": "mfubench"})


if __name__ == "__main__":
    main()
