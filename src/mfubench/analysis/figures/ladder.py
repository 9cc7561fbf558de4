"""The ladder of optimisations: each rung adds one setting to the one before."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from mfubench.analysis.effects import Effect, judge_effect
from mfubench.analysis.figures.style import (
    Theme,
    empty_figure,
    halo,
    machine_label,
    peak_label,
    per_gpu,
    plain_axes,
    run_plot,
    side_clear_of_line,
    status_words,
    step_count,
    titled_figure,
    with_start,
)
from mfubench.analysis.findings import Findings
from mfubench.analysis.measures import Measures
from mfubench.analysis.study import base_name, in_stage_order
from mfubench.analysis.units import format_difference, format_rate

TITLE = "What each rung of the ladder adds"
STAGES = ("baseline", "tiers")
BEYOND = 1.8  # of the highest median: the bars of noise go beyond
LABEL_ROOM = 0.28  # of the range of the rates, above and below it
FLAT = 0.1  # of the axis: a line that rises by less from rung to rung passes under the labels
CHANGES_AT = -0.1  # of the axis: below the names of the rungs


def draw(found: Findings, theme: Theme) -> Figure:
    ladders = {stage: rungs for stage in STAGES if len(measured_of(found, rungs := rungs_of(found, stage))) > 1}
    if not ladders:
        reason = "a ladder needs two measured cases of the stage baseline or tiers"
        return empty_figure(theme, TITLE, machine_label(found), reason)
    measured = [name for rungs in ladders.values() for name in measured_of(found, rungs)]
    low, high = limits_of(found, measured)
    shown = [found.good[name] for name in measured]
    arrows = ", arrows: beyond the axis" if any(end_of(judged) > high for judged in shown) else ""
    subtitle = (
        f"{machine_label(found)} · median of the measured steps ({step_count(shown)}), bars: its 95 % interval (block "
        f"bootstrap{arrows}), small dots: repeats; below: change from rung to rung · MFU: palm, of {peak_label(shown)}"
    )
    figure = titled_figure(theme, TITLE, subtitle, 3.8)
    widths = [len(rungs) for rungs in ladders.values()]
    panels = figure.subplots(1, len(ladders), squeeze=False, sharey=True, width_ratios=widths)[0]
    for axes, (stage, rungs) in zip(panels, ladders.items(), strict=True):
        axes.set_ylim(low, high)
        draw_ladder(axes, found, stage, rungs, theme)
    panels[0].set_ylabel(with_start(per_gpu(found), low))
    return figure


def rungs_of(found: Findings, stage: str) -> list[str]:
    """The cases of a stage in order, those too that were left out or have no rate; repeats are none of their own."""
    names = in_stage_order((name, None) for name in [*found.measures, *found.study.left_out()])
    return [name for name, _ in names if name.startswith(f"{stage}/") and base_name(name) == name]


def measured_of(found: Findings, rungs: Sequence[str]) -> list[str]:
    return [name for name in rungs if name in found.good]


def end_of(judged: Measures) -> float:
    """Upper end of what is drawn of a case: of its interval, where there is one."""
    assert judged.tokens_per_s_per_gpu is not None
    return judged.rate_interval.high if judged.rate_interval is not None else judged.tokens_per_s_per_gpu.median


def limits_of(found: Findings, measured: Sequence[str]) -> tuple[float, float]:
    """Ends of the vertical axis: all medians and repeats, and the intervals as far as they are no noise; labels need
    room above and below. No rate is below 0.
    """
    medians, ends = [], []
    for name in measured:
        judged = found.good[name]
        assert judged.tokens_per_s_per_gpu is not None
        medians += [judged.tokens_per_s_per_gpu.median, *repeats_of(found, name)]
        ends += [judged.rate_interval.low, judged.rate_interval.high] if judged.rate_interval is not None else []
    low, high = min([*medians, *ends]), max([*medians, *ends])
    high = min(high, max(medians) * BEYOND)
    room = LABEL_ROOM * max(high - low, 0.06 * high)
    return max(0.0, low - room), high + room


def draw_ladder(axes: Axes, found: Findings, stage: str, rungs: list[str], theme: Theme) -> None:
    """The axis has its limits already, which intervals may go beyond."""
    plain_axes(axes, "y")
    measured = {rungs.index(name): found.good[name] for name in measured_of(found, rungs)}
    medians = [judged.tokens_per_s_per_gpu.median for judged in measured.values() if judged.tokens_per_s_per_gpu]
    for order, (at, judged) in enumerate(measured.items()):
        draw_interval(axes, at, judged, theme)
        axes.plot(at, medians[order], "o", color=theme.series[0], markersize=8, zorder=4)
        repeats = repeats_of(found, rungs[at])
        axes.plot([at + 0.12] * len(repeats), repeats, ".", color=theme.muted, markersize=6, zorder=3)
        around = medians[max(order - 1, 0)], medians[min(order + 1, len(medians) - 1)]
        label_rung(axes, at, judged, [height - medians[order] for height in around], theme)
    axes.plot(list(measured), medians, color=theme.muted, linewidth=1.0, linestyle=(0, (4, 3)), zorder=1)
    for at, name in enumerate(rungs):
        if at not in measured:
            words = status_words(found.measures[name].log.status if name in found.measures else "skipped")
            axes.text(at, 0.03, words, transform=axes.get_xaxis_transform(), ha="center", va="bottom", size=8,
                      style="italic", color=theme.bad)  # fmt: skip
    for below, above in pairwise(measured):
        arm, control = rungs[above], rungs[below]
        effect = judge_effect(found.study, found.measures, arm, arm, control, None, found.spread, found.expectations)
        axes.text((below + above) / 2, CHANGES_AT, step_label(effect), transform=axes.get_xaxis_transform(),
                  ha="center", va="top", size=7.5, color=theme.text, linespacing=1.35)  # fmt: skip
    axes.set_xticks(range(len(rungs)), [name.split("/")[1] for name in rungs])
    axes.set_xlim(-0.6, len(rungs) - 0.4)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_rate(value)))
    world_size = list(measured.values())[-1].log.config.world_size
    axes.set_title(f"{stage}, world size {world_size}", loc="left", color=theme.muted, weight="bold")


def draw_interval(axes: Axes, at: float, judged: Measures, theme: Theme) -> None:
    """The bar of a case's interval; an arrow and a number where it goes beyond the axis."""
    rate, interval = judged.tokens_per_s_per_gpu, judged.rate_interval
    if rate is None or interval is None:
        return
    bar = [[rate.median - interval.low], [interval.high - rate.median]]
    axes.errorbar(at, rate.median, yerr=bar, color=theme.series[0], capsize=4, linewidth=1.4, zorder=3)
    if interval.high > axes.get_ylim()[1]:
        where = axes.get_xaxis_transform()
        axes.plot(at, 0.98, "^", color=theme.series[0], markersize=7, zorder=4, transform=where)
        axes.annotate(f"to {format_rate(interval.high)}", (at, 0.98), xycoords=where, xytext=(7, 0),
                      textcoords="offset points", va="center", size=7.5)  # fmt: skip


def label_rung(axes: Axes, at: int, judged: Measures, rises: Sequence[float], theme: Theme) -> None:
    """Rate and MFU on that side of the bar where neither it nor the line to the next rungs runs.

    rises: how far the rungs before and after lie above this one; 0 at the ends of the ladder.
    """
    assert judged.tokens_per_s_per_gpu is not None
    median, interval = judged.tokens_per_s_per_gpu.median, judged.rate_interval
    low, high = axes.get_ylim()
    room = 0.9 * LABEL_ROOM / (1 + 2 * LABEL_ROOM) * (high - low)
    before, after = (0.0 if abs(rise) < FLAT * (high - low) else rise for rise in rises)
    side, vertical = side_clear_of_line(before, after)
    lowest = interval.low if interval is not None else median
    if vertical == "top" and lowest - room < low and min(before, after) <= 0:
        # no room below the bar, and the line leaves some on one side above it
        side, vertical = ("right" if before <= 0 else "left"), "bottom"
    end, offset = (end_of(judged), (0, 9)) if vertical == "bottom" else (lowest, (0, -9))
    if end - room < low if vertical == "top" else end + room > high:  # beside the bar, above or below the line
        end, side, vertical = median, "left", "top" if rises[1] > 0 else "bottom"
        offset = (9, 4 if vertical == "bottom" else -4)
    axes.annotate(rate_label(judged), (at, end), xytext=offset, textcoords="offset points", ha=side, va=vertical,
                  size=8.5, linespacing=1.3, zorder=5, path_effects=halo(theme))  # fmt: skip


def repeats_of(found: Findings, name: str) -> list[float]:
    return [
        judged.tokens_per_s_per_gpu.median
        for key, judged in found.good.items()
        if key != name and base_name(key) == name and judged.tokens_per_s_per_gpu is not None
    ]


def rate_label(judged: Measures) -> str:
    assert judged.tokens_per_s_per_gpu is not None
    label = format_rate(judged.tokens_per_s_per_gpu.median)
    return f"{label}\n{100 * judged.headline_mfu:.1f} % MFU" if judged.headline_mfu is not None else label


def step_label(effect: Effect) -> str:
    return effect.verdict if effect.difference is None else format_difference(effect.difference, effect.verdict)


def main(argv: Sequence[str] | None = None) -> int:
    return run_plot(draw, "Plot the ladders of optimisations.", argv)
