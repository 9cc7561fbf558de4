"""MFU of every step, so that warm-up, drift and hiccups can be seen."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from mfubench.analysis.figures.style import (
    Theme,
    count_words,
    empty_figure,
    machine_label,
    peak_label,
    per_gpu,
    plain_axes,
    run_plot,
    shade_unmeasured,
    titled_figure,
)
from mfubench.analysis.findings import Findings
from mfubench.analysis.measures import Measures, is_outlier, mfu_factor
from mfubench.analysis.statistics import Quartiles
from mfubench.analysis.units import format_rate
from mfubench.run_log import Step

TITLE = "Step by step: warm-up, drift, hiccups"
MOST_PANELS = 9
COLUMNS = 3


def draw(found: Findings, theme: Theme) -> Figure:
    chosen = choose(found)
    if not chosen:
        return empty_figure(theme, TITLE, machine_label(found), "no case with measured steps yet")
    with_mfu = all("palm" in judged.mfu for judged in chosen.values())
    what = f"MFU (palm) of {peak_label(list(chosen.values()))}" if with_mfu else per_gpu(found)
    subtitle = (
        f"{machine_label(found)} · {what}; hatched: compilation and warm-up, recorded and not "
        "judged (triangles: beyond the axis); line and band: median and quartiles of the measured steps; crosses: "
        f"outliers{start_words([step_limits(judged, factor_of(judged, with_mfu))[0] for judged in chosen.values()])}"
    )
    rows = math.ceil(len(chosen) / COLUMNS)
    figure = titled_figure(theme, TITLE, subtitle, 1.75 * rows + 0.3)
    panels = figure.subplots(rows, COLUMNS, squeeze=False).ravel()
    for axes, (name, judged) in zip(panels, chosen.items(), strict=False):
        draw_steps(axes, judged, with_mfu, theme)
        title = f"{name}  ({count_words(found, judged.log.config.world_size)})"
        axes.set_title(title, loc="left", size=8, weight="bold", color=theme.text)
    for axes in panels[len(chosen) :]:
        axes.set_axis_off()
    for axes in panels[max(0, len(chosen) - COLUMNS) : len(chosen)]:
        axes.set_xlabel("optimizer step")
    return figure


def choose(found: Findings) -> dict[str, Measures]:
    """At most nine cases: the ladders first, then training, then the rest; repeats and smoke tests left out."""
    order = {"tiers": 0, "baseline": 1, "training": 2, "scaling": 3, "ablations": 4, "memory": 5}
    names = [
        name
        for name, judged in found.good.items()
        if judged.log.config.stage in order and judged.log.config.repeat == 0
    ]
    names.sort(key=lambda name: order[found.good[name].log.config.stage])
    kept = set(names[:MOST_PANELS])
    return {name: judged for name, judged in found.good.items() if name in kept}


def start_words(starts: Sequence[float]) -> str:
    """Where the panels' axes begin, for the subtitle; nothing where all begin at 0."""
    if all(start > 0 for start in starts):
        return " · axes do not start at 0"
    return " · not all axes start at 0" if any(start > 0 for start in starts) else ""


def factor_of(judged: Measures, with_mfu: bool) -> float:
    """What a rate is multiplied with to be drawn: FLOPs of a token over the peak for MFU, else 1."""
    if not with_mfu or judged.peak is None:
        return 1.0
    factor = mfu_factor(judged.log, "palm", judged.peak.tflops)
    assert factor is not None
    return factor


def reach_of(middle: Quartiles) -> float:
    """How far apart ordinary steps are."""
    return max(middle.q3 - middle.q1, 0.004 * middle.median)


def step_limits(judged: Measures, factor: float) -> tuple[float, float]:
    """Ends of a panel's vertical axis: all measured steps but the very strange; nothing is below 0."""
    assert judged.tokens_per_s_per_gpu is not None
    middle = judged.tokens_per_s_per_gpu.scaled(factor)
    reach = reach_of(middle)
    low = max(min(judged.rates) * factor, middle.median - 14 * reach)
    high = min(max(judged.rates) * factor, middle.median + 14 * reach)
    return max(0.0, low - 1.2 * reach), high + 1.2 * reach


def draw_steps(axes: Axes, judged: Measures, with_mfu: bool, theme: Theme) -> None:
    plain_axes(axes, "y")
    axes.spines["bottom"].set_visible(True)
    world_size = judged.log.config.world_size
    factor = factor_of(judged, with_mfu)
    steps, times = judged.log.steps, judged.step_time_s
    assert judged.tokens_per_s_per_gpu is not None and times is not None
    middle = judged.tokens_per_s_per_gpu.scaled(factor)

    def points(chosen: Iterable[Step]) -> list[tuple[int, float]]:
        return [(step.step + 1, step.tokens / step.step_time_s / world_size * factor) for step in chosen]

    low, high = step_limits(judged, factor)
    shade_unmeasured(axes, steps, facecolor=theme.band, hatch="////", edgecolor=theme.grid, linewidth=0)
    unmeasured = points(step for step in steps if step.phase != "measured")
    seen = [(x, y) for x, y in unmeasured if low < y < high]
    axes.plot([x for x, _ in seen], [y for _, y in seen], ".", color=theme.muted, markersize=4)
    for marker, share, beyond in (
        ("v", 0.05, [x for x, y in unmeasured if y <= low]),
        ("^", 0.95, [x for x, y in unmeasured if y >= high]),
    ):
        axes.plot(beyond, [low + share * (high - low)] * len(beyond), marker, color=theme.muted, markersize=3.5)
    axes.axhspan(middle.q1, middle.q3, color=theme.series[0], alpha=0.16, linewidth=0)
    axes.axhline(middle.median, color=theme.series[0], linewidth=1.2)
    measured = judged.log.measured_steps()
    usual = points(step for step in measured if not is_outlier(step.step_time_s, times))
    axes.plot([x for x, _ in usual], [y for _, y in usual], ".", color=theme.series[0], markersize=3.5)
    outliers = points(step for step in measured if is_outlier(step.step_time_s, times))
    strange = [(x, min(max(y, low), high)) for x, y in outliers]
    axes.plot([x for x, _ in strange], [y for _, y in strange], "x", color=theme.bad, markersize=5, markeredgewidth=1.4)
    axes.set_ylim(low, high)
    axes.set_xlim(0.5, steps[-1].step + 1.5)
    axes.yaxis.set_major_formatter(
        PercentFormatter(1.0, symbol=" %") if with_mfu else FuncFormatter(lambda value, _: format_rate(value))
    )
    axes.locator_params(axis="y", nbins=4)
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10], integer=True))


def main(argv: Sequence[str] | None = None) -> int:
    return run_plot(draw, "Plot MFU over time.", argv)
