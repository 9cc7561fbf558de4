"""`mfubench plan`: compute-optimal models for a budget, what they cost and what they would reach."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

app = typer.Typer(no_args_is_help=True, help="Compute-optimal models for a budget, by Chinchilla laws and exact costs.")

Law = Annotated[Literal["hoffmann", "besiroglu"], typer.Option(help="Fit of the Chinchilla law.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def loss(
    parameters: Annotated[float, typer.Option(help="All parameters, e.g. 1544628224 or 1.5e9.")],
    tokens: Annotated[float, typer.Option(help="Training tokens.")],
    law: Law = "hoffmann",
    as_json: Json = False,
) -> None:
    """Predicted loss of N parameters trained on D tokens."""
    from mfubench.analysis.units import format_digits
    from mfubench.planner.design import find_law, require_positive

    require_positive(parameters=parameters, tokens=tokens)
    chinchilla = find_law(law)
    result = {
        "loss": chinchilla.loss(parameters, tokens),
        "law": law,
        "source": chinchilla.source,
        "parameters": parameters,
        "tokens": tokens,
        "tokens_per_parameter": tokens / parameters,
    }
    if as_json:
        typer.echo(json.dumps(result))
    else:
        ratio = format_digits(tokens / parameters)
        typer.echo(f"loss {result['loss']:.5f} nats per token at D/N {ratio} ({chinchilla.source})")


@app.command()
def cost(
    model: Annotated[str, typer.Argument(help="A preset of config/models.yaml.")],
    tokens: Annotated[float, typer.Option(help="Training tokens.")],
    seq_len: Annotated[int, typer.Option(min=1)] = 2048,
    law: Law = "hoffmann",
    as_json: Json = False,
) -> None:
    """FLOPs of training a preset, by every convention and by 6ND, and the loss to expect."""
    from mfubench.analysis.units import format_count, format_digits
    from mfubench.planner.design import evaluate, find_law, require_positive
    from mfubench.planner.study import describe_design
    from mfubench.presets import load_model

    require_positive(tokens=tokens)
    design = evaluate(load_model(model), tokens, seq_len, find_law(law))
    result = {"model": model, **describe_design(design), "law": law}
    if as_json:
        typer.echo(json.dumps(result))
        return
    ratio = format_digits(design.tokens_per_parameter)
    typer.echo(f"{model}: N {design.parameters:,}, D {format_count(tokens)}, D/N {ratio}")
    typer.echo(f"loss    {design.loss:.5f} nats per token ({law})")
    for name, flops in result["cost_flops"].items():
        typer.echo(f"{name:<7} {flops:.4e} FLOPs")


@app.command()
def search(
    vocab_size: Annotated[int, typer.Option(help="Rows of the embedding.")],
    compute: Annotated[float | None, typer.Option(help="Budget in FLOPs, counted by --convention.")] = None,
    hours: Annotated[float | None, typer.Option(help="Budget in hours of the machine, instead of --compute.")] = None,
    seq_len: Annotated[int, typer.Option()] = 2048,
    law: Law = "hoffmann",
    convention: Annotated[Literal["palm", "matmul", "causal"], typer.Option(help="How FLOPs are counted.")] = "matmul",
    ratio_min: Annotated[float | None, typer.Option(help="Tokens per parameter at least.")] = None,
    ratio_max: Annotated[float | None, typer.Option(help="Tokens per parameter at most.")] = None,
    unique_tokens: Annotated[float | None, typer.Option(help="Tokens the data set holds.")] = None,
    max_epochs: Annotated[float, typer.Option(help="How often the data may be read.")] = 1.0,
    layers: Annotated[list[int] | None, typer.Option(help="Allowed number of layers (repeatable).")] = None,
    hidden_size: Annotated[list[int] | None, typer.Option(help="Allowed width (repeatable).")] = None,
    head_dim: Annotated[list[int] | None, typer.Option(help="Allowed head size (repeatable); first preferred.")] = None,
    query_groups: Annotated[list[int] | None, typer.Option(help="Query heads per kv head (repeatable).")] = None,
    tied: Annotated[bool, typer.Option("--tied", help="Embedding and head share one matrix.")] = False,
    gpu: Annotated[str | None, typer.Option(help="Card to fit into memory and to price.")] = None,
    gpus: Annotated[int, typer.Option(min=1, help="How many cards.")] = 8,
    mfu: Annotated[float | None, typer.Option(help="Fraction of the dense peak (palm); default: predicted.")] = None,
    parallelism: Annotated[Literal["none", "ddp", "zero1", "fsdp"] | None, typer.Option(help="Default: ddp.")] = None,
    price_per_gpu_hour: Annotated[float | None, typer.Option(help="In any currency.")] = None,
    runs: Annotated[list[Path] | None, typer.Option(help="Results to calibrate the prediction on.")] = None,
    count: Annotated[int, typer.Option(min=1, help="Designs to show.")] = 5,
    as_json: Json = False,
) -> None:
    """Search the models of lowest predicted loss for a compute budget, or for hours of a machine."""
    from mfubench.config import ConfigError, parse
    from mfubench.planner.design import PlanConfig
    from mfubench.planner.machine import Machine, compute_in_hours, search_on_machine
    from mfubench.planner.search import search as search_designs
    from mfubench.planner.study import describe_plan, format_designs
    from mfubench.prediction.calibration import calibrate_on

    if (compute is None) == (hours is None):
        raise ConfigError("plan: give the budget either as --compute (FLOPs) or as --hours (with --gpu and --gpus)")
    settings: dict[str, Any] = {
        "compute": 1e21 if compute is None else compute,
        "vocab_size": vocab_size,
        "seq_len": seq_len,
        "law": law,
        "convention": convention,
        "ratio_min": ratio_min,
        "ratio_max": ratio_max,
        "unique_tokens": unique_tokens,
        "max_epochs": max_epochs,
        "tie_word_embeddings": tied,
        "layers": layers or (),
        "hidden_sizes": hidden_size or (),
    }
    settings |= {"head_dims": head_dim} if head_dim else {}
    settings |= {"query_groups": query_groups} if query_groups else {}
    plan = parse(PlanConfig, settings, "plan")

    if gpu is None:
        if hours is not None:
            raise ConfigError("plan: --hours needs --gpu: whose hours are they?")
        designs, prices = search_designs(plan, count), []
    else:
        calibration = {"calibration": calibrate_on(runs)} if runs else {}
        machine = Machine(gpu, gpus, mfu, price_per_gpu_hour, parallelism, **calibration)
        if hours is not None:
            plan = plan.model_copy(update={"compute": compute_in_hours(plan, machine, hours)})
        designs = search_on_machine(plan, machine, count)
        prices = [machine.price(design) for design in designs]
    if as_json:
        typer.echo(json.dumps(describe_plan(plan, designs, prices)))
    else:
        typer.echo(format_designs(plan, designs, prices))


@app.command()
def figures(
    vocab_size: Annotated[int, typer.Option(help="Rows of the embedding.")],
    compute: Annotated[float, typer.Option(help="Budget in FLOPs, counted by --convention.")],
    output: Annotated[Path, typer.Option(help="Folder for isoflops.png and loss-surface.png.")],
    design: Annotated[list[str] | None, typer.Option(help="PRESET:TOKENS to mark (repeatable).")] = None,
    seq_len: Annotated[int, typer.Option()] = 2048,
    law: Law = "hoffmann",
    convention: Annotated[Literal["palm", "matmul", "causal"], typer.Option(help="How FLOPs are counted.")] = "matmul",
    dark: Annotated[bool, typer.Option("--dark", help="On a dark background.")] = False,
) -> None:
    """Draw isoflop curves and the loss surface of a budget, with given designs as points."""
    from mfubench.config import ConfigError, parse
    from mfubench.planner.design import PlanConfig, require_positive
    from mfubench.planner.study import draw_plan, evaluate_all

    settings = {"vocab_size": vocab_size, "compute": compute, "seq_len": seq_len, "law": law, "convention": convention}
    plan = parse(PlanConfig, settings, "plan")
    presets: list[tuple[str, float]] = []
    for text in design or []:
        preset, _, tokens = text.partition(":")
        try:
            require_positive(tokens=float(tokens))
        except ValueError:
            raise ConfigError(f"--design: found {text!r}; write PRESET:TOKENS, as llama3-1.5b:101.909e9") from None
        presets.append((preset, float(tokens)))
    isoflops, loss_surface = output / "isoflops.png", output / "loss-surface.png"
    draw_plan(plan, evaluate_all(presets, plan), isoflops, loss_surface, dark)
    typer.echo(f"{isoflops}\n{loss_surface}")
