"""Figures of a plan: isoflop curves and the loss surface, with given designs as points."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import cycle

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from mfubench.analysis.figures.style import MARKERS, Theme, halo, titled_figure
from mfubench.analysis.units import format_count
from mfubench.flops import Convention
from mfubench.planner.design import Design, PlanConfig, find_law
from mfubench.planner.search import isoflop_curve, search

BUDGET_STEPS = (1 / 16, 1 / 4, 1.0, 4.0)  # budgets shown, over the plan's
RATIOS = (10, 20, 40, 80, 160)  # tokens per parameter


def draw_isoflops(plan: PlanConfig, designs: Sequence[Design], theme: Theme) -> Figure:
    """Lowest loss at each model size for four budgets; the best design of each, and `designs` at their own cost."""
    title = f"What {scientific(plan.compute)} FLOPs buy: loss over model size"
    subtitle = (
        f"{describe_plan(plan)}. Solid: the best real shape of each size on the tokens a budget pays for; "
        "dots: the best of all; dashed: the textbook's 6ND; in the legend: given designs."
    )
    with theme.applied():
        figure = titled_figure(theme, title, subtitle, 4.4)
        axes = figure.subplots()
        law = find_law(plan.law)
        bests = []
        for position, step in enumerate(BUDGET_STEPS):
            budget = plan.model_copy(update={"compute": plan.compute * step})
            colour = theme.series[position]
            parameters, _, losses = isoflop_curve(budget)
            axes.plot(parameters, losses, color=colour, lw=1.6)
            textbook = np.geomspace(parameters[0], parameters[-1], 200)
            axes.plot(textbook, law.loss(textbook, budget.compute / 6 / textbook), color=colour, lw=0.9, ls=(0, (4, 3)))
            best = search(budget, count=1)[0]
            axes.plot(best.parameters, best.loss, "o", color=colour, ms=6)
            bests.append((budget.compute, best, colour))
        mark_designs(axes, designs, theme, "loss", plan.convention)
        losses_at_best = [best.loss for _, best, _ in bests]
        axes.set_ylim(min(losses_at_best) - 0.17, max(losses_at_best) + 0.15)
        label_axes(axes, "parameters", "predicted loss, nats a token")
        for compute, best, colour in bests:
            axes.annotate(
                f"{scientific(compute)} FLOPs: {format_count(best.parameters)} on {format_count(best.tokens)}, "
                f"{best.loss:.3f}",
                (best.parameters, best.loss), xytext=(0, -13), textcoords="offset points",
                ha=side_within(axes, best.parameters), color=colour, size=8.5, path_effects=halo(theme),
            )  # fmt: skip
    return figure


def draw_loss_surface(plan: PlanConfig, designs: Sequence[Design], theme: Theme) -> Figure:
    """Contours of loss over parameters and tokens, with the plan's budget, lines of equal D/N and `designs`."""
    law = find_law(plan.law)
    centre_parameters, centre_tokens = law.optimum(plan.compute)
    parameters = np.geomspace(centre_parameters / 8, centre_parameters * 8, 240)
    tokens = np.geomspace(centre_tokens / 8, centre_tokens * 8, 240)
    losses = law.loss(parameters[None, :], tokens[:, None])  # [tokens, parameters]
    title = "Predicted loss over parameters and tokens"
    subtitle = (
        f"{describe_plan(plan)}. Thick: the best shape of each size at {scientific(plan.compute)} FLOPs; dashed: 6ND "
        "of the same; dotted: tokens per parameter; in the legend: given designs, with what they really cost."
    )
    with theme.applied():
        figure = titled_figure(theme, title, subtitle, 5.4)
        axes = figure.subplots()
        axes.grid(False)
        levels = np.arange(np.floor(losses.min() * 20) / 20, losses.max(), 0.05)
        axes.contourf(parameters, tokens, losses, levels=levels, cmap="Blues_r", alpha=0.55, extend="max")
        lines = axes.contour(parameters, tokens, losses, levels=levels, colors=theme.muted, linewidths=0.5)
        axes.clabel(lines, levels[::2], fmt="%.2f", fontsize=7.5)
        for ratio in RATIOS:
            axes.plot(parameters, ratio * parameters, color=theme.muted, lw=0.6, ls=":")
            edge = min(parameters[-1], tokens[-1] / ratio) / 1.15
            if edge > parameters[0] and ratio * edge > tokens[0]:
                axes.annotate(
                    f"D/N {ratio}", (edge, ratio * edge), ha="right", va="bottom", size=7.5, color=theme.muted
                )
        axes.plot(parameters, plan.compute / 6 / parameters, color=theme.series[0], lw=1.0, ls=(0, (4, 3)))
        curve_parameters, curve_tokens, _ = isoflop_curve(plan)
        axes.plot(curve_parameters, curve_tokens, color=theme.series[0], lw=2.0)
        best = search(plan, count=1)[0]
        axes.plot(best.parameters, best.tokens, "o", color=theme.series[0], ms=7)
        axes.annotate(
            f"best: {best.model.name}, {best.loss:.3f}", (best.parameters, best.tokens), xytext=(8, 6),
            textcoords="offset points", size=8.5, color=theme.series[0], weight="bold",
        )  # fmt: skip
        mark_designs(axes, designs, theme, "tokens", plan.convention)
        axes.set_xlim(parameters[0], parameters[-1])
        axes.set_ylim(tokens[0], tokens[-1])
        axes.set_yscale("log")
        label_axes(axes, "parameters", "training tokens")
        mark_powers(axes.yaxis)
    return figure


def mark_designs(axes: Axes, designs: Sequence[Design], theme: Theme, height: str, convention: Convention) -> None:
    """A marker at (parameters, `height` of the design) each; the legend has name, loss and cost.

    In a colour that no curve has, and no dots, which are the best designs.
    """
    for design, marker in zip(designs, cycle(MARKERS[1:]), strict=False):
        axes.plot(
            design.parameters, design.loss if height == "loss" else design.tokens, marker,
            color=theme.series[len(BUDGET_STEPS)], ms=8, mec=theme.text, mew=0.8, ls="none",
            label=f"{design.model.name} on {format_count(design.tokens)} tokens: loss {design.loss:.3f} "
            f"for {scientific(design.cost(convention))} FLOPs",
        )  # fmt: skip
    if designs:
        legend = axes.legend(loc="lower left", frameon=True, framealpha=0.9)
        legend.get_frame().set(edgecolor="none", facecolor=theme.background)


def label_axes(axes: Axes, x: str, y: str) -> None:
    axes.set_xscale("log")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    mark_powers(axes.xaxis)


def side_within(axes: Axes, x: float) -> str:
    """Horizontal alignment of a label at x of the logarithmic axis, so that it does not run beyond an end."""
    low, high = axes.get_xlim()
    place = math.log(x / low) / math.log(high / low)
    return "left" if place < 0.2 else "right" if place > 0.8 else "center"


def mark_powers(axis: Axis) -> None:
    """1 and 3 of each power of ten: 300M, 1B, 3B."""
    low, high = axis.get_view_interval()
    axis.set_ticks([tick for power in range(3, 15) for tick in (10.0**power, 3 * 10.0**power) if low <= tick <= high])
    axis.set_major_formatter(FuncFormatter(lambda value, _: format_count(value)))
    axis.set_minor_locator(NullLocator())


def describe_plan(plan: PlanConfig) -> str:
    source = find_law(plan.law).source
    return f"{source}; {plan.convention} cost, vocabulary {plan.vocab_size:,}, T {plan.seq_len:,}"


def scientific(value: float) -> str:
    """1.36e21."""
    return f"{value:.2e}".replace("e+", "e")
