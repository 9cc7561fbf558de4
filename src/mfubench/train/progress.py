"""What a run shows while it goes on: WORK/live.json for other programs, a bar or plain lines for people. No torch."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from mfubench.ceilings import read_ceilings
from mfubench.config import ConfigError, RunConfig
from mfubench.flops import flop_terms, flops_per_token, mfu
from mfubench.hardware import peak_for_run
from mfubench.run_log import RankMemory, RunLog

LINE_PERIOD_S = 5.0  # between plain lines, where the output is no terminal
BAR_WIDTH = 16  # characters
MOST_LOSSES = 6  # of evaluations, at the end: the first and the last ones
SAMPLE_WIDTH = 200  # characters


def palm_mfu_of(log: RunLog, ceilings: Path | None = None) -> float | None:
    """MFU (palm) of one token a second and GPU, a factor for the display; None where the device's peak is not known.

    A CPU's peak is measured: it is known where `ceilings` names the file of that measurement and it is there.
    """
    try:
        measured = read_ceilings(ceilings) if ceilings is not None and ceilings.exists() else None
        peak = peak_for_run(log, measured)
    except ConfigError:
        return None
    terms = flop_terms(log.config.model, log.config.seq_len)
    return mfu(1.0, flops_per_token(terms, "palm"), peak.tflops)


def live_values(
    log: RunLog, memory: RankMemory, allocated_gib: float | None, mfu_factor: float | None
) -> dict[str, Any]:
    """The last step of a run, as a flat record: units in the keys.

    Until a step was measured, the rate is the last step's own and the time left is not known: the first ones compile.
    """
    config = log.config
    last = log.steps[-1]
    recent = sorted(step.step_time_s for step in log.steps[-20:] if step.phase == "measured")
    step_time_s = recent[len(recent) // 2] if recent else last.step_time_s
    tokens_per_s = config.tokens_per_step / step_time_s
    per_gpu = tokens_per_s / config.world_size
    return {
        "name": log.name,
        "status": None,  # while it runs
        "stopped_early": None,  # why the run ended before max_iters, where it did
        "step": last.step,
        "max_iters": config.max_iters,
        "phase": last.phase,
        "loss": last.loss,
        "grad_norm": last.grad_norm,
        "learning_rate": last.learning_rate,
        "step_time_s": step_time_s,
        "tokens_per_s": tokens_per_s,
        "tokens_per_s_per_gpu": per_gpu,
        "mfu_palm": per_gpu * mfu_factor if mfu_factor is not None else None,
        "memory_allocated_gib": allocated_gib,
        "memory_reserved_peak_gib": memory.peak_reserved_gib,
        "memory_allocated_peak_gib": memory.peak_allocated_gib,
        "memory_rss_peak_gib": memory.peak_rss_gib,
        "time_left_s": (config.max_iters - 1 - last.step) * step_time_s if recent else None,
        "updated_at": time.time(),
    }


def describe(live: dict[str, Any]) -> str:
    """One line for people; numbers that are not known are left out, and so is the time left of a run that ended."""
    done = live["step"] + 1
    early = live["stopped_early"] is not None
    parts = [f"{done} steps of at most {live['max_iters']}" if early else f"step {done}/{live['max_iters']}"]
    if live["phase"] != "measured":
        parts.append(live["phase"])
    parts.append(f"loss {live['loss']:.4f}" if live["loss"] is not None else "loss not finite")
    if live["mfu_palm"] is not None:
        parts.append(f"MFU {live['mfu_palm']:.1%} (palm)")
    parts.append(f"{live['tokens_per_s']:,.0f} tokens/s")
    if live["memory_allocated_gib"] is not None:
        parts.append(
            f"memory {live['memory_allocated_gib']:.1f} GiB (peak {live['memory_allocated_peak_gib']:.1f}, "
            f"reserved {live['memory_reserved_peak_gib']:.1f})"
        )
    else:
        parts.append(f"memory peak {live['memory_rss_peak_gib']:.2f} GiB")
    if live["status"] is None and live["time_left_s"] is not None:
        minutes, seconds = divmod(round(live["time_left_s"]), 60)
        parts.append(f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d} left")
    return ", ".join(parts)


def describe_end(log: RunLog) -> list[str]:
    """How a run ended, what ran in place of what was asked, what it evaluated and sampled: lines for people."""
    why = log.reason or log.stopped_early or nothing_trained(log) or nothing_measured(log)
    lines = [f"{log.name}: {log.status}{f' ({why})' if why else ''}"]
    if (demoted := log.demoted()) is not None and demoted not in lines[0]:
        lines.append(f"  {demoted}")
    lines += [f"  {setting}: {note}" for setting, note in log.fallbacks().items()]
    if log.evaluations:
        losses = [
            f"{f'{one.loss:.4f}' if one.loss is not None else 'not finite'} after {one.step} steps"
            for one in log.evaluations
        ]
        if len(losses) > MOST_LOSSES:
            losses = [losses[0], "…", *losses[2 - MOST_LOSSES :]]
        lines.append(f"  validation loss: {', '.join(losses)}")
    if log.sample is not None:
        text = " ".join(log.sample.split())  # on one line
        lines.append(f"  sample: {text if len(text) <= SAMPLE_WIDTH else f'{text[:SAMPLE_WIDTH]}…'}")
    return lines


def nothing_trained(log: RunLog) -> str | None:
    """A sentence where a run was called again after its last step."""
    if not log.resumes or log.config.evaluation.only or log.wall is None or log.wall.training_tokens:
        return None
    return f"all {log.resumes[-1].step} steps were done before; nothing was trained"


def nothing_measured(log: RunLog) -> str | None:
    """A sentence where a run has no rate."""
    if not log.steps or log.measured_steps() or log.config.evaluation.only:
        return None
    if (demoted := log.demoted()) is not None:
        return f"no step was measured: {demoted}; raise max_iters for a rate here"
    return f"no step was measured: all {len(log.steps)} are compilation or warm-up; raise max_iters for a rate"


class Display:
    """A progress bar on a terminal, a line every few seconds elsewhere; on standard error."""

    def __init__(self, config: RunConfig):
        self.config = config
        self.bar: Any = None
        self.last_line = self.last_change = 0.0
        self.last: dict[str, Any] | None = None
        self.shown: dict[str, Any] | None = None

    def update(self, live: dict[str, Any]) -> None:
        self.last = live
        if sys.stderr.isatty():
            self.update_bar(live)
        elif time.monotonic() - self.last_line >= LINE_PERIOD_S:
            self.print_line(live)

    def print_line(self, live: dict[str, Any]) -> None:
        self.last_line, self.shown = time.monotonic(), live
        filled = BAR_WIDTH * (live["step"] + 1) // live["max_iters"]
        bar = "#" * filled + "." * (BAR_WIDTH - filled)
        print(f"{live['name']} [{bar}] {describe(live)}", file=sys.stderr, flush=True)

    def update_bar(self, live: dict[str, Any]) -> None:
        if self.bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn
            from rich.table import Column

            values = TextColumn("{task.fields[values]}", table_column=Column(ratio=1))  # wraps on a narrow terminal
            self.bar = Progress(BarColumn(bar_width=BAR_WIDTH), values, console=Console(stderr=True), expand=True)
            self.bar.start()
            self.bar.add_task(self.config.name, total=self.config.max_iters, values="")
        self.bar.update(self.bar.task_ids[0], completed=live["step"] + 1, values=describe(live))

    def follow(self, path: Path) -> None:
        """Show what another process wrote to live.json, when it is new."""
        try:
            changed = path.stat().st_mtime
            if changed == self.last_change:
                return
            self.last_change = changed
            self.update(json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return

    def close(self) -> None:
        """Leave the last values standing."""
        if self.bar is not None:
            self.bar.stop()
        elif self.last is not None and self.last is not self.shown:
            self.print_line(self.last)
