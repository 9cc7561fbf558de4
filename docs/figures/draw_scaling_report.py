"""Draw scaling-report.png from the audit of the report's own figures: `python docs/figures/draw_scaling_report.py`."""

from __future__ import annotations

import json
from pathlib import Path

from matplotlib.axes import Axes

from mfubench.analysis.figures.style import LIGHT, plain_axes, titled_figure
from mfubench.audit import audit_paths

ROOT = Path(__file__).parents[2]
REPORT = ROOT / "tests" / "audit_cases" / "scaling_report.json"
OUTPUT = Path(__file__).with_name("scaling-report.png")

STATED, TRUE = LIGHT.grid, LIGHT.good
X = (0, 1)
NOTE = {"facecolor": LIGHT.background, "edgecolor": "none", "pad": 1.0}  # covers the grid behind a note


def main() -> None:
    stated = json.loads(REPORT.read_text(encoding="utf-8"))["runs"]
    audit = audit_paths([REPORT])
    true = audit.runs
    with LIGHT.applied():
        figure = titled_figure(
            LIGHT,
            f"Nothing failed to scale: 8 GPUs kept {audit.weak_scaling_efficiency:.1%} of the 2-GPU rate per GPU",
            "LLaMA 1.36B on a DGX B200: what a report from the field states, and what its own figures give. MFU by the "
            "palm convention, of 2,250 TFLOP/s a card (bf16, dense).",
            3.3,
        )
        left, middle, right = figure.subplots(1, 3, width_ratios=(1, 1.05, 1.55))
        draw_step_times(left, stated, true)
        draw_rates(middle, stated, true)
        draw_mfu(right, stated, true)
        figure.savefig(OUTPUT, metadata={"Software": "mfubench"})
    print(OUTPUT)


def name_axes(axes: Axes, stated: list[dict], title: str, unit: str) -> None:
    axes.set_xticks(X, [f"{run['num_gpus']} GPUs" for run in stated])
    axes.tick_params(axis="x", labelcolor=LIGHT.text)
    axes.set_title(f"{title}\n", loc="left", weight="bold")
    axes.text(0, 1.02, unit, transform=axes.transAxes, size=8.5, color=LIGHT.muted).set_in_layout(False)
    axes.margins(y=0.14)
    plain_axes(axes, "y")


def draw_step_times(axes: Axes, stated: list[dict], true: list) -> None:
    """A step of the 8-GPU run holds 16 times the micro-steps, each as long as before."""
    for x, run, verdict in zip(X, stated, true, strict=True):
        axes.bar(x, run["step_time_s"], 0.55, color=LIGHT.series[1])
        one_s = run["step_time_s"] / verdict.micro_steps_per_gpu
        label = f"{run['step_time_s']:.2f} s =\n{verdict.micro_steps_per_gpu:.0f} × {one_s:.2f} s"
        axes.annotate(label, (x, run["step_time_s"]), (0, 3), textcoords="offset points", ha="center", size=8.5)
    name_axes(axes, stated, "16 times the work in a step", "seconds = micro-steps × length")


def draw_rates(axes: Axes, stated: list[dict], true: list) -> None:
    """The log shows one rank's rate as the run's."""
    for x, run, verdict in zip(X, stated, true, strict=True):
        for offset, rate, color, text in (
            (-0.2, run["tokens_per_s"], STATED, LIGHT.muted),
            (0.2, verdict.true_tokens_per_s, TRUE, LIGHT.text),
        ):
            axes.bar(x + offset, rate / 1e3, 0.37, color=color)
            axes.annotate(
                f"{rate / 1e3:.0f}k", (x + offset, rate / 1e3), (0, 3), textcoords="offset points", ha="center",
                size=8.5, color=text,
            )  # fmt: skip
    name_axes(axes, stated, "The rate was one rank's", "1,000 tokens/s: stated (grey), true (blue)")


def draw_mfu(axes: Axes, stated: list[dict], true: list) -> None:
    """Stated MFU, times the ranks left out, times the two of sparsity."""
    for x, run, verdict in zip(X, stated, true, strict=True):
        start, ranks = run["mfu_percent"], run["num_gpus"]
        end = 100 * verdict.true_mfu_palm
        levels = ((start, STATED), (start * ranks, LIGHT.series[5]), (end, TRUE))
        bottom = 0.0
        for level, color in levels:
            axes.bar(x, level - bottom, 0.4, bottom=bottom, color=color)
            bottom = level
        notes = ((start, f"stated {start:.4g} %"), (start * ranks, f"× {ranks} GPUs"), (end, "× 2: dense"))
        for height, text in notes:
            axes.annotate(text, (x + 0.2, height), (4, -1), textcoords="offset points", va="top", size=8, bbox=NOTE)
        axes.annotate(f"{end:.1f} %", (x, end), (0, 3), textcoords="offset points", ha="center", size=8.5)
    axes.set_xlim(-0.3, 1.8)
    name_axes(axes, stated, "MFU was of one rank and a sparse peak", "percent")


if __name__ == "__main__":
    main()
