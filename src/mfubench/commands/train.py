"""`mfubench train`: one run by hand, with the same RunConfig as in a study."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

DEFAULT = Path("results/by-hand/run.json")


def train(
    model: Annotated[str, typer.Argument(help="Preset of config/models.yaml.")],
    settings: Annotated[list[str] | None, typer.Argument(help="RunConfig keys: key=value …")] = None,
    data: Annotated[Path, typer.Option(help="Folder of a prepared dataset.")] = Path("resources/datasets/stdlib"),
    tokenizer: Annotated[Path | None, typer.Option(help="Folder of its tokenizer, to show sampled text.")] = None,
    output: Annotated[Path, typer.Option(help="Run JSON to write.")] = DEFAULT,
    resume: Annotated[
        bool | None,
        typer.Option("--resume/--anew", help="Go on from the checkpoint that is there, or remove it and start anew."),
    ] = None,
    start_from: Annotated[
        Path | None, typer.Option(help="Of the run that `continues` names: its work folder, or checkpoints.")
    ] = None,
    cards: Annotated[
        int | None, typer.Option(help="GPUs to take; default: world_size where there are GPUs.", min=0)
    ] = None,
) -> None:
    """Train MODEL once: mfubench train llama2-tiny max_iters=50 micro_batch_size=8 model.num_hidden_layers=2

    Exits with 0 where a run JSON was written: its status says whether the run is ok, oom, diverged or skipped (for want
    of what `requires` names). With 75 where it was stopped with a checkpoint, from which --resume goes on. With any
    other code it failed or was refused: the last lines say why.
    """
    from mfubench.config import ConfigError
    from mfubench.experiments import build_run, parse_overrides
    from mfubench.lease import visible_cards
    from mfubench.stop_signals import listen_once
    from mfubench.train.arguments import work_by_hand
    from mfubench.train.checkpoint_folders import latest
    from mfubench.training_job import main

    defaults = {
        "name": "by-hand/run",
        "model": model,
        "dataset": data.name,
        "seq_len": 256,
        "micro_batch_size": 8,
        "max_iters": 20,
    }
    # `model` is a preset here: model.KEY=value changes one of its keys.
    run = build_run((defaults, parse_overrides(settings or [])), "mfubench train")
    if (run.continues is None) != (start_from is None):
        raise ConfigError(
            "mfubench train: `continues` and --start-from go together: continues=STAGE/CASE is the other run's name, "
            "--start-from its work folder"
        )
    work = work_by_hand(output)
    checkpoint = latest(work / "checkpoints")
    if resume is None and checkpoint is not None:
        raise ConfigError(
            f"{checkpoint}: an earlier run's checkpoint; go on from it with --resume, remove it and start anew with "
            "--anew, or name another run JSON with --output"
        )
    if resume and checkpoint is None and not run.evaluation.only:  # which is refused without one
        typer.echo(f"no checkpoint in {work / 'checkpoints'}: starts anew", err=True)
    if cards is None:
        cards = run.world_size if visible_cards() and run.device != "cpu" else 0
    arguments = ["--config", run.to_json(), "--data", str(data), "--work", str(work)]
    arguments += ["--output", str(output), "--cards", str(cards)]
    if tokenizer is not None:
        arguments += ["--tokenizer", str(tokenizer)]
    if start_from is not None:
        arguments += ["--start-from", str(start_from)]
    arguments += ["--resume", "always" if resume else "never"]
    listen_once()
    code = main(arguments)
    if code == 0 and output.exists():  # of several nodes the first one writes it
        typer.echo(f"run JSON: {output} (another run without --output replaces it)" if output == DEFAULT else output)
    raise typer.Exit(code)
