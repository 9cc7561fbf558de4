"""`mfubench watch`: a live or finished run in a second terminal."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

import typer


def watch(
    run: Annotated[Path, typer.Argument(help="A run JSON, a run's work folder, or a study's folder: its latest run.")],
    once: Annotated[bool, typer.Option("--once", help="Show the present state and exit.")] = False,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Of a study's folder: go on with its next run, until Ctrl-C.")
    ] = False,
    interval: Annotated[float, typer.Option(help="Seconds between looks.", min=0.1)] = 1.0,
) -> None:
    """Last values, MFU and loss over time, power and clocks of the cards; ends with the run, or on Ctrl-C.

    The rate in the first line is of the median of the last 20 steps, the one beside its curve of the last step.
    """
    from mfubench.config import ConfigError
    from mfubench.watching import follow_study, watch_run

    if follow and (once or not run.is_dir()):
        raise ConfigError("--follow needs the folder of a study, such as results/default, and no --once")
    with contextlib.suppress(KeyboardInterrupt):
        if follow:
            follow_study(run, interval_s=interval)
        else:
            watch_run(run, once=once, interval_s=interval)
