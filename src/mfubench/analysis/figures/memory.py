"""Memory against throughput: what a larger micro-batch costs and buys, up to the limit."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from mfubench.analysis.figures.style import (
    MARKERS,
    Theme,
    empty_figure,
    halo,
    machine_label,
    per_gpu,
    plain_axes,
    run_plot,
    side_clear_of_line,
    titled_figure,
    with_start,
)
from mfubench.analysis.findings import Findings
from mfubench.analysis.study import MemoryLimit
from mfubench.analysis.units import format_gib, format_rate

TITLE = "What memory buys"


def draw(found: Findings, theme: Theme) -> Figure:
    limits = {name: limit for name, limit in found.study.limits.items() if points_of(limit)}
    runs = [
        (judged.peak_memory_gib, judged.tokens_per_s_per_gpu.median, judged.log.config.micro_batch_size)
        for judged in found.good.values()
        if judged.log.config.stage == "memory" and judged.peak_memory_gib and judged.tokens_per_s_per_gpu
    ]
    if not limits and not runs:
        return empty_figure(
            theme, TITLE, machine_label(found), "neither a memory search nor a case of the stage memory"
        )
    points = [*runs, *(point for limit in limits.values() for point in points_of(limit))]
    if len(points) == 1:
        memory, rate, size = points[0]
        reason = f"a curve needs two micro-batch sizes, and one was measured: micro-batch {size} "
        what = f"({format_rate(rate)} {per_gpu(found)}, {format_gib(memory)})"
        return empty_figure(theme, TITLE, machine_label(found), reason + what)
    on_cpu = "process" in per_gpu(found)
    what = "resident memory of the fullest process" if on_cpu else "memory reserved on the fullest GPU"
    subtitle = (
        f"{machine_label(found)} · {what}, numbers at the points: micro-batch size · trials of the limit search are "
        "short runs (few steps), so their rates are less sure than those of measured runs"
    )
    figure = titled_figure(theme, TITLE, subtitle, 3.9)
    axes = figure.subplots()
    plain_axes(axes, "y")
    axes.spines["bottom"].set_visible(True)
    for position, (name, limit) in enumerate(limits.items()):
        color, marker = theme.series[position % len(theme.series)], MARKERS[position % len(MARKERS)]
        draw_search(axes, name, limit, color, marker, exact=not on_cpu, theme=theme)
    if runs:
        memories, rates, sizes = zip(*sorted(runs), strict=True)
        axes.plot(memories, rates, "*", color=theme.series[-1], markeredgecolor=theme.text, markeredgewidth=0.5,
                  markersize=13, label="measured runs of the stage memory", zorder=5)  # fmt: skip
        for x, y, size in zip(memories, rates, sizes, strict=True):
            axes.annotate(str(size), (x, y), xytext=(0, 8), textcoords="offset points", ha="center", size=8,
                          path_effects=halo(theme))  # fmt: skip
    low, high = axes.get_ylim()
    low, high = max(0.0, low - 0.2 * (high - low)), high + 0.16 * (high - low)
    axes.set_ylim(low, high)
    draw_capacity(axes, list(limits.values()), theme)
    axes.set_xlabel("memory, GiB")
    axes.set_ylabel(with_start(per_gpu(found), low))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_rate(value)))
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2)
    return figure


def points_of(limit: MemoryLimit) -> list[tuple[float, float, int]]:
    """(memory in GiB, tokens/s/GPU, micro-batch size) of each trial that fitted."""
    return [
        (trial.peak_memory_gib, trial.tokens_per_s_per_gpu, trial.micro_batch_size)
        for trial in limit.trials
        if trial.peak_memory_gib and trial.tokens_per_s_per_gpu
    ]


def draw_search(axes: Axes, name: str, limit: MemoryLimit, color: str, marker: str, exact: bool, theme: Theme) -> None:
    fitting = sorted(points_of(limit), key=lambda point: point[2])
    too_large = sorted(trial.micro_batch_size for trial in limit.trials if trial.status == "oom")
    fits = f"largest {'' if exact else 'about '}{limit.largest}" if limit.largest is not None else "nothing fits"
    beyond = f", out of memory at {too_large[0]}" if too_large else ""
    memories, rates, _ = zip(*fitting, strict=True)
    label = f"{name.split('/')[1]}: {fits}{beyond}"
    axes.plot(memories, rates, marker=marker, color=color, linewidth=1.2, label=label)
    for position, (x, y, size) in enumerate(fitting):
        before, after = rates[max(position - 1, 0)] - y, rates[min(position + 1, len(rates) - 1)] - y
        side, vertical = side_clear_of_line(before, after)
        offset = ({"right": -3, "center": 0, "left": 3}[side], 6 if vertical == "bottom" else -6)
        axes.annotate(str(size), (x, y), xytext=offset, textcoords="offset points", ha=side, va=vertical, size=8,
                      color=color, path_effects=halo(theme))  # fmt: skip


def draw_capacity(axes: Axes, limits: list[MemoryLimit], theme: Theme) -> None:
    """The end of the memory, and the share of it that is called comfortable."""
    ends = {(limit.memory_gib, limit.search.comfort_fraction) for limit in limits if limit.memory_gib}
    for capacity, fraction in sorted(ends):
        assert capacity is not None
        left, right = axes.get_xlim()
        axes.set_xlim(left, max(right, capacity * 1.03))
        axes.axvspan(capacity, capacity * 1.5, color=theme.band, zorder=0)
        axes.axvline(capacity, color=theme.bad, linewidth=1.6)
        axes.axvline(capacity * fraction, color=theme.bad, linewidth=1.0, linestyle=(0, (4, 3)))
        for x, label in (
            (capacity, f"all of it: {format_gib(capacity)} "),
            (capacity * fraction, f"comfortable: {100 * fraction:.0f} % "),
        ):
            axes.text(x, 0.985, label, transform=axes.get_xaxis_transform(), ha="right", va="top", size=8,
                      color=theme.bad)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    return run_plot(draw, "Plot memory against throughput.", argv)
