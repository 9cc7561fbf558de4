"""One run's panels over its steps: loss, rate, gradient norm, step times, learning rate, data. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from mfubench.analysis.figures.style import DPI, LIGHT, Theme, plain_axes, shade_unmeasured, titled_figure, write_png
from mfubench.config import ConfigError
from mfubench.run_log import RunLog
from mfubench.train.progress import palm_mfu_of

Value = float | None

ENDING = ".png"


def picture_path(run: Path, output: Path | None) -> Path:
    """Where the panels of a run JSON go: beside it, to the file that is named, or into the folder that is.

    Raises ConfigError for a file that is to be no PNG.
    """
    name = f"{run.stem}{ENDING}"
    if output is None:
        return run.with_name(name)
    if output.is_dir():
        return output / name
    if output.suffix.lower() not in ("", ENDING):
        raise ConfigError(f"--output {output}: pictures are written as {ENDING}; found the ending {output.suffix}")
    return output if output.suffix else output.with_name(f"{output.name}{ENDING}")


def plot_run(log: RunLog, path: Path) -> None:
    """Write the panels as PNG. Raises ConfigError for a run without steps."""
    if not log.steps:
        why = log.reason or ("evaluation.only: it was to evaluate a checkpoint" if log.config.evaluation.only else None)
        ended = f"it ended with status {log.status}" + (f" ({why})" if why else "")
        raise ConfigError(f"{log.name}: has no steps to draw; {ended}")
    with LIGHT.applied():
        write_png(draw(log, LIGHT), path, dpi=DPI)


def draw(log: RunLog, theme: Theme) -> Figure:
    environment, config = log.environment, log.config
    cards = " and ".join(dict.fromkeys(gpu.name for gpu in environment.gpus)) or environment.cpu
    subtitle = (
        f"{config.model.name} on {config.world_size}× {cards} · {log.used['parallelism'].used}, "
        f"{log.used['dtype'].used}, attention {log.used['attention'].used}, compile {log.used['compile'].used} · "
        f"{config.tokens_per_step:,} tokens a step · status {log.status} · shaded: compilation and warm-up, not judged"
    )
    figure = titled_figure(theme, log.name, subtitle, 5.4)
    panels = figure.subplots(3, 2)
    steps = log.steps
    draw_loss(panels[0, 0], log, theme)
    draw_rate(panels[0, 1], log, theme)
    draw_series(panels[1, 0], "gradient norm before clipping", log, [step.grad_norm for step in steps], theme)
    draw_rank_times(panels[1, 1], log, theme)
    rates = [1e6 * step.learning_rate for step in steps]
    draw_series(panels[2, 0], "learning rate, millionths", log, rates, theme)
    data_ms = [step.data_time_s * 1000 for step in steps]
    draw_series(panels[2, 1], "fetching data, ms", log, data_ms, theme)
    for axes in panels[2]:
        axes.set_xlabel("optimizer step")
    return figure


def draw_series(axes: Axes, title: str, log: RunLog, values: Sequence[Value], theme: Theme, color: int = 0) -> None:
    """One line over the steps; where a value is not finite the line is broken."""
    prepare_panel(axes, title, log, theme)
    positions = [step.step + 1 for step in log.steps]
    points = [math.nan if value is None else value for value in values]
    axes.plot(positions, points, color=theme.series[color], lw=1.2)


def prepare_panel(axes: Axes, title: str, log: RunLog, theme: Theme) -> None:
    plain_axes(axes, "y")
    axes.set_title(title, loc="left")
    shade_unmeasured(axes, log.steps, color=theme.band, lw=0)
    for resume in log.resumes:
        axes.axvline(resume.step + 0.5, color=theme.muted, lw=0.8, ls=":")
    axes.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True))


def draw_loss(axes: Axes, log: RunLog, theme: Theme) -> None:
    draw_series(axes, "loss (points: validation)", log, [step.loss for step in log.steps], theme)
    known = [(evaluation.step, evaluation.loss) for evaluation in log.evaluations if evaluation.loss is not None]
    for step, loss in known:
        axes.plot(step, loss, "o", color=theme.series[1], markersize=4)


def draw_rate(axes: Axes, log: RunLog, theme: Theme) -> None:
    """MFU (palm) where the device's peak is known, tokens/s a process elsewhere."""
    factor = palm_mfu_of(log)
    scale = 1.0 if factor is None else factor
    rates = [  # a step that compiles would flatten all others
        None if step.phase == "compile" else step.tokens / step.step_time_s / log.config.world_size * scale
        for step in log.steps
    ]
    if factor is None:
        draw_series(axes, "tokens/s a process", log, rates, theme)
        return
    draw_series(axes, "MFU (palm)", log, rates, theme)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))


def draw_rank_times(axes: Axes, log: RunLog, theme: Theme) -> None:
    """Measured step times of every rank."""
    prepare_panel(axes, "step time of each rank, s", log, theme)
    measured = [position for position, step in enumerate(log.steps) if step.phase == "measured"]
    for rank, times in enumerate(log.rank_step_times_s):
        if len(times) != len(log.steps):  # of other steps: the audit says so
            continue
        color = theme.series[rank % len(theme.series)]
        positions = [log.steps[position].step + 1 for position in measured]
        axes.plot(positions, [times[position] for position in measured], color=color, lw=0.9, label=f"rank {rank}")
    if 1 < len(log.rank_step_times_s) <= len(theme.series):
        axes.legend(ncols=4, loc="lower right", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.0, handlelength=1.0)
