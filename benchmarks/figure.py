"""The benchmarks' figures: one dot a repeat, a bar at the median, in the project's own style. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.rows import is_own
from mfubench.analysis.figures.style import LIGHT, plain_axes, titled_figure, with_start
from mfubench.analysis.units import format_percent


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
            colour = LIGHT.series[1 if is_own(row) else 0]
            axes.barh(place, rate["median"], height=0.62, color=colour, alpha=0.25)
            axes.plot(rate["by_repeat"], [place] * len(rate["by_repeat"]), "o", color=colour, markersize=4)
            axes.text(max(rate["by_repeat"]), place, f"  {rate['median']:,.0f}", va="center", size=8.5)
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
            f"{result['seq_len']:,} tokens a step, one {result['card'] or 'CPU'}, torch {result['torch']}. A line a "
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
        if named:
            curves.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.0, ncols=4)  # above the curves
        apart.set_ylabel("difference, nats")
        apart.set_xlabel("optimizer step")
        for axes in (curves, apart):
            plain_axes(axes, "y")
        figure.savefig(path, metadata={"Software": "mfubench"})


def draw_scaling(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """What each arm keeps of its cards' own rate, one panel an accumulation."""
    measured = [row for row in rows if row.get("efficiency")]
    panels = sorted({(row["gradient_accumulation_steps"], row["world_size"]) for row in measured}, reverse=True)
    with LIGHT.applied():
        words = (
            "Rate a GPU of the joint job over that of the same cards with a job each at the same time. Dots: "
            "repeats, lines: 95 % intervals; where a run was made once there is none, and half a percent says nothing."
        )
        model = f"{measured[0]['model']} on {measured[0]['card']}" if measured else "nothing measured"
        height = 1.3 + 0.3 * max(1, len({row["arm"] for row in measured}))
        figure = titled_figure(LIGHT, f"Scaling: {model}", words, height)
        axes = figure.subplots(1, max(1, len(panels)), sharex=True, squeeze=False)[0]
        for panel, (accumulation, cards) in zip(axes, panels, strict=False):
            shown = [
                row
                for row in measured
                if (row["gradient_accumulation_steps"], row["world_size"]) == (accumulation, cards)
            ]
            for place, row in enumerate(reversed(shown)):
                found, colour = row["efficiency"], LIGHT.series[1 if is_own(row) else 0]
                panel.barh(place, 100 * found["median"] - 100, left=100, height=0.3, color=colour, alpha=0.25)
                dots = [100 * one for one in found["by_repeat"]]
                panel.plot(dots, [place] * len(dots), "o", color=colour, markersize=4)
                leftmost = min(*found["by_repeat"], found.get("low", found["median"]))
                if "low" in found:
                    panel.plot([100 * found["low"], 100 * found["high"]], [place, place], color=colour, linewidth=1.2)
                number = f"{format_percent(found['median'])}  "
                panel.text(100 * leftmost, place, number, va="center", ha="right", size=8.5)
            panel.set_yticks(range(len(shown)), list(reversed(arm_labels(shown))))
            panel.set_title(f"accumulation {accumulation}, {cards} GPUs", loc="left", size=9)
            panel.axvline(100, color=LIGHT.muted, linewidth=0.8)
            panel.margins(x=0.25)
            plain_axes(panel, "x")
        for panel in axes:  # they share their axis, whose ends are known now
            panel.set_xlabel(with_start("% of the cards' own rate", panel.get_xlim()[0]))
        figure.savefig(path, metadata={"Software": "mfubench"})


def arm_labels(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The arms' names, with the micro-batch where that is not the same for all."""
    alike = len({row["micro_batch_size"] for row in rows}) == 1
    names = [row["arm"].replace(":", ", ") for row in rows]
    return (
        names
        if alike
        else [f"{name}, micro-batch {row['micro_batch_size']}" for name, row in zip(names, rows, strict=True)]
    )


def label_of(row: dict[str, Any]) -> str:
    batch = f"{row['micro_batch_size']} × {row['gradient_accumulation_steps']}"
    cards = f", {row['world_size']} GPUs" if row["world_size"] > 1 else ""
    return f"{row['system']} ({batch}{cards})"
