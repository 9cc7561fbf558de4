"""Where a step's time goes: from its FLOPs at the datasheet peak, part by part, to the measured step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from mfubench.analysis.figures.profiled import fastest_profile
from mfubench.analysis.figures.style import (
    Theme,
    machine_label,
    peak_label,
    plain_axes,
    run_plot,
    titled_figure,
)
from mfubench.analysis.findings import Findings
from mfubench.analysis.profiles import Profiled
from mfubench.analysis.units import format_milliseconds, format_percent, format_signed_percent

TITLE = "Where the rest went: one step, from the peak down to what was measured"
SMALL = 0.004  # of the step: smaller parts stand in the table alone


@dataclass(frozen=True)
class Bar:
    """A stretch of the step. `ideal_s` of it cannot be won on this machine (lighter), the rest can (darker)."""

    label: str
    ideal_s: float
    excess_s: float = 0.0
    known: bool = True  # whether there is an ideal to compare with
    peak: bool = False  # the FLOPs at the datasheet peak

    @property
    def time_s(self) -> float:
        return self.ideal_s + self.excess_s


def bars_of(profiled: Profiled) -> list[Bar]:
    """The profiled step from the top. They add up to it; parts too small to see are one bar at the end."""
    ideals = profiled.ideals
    at_peak = {"matmul": ideals.peak_matmul_s, "attention": ideals.peak_attention_s} if ideals.peak_s else {}
    bars: list[Bar] = []
    first_s = 0.0
    whose = "this card's" if profiled.breakdown.device == "cuda" else "this machine's"
    for row in profiled.rows:
        peak_s = min(at_peak.get(row.key) or 0.0, row.time_s)
        first_s += peak_s
        ideal_s = row.ideal_s if row.ideal_s is not None else row.time_s
        below_s = max(0.0, min(ideal_s, row.time_s) - peak_s)
        excess_s = row.time_s - peak_s - below_s
        if row.key in at_peak and row.ideal_s is not None:
            bars.append(Bar(f"{row.label}: {whose} ceiling", below_s))
            bars.append(Bar(f"{row.label}: above the ceiling", 0.0, excess_s))
        elif row.key in at_peak:
            bars.append(Bar(f"{row.label}: below the peak", below_s, known=False))
        else:
            bars.append(Bar(row.label, below_s, excess_s, known=row.ideal_s is not None))
    seen = [bar for bar in bars if bar.time_s >= SMALL * profiled.rank.step_s]
    small_s = sum(bar.time_s for bar in bars if bar not in seen)
    if first_s > 0:
        seen.insert(0, Bar("FLOPs of the model at the peak", first_s, peak=True))
    return [*seen, Bar("all that is smaller", small_s, known=False)] if small_s > 0 else seen


def draw(found: Findings, theme: Theme) -> Figure:
    profiled = fastest_profile(found, theme, TITLE)
    if isinstance(profiled, Figure):
        return profiled
    config = profiled.judged.log.config
    n = len(profiled.judged.rates)
    subtitle = (
        f"{machine_label(found)} · {profiled.case}, world size {config.world_size}, rank {profiled.rank.rank} · one "
        f"profiled step of {format_milliseconds(profiled.rank.step_s)} ({format_signed_percent(profiled.overhead)} "
        f"against the median of n = {n} measured ones) · MFU: causal, of {peak_label([profiled.judged])}"
    )
    bars = bars_of(profiled)
    figure = titled_figure(theme, TITLE, subtitle, 0.29 * (len(bars) + 2) + 0.5)
    axes = figure.subplots()
    draw_bars(axes, bars, profiled, theme)
    return figure


def draw_bars(axes: Axes, bars: Sequence[Bar], profiled: Profiled, theme: Theme) -> None:
    plain_axes(axes, "x")
    reached, peak_s = 0.0, profiled.ideals.peak_s
    dark, light = theme.series[1], theme.series[0]
    unknown: dict[str, Any] = {"facecolor": theme.band, "edgecolor": theme.muted, "hatch": "////", "linewidth": 0.5}
    right = 1000 * max(profiled.rank.step_s, profiled.measured_step_s)
    for position, bar in enumerate(bars):
        start = reached
        color = theme.muted if bar.peak else light
        if bar.known:
            axes.barh(position, 1000 * bar.ideal_s, left=1000 * start, color=color, alpha=1.0 if bar.peak else 0.45,
                      height=0.72)  # fmt: skip
        else:
            axes.barh(position, 1000 * bar.ideal_s, left=1000 * start, height=0.72, **unknown)
        axes.barh(position, 1000 * bar.excess_s, left=1000 * (start + bar.ideal_s), color=dark, height=0.72)
        reached += bar.time_s
        axes.plot([1000 * reached] * 2, [position - 0.36, position + 1.36], color=theme.muted, linewidth=0.7)
        share = f"   MFU {format_percent(peak_s / reached)}" if peak_s and peak_s <= 1.001 * reached else ""
        words = f"{'' if position == 0 else '+'}{format_milliseconds(bar.time_s)}{share}"
        # on the right of the bar while there is room, else on its left, else in it
        if reached * 1000 < 0.72 * right:
            at, side = reached, "left"
        else:
            at, side = (start if start * 1000 > 0.28 * right else reached), "right"
        nudge = 0.008 * right * (1 if side == "left" else -1)
        axes.text(1000 * at + nudge, position, words, va="center", ha=side, size=8)
    measured = len(bars)
    axes.barh(measured, 1000 * profiled.measured_step_s, color=theme.text, height=0.72)
    words = format_milliseconds(profiled.measured_step_s)
    words += f": MFU {format_percent(peak_s / profiled.measured_step_s)} causal" if peak_s else ""
    inside = 1000 * profiled.measured_step_s > 0.5 * right  # wide enough for the words
    at, color = (0.0, theme.background) if inside else (1000 * profiled.measured_step_s, theme.text)
    axes.text(at + 0.008 * right, measured, words, va="center", ha="left", size=8.5, color=color, weight="bold")
    axes.set_yticks(range(measured + 1), [*(bar.label for bar in bars), "measured step, median"])
    axes.set_ylim(measured + 0.6, -0.6)
    axes.set_xlim(0, 1.02 * right)
    axes.set_xlabel("milliseconds of the step")
    handles = [Patch(color=light, alpha=0.45), Patch(color=dark), Patch(**unknown)]
    axes.legend(handles, ["at best on this machine", "could be won", "no ideal known"], loc="lower left",
                bbox_to_anchor=(0.0, 1.0), ncols=3)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    return run_plot(draw, "Plot where a step's time goes.", argv)
