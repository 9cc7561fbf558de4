"""`mfubench export`: a trained checkpoint in Hugging Face's format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer


def export_model(
    source: Annotated[Path, typer.Argument(metavar="CHECKPOINT_OR_RUN", help="Checkpoint, work folder or run JSON.")],
    output: Annotated[Path, typer.Argument(help="Folder to write; must not exist yet.")],
    tokenizer: Annotated[Path | None, typer.Option(help="Folder of the tokenizer to put beside the model.")] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], typer.Option(help="Of the weights on disk.")
    ] = "float32",
) -> None:
    """Write a checkpoint so that transformers' AutoModelForCausalLM.from_pretrained(OUTPUT) loads it."""
    from mfubench.conversion.checkpoints import export_checkpoint

    checkpoint = export_checkpoint(source, output, tokenizer_dir=tokenizer, dtype=dtype)
    typer.echo(f"{output}: {checkpoint} in {dtype}, {'with its' if tokenizer else 'without a'} tokenizer")
