"""The benchmarks' figures: one dot a repeat, a bar at the median, in the project's own style. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mfubench.analysis.figures.style import LIGHT, plain_axes, titled_figure


def draw(path: Path, rows: Sequence[dict[str, Any]], title: str, subtitle: str) -> None:
    """Rates of the rows that have one, fastest on top; what has none is named below them."""
    measured = sorted(
        (row for row in rows if row["tokens_per_s_per_gpu"]), key=lambda row: row["tokens_per_s_per_gpu"]["median"]
    )
    absent = [f"{label_of(row)}: {row['status']}" for row in rows if not row["tokens_per_s_per_gpu"]]
    with LIGHT.applied():
        words = f"{subtitle} {'Not measured: ' + '; '.join(absent) + '.' if absent else ''}"
        figure = titled_figure(LIGHT, title, words, 0.9 + 0.34 * max(1, len(measured)))
        axes = figure.subplots()
        for place, row in enumerate(measured):
            rate = row["tokens_per_s_per_gpu"]
            own = row["system"].startswith("mfubench")
            colour = LIGHT.series[1] if own else LIGHT.series[0]
            axes.barh(place, rate["median"], height=0.62, color=colour, alpha=0.25)
            axes.plot(rate["by_repeat"], [place] * len(rate["by_repeat"]), "o", color=colour, markersize=4)
            axes.text(rate["median"], place, f"  {rate['median']:,.0f}", va="center", size=8.5)
        axes.set_yticks(range(len(measured)), [label_of(row) for row in measured])
        axes.set_xlabel("tokens/s/GPU; bars: median, dots: repeats")
        axes.set_xlim(left=0)
        axes.margins(x=0.12)
        plain_axes(axes, "x")
        figure.savefig(path, metadata={"Software": "mfubench"})


def label_of(row: dict[str, Any]) -> str:
    batch = f"{row['micro_batch_size']} × {row['gradient_accumulation_steps']}"
    cards = f", {row['world_size']} GPUs" if row["world_size"] > 1 else ""
    return f"{row['system']} ({batch}{cards})"
