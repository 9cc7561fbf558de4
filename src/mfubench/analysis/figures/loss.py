"""Loss curves and gradient norms of the training runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from mfubench.analysis.figures.style import (
    MARKERS,
    Theme,
    empty_figure,
    machine_label,
    plain_axes,
    run_plot,
    titled_figure,
)
from mfubench.analysis.findings import Findings
from mfubench.analysis.units import format_digits
from mfubench.run_log import RunLog

TITLE = "Loss and gradient norm"
MOST_CURVES = 5
LEGEND_COLUMNS = 2
CURVE_WIDTH = 1.8  # points
WINDOW = 15  # steps of the moving median
SHORTEST_SMOOTHED = 4 * WINDOW  # steps of a run; a shorter one is shown as it is


def draw(found: Findings, theme: Theme) -> Figure:
    logs = training_runs(found)
    if not logs:
        return empty_figure(theme, TITLE, machine_label(found), "no run with a loss yet")
    subtitle = (
        f"{machine_label(found)} · {curve_words(list(logs.values()))} · gradient norm over all parameters, before "
        "clipping · dotted: ln(vocabulary), the loss of a guess"
    )
    legend_rows = math.ceil(len(logs) / LEGEND_COLUMNS)
    figure = titled_figure(theme, TITLE, subtitle, 3.5 + 0.19 * legend_rows)
    left, right = figure.subplots(1, 2, width_ratios=[1.4, 1])
    handles: dict[str, Line2D] = {}
    for position, (name, log) in enumerate(logs.items()):
        color = theme.series[position % len(theme.series)]
        handles[f"{name}, {log.config.model.name}"] = draw_loss(left, log, color, MARKERS[position % len(MARKERS)])
        draw_curve(right, norms_of(log), color)
    for vocab_size in {log.config.model.vocab_size for log in logs.values()}:
        left.axhline(math.log(vocab_size), color=theme.muted, linewidth=0.9, linestyle=(0, (2, 3)))
    for axes in (left, right):
        plain_axes(axes, "y")
        axes.spines["bottom"].set_visible(True)
        axes.set_xlabel("optimizer step")
        axes.set_xlim(left=0)
    left.set_title("loss, nats per token", loc="left", color=theme.muted, weight="bold")
    right.set_yscale("log")
    right.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5, 7)))
    right.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_digits(value)))
    right.yaxis.set_minor_locator(NullLocator())
    right.set_title("gradient norm (logarithmic)", loc="left", color=theme.muted, weight="bold")
    # below both panels, whose colours it explains: a curve may come to any place within them
    figure.legend(list(handles.values()), list(handles), loc="outside lower left", ncols=LEGEND_COLUMNS)
    return figure


def training_runs(found: Findings) -> dict[str, RunLog]:
    """The runs of the stage training, diverged ones too; without them the longest run there is."""
    logs = {name: log for name, log in found.study.runs.items() if any(step.loss is not None for step in log.steps)}
    training = {name: log for name, log in logs.items() if log.config.stage == "training"}
    if training:
        return dict(list(training.items())[:MOST_CURVES])
    longest = sorted(logs, key=lambda name: len(logs[name].steps))[-1:]
    return {name: logs[name] for name in longest}


def curve_words(logs: Sequence[RunLog]) -> str:
    """What lines and marks are, as far as there are any."""
    is_long = any(len(points) >= SHORTEST_SMOOTHED for log in logs for points in (losses_of(log), norms_of(log)))
    words = f"moving median of {WINDOW} steps in runs of {SHORTEST_SMOOTHED} or more" if is_long else "every step"
    return "; ".join(
        [
            *(["faint: every step"] if is_long else []),
            f"line: {words}",
            *(["marks: held-out text"] if any(held_out_of(log) for log in logs) else []),
        ]
    )


def losses_of(log: RunLog) -> list[tuple[int, float]]:
    """Steps, counted from 1, whose loss is finite."""
    return [(step.step + 1, step.loss) for step in log.steps if step.loss is not None]


def norms_of(log: RunLog) -> list[tuple[int, float]]:
    return [(step.step + 1, step.grad_norm) for step in log.steps if step.grad_norm is not None]


def held_out_of(log: RunLog) -> list[tuple[int, float]]:
    """Losses of held-out text beside a curve; a single step has none."""
    if len(log.steps) < 2:
        return []
    return [(entry.step, entry.loss) for entry in log.evaluations if entry.loss is not None]


def draw_loss(axes: Axes, log: RunLog, color: str, marker: str) -> Line2D:
    """The curve, marks for held-out text; returns what stands for both in a legend."""
    draw_curve(axes, losses_of(log), color)
    held_out = held_out_of(log)
    marks: dict[str, Any] = {"color": color, "markerfacecolor": "none", "markersize": 7, "markeredgewidth": 1.4}
    if not held_out:
        return Line2D([], [], color=color, linewidth=CURVE_WIDTH)
    steps, losses = zip(*held_out, strict=True)
    # not clipped: an evaluation at step 0 stands on the frame
    axes.plot(steps, losses, marker, clip_on=False, zorder=3, **marks)
    return Line2D([], [], marker=marker, linewidth=CURVE_WIDTH, **marks)


def draw_curve(axes: Axes, points: list[tuple[int, float]], color: str) -> None:
    """Every value, faint, under its moving median; a short run, whose curve that would bend, as it is."""
    if not points:
        return
    x, y = np.array([point[0] for point in points]), np.array([point[1] for point in points])
    axes.plot(x, y, color=color, linewidth=0.8, alpha=0.35)
    half = WINDOW // 2 if len(y) >= SHORTEST_SMOOTHED else 0
    smooth = [float(np.median(y[max(0, i - half) : i + half + 1])) for i in range(len(y))]
    axes.plot(x, smooth, color=color, linewidth=CURVE_WIDTH)


def main(argv: Sequence[str] | None = None) -> int:
    return run_plot(draw, "Plot loss and gradient norm.", argv)
