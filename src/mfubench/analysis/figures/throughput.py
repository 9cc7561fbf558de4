"""Rate and MFU of every case, by stage, with quartiles."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter

from mfubench.analysis.figures.style import (
    Theme,
    empty_figure,
    machine_label,
    peak_label,
    per_gpu,
    plain_axes,
    run_plot,
    status_words,
    step_count,
    titled_figure,
)
from mfubench.analysis.findings import Findings
from mfubench.analysis.measures import Measures
from mfubench.analysis.units import format_rate

TITLE = "How fast each case trains, and how much of the arithmetic it uses"
ROW = 0.235  # inches
CONVENTIONS = {"palm": ("o", "palm: 6N + 12LHQT"), "causal": ("|", "causal: what the kernels execute")}


def draw(found: Findings, theme: Theme) -> Figure:
    shown = {name: judged for name, judged in found.measures.items() if is_measurement(judged)}
    good = [judged for name, judged in shown.items() if name in found.good]
    if not good:
        return empty_figure(theme, TITLE, machine_label(found), "no case beyond the smoke test has measured steps yet")
    subtitle = (
        f"{machine_label(found)} · median of the measured steps ({step_count(good)}), whiskers: quartiles · "
        f"{mfu_words(good)}; smoke tests and evaluations left out"
    )
    positions, labels, stages = rows_of(shown)
    figure = titled_figure(theme, TITLE, subtitle, 0.9 + ROW * (max(positions.values()) + 1))
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[1.25, 1])
    draw_rates(left, found, shown, positions, theme)
    draw_mfu(right, found, positions, theme)
    left.set_yticks(list(positions.values()), labels)
    left.set_ylim(max(positions.values()) + 0.8, -1.2)
    for stage, position in stages.items():
        left.text(-0.012, position, stage, transform=left.get_yaxis_transform(), ha="right", va="center",
                  size=8.5, weight="bold", color=theme.muted)  # fmt: skip
    return figure


def mfu_words(good: Sequence[Measures]) -> str:
    """What MFU is of: one peak, or that of each case's precision, cards or share of a CPU."""
    peaks = {(judged.peak.dtype, judged.peak.tflops): judged.peak.measured for judged in good if judged.peak}
    precisions = {dtype for dtype, _ in peaks}
    if len(peaks) < 2:
        return f"MFU of {peak_label(good)}"
    differing = ["precision"] if len(precisions) > 1 else []
    if len(peaks) > len(precisions):
        differing.append("share of the machine" if all(peaks.values()) else "cards")
    return f"MFU of the peak of each case's {' and '.join(differing)}: {peak_label(good)}"


def is_measurement(judged: Measures) -> bool:
    return judged.log.config.stage != "smoke" and not judged.log.config.evaluation.only


def rows_of(shown: dict[str, Measures]) -> tuple[dict[str, float], list[str], dict[str, float]]:
    """Height of each case, its label, and the height of each stage's heading."""
    positions, labels, stages, height = {}, [], {}, 0.0
    for stage, members in groupby(shown.items(), key=lambda item: item[1].log.config.stage):
        stages[stage] = height
        for name, judged in members:
            height += 1
            positions[name] = height
            world_size = judged.log.config.world_size
            labels.append(f"{judged.log.config.case}  ({world_size})")
        height += 1.4
    return positions, labels, stages


def draw_rates(
    axes: Axes, found: Findings, shown: dict[str, Measures], positions: dict[str, float], theme: Theme
) -> None:
    plain_axes(axes, "x")
    widest = max(judged.tokens_per_s_per_gpu.q3 for judged in shown.values() if judged.tokens_per_s_per_gpu)
    for name, judged in shown.items():
        rate, position = judged.tokens_per_s_per_gpu, positions[name]
        if rate is None or name not in found.good:
            note = status_words(judged.log.status)
            axes.text(0.01 * widest, position, note, va="center", size=8, style="italic", color=theme.bad)
            continue
        axes.barh(position, rate.median, height=0.66, color=theme.series[0], alpha=0.85)
        axes.errorbar(rate.median, position, xerr=[[rate.median - rate.q1], [rate.q3 - rate.median]],
                      color=theme.text, linewidth=1.1, capsize=2.2)  # fmt: skip
        axes.annotate(format_rate(rate.median), (rate.q3, position), xytext=(5, 0), textcoords="offset points",
                      va="center", size=8)  # fmt: skip
    axes.set_xlim(0, 1.17 * widest)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_rate(value) if value else "0"))
    axes.locator_params(axis="x", nbins=6)
    axes.set_xlabel(f"{per_gpu(found)}   (in brackets: how many of them)")


def draw_mfu(axes: Axes, found: Findings, positions: dict[str, float], theme: Theme) -> None:
    plain_axes(axes, "x")
    known = [judged for name, judged in found.good.items() if "palm" in judged.mfu and name in positions]
    axes.set_xlabel("MFU")
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))
    if not known:
        axes.text(
            0.5, 0.5, "no peak is known for this machine", transform=axes.transAxes, ha="center", color=theme.muted
        )
        return
    for name, judged in found.good.items():
        if name not in positions or "palm" not in judged.mfu:
            continue
        palm, causal, position = judged.mfu["palm"], judged.mfu["causal"], positions[name]
        axes.plot([causal.median, palm.median], [position] * 2, color=theme.grid, linewidth=1.6, zorder=1)
        axes.errorbar(palm.median, position, xerr=[[palm.median - palm.q1], [palm.q3 - palm.median]],
                      color=theme.text, linewidth=1.1, capsize=2.2)  # fmt: skip
        axes.plot(palm.median, position, "o", color=theme.series[0], markersize=5.5, zorder=3)
        axes.plot(causal.median, position, "|", color=theme.series[1], markersize=8, markeredgewidth=1.8, zorder=3)
        axes.annotate(f"{100 * palm.median:.1f} %", (palm.q3, position), xytext=(6, 0), textcoords="offset points",
                      va="center", size=8)  # fmt: skip
    largest = max(judged.mfu["palm"].q3 for judged in known)
    axes.set_xlim(0, max(1.16 * largest, largest + 0.09))
    handles = [
        axes.plot([], [], marker, color=theme.series[i], markeredgewidth=1.8 if marker == "|" else 1, label=label)[0]
        for i, (marker, label) in enumerate(CONVENTIONS.values())
    ]
    axes.legend(handles=handles, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, handletextpad=0.3)


def main(argv: Sequence[str] | None = None) -> int:
    return run_plot(draw, "Plot rate and MFU of every case.", argv)
