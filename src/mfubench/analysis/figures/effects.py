"""What each optimisation is worth, with intervals, what was expected, and where no difference is told."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter

from mfubench.analysis.effects import Effect
from mfubench.analysis.expectations import EFFECT_TOLERANCE, Expectations, expected_change, judged_change
from mfubench.analysis.figures.style import (
    Theme,
    empty_figure,
    machine_label,
    per_gpu,
    plain_axes,
    run_plot,
    titled_figure,
)
from mfubench.analysis.findings import Findings
from mfubench.analysis.statistics import ProcessSpread, process_half_width
from mfubench.analysis.units import NOTHING_TOLD, format_difference, format_signed_percent
from mfubench.words import number_of

TITLE = "What each setting is worth"
ROW = 0.46  # inches
EXPECTED = f"expected by the testing guide (a single figure: ± {100 * EFFECT_TOLERANCE:.0f} points)"
WIDEST = 2.0  # change shown at the most: what goes beyond has an arrow at the edge
MARKS = {"faster": "o", "slower": "s", "no difference": "D", "not told apart": "P", "too noisy": "X"}


def draw(found: Findings, theme: Theme) -> Figure:
    measured = [effect for effect in found.effects if effect.difference is not None]
    if not measured:
        reason = "the study declares no effects" if not found.effects else "no declared effect has both of its arms yet"
        return empty_figure(theme, TITLE, machine_label(found), reason)
    measured.sort(key=lambda effect: effect.difference.change if effect.difference else 0.0, reverse=True)
    basis = (
        f"95 % intervals from {found.spread.processes} processes of {number_of(found.spread.cases, 'repeated setting')}"
        if found.spread
        else "95 % intervals of one process each (nothing was repeated), no less than processes differ on other cards"
    )
    subtitle = f"{machine_label(found)} · change of {per_gpu(found)}, arm over control · {basis}"
    figure = titled_figure(theme, TITLE, subtitle, 1.0 + ROW * len(measured))
    axes = figure.subplots()
    draw_forest(axes, measured, found.expectations, theme)
    half = no_difference_band(found.spread)
    left, right = axes.get_xlim()
    axes.axvspan(-half, half, color=theme.band, zorder=0)
    axes.set_xlim(min(left, max(-1.0, -1.1 * half)), max(right, min(WIDEST, 1.1 * half)))
    for position, effect in enumerate(measured):
        mark_beyond(axes, position, effect, theme)
    handles = [
        Patch(facecolor=theme.band, label="two single processes of one setting differ by as much"),
        Patch(facecolor="none", edgecolor=theme.series[1], hatch="////", label=EXPECTED)
        if found.expectations
        else None,
    ]
    axes.legend(
        handles=[handle for handle in handles if handle], loc="lower center", bbox_to_anchor=(0.45, 1.0), ncols=2
    )
    return figure


def draw_forest(axes: Axes, effects: list[Effect], expectations: Expectations | None, theme: Theme) -> None:
    plain_axes(axes, "x")
    axes.use_sticky_edges = False  # bars have them, and would then touch the frame
    axes.axvline(0, color=theme.muted, linewidth=1)
    for position, effect in enumerate(effects):
        assert effect.difference is not None
        change, interval = effect.difference.change, effect.difference.interval
        color = effect_color(effect, theme)
        expected = expected_change(effect.arm, effect.control, expectations)
        if expected is not None:
            low, high = judged_change(expected)
            axes.barh(position, high - low, left=low, height=0.62, facecolor="none", edgecolor=theme.series[1],
                      linewidth=0.9, hatch="////", zorder=1)  # fmt: skip
        axes.errorbar(change, position, xerr=[[change - interval.low], [interval.high - change]], color=color,
                      capsize=4, linewidth=1.8, zorder=3)  # fmt: skip
        axes.plot(change, position, MARKS[effect.verdict], color=color, markersize=7.5, zorder=4)
        axes.text(1.015, position, format_difference(effect.difference, effect.verdict), size=8.5, linespacing=1.35,
                  transform=axes.get_yaxis_transform(), va="center")  # fmt: skip
    axes.set_yticks(range(len(effects)), [effect_label(effect) for effect in effects])
    axes.set_ylim(len(effects) - 0.4, -0.6)
    axes.margins(x=0.06)
    left, right = axes.get_xlim()
    axes.set_xlim(max(left, -1.0), min(right, WIDEST))
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))
    axes.set_xlabel("change in rate (0 %: the setting does nothing)")


def mark_beyond(axes: Axes, position: int, effect: Effect, theme: Theme) -> None:
    """Arrows where the interval goes beyond the axis, and the number where the change itself does."""
    assert effect.difference is not None
    change, interval = effect.difference.change, effect.difference.interval
    left, right = axes.get_xlim()
    color, edges = effect_color(effect, theme), axes.get_yaxis_transform()
    for beyond, edge, marker in ((interval.low < left, 0.007, "<"), (interval.high > right, 0.993, ">")):
        if beyond:
            axes.plot(edge, position, marker, color=color, markersize=7, transform=edges, zorder=4)
    if change > right:
        axes.annotate(format_signed_percent(change, 0), (1, position), xycoords=edges, xytext=(-3, 5),
                      textcoords="offset points", ha="right", size=8.5, color=color)  # fmt: skip


def effect_color(effect: Effect, theme: Theme) -> str:
    return theme.muted if effect.verdict in ("no difference", *NOTHING_TOLD) else theme.series[0]


def effect_label(effect: Effect) -> str:
    arm, control = effect.arm.split("/")[1], effect.control.split("/")[1]
    return f"{effect.name}\n{arm} over {control}"


def no_difference_band(spread: ProcessSpread | None) -> float:
    """Half-width of the 95 % interval of the difference of two single processes."""
    return math.expm1(process_half_width(spread, 1, 1))


def main(argv: Sequence[str] | None = None) -> int:
    return run_plot(draw, "Plot what each setting is worth.", argv)
