"""`mfubench import`: a Hugging Face checkpoint as one that a run can go on from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def import_model(
    source: Annotated[Path, typer.Argument(metavar="HF_DIR", help="Folder with config.json and *.safetensors.")],
    output: Annotated[Path, typer.Argument(help="Checkpoint to write; WORK/checkpoints/step-000000 to go on from it.")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="RunConfig keys, e.g. seq_len=1024 model.name=mine."),
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Prepared dataset that a run will go on with.")] = None,
) -> None:
    """Read GPT2LMHeadModel, LlamaForCausalLM or Qwen3ForCausalLM; prints the preset to add to config/models.yaml."""
    import yaml

    from mfubench.conversion.checkpoints import import_checkpoint
    from mfubench.experiments import parse_overrides

    model = import_checkpoint(source, output, settings=parse_overrides(settings or []), data=data).model
    typer.echo(f"{output}: written. Runs of other presets of this shape go on from it with model.name={model.name}.")
    typer.echo("The preset of this model, for config/models.yaml:\n")
    typer.echo(yaml.safe_dump({model.name: model.model_dump(exclude={"name"})}, sort_keys=False))
