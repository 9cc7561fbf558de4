"""A figure as a file. No torch."""

from __future__ import annotations

import io
from pathlib import Path

from matplotlib.figure import Figure

from mfubench.run_log import write_bytes_atomically


def write_png(figure: Figure, path: Path, dpi: float | None = None) -> None:
    """Write a figure as a PNG that is whole or not there; dpi: dots an inch, by default the figure's own."""
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=dpi or "figure", metadata={"Software": "mfubench"})
    write_bytes_atomically(path, stream.getvalue())
