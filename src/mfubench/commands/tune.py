"""`mfubench tune`: the fastest settings for a model on this machine, within a budget of minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def tune(
    model: Annotated[str, typer.Argument(help="Preset of config/models.yaml.")],
    settings: Annotated[
        list[str] | None, typer.Argument(help="RunConfig keys that all trials share: key=value …")
    ] = None,
    data: Annotated[Path, typer.Option(help="Folder of a prepared dataset.")] = Path("resources/datasets/stdlib"),
    minutes: Annotated[float, typer.Option(help="Budget; what is not measured by then is left.", min=0.0)] = 20.0,
    gpus: Annotated[int | None, typer.Option(help="GPUs to use; default: all. Without GPUs: processes.", min=1)] = None,
    memory_gib: Annotated[
        float | None, typer.Option(help="Memory that a process may take; default: the card's, or the machine's.")
    ] = None,
    margin: Annotated[float, typer.Option(help="Share of that memory to keep free.", min=0.0, max=0.9)] = 0.1,
    global_batch_size: Annotated[
        int | None, typer.Option(help="Sequences of a step over all GPUs; default: as many as it pays.", min=1)
    ] = None,
    parallelism: Annotated[
        list[str] | None, typer.Option(help="Only none, ddp, zero1 or fsdp (repeatable); default: what makes sense.")
    ] = None,
    checkpointing: Annotated[
        list[str] | None,
        typer.Option(help="Only none, selective or full activation checkpointing (repeatable); default: all."),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Folder of the trials; default: results/tune/MODEL.")] = None,
) -> None:
    """Find the fastest micro-batch, accumulation, parallelism and checkpointing for MODEL on this machine."""
    from mfubench.experiments import parse_overrides
    from mfubench.lease import visible_cards
    from mfubench.tune.table import format_outcome
    from mfubench.tune.trials import Request
    from mfubench.tune.trials import tune as run_tune

    overrides = parse_overrides(settings or [])
    cards = visible_cards() if overrides.get("device") != "cpu" else []
    request = Request(
        model=model,
        data=data,
        folder=output or Path("results/tune") / model,
        minutes=minutes,
        gpus=gpus or max(1, len(cards)),
        on_cards=bool(cards),
        memory_gib=memory_gib,
        margin=margin,
        global_batch_size=global_batch_size,
        parallelisms=tuple(parallelism or ()),
        checkpointings=tuple(checkpointing or ()),
        overrides=overrides,
    )
    outcome = run_tune(request, say=lambda line: typer.echo(line, err=True))
    typer.echo(format_outcome(outcome, request))
    raise typer.Exit(0 if outcome.best else 1)
