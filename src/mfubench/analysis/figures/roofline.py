"""Kernel groups under the roof: what bounds each, and how far below it they run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.textpath import TextPath
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from mfubench.analysis.figures.profiled import fastest_profile
from mfubench.analysis.figures.style import Theme, empty_figure, halo, machine_label, run_plot, titled_figure
from mfubench.analysis.findings import Findings
from mfubench.analysis.profiles import Profiled
from mfubench.analysis.roofline import Point, points_of
from mfubench.analysis.units import format_digits, format_percent, unit_of_tflops
from mfubench.hardware import arithmetic_of_run, find_gpu, rank_share

TITLE = "Roofline of the kernels"
LABEL_SIZE = 8  # points
LABEL_DISTANCE = 10**0.18  # between two labels on the vertical axis
CLEARANCE = 1.35  # a roof over the label beneath it
PANEL = (8.1, 3.5)  # inches, about: width and height of the axes
DOT = 0.12  # inches: a line that passes a point nearer than this seems to lead to it
APART = 0.6  # of the horizontal axis: columns of labels that are nearer than this may meet
SHAPES = {"matmul": "s", "attention": "^", "memory": "o"}


@dataclass(frozen=True)
class Roof:
    label: str
    tflops: float
    gb_s: float
    style: str | tuple[int, tuple[int, int]]  # of the line
    color: str

    def at(self, intensity: float) -> float:
        """TFLOP/s at so many FLOPs a byte."""
        return min(self.tflops, intensity * self.gb_s / 1000)


@dataclass(frozen=True)
class Label:
    """The words at a point, a line away: they begin or end at x, by their side."""

    point: Point
    words: str
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
        f"{arithmetic_of_run(profiled.judged.log)} · numbers: share of the step"
    )
    figure = titled_figure(theme, TITLE, subtitle, 4.2)
    axes = figure.subplots()
    roofs = roofs_of(found, profiled, theme)
    draw_roofs(axes, roofs, points)
    draw_points(axes, points, roofs, profiled, theme)
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator())
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: format_digits(value)))
    axes.set_xlabel("FLOPs a byte")
    unit, scale = unit_of_axis(points)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_digits(scale * value)))
    axes.set_ylabel(f"{unit} of one device while the group runs")
    return figure


def unit_of_axis(points: list[Point]) -> tuple[str, float]:
    """The unit of the fastest group, as the report's tables write it, and how many of it a TFLOP/s is."""
    return unit_of_tflops(max(point.tflops for point in points))


def draw_roofs(axes: Axes, roofs: list[Roof], points: list[Point]) -> None:
    """The roofs over the range of the points."""
    unit, scale = unit_of_axis(points)
    # on the left of compute-bound groups their labels need room, which memory-bound ones make
    low = min(point.intensity for point in points) / (3 if any(p.kind == "memory" for p in points) else 60)
    high = max(point.intensity for point in points) * 4
    for roof in roofs:
        ridge = roof.tflops * 1000 / roof.gb_s
        knees = [low, *([ridge] if low < ridge < high else []), high]
        label = f"{roof.label}: {format_digits(scale * roof.tflops, 4)} {unit}, {format_digits(roof.gb_s, 4)} GB/s"
        axes.plot(knees, [roof.at(x) for x in knees], linestyle=roof.style, color=roof.color, linewidth=1.4,
                  label=label)  # fmt: skip
    axes.set_xlim(low, high)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper left")


def roofs_of(found: Findings, profiled: Profiled, theme: Theme) -> list[Roof]:
    """The datasheet's roof and the measured one, as far as they are known."""
    roofs: list[Roof] = []
    log, ceilings = profiled.judged.log, found.study.ceilings
    peak = profiled.judged.peak
    if peak is not None and not peak.measured and log.environment.gpus:
        row = find_gpu(log.environment.gpus[0].name)  # the peak is from this row
        roofs.append(Roof("datasheet", peak.tflops, row.bandwidth_gb_s, "-", theme.muted))
    if ceilings is not None and ceilings.copy_rate is not None and ceilings.device == log.environment.device:
        rate = ceilings.fastest_matmul_tflops(arithmetic_of_run(log))
        if rate is not None:
            rate *= rank_share(log, ceilings)
            roofs.append(Roof("fastest matmul measured", rate, ceilings.copy_rate.gb_s, (0, (4, 2)), theme.text))
    return roofs


def draw_points(axes: Axes, points: list[Point], roofs: list[Roof], profiled: Profiled, theme: Theme) -> None:
    """Points, and their labels in two columns: memory-bound groups to the right of theirs, the others to the left."""
    colors = {"matmul": theme.series[0], "attention": theme.series[1], "memory": theme.series[2]}
    for point in points:
        axes.plot(point.intensity, point.tflops, SHAPES[point.kind], color=colors[point.kind], markersize=8, zorder=3)
    lowest = min(point.tflops for point in points)
    for label in labels_of(points, profiled.rank.step_s, axes.get_xlim(), roofs):
        point, lowest = label.point, min(lowest, label.y)
        axes.plot([point.intensity, label.x], [point.tflops, label.y], color=theme.muted, linewidth=0.6, zorder=2)
        axes.text(label.x * (1.06 if label.side == "left" else 0.94), label.y, label.words, size=LABEL_SIZE,
                  ha=label.side, va="center", path_effects=halo(theme))  # fmt: skip
    axes.set_ylim(lowest / 3, 2 * axes.dataLim.y1)  # the roofs among the data


def labels_of(points: list[Point], step_s: float, limits: tuple[float, float], roofs: list[Roof]) -> list[Label]:
    """Where the labels stand, so that none covers another or a roof, and no line crosses another.

    limits: those of the horizontal axis.
    """
    words = {point.label: f"{point.label}, {format_percent(point.time_s / step_s)}" for point in points}
    memory = [point for point in points if point.kind == "memory"]
    compute = [point for point in points if point.kind != "memory"]
    columns: list[list[Label]] = []
    if memory:
        edge = max(point.intensity for point in memory) * 2.2
        order = sorted(memory, key=lambda point: -point.tflops)
        columns.append([Label(point, words[point.label], edge, point.tflops, "left") for point in order])
    if compute:
        edge = min(point.intensity for point in compute) / 2.0
        # they hang below the highest, where no roof is
        highest = 0.1 * max(point.tflops for point in compute)
        order = sorted(compute, key=lambda point: point.intensity)
        columns.append([Label(point, words[point.label], edge, min(point.tflops, highest), "right") for point in order])
    columns = [under_roofs(column, roofs, limits) for column in columns]
    if len(columns) == 2:
        left, right = columns
        apart = math.log(right[0].x / left[0].x) / math.log(limits[1] / limits[0])
        if apart < APART:  # one above the other, as if they were one column
            columns = [sorted([*left, *right], key=lambda label: -label.y)]
    placed = []
    for column in columns:
        heights = fan_out([label.y for label in column])
        placed += [replace(label, y=y) for label, y in zip(column, heights, strict=True)]
    return untangle(placed, points, limits)


def under_roofs(column: list[Label], roofs: list[Roof], limits: tuple[float, float]) -> list[Label]:
    """The labels at most as high as all of them are clear of the roofs, in whatever order they come to stand."""
    above = min((roof.at(start_of(label, limits)) for roof in roofs for label in column), default=math.inf)
    return [replace(label, y=min(label.y, above / CLEARANCE)) for label in column]


def start_of(label: Label, limits: tuple[float, float]) -> float:
    """Where a label's words begin on the horizontal axis."""
    if label.side == "left":
        return label.x
    width = TextPath((0, 0), label.words, size=LABEL_SIZE).get_extents().width / 72 / PANEL[0]
    return label.x * 0.94 / (limits[1] / limits[0]) ** width


def fan_out(values: list[float]) -> list[float]:
    """Falling values on a log axis, moved down as far as labels need it so as not to touch."""
    placed: list[float] = []
    for value in values:
        placed.append(min(value, placed[-1] / LABEL_DISTANCE) if placed else value)
    return placed


def untangle(labels: list[Label], points: list[Point], limits: tuple[float, float]) -> list[Label]:
    """The labels of a column in that order in which their lines cross least, and are short."""
    heights = [height for label in labels for height in (label.y, label.point.tflops)]
    low, high = min(heights) / 3, max(heights) * 2  # about the ends of the vertical axis

    def inches(x: float, y: float) -> complex:
        """A place on the panel, horizontal and vertical."""
        return complex(
            math.log(x / limits[0]) / math.log(limits[1] / limits[0]) * PANEL[0],
            math.log(y / low) / math.log(high / low) * PANEL[1],
        )

    def faults(order: list[Label]) -> tuple[int, float]:
        """Lines that cross one another or pass over a point of another, and the length of all."""
        lines = [(inches(label.point.intensity, label.point.tflops), inches(label.x, label.y)) for label in order]
        crossings = sum(cross(*one, *other) for one, other in combinations(lines, 2))
        passed = sum(
            distance(inches(point.intensity, point.tflops), *line) < DOT
            for label, line in zip(order, lines, strict=True)
            for point in points
            if point is not label.point
        )
        return crossings + passed, sum(abs(end - start) for start, end in lines)

    best = faults(labels)
    improved = True
    while improved:  # every round has fewer faults or shorter lines
        improved = False
        for i, j in combinations(range(len(labels)), 2):
            if labels[i].side != labels[j].side:
                continue
            swapped = list(labels)
            swapped[i], swapped[j] = replace(labels[i], y=labels[j].y), replace(labels[j], y=labels[i].y)
            found = faults(swapped)
            if found < best:
                labels, best, improved = swapped, found, True
    return labels


def cross(a: complex, b: complex, c: complex, d: complex) -> bool:
    """Whether the line from a to b crosses the one from c to d."""

    def turn(p: complex, q: complex, r: complex) -> float:
        return ((q - p).conjugate() * (r - p)).imag

    return turn(a, b, c) * turn(a, b, d) < 0 and turn(c, d, a) * turn(c, d, b) < 0


def distance(point: complex, start: complex, end: complex) -> float:
    """From a point to the line between two others."""
    along = ((end - start).conjugate() * (point - start)).real / abs(end - start) ** 2
    return abs(point - start - min(max(along, 0.0), 1.0) * (end - start))


def main(argv: Sequence[str] | None = None) -> int:
    return run_plot(draw, "Plot the roofline of the kernels.", argv)
