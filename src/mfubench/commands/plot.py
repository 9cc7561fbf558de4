"""`mfubench plot`: one run's panels."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def plot(
    run: Annotated[Path, typer.Argument(help="A run JSON.")],
    output: Annotated[
        Path | None, typer.Option(help="PNG to write, or a folder for it; default: beside the run JSON.")
    ] = None,
) -> None:
    """Draw loss, step time, MFU or tokens/s, gradient norm and learning rate of one run as PNG."""
    from mfubench.run_log import read_run_log
    from mfubench.run_plot import picture_path, plot_run

    path = picture_path(run, output)
    plot_run(read_run_log(run), path)
    typer.echo(str(path))
