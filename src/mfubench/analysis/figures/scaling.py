"""Scaling: what a GPU still does when there are more of them."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator, PercentFormatter

from mfubench.analysis.figures.style import (
    MARKERS,
    Theme,
    empty_figure,
    machine_label,
    per_gpu,
    plain_axes,
    run_plot,
    titled_figure,
    with_start,
)
from mfubench.analysis.findings import Findings
from mfubench.analysis.scaling import ScalingPoint
from mfubench.analysis.units import format_count

TITLE = "What is left of a GPU's rate when there are more of them"


def draw(found: Findings, theme: Theme) -> Figure:
    unit = per_gpu(found).rsplit("/", 1)[1]
    curves: dict[str, list[tuple[ScalingPoint, float]]] = {}  # with their efficiency
    for point in found.scaling:
        if point.efficiency is not None:
            curves.setdefault(point.series, []).append((point, point.efficiency))
    if not curves:
        measured = {point.world_size for point in found.scaling}
        there = "no series has two" if measured else "no case of the stage scaling was measured"
        if len(measured) == 1:
            there = f"only world size {min(measured)} was measured"
        return empty_figure(theme, TITLE, machine_label(found), f"{there}; a curve needs two world sizes")
    sizes = sorted({point.world_size for points in curves.values() for point, _ in points})
    subtitle = (
        f"{machine_label(found)} · weak scaling: the same work for each {unit} · efficiency: rate per {unit} over that "
        "of the series' smallest world size, bars: 95 % interval"
    )
    figure = titled_figure(theme, TITLE, subtitle, 3.5)
    left, right = figure.subplots(1, 2, width_ratios=[1.15, 1])
    for position, (name, curve) in enumerate(curves.items()):
        points = [point for point, _ in curve]
        color, marker = theme.series[position % len(theme.series)], MARKERS[position % len(MARKERS)]
        draw_efficiency(left, curve, name, color, marker, nudge=1 + 0.02 * (position - (len(curves) - 1) / 2))
        right.plot([p.world_size for p in points], [p.tokens_per_s for p in points], marker=marker, color=color)
        right.annotate(format_count(points[-1].tokens_per_s), (points[-1].world_size, points[-1].tokens_per_s),
                       xytext=(-6, 6), textcoords="offset points", ha="right", size=8.5)  # fmt: skip
        first = points[0]
        ideal = [first.tokens_per_s_per_gpu * size for size in (first.world_size, max(sizes))]
        right.plot([first.world_size, max(sizes)], ideal, color=color, linewidth=0.9, linestyle=(0, (2, 3)))
    for axes in (left, right):
        plain_axes(axes, "y")
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.minorticks_off()
        axes.set_xlabel("GPUs" if unit == "GPU" else "processes")
    left.axhline(1, color=theme.muted, linewidth=0.9, linestyle=(0, (2, 3)))
    lowest = min(
        point.interval.low if point.interval else efficiency for curve in curves.values() for point, efficiency in curve
    )
    highest = max(efficiency for curve in curves.values() for _, efficiency in curve)
    start = max(0.0, min(0.9, lowest - 0.1 * (1.1 - lowest)))
    left.set_ylim(start, 1.03 * highest)
    left.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))
    left.set_title(with_start(f"efficiency per {unit}", start), loc="left", color=theme.muted, weight="bold")
    left.legend(loc="lower left")
    right.set_yscale("log")
    right.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5, 7)))
    right.yaxis.set_minor_locator(NullLocator())
    right.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_count(value)))
    right.set_title("tokens/s in all (dotted: ideal)", loc="left", color=theme.muted, weight="bold")
    return figure


def draw_efficiency(
    axes: Axes, curve: list[tuple[ScalingPoint, float]], name: str, color: str, marker: str, nudge: float
) -> None:
    """One series; `nudge` sets its points a little aside, so that intervals do not cover one another."""
    last, at_last = curve[-1]
    where = [point.world_size * nudge for point, _ in curve]
    label = f"{name}: {100 * at_last:.1f} % at {last.world_size}"
    axes.plot(where, [efficiency for _, efficiency in curve], marker=marker, color=color, label=label)
    for x, (point, efficiency) in zip(where, curve, strict=True):
        if point.interval is not None:
            below, above = efficiency - point.interval.low, point.interval.high - efficiency
            axes.errorbar(x, efficiency, yerr=[[below], [above]], color=color, capsize=3, linewidth=1.2)


def main(argv: Sequence[str] | None = None) -> int:
    return run_plot(draw, "Plot scaling efficiency.", argv)
