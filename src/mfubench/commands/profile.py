"""`mfubench profile`: a profiled step taken apart in the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def profile(
    what: Annotated[Path, typer.Argument(help="A trace (.json or .json.gz), or the run JSON of a profiled case.")],
    kernels: Annotated[int, typer.Option(help="Longest kernels to list.", min=0)] = 15,
) -> None:
    """Show where the time of a profiled step went, each moment counted once, and its longest kernels."""
    from mfubench.profiling.terminal import show_profile

    show_profile(what, kernels)
