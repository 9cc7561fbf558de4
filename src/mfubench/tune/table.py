"""What `mfubench tune` prints: the trials as a table, fastest first, and the command that uses the best."""

from __future__ import annotations

from collections.abc import Sequence

from mfubench.analysis.answer import command_for
from mfubench.config import RunConfig
from mfubench.tune.search import Trial
from mfubench.tune.trials import Outcome, Request

HEADER = ("parallelism", "checkpointing", "micro-batch", "accumulation", "tokens/s", "MFU palm", "memory GiB", "")


def format_outcome(outcome: Outcome, request: Request) -> str:
    """The table, what was left out, and the command."""
    usable_gib = outcome.capacity_gib * (1 - request.margin)
    lines = [format_trials(outcome.trials, outcome.best, usable_gib), ""]
    known = sum(trial.cached for trial in outcome.trials)
    lines.append(
        f"{len(outcome.trials)} trials in {outcome.seconds / 60:.1f} minutes ({known} known from earlier runs); "
        f"memory up to {usable_gib:.2f} of {outcome.capacity_gib:.2f} GiB a process"
    )
    lines += [f"note: {note}" for note in outcome.notes]
    if outcome.best is None or outcome.config is None:
        lines.append(why_nothing(outcome.trials))
        return "\n".join(lines)
    lines += ["", "Fastest within the margin (max_iters is yours to choose):", command(outcome.config, request)]
    return "\n".join(lines)


def why_nothing(trials: Sequence[Trial]) -> str:
    """Why there is no best setting."""
    if not trials:
        return "Nothing was measured: give it more --minutes."
    if all(trial.status == "failed" for trial in trials):
        return "Every trial failed; the reasons stand above, each run's log in its work folder."
    return "No setting fits: try more GPUs, a shorter seq_len or a smaller --margin."


def format_trials(trials: Sequence[Trial], best: Trial | None, usable_gib: float) -> str:
    """Columns of equal width; what did not fit comes last."""
    order = sorted(trials, key=lambda trial: (not trial.fits(usable_gib), -trial.tokens_per_s))
    rows = [HEADER, *(row_of(trial, best, usable_gib) for trial in order)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column in (0, 1, len(HEADER) - 1) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def row_of(trial: Trial, best: Trial | None, usable_gib: float) -> tuple[str, ...]:
    setting = trial.setting
    remark = "best" if trial == best else ""
    if trial.status != "ok":
        remark = "out of memory" if trial.status == "oom" else f"{trial.status}: {trial.reason}"
    elif not trial.fits(usable_gib):
        remark = "into the margin"
    return (
        setting.parallelism,
        setting.activation_checkpointing,
        str(setting.micro_batch_size),
        str(setting.gradient_accumulation_steps),
        f"{trial.tokens_per_s:,.0f}" if trial.tokens_per_s else "–",
        f"{trial.mfu:.1%}" if trial.mfu is not None else "–",
        f"{trial.peak_memory_gib:.2f}" if trial.peak_memory_gib is not None else "–",
        remark,
    )


def command(config: RunConfig, request: Request) -> str:
    """`mfubench train …` with the dataset where it lies."""
    return command_for(config).replace(f"--data resources/datasets/{config.dataset}", f"--data {request.data}", 1)
