"""Plans declared in a study: what a compute budget buys, as JSON, a table and two figures."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from mfubench.analysis.units import format_count, format_digits
from mfubench.config import ConfigError, Parallelism, Strict
from mfubench.flops import CONVENTIONS
from mfubench.hardware import find_gpu
from mfubench.planner.design import Design, PlanConfig, evaluate, find_law
from mfubench.presets import load_model
from mfubench.run_log import write_json, write_text_atomically

Tokens = Annotated[float, Field(gt=0)]


class PlannedMachine(Strict):
    """Cards to plan for: designs must fit their memory, and are priced on them."""

    gpu: str = Field(description="a name that config/hardware.yaml knows")
    gpus: int = Field(8, ge=1)
    parallelism: Parallelism | None = None
    mfu: float | None = Field(None, gt=0, le=1, description="of the dense peak, palm; null: predicted")
    price_per_gpu_hour: float | None = Field(None, gt=0)


class PlanRequest(Strict):
    """One entry under a study's `plans`."""

    search: PlanConfig
    machine: PlannedMachine | None = None
    compare: dict[str, Tokens] = Field({}, description="presets and their training tokens, set beside the plan")
    count: int = Field(5, ge=1, description="designs to list")

    def check(self, where: str) -> None:
        """Raise ConfigError where a preset or card is unknown."""
        try:
            for preset in self.compare:
                load_model(preset)
            if self.machine is not None:
                find_gpu(self.machine.gpu)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None

    def to_json(self) -> str:
        return json.dumps(self.model_dump(mode="json"), sort_keys=True)


def evaluate_all(presets: Iterable[tuple[str, float]], plan: PlanConfig) -> list[Design]:
    """Presets on their tokens, by the plan's law and sequence length. Raises ConfigError for an unknown preset."""
    law = find_law(plan.law)
    return [evaluate(load_model(preset), tokens, plan.seq_len, law) for preset, tokens in presets]


def draw_plan(plan: PlanConfig, compared: Sequence[Design], isoflops: Path, loss_surface: Path, dark: bool) -> None:
    """The two figures of a plan, with the given designs as points."""
    from mfubench.analysis.figures.style import DARK, LIGHT, write_png
    from mfubench.planner.figures import draw_isoflops, draw_loss_surface

    for path, draw in ((isoflops, draw_isoflops), (loss_surface, draw_loss_surface)):
        write_png(draw(plan, compared, DARK if dark else LIGHT), path)


def describe_design(design: Design) -> dict[str, Any]:
    """A design as JSON."""
    return {
        "architecture": design.model.model_dump(mode="json"),
        "parameters": design.parameters,
        "tokens": design.tokens,
        "tokens_per_parameter": design.tokens_per_parameter,
        "epochs": design.epochs,
        "loss": design.loss,
        "cost_flops": {
            **{name: design.cost(name) for name in CONVENTIONS},
            "6ND": 6 * design.parameters * design.tokens,
        },
    }


def describe_plan(plan: PlanConfig, designs: Sequence[Design], prices: Sequence[Any]) -> dict[str, Any]:
    """A plan and its designs, with their price where a machine was named, as JSON."""
    return {"plan": plan.model_dump(mode="json"), "designs": describe_designs(designs, prices)}


def describe_designs(designs: Sequence[Design], prices: Sequence[Any]) -> list[dict[str, Any]]:
    return [
        describe_design(design) | ({"price": asdict(prices[position])} if prices else {})
        for position, design in enumerate(designs)
    ]


def format_designs(plan: PlanConfig, designs: Sequence[Design], prices: Sequence[Any]) -> str:
    """Designs and what they take, for people."""
    lines = [
        f"{plan.compute:.3g} FLOPs ({plan.convention}), vocabulary {plan.vocab_size:,}, {plan.law} law",
        f"{'layers':>6} {'hidden':>6} {'heads/kv/dim':>13} {'mlp':>6} {'N':>8} {'D':>8} {'D/N':>8} {'loss':>8}"
        + (f" {'MFU':>6} {'hours':>7} {'MWh':>6} {'money':>9}" if prices else ""),
    ]
    lines += design_lines(designs, prices)
    if prices:
        first = prices[0]
        error = f" Hours, MWh and money ± {100 * first.error_fraction:.0f} %." if first.error_fraction else ""
        lines.append(f"{first.gpus} x {first.gpu}; MFU (palm, of the dense peak) {first.mfu_source}{error}")
        lines.append("Hours by each design's own MFU, which may exceed a budget's; money in the unit of the price.")
    return "\n".join(lines)


def design_lines(designs: Sequence[Design], prices: Sequence[Any]) -> list[str]:
    """A line each, in the columns of `format_designs`."""
    lines = []
    for position, design in enumerate(designs):
        model = design.model
        heads = f"{model.num_attention_heads}/{model.num_key_value_heads}/{model.head_dim}"
        line = (
            f"{model.num_hidden_layers:>6} {model.hidden_size:>6} {heads:>13} {model.intermediate_size:>6} "
            f"{format_count(design.parameters):>8} {format_count(design.tokens):>8} "
            f"{format_digits(design.tokens_per_parameter):>8} "
            f"{design.loss:>8.5f}"
        )
        if prices:
            price = prices[position]
            money = "-" if price.money is None else f"{price.money:,.0f}"
            line += f" {100 * price.mfu:>5.1f}% {price.hours:>7.1f} {price.energy_kwh / 1000:>6.2f} {money:>9}"
        lines.append(line)
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Run `plan_models.py --plan JSON --output FILE --table FILE --isoflops FILE --loss-surface FILE`."""
    parser = argparse.ArgumentParser(description="Search the models of lowest predicted loss for a compute budget.")
    parser.add_argument("--plan", required=True, help="PlanRequest as JSON")
    for name in ("output", "table", "isoflops", "loss-surface"):
        parser.add_argument(f"--{name}", required=True, type=Path)
    arguments = parser.parse_args(argv)
    try:
        request = PlanRequest.model_validate_json(arguments.plan)
        table = run_plan(request, arguments)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(table)
    return 0


def run_plan(request: PlanRequest, files: argparse.Namespace) -> str:
    """Search, price, draw and write; the table. JSON comes last."""
    from mfubench.planner.machine import Machine, search_on_machine
    from mfubench.planner.search import search

    plan, machine = request.search, None
    if request.machine is not None:
        machine = Machine(**request.machine.model_dump())
    designs = search_on_machine(plan, machine, request.count) if machine else search(plan, request.count)
    compared = evaluate_all(request.compare.items(), plan)
    prices = [machine.price(design) for design in designs] if machine else []
    compared_prices = [machine.price(design) for design in compared] if machine else []
    table = format_designs(plan, designs, prices)
    if compared:
        given = "\n".join(design_lines(compared, compared_prices))
        table += f"\nfor comparison: {', '.join(request.compare)}\n{given}"
    draw_plan(plan, compared, files.isoflops, files.loss_surface, dark=False)
    write_text_atomically(files.table, table + "\n")
    rows = dict(zip(request.compare, describe_designs(compared, compared_prices), strict=True))
    write_json(files.output, describe_plan(plan, designs, prices) | {"compared": rows})
    return table
