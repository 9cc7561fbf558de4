"""Kernel groups under the roof: what bounds each, and how far below it they run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from mfubench.analysis.figures.profiled import fastest_profile
from mfubench.analysis.figures.style import Theme, empty_figure, machine_label, run_plot, titled_figure
from mfubench.analysis.findings import Findings
from mfubench.analysis.profiles import Profiled
from mfubench.analysis.roofline import Point, points_of
from mfubench.analysis.units import format_percent
from mfubench.hardware import arithmetic_of_run, find_gpu, rank_share

TITLE = "Roofline of the kernels"
LABEL_DISTANCE = 10**0.18  # between two labels on the vertical axis
LABELLED_FROM = 0.01  # of the step: smaller groups are points without a label
APART = 0.6  # of the horizontal axis: columns of labels that are nearer than this may meet
SHAPES = {"matmul": "s", "attention": "^", "memory": "o"}


@dataclass(frozen=True)
class Label:
    """The words at a point, a line away: they begin or end at x, by their side."""

    point: Point
    x: float
    y: float
    side: Literal["left", "right"]


def draw(found: Findings, theme: Theme) -> Figure:
    profiled = fastest_profile(found, theme, TITLE)
    if isinstance(profiled, Figure):
        return profiled
    points = [point for point in points_of(profiled) if point.flops > 0 and point.bytes > 0]
    if not points:
        return empty_figure(theme, TITLE, machine_label(found), f"{profiled.case}: no kernel group has a known size")
    subtitle = (
        f"{machine_label(found)} · {profiled.case}, rank {profiled.rank.rank}, n = 1 profiled step · FLOPs: causal, by "
        "shape; bytes: each operand once, by shape; elementwise arithmetic counted roughly · "
        f"{arithmetic_of_run(profiled.judged.log)} · numbers: share of the step, from "
        f"{format_percent(LABELLED_FROM, 0)} on"
    )
    figure = titled_figure(theme, TITLE, subtitle, 4.2)
    axes = figure.subplots()
    draw_roofs(axes, found, profiled, points, theme)
    draw_points(axes, points, profiled, theme)
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator())
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("FLOPs a byte")
    axes.set_ylabel("TFLOP/s of one device while the group runs")
    return figure


def draw_roofs(axes: Axes, found: Findings, profiled: Profiled, points: list[Point], theme: Theme) -> None:
    """The datasheet's roof and the measured one, over the range of the points."""
    # on the left of compute-bound groups their labels need room, which memory-bound ones make
    low = min(point.intensity for point in points) / (3 if any(p.kind == "memory" for p in points) else 60)
    high = max(point.intensity for point in points) * 4
    for label, tflops, gb_s, style, color in roofs_of(found, profiled, theme):
        ridge = tflops * 1000 / gb_s
        knees = [low, *([ridge] if low < ridge < high else []), high]
        axes.plot(knees, [min(tflops, x * gb_s / 1000) for x in knees], linestyle=style, color=color, linewidth=1.4,
                  label=f"{label}: {tflops:,.4g} TFLOP/s, {gb_s:,.4g} GB/s")  # fmt: skip
    axes.set_xlim(low, high)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper left")


def roofs_of(
    found: Findings, profiled: Profiled, theme: Theme
) -> list[tuple[str, float, float, str | tuple[int, tuple[int, int]], str]]:
    """(label, TFLOP/s, GB/s, line style, colour) of each roof that is known."""
    roofs: list[tuple[str, float, float, str | tuple[int, tuple[int, int]], str]] = []
    log, ceilings = profiled.judged.log, found.study.ceilings
    peak = profiled.judged.peak
    if peak is not None and not peak.measured and log.environment.gpus:
        row = find_gpu(log.environment.gpus[0].name)  # the peak is from this row
        roofs.append(("datasheet", peak.tflops, row.bandwidth_gb_s, "-", theme.muted))
    if ceilings is not None and ceilings.copy_rate is not None and ceilings.device == log.environment.device:
        rate = ceilings.fastest_matmul_tflops(arithmetic_of_run(log))
        if rate is not None:
            rate *= rank_share(log, ceilings)
            roofs.append(("measured", rate, ceilings.copy_rate.gb_s, (0, (4, 2)), theme.text))
    return roofs


def draw_points(axes: Axes, points: list[Point], profiled: Profiled, theme: Theme) -> None:
    """Points, and their labels in two columns: memory-bound groups to the right of theirs, the others to the left."""
    colors = {"matmul": theme.series[0], "attention": theme.series[1], "memory": theme.series[2]}
    for point in points:
        axes.plot(point.intensity, point.tflops, SHAPES[point.kind], color=colors[point.kind], markersize=8, zorder=3)
    lowest = min(point.tflops for point in points)
    step_s = profiled.rank.step_s
    for label in labels_of(points, LABELLED_FROM * step_s, axes.get_xlim()):
        point, lowest = label.point, min(lowest, label.y)
        axes.plot([point.intensity, label.x], [point.tflops, label.y], color=theme.muted, linewidth=0.6, zorder=2)
        axes.text(label.x * (1.06 if label.side == "left" else 0.94), label.y,
                  f"{point.label}, {format_percent(point.time_s / step_s)}", size=8, ha=label.side,
                  va="center")  # fmt: skip
    axes.set_ylim(lowest / 3, 2 * axes.dataLim.y1)  # the roofs among the data


def labels_of(points: list[Point], shortest_s: float, limits: tuple[float, float]) -> list[Label]:
    """Where the labels of points from `shortest_s` on stand, so that none covers another.

    limits: those of the horizontal axis.
    """
    memory = [point for point in points if point.kind == "memory"]
    compute = [point for point in points if point.kind != "memory"]
    columns: list[list[Label]] = []
    if memory:
        edge = max(point.intensity for point in memory) * 2.2
        order = sorted(memory, key=lambda point: -point.tflops)
        columns.append([Label(point, edge, point.tflops, "left") for point in order])
    if compute:
        edge = min(point.intensity for point in compute) / 2.0
        # they hang below the highest, where no roof is
        highest = 0.18 * max(point.tflops for point in compute)
        order = sorted(compute, key=lambda point: point.intensity)
        columns.append([Label(point, edge, min(point.tflops, highest), "right") for point in order])
    if len(columns) == 2:
        left, right = columns
        apart = math.log(right[0].x / left[0].x) / math.log(limits[1] / limits[0])
        if apart < APART:  # one above the other, as if they were one column
            columns = [sorted([*left, *right], key=lambda label: -label.y)]
    placed = []
    for column in columns:
        shown = [label for label in column if label.point.time_s >= shortest_s]
        heights = fan_out([label.y for label in shown])
        placed += [replace(label, y=y) for label, y in zip(shown, heights, strict=True)]
    return placed


def fan_out(values: list[float]) -> list[float]:
    """Falling values on a log axis, moved down as far as labels need it so as not to touch."""
    placed: list[float] = []
    for value in values:
        placed.append(min(value, placed[-1] / LABEL_DISTANCE) if placed else value)
    return placed


def main(argv: Sequence[str] | None = None) -> int:
    return run_plot(draw, "Plot the roofline of the kernels.", argv)
