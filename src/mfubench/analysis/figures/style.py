"""What all figures share: two themes, a titled figure, an empty one that says why, PNG, and the scripts' arguments."""

from __future__ import annotations

import argparse
import io
import re
import textwrap
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import matplotlib as mpl
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import AbstractPathEffect, withStroke
from matplotlib.ticker import ScalarFormatter

from mfubench.analysis.findings import Findings
from mfubench.analysis.measures import Measures
from mfubench.analysis.units import format_digits, rate_unit
from mfubench.run_log import Step, write_bytes_atomically

DPI = 160
WIDTH = 9.0  # inches

# Okabe and Ito's palette (jfly.uni-koeln.de/color), ordered so that neighbours differ in lightness as well.
SERIES_LIGHT = ("#0072B2", "#D55E00", "#009E73", "#000000", "#CC79A7", "#56B4E9", "#E69F00")
SERIES_DARK = ("#56B4E9", "#E69F00", "#2FC48F", "#F0F0F0", "#CC79A7", "#F0E442", "#D55E00")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


@dataclass(frozen=True)
class Theme:
    """Colours of one appearance."""

    name: str
    background: str
    text: str
    muted: str  # secondary text, axes
    grid: str
    band: str  # shaded regions
    good: str
    bad: str
    series: tuple[str, ...]

    def applied(self) -> AbstractContextManager[None]:
        """matplotlib's settings of this theme, for the time of a `with`."""
        context: AbstractContextManager[None] = mpl.rc_context(
            {
                "figure.facecolor": self.background,
                "axes.facecolor": self.background,
                "savefig.facecolor": self.background,
                "text.color": self.text,
                "axes.labelcolor": self.muted,
                "axes.edgecolor": self.grid,
                "xtick.color": self.muted,
                "ytick.color": self.muted,
                "ytick.labelcolor": self.text,
                "axes.spines.top": False,
                "axes.spines.right": False,
                "axes.grid": True,
                "axes.axisbelow": True,
                "axes.prop_cycle": cycler(color=self.series),
                "grid.color": self.grid,
                "grid.linewidth": 0.6,
                "xtick.major.size": 0,
                "ytick.major.size": 0,
                "font.size": 9.0,
                "axes.labelsize": 9.0,
                "axes.titlesize": 9.5,
                "legend.frameon": False,
                "legend.fontsize": 8.5,
                "hatch.linewidth": 0.5,
                "hatch.color": self.grid,
            }
        )
        return context


LIGHT = Theme("light", "#ffffff", "#1c2024", "#5b6570", "#d9dee3", "#eceff2", "#0072B2", "#B84A00", SERIES_LIGHT)
DARK = Theme("dark", "#15191e", "#e8ebee", "#a3adb7", "#343b43", "#242a31", "#56B4E9", "#E69F00", SERIES_DARK)

Draw = Callable[[Findings, Theme], Figure]


def titled_figure(theme: Theme, title: str, subtitle: str, height: float) -> Figure:
    """A figure with its title and what the numbers are, `height` inches for the panels below."""
    lines = textwrap.wrap(subtitle, 134)
    head = 0.5 + 0.17 * len(lines)
    figure = Figure(figsize=(WIDTH, height + head), dpi=DPI, layout="constrained")
    total = height + head
    figure.text(0.012, 1 - 0.10 / total, title, size=12.5, weight="bold", va="top", ha="left")
    figure.text(
        0.012, 1 - 0.37 / total, "\n".join(lines), size=8.5, color=theme.muted, va="top", ha="left", linespacing=1.35
    )
    engine = figure.get_layout_engine()
    assert engine is not None
    engine.set(rect=(0.008, 0.01, 0.984, height / total - 0.01))  # type: ignore[call-arg]
    return figure


def empty_figure(theme: Theme, title: str, subtitle: str, reason: str) -> Figure:
    """An honest empty panel: what would stand here and why it does not."""
    lines = textwrap.wrap(f"Nothing to show: {reason}", 90)
    figure = titled_figure(theme, title, subtitle, 0.8 + 0.2 * len(lines))
    axes = figure.subplots()
    axes.set_axis_off()
    axes.text(
        0.5, 0.5, "\n".join(lines), ha="center", va="center",
        transform=axes.transAxes, size=10, color=theme.muted,
        bbox={"boxstyle": "round,pad=1.0", "facecolor": theme.band, "edgecolor": "none"},
    )  # fmt: skip
    return figure


def machine_label(found: Findings) -> str:
    """The card and how many of them the largest run took, or the CPU."""
    environment = found.study.environment
    if environment is None:
        return "no machine"
    if environment.device == "cpu":
        return f"{environment.cpu}, no GPU"
    most = max(log.config.world_size for log in found.study.runs.values())
    names = " and ".join(dict.fromkeys(gpu.name for gpu in environment.gpus))
    return f"{most}× {names}"


def per_gpu(found: Findings) -> str:
    """The unit of a rate: a CPU study has processes, not GPUs."""
    environment = found.study.environment
    return rate_unit(environment.device if environment is not None else "cuda")


def with_start(label: str, low: float) -> str:
    """An axis's label, with a remark where its lower end is above 0."""
    return f"{label} (axis does not start at 0)" if low > 0 else label


def count_words(found: Findings, world_size: int) -> str:
    """1 GPU, 2 GPUs, 4 processes."""
    one, more = ("GPU", "GPUs") if per_gpu(found).endswith("GPU") else ("process", "processes")
    return f"{world_size} {one if world_size == 1 else more}"


def peak_label(measures: Sequence[Measures]) -> str:
    """What the MFU of these runs is divided by."""
    peaks = {(judged.peak.tflops, judged.peak.dtype, judged.peak.measured) for judged in measures if judged.peak}
    if not peaks:
        return "no known peak"
    words = [
        f"{format_digits(tflops, 4)} TFLOP/s {dtype} ({'measured' if measured else 'datasheet, dense'})"
        for tflops, dtype, measured in sorted(peaks, reverse=True)
    ]
    return " or ".join([", ".join(words[:-1]), words[-1]] if words[1:] else words)


def step_count(measures: Sequence[Measures]) -> str:
    """n = 57 steps, or n = 20–76 steps a case."""
    counts = sorted({len(judged.rates) for judged in measures})
    if not counts:
        return "n = 0"
    return f"n = {counts[0]} steps" if len(counts) == 1 else f"n = {counts[0]}–{counts[-1]} steps a case"


class Thousands(ScalarFormatter):
    """Ticks as matplotlib writes them, but 70,000 for 70000, and no power of ten or offset beside the axis."""

    def __init__(self) -> None:
        super().__init__(useOffset=False)
        self.set_scientific(False)

    def __call__(self, x: float, pos: int | None = None) -> str:
        whole, point, decimals = super().__call__(x, pos).partition(".")
        return re.sub(r"\d+", lambda digits: f"{int(digits[0]):,}", whole) + point + decimals


def plain_axes(axes: Axes, grid: str) -> None:
    """Grid in one direction ("x" or "y") and no frame on that side; ticks with separators of thousands, unless they
    have labels of their own."""
    for axis in (axes.xaxis, axes.yaxis):
        if isinstance(axis.get_major_formatter(), ScalarFormatter):  # matplotlib's own choice for numbers
            axis.set_major_formatter(Thousands())
    axes.grid(visible=False, axis="y" if grid == "x" else "x")
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(side == ("bottom" if grid == "y" else "left"))


def halo(theme: Theme) -> list[AbstractPathEffect]:
    """For a text's `path_effects`: its letters stand clear of a line beneath, which a box would cut in two."""
    return [withStroke(linewidth=2.5, foreground=theme.background)]


def side_clear_of_line(before: float, after: float) -> tuple[str, str]:
    """(horizontal, vertical) alignment of a label at a point of a line, on the side where the line does not run.

    before, after: how far the line's neighbouring points lie above the point; 0 where about as high, or none.
    """
    if before <= 0 and after <= 0:
        return "center", "bottom"
    if before >= 0 and after >= 0:
        return "center", "top"
    return ("right" if before < 0 else "left"), "bottom"


def status_words(status: str) -> str:
    """Of a run without rates, where its bar or point would be."""
    return {"oom": "out of memory", "diverged": "diverged", "skipped": "skipped"}.get(status, "failed")


def shade_unmeasured(axes: Axes, steps: Sequence[Step], **look: Any) -> None:
    """A span over each stretch of steps that are recorded and not judged; a resumed run has several.

    Steps stand at their number counted from 1. look: of the spans, as `axvspan` takes it.
    """
    for measured, stretch in groupby(steps, key=lambda step: step.phase == "measured"):
        if not measured:
            numbers = [step.step + 1 for step in stretch]
            axes.axvspan(min(numbers) - 0.5, max(numbers) + 0.5, zorder=0, **look)


def png(draw: Draw, found: Findings, theme: Theme) -> bytes:
    with theme.applied():
        return png_bytes(draw(found, theme))


def png_bytes(figure: Figure, dpi: float | None = None) -> bytes:
    """A figure as a PNG; dpi: dots an inch, by default the figure's own."""
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=dpi or "figure", metadata={"Software": "mfubench"})
    return stream.getvalue()


def write_png(figure: Figure, path: Path, dpi: float | None = None) -> None:
    """Write a figure as a PNG that is whole or not there."""
    write_bytes_atomically(path, png_bytes(figure, dpi))


def run_plot(draw: Draw, description: str, argv: Sequence[str] | None) -> int:
    """`--study-dir DIR --output FILE`: write one figure."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--study-dir", required=True, type=Path)
    parser.add_argument("--output", required=True, type=Path)
    arguments = parser.parse_args(argv)
    image = png(draw, Findings.of(arguments.study_dir), LIGHT)
    write_bytes_atomically(arguments.output, image)
    return 0
