"""Scaling: what a GPU still does when there are more of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator, PercentFormatter

from mfubench.analysis.figures.style import (
    MARKERS,
    Theme,
    empty_figure,
    halo,
    machine_label,
    per_gpu,
    plain_axes,
    run_plot,
    titled_figure,
    with_start,
)
from mfubench.analysis.findings import Findings
from mfubench.analysis.scaling import ScalingPoint, words_of_shared_cores
from mfubench.analysis.study import MOST_EFFICIENT
from mfubench.analysis.units import TOO_NOISY, format_count, format_percent, is_noise

Curve = list[tuple[ScalingPoint, float]]  # with their efficiency
APART = 1.08  # of rates whose words stand beside each other
TITLE = "What is left of a {unit}'s rate when there are more of them"


def draw(found: Findings, theme: Theme) -> Figure:
    unit = per_gpu(found).rsplit("/", 1)[1]
    title = TITLE.format(unit=unit)
    curves, impossible = curves_of(found)
    left_out = f"left out as no scaling (more than {format_percent(MOST_EFFICIENT, 0)}): {', '.join(impossible)}"
    if not curves:
        reason = left_out if impossible else f"{what_there_is(found)}; a curve needs two world sizes"
        return empty_figure(theme, title, machine_label(found), reason)
    drawn = [point for curve in curves.values() for point, _ in curve]
    sizes = sorted({point.world_size for point in drawn})
    start, end = limits_of(curves)
    arrows = ", arrows: beyond the axis" if any(end_of(point) > end for point in drawn) else ""
    subtitle = (
        f"{machine_label(found)} · weak scaling: the same work for each {unit} · efficiency: rate per {unit} over that "
        f"of the series' smallest world size, bars: 95 % interval{arrows}{f' · {left_out}' if impossible else ''}"
        f"{''.join(f' · {shared}' for shared in words_of_shared_cores(drawn))}"
    )
    figure = titled_figure(theme, title, subtitle, 3.5)
    left, right = figure.subplots(1, 2, width_ratios=[1.15, 1])
    left.set_ylim(start, end)
    for position, (name, curve) in enumerate(curves.items()):
        points = [point for point, _ in curve]
        style: dict[str, Any] = {
            "color": theme.series[position % len(theme.series)],
            "marker": MARKERS[position % len(MARKERS)],
        }
        if position >= len(MARKERS):  # a second round, hollow
            style["markerfacecolor"] = theme.background
        draw_efficiency(left, curve, name, style, nudge=1 + 0.02 * (position - (len(curves) - 1) / 2))
        right.plot([p.world_size for p in points], [p.tokens_per_s for p in points], **style)
        color, first = style["color"], points[0]
        ideal = [first.tokens_per_s_per_gpu * size for size in (first.world_size, max(sizes))]
        right.plot([first.world_size, max(sizes)], ideal, color=color, linewidth=0.9, linestyle=(0, (2, 3)))
    name_ends(right, [curve[-1][0] for curve in curves.values()], theme)
    for axes in (left, right):
        plain_axes(axes, "y")
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.minorticks_off()
        axes.set_xlabel("GPUs" if unit == "GPU" else "processes")
    left.axhline(1, color=theme.muted, linewidth=0.9, linestyle=(0, (2, 3)))
    left.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))
    left.set_title(with_start(f"efficiency per {unit}", start), loc="left", color=theme.muted, weight="bold")
    left.legend(loc="lower left")
    right.set_yscale("log")
    right.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5, 7)))
    right.yaxis.set_minor_locator(NullLocator())
    right.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_count(value)))
    right.set_title("tokens/s in all (logarithmic; dotted: ideal)", loc="left", color=theme.muted, weight="bold")
    return figure


def curves_of(found: Findings) -> tuple[dict[str, Curve], list[str]]:
    """The points of each series of two and more, and in words those left out: of an efficiency that cannot be."""
    curves: dict[str, Curve] = {}
    impossible = []
    for point in found.scaling:
        if point.efficiency is None:
            continue
        if point.efficiency > MOST_EFFICIENT:
            impossible.append(f"{point.series} at {point.world_size} ({format_percent(point.efficiency)})")
        else:
            curves.setdefault(point.series, []).append((point, point.efficiency))
    return {name: curve for name, curve in curves.items() if len(curve) > 1}, impossible


def what_there_is(found: Findings) -> str:
    """Why there is no curve."""
    measured = {point.world_size for point in found.scaling}
    if len(measured) == 1:
        return f"only world size {min(measured)} was measured"
    return "no series has two" if measured else "no case of the stage scaling was measured"


def end_of(point: ScalingPoint) -> float:
    """Upper end of the interval of an efficiency; 0 where there is none."""
    return point.interval.high if point.interval is not None else 0.0


def limits_of(curves: dict[str, Curve]) -> tuple[float, float]:
    """Ends of the axis of efficiency: all points and the intervals, but above as far only as an efficiency may be."""
    points = [pair for curve in curves.values() for pair in curve]
    lowest = min(min(efficiency, point.interval.low if point.interval else 1.0) for point, efficiency in points)
    highest = max(max(efficiency, min(end_of(point), MOST_EFFICIENT)) for point, efficiency in points)
    start = max(0.0, min(0.9, lowest - 0.1 * (1.1 - lowest)))
    return start, highest + 0.04 * (highest - start)


def name_ends(axes: Axes, ends: list[ScalingPoint], theme: Theme) -> None:
    """The rates that curves end at, the highest above its point, others below theirs: above runs the next curve. Of
    ends so near each other that their words would cover one another the higher is named."""
    named: list[float] = []
    for end in sorted(ends, key=lambda point: -point.tokens_per_s):
        if named and named[-1] / end.tokens_per_s < APART:
            continue
        above: dict[str, Any] = {"xytext": (-6, 6), "ha": "right", "va": "baseline"}
        below: dict[str, Any] = {"xytext": (0, -8), "ha": "center", "va": "top"}
        axes.annotate(format_count(end.tokens_per_s), (end.world_size, end.tokens_per_s),
                      textcoords="offset points", size=8.5, path_effects=halo(theme),
                      **(below if named else above))  # fmt: skip
        named.append(end.tokens_per_s)


def draw_efficiency(axes: Axes, curve: Curve, name: str, style: dict[str, Any], nudge: float) -> None:
    """One series; `nudge` sets its points a little aside, so that intervals do not cover one another."""
    last, at_last = curve[-1]
    where = [point.world_size * nudge for point, _ in curve]
    told = "" if last.interval is None or not is_noise(last.interval.low, last.interval.high) else f", {TOO_NOISY}"
    label = f"{name}: {100 * at_last:.1f} % at {last.world_size}{told}"
    axes.plot(where, [efficiency for _, efficiency in curve], label=label, **style)
    color = style["color"]
    for x, (point, efficiency) in zip(where, curve, strict=True):
        if point.interval is None:
            continue
        below, above = efficiency - point.interval.low, point.interval.high - efficiency
        axes.errorbar(x, efficiency, yerr=[[below], [above]], color=color, capsize=3, linewidth=1.2)
        if point.interval.high > axes.get_ylim()[1]:
            axes.plot(x, 0.985, "^", color=color, markersize=7, zorder=4, transform=axes.get_xaxis_transform())


def main(argv: Sequence[str] | None = None) -> int:
    return run_plot(draw, "Plot scaling efficiency.", argv)
