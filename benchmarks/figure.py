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


def draw_losses(path: Path, result: dict[str, Any]) -> None:
    """Loss curves of `benchmarks.loss_parity` above, below them what each is away from its seed's reference."""
    reference = result["reference"]["system"]
    with LIGHT.applied():
        words = (
            f"{result['model']}, {result['micro_batch_size']} × {result['accumulation']} sequences of "
            f"{result['seq_len']} tokens a step, one {result['card'] or 'CPU'}, torch {result['torch']}. A line a "
            f"seed; below: minus {reference} of the same seed; grey: {reference} of the same seed, run again."
        )
        figure = titled_figure(LIGHT, "Loss of the fast settings against the plain ones", words, 5.2)
        curves, apart = figure.subplots(2, 1, sharex=True)
        colours = {reference: LIGHT.series[0]}
        for place, arm in enumerate(result["arms"]):
            colours[arm] = LIGHT.series[1 + place % (len(LIGHT.series) - 1)]
        named: set[str] = set()
        for name, losses in result["curves"].items():
            system, seed, label = name.split()
            steps = range(1, len(losses) + 1)
            colour = colours[system] if label == "first" else "0.6"
            if label == "first":
                curves.plot(steps, losses, color=colour, linewidth=0.8, label=None if system in named else system)
                named.add(system)
            base = result["curves"].get(f"{reference} {seed} first")
            if base is not None and (system != reference or label != "first"):
                apart.plot(steps, [a - b for a, b in zip(losses, base, strict=True)], color=colour, linewidth=0.8)
        curves.set_ylabel("loss, nats")
        curves.legend(frameon=False)
        apart.set_ylabel("difference, nats")
        apart.set_xlabel("optimizer step")
        for axes in (curves, apart):
            plain_axes(axes, "y")
        figure.savefig(path, metadata={"Software": "mfubench"})


def label_of(row: dict[str, Any]) -> str:
    batch = f"{row['micro_batch_size']} × {row['gradient_accumulation_steps']}"
    cards = f", {row['world_size']} GPUs" if row["world_size"] > 1 else ""
    return f"{row['system']} ({batch}{cards})"
