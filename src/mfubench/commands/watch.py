"""`mfubench watch`: a live or finished run in a second terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def watch(
    run: Annotated[Path, typer.Argument(help="A run JSON, a run's work folder, or a study's folder: its latest run.")],
    once: Annotated[bool, typer.Option("--once", help="Show the present state and exit.")] = False,
    interval: Annotated[float, typer.Option(help="Seconds between looks.", min=0.1)] = 1.0,
) -> None:
    """Last values, MFU and loss over time, power and clocks of the cards; ends with the run, or on Ctrl-C."""
    from mfubench.watching import watch_run

    watch_run(run, once=once, interval_s=interval)
