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
    machine_label,
    peak_label,
    per_gpu,
    plain_axes,
    run_plot,
    step_count,
    titled_figure,
    with_start,
)
from mfubench.analysis.findings import Findings
from mfubench.analysis.measures import Measures
from mfubench.analysis.study import base_name
from mfubench.analysis.units import format_difference, format_rate

TITLE = "What each rung of the ladder adds"
STAGES = ("baseline", "tiers")


def draw(found: Findings, theme: Theme) -> Figure:
    ladders = {stage: rungs for stage in STAGES if len(rungs := rungs_of(found, stage)) > 1}
    if not ladders:
        reason = "a ladder needs two measured cases of the stage baseline or tiers"
        return empty_figure(theme, TITLE, machine_label(found), reason)
    shown = [found.good[name] for rungs in ladders.values() for name in rungs]
    subtitle = (
        f"{machine_label(found)} · median of the measured steps ({step_count(shown)}), bars: its 95 % interval (block "
        f"bootstrap), small dots: repeats; below: change from rung to rung · MFU: palm, of {peak_label(shown)}"
    )
    figure = titled_figure(theme, TITLE, subtitle, 3.5)
    widths = [len(rungs) for rungs in ladders.values()]
    panels = figure.subplots(1, len(ladders), squeeze=False, sharey=True, width_ratios=widths)[0]
    highest = max(judged.tokens_per_s_per_gpu.median for judged in shown if judged.tokens_per_s_per_gpu)
    end = 1.8 * highest  # the bars of noise go beyond
    for axes, (stage, rungs) in zip(panels, ladders.items(), strict=True):
        draw_ladder(axes, found, stage, rungs, end, theme)
    low, high = panels[0].get_ylim()  # shared by all panels
    high = min(high, end)
    room = max(high - low, 0.06 * high)
    low -= 0.3 * room
    panels[0].set_ylim(low, high + 0.25 * room)
    panels[0].set_ylabel(with_start(per_gpu(found), low))
    return figure


def rungs_of(found: Findings, stage: str) -> list[str]:
    """The measured cases of a stage, repeats left out, in order."""
    return [name for name, judged in found.good.items() if judged.log.config.stage == stage and base_name(name) == name]


def draw_ladder(axes: Axes, found: Findings, stage: str, rungs: list[str], end: float, theme: Theme) -> None:
    """end: of the axis, in tokens/s/GPU, which intervals may go beyond."""
    plain_axes(axes, "y")
    medians = []
    for position, name in enumerate(rungs):
        judged = found.good[name]
        assert judged.tokens_per_s_per_gpu is not None
        median = judged.tokens_per_s_per_gpu.median
        medians.append(median)
        interval = judged.rate_interval
        if interval is not None:
            axes.errorbar(position, median, yerr=[[median - interval.low], [interval.high - median]],
                          color=theme.series[0], capsize=4, linewidth=1.4, zorder=3)  # fmt: skip
        axes.plot(position, median, "o", color=theme.series[0], markersize=8, zorder=4)
        repeats = repeats_of(found, name)
        axes.plot([position + 0.12] * len(repeats), repeats, ".", color=theme.muted, markersize=6, zorder=3)
        top = interval.high if interval is not None else median
        # above the bar; beside the point where the bar goes beyond the axis
        at, offset, sides = (top, (0, 9), ("center", "bottom")) if top <= end else (median, (9, 0), ("left", "center"))
        axes.annotate(rate_label(judged), (position, at), xytext=offset, textcoords="offset points",
                      ha=sides[0], va=sides[1], size=8.5, linespacing=1.3, zorder=2,
                      bbox={"facecolor": axes.get_facecolor(), "edgecolor": "none", "pad": 1})  # fmt: skip
    axes.plot(range(len(rungs)), medians, color=theme.muted, linewidth=1.0, linestyle=(0, (4, 3)), zorder=1)
    for position, (below, above) in enumerate(pairwise(rungs)):
        effect = judge_effect(found.study, found.measures, above, above, below, None, found.spread)
        axes.text(position + 0.5, 0.03, step_label(effect), transform=axes.get_xaxis_transform(), ha="center",
                  va="bottom", size=7.5, color=theme.text, linespacing=1.35)  # fmt: skip
    axes.set_xticks(range(len(rungs)), [found.good[name].log.config.case for name in rungs])
    axes.set_xlim(-0.6, len(rungs) - 0.4)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_rate(value) if value >= 0 else ""))
    world_size = found.good[rungs[-1]].log.config.world_size
    axes.set_title(f"{stage}, world size {world_size}", loc="left", color=theme.muted, weight="bold")


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
    return effect.verdict if effect.difference is None else format_difference(effect.difference)


def main(argv: Sequence[str] | None = None) -> int:
    return run_plot(draw, "Plot the ladders of optimisations.", argv)
