"""The study as tables: results/<study>/tables/*.csv. Units stand in the column names; MFU is a fraction."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from mfubench.analysis.effects import Effect
from mfubench.analysis.expected import Comparison
from mfubench.analysis.measures import Measures
from mfubench.analysis.profiles import Profiled
from mfubench.analysis.scaling import ScalingPoint
from mfubench.analysis.statistics import Quartiles
from mfubench.analysis.study import Study
from mfubench.run_log import write_text_atomically

MFU_COLUMNS = ("palm", "matmul", "causal", "hfu", "mamfu")


def runs_table(study: Study, measures: dict[str, Measures]) -> pd.DataFrame:
    """One row a case: what was asked, what ran, what came out; also cases that left no numbers, with the reason."""
    rows = [run_row(name, judged) for name, judged in measures.items()]
    for name, failure in study.failures.items():
        if name not in measures:
            rows.append({"case": name, "status": "failed", "reason": failure.reason})
    rows += [{"case": name, "status": "skipped", "reason": reason} for name, reason in study.declared.skipped.items()]
    rows += [{"case": name, "status": "missing", "reason": study.why_missing(name)} for name in study.missing()]
    # runs of several versions do not say what they used of the same settings
    columns = list(dict.fromkeys(column for row in rows for column in row)) or ["case", "status", "reason"]
    return pd.DataFrame(rows, columns=columns)


def run_row(name: str, judged: Measures) -> dict[str, Any]:
    log, config = judged.log, judged.log.config
    row: dict[str, Any] = {
        "case": name,
        "status": log.status,
        "model": config.model.name,
        "world_size": config.world_size,
        "micro_batch_size": config.micro_batch_size,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "global_batch_size": config.global_batch_size,
        "seq_len": config.seq_len,
        "activation_checkpointing": config.activation_checkpointing,
        "repeat": config.repeat,
    }
    for key, choice in log.used.items():
        row[f"{key}_asked"], row[f"{key}_used"] = choice.requested, choice.used
    row |= quartile_columns("tokens_per_s_per_gpu", judged.tokens_per_s_per_gpu)
    interval = judged.rate_interval
    row["tokens_per_s_per_gpu_low95"] = interval.low if interval else None
    row["tokens_per_s_per_gpu_high95"] = interval.high if interval else None
    row["total_tokens_per_s_per_gpu"] = judged.total_rate
    row["tokens_per_s"] = judged.tokens_per_s
    row |= {f"mfu_{key}": judged.mfu[key].median if key in judged.mfu else None for key in MFU_COLUMNS}
    row["peak_tflops"] = judged.peak.tflops if judged.peak else None
    row["peak_source"] = judged.peak.source if judged.peak else judged.peak_problem
    row["step_time_s"] = judged.step_time_s.median if judged.step_time_s else None
    row["data_share"] = judged.data_share
    row["measured_steps"] = len(judged.rates)
    row["outlier_steps"] = judged.stability.outliers if judged.stability else None
    row["step_time_spread"] = judged.stability.spread if judged.stability else None
    row["peak_memory_gib"] = judged.peak_memory_gib
    row["peak_allocated_gib"] = judged.peak_allocated_gib
    row["capacity_gib"] = judged.capacity_gib
    row["final_loss"] = judged.final_loss
    row["fallbacks"] = "; ".join(f"{key}: {note}" for key, note in log.fallbacks().items())
    row["stopped_early"] = log.stopped_early
    row["reason"] = log.reason
    return row


def quartile_columns(name: str, values: Quartiles | None) -> dict[str, float | None]:
    return {
        f"{name}_median": values.median if values else None,
        f"{name}_q1": values.q1 if values else None,
        f"{name}_q3": values.q3 if values else None,
    }


def expectations_table(comparisons: Sequence[Comparison]) -> pd.DataFrame:
    """Every expectation of a case of this study beside what was measured, in the expectation's unit."""
    columns = ["case", "quantity", "expected_low", "expected_high", "expected_on", "measured", "verdict", "rank"]
    rows = [
        (c.case, c.quantity, *c.expected, c.expected_on, c.measured, c.verdict, c.rank, c.source, c.note)
        for c in comparisons
    ]
    return pd.DataFrame(rows, columns=[*columns, "source", "note"])


def effects_table(effects: Sequence[Effect]) -> pd.DataFrame:
    """What each setting is worth: relative change in tokens/s/GPU with its 95 % interval."""
    names = ["effect", "arm", "control", "expected", "verdict"]
    figures = ["change", "low95", "high95", "basis", "arm_processes", "control_processes"]
    rows = []
    for effect in effects:
        measured = effect.difference
        numbers: tuple[Any, ...] = (None,) * len(figures)
        if measured is not None:
            numbers = (measured.change, measured.interval.low, measured.interval.high, measured.basis)
            numbers += (measured.arm_processes, measured.control_processes)
        differs_in = "; ".join(f"{key}: {before} → {after}" for key, (before, after) in effect.differs_in.items())
        sides = (effect.name, effect.arm, effect.control, effect.expected, effect.verdict)
        rows.append((*sides, *numbers, effect.memory_change, differs_in, effect.reason))
    return pd.DataFrame(rows, columns=[*names, *figures, "memory_change", "differs_in", "reason"])


def scaling_table(points: Sequence[ScalingPoint]) -> pd.DataFrame:
    """Efficiency: rate per GPU over that of the series' smallest world size, the same work for each GPU.

    same_cores: a CPU's processes have no more cores than the smallest world size had; empty of GPUs.
    """
    columns = ["series", "case", "world_size", "tokens_per_s_per_gpu", "tokens_per_s", "efficiency", "low95", "high95"]
    columns += ["reference_world_size", "threads_per_process", "same_cores"]
    rows = [
        (
            *(p.series, p.case, p.world_size, p.tokens_per_s_per_gpu, p.tokens_per_s, p.efficiency),
            *((p.interval.low, p.interval.high) if p.interval else (None, None)),
            p.reference_world_size,
            *((p.cores.threads, p.shares_cores) if p.cores else (None, None)),
        )
        for p in points
    ]
    return pd.DataFrame(rows, columns=columns)


def memory_table(study: Study) -> pd.DataFrame:
    """Every trial of every search for the memory limit."""
    columns = ["case", "model", "micro_batch_size", "status", "peak_memory_gib", "capacity_gib"]
    rows = [
        (
            *(name, limit.search.run.model.name, trial.micro_batch_size, trial.status, trial.peak_memory_gib),
            *(limit.memory_gib, trial.tokens_per_s_per_gpu, limit.largest, limit.largest_comfortable),
            *(limit.search.comfort_fraction, trial.reason),
        )
        for name, limit in study.limits.items()
        for trial in limit.trials
    ]
    columns += ["tokens_per_s_per_gpu", "largest", "largest_comfortable", "comfort_fraction", "reason"]
    return pd.DataFrame(rows, columns=columns)


def profiles_table(profiles: Sequence[Profiled]) -> pd.DataFrame:
    """The parts of each profiled step, on its slowest rank; they add up to step_s."""
    columns = [
        "case",
        "rank",
        "part",
        "time_s",
        "ideal_s",
        "excess_s",
        "tokens_per_s_per_gpu_won",
        "step_s",
        "overhead",
    ]
    rows = [
        (
            *(profiled.case, profiled.rank.rank, row.key, row.time_s, row.ideal_s, row.excess_s),
            *(profiled.rate_won(row.excess_s), profiled.rank.step_s, profiled.overhead),
        )
        for profiled in profiles
        for row in profiled.rows
    ]
    return pd.DataFrame(rows, columns=columns)


def write_tables(study_folder: Path | str, output_dir: Path | str, partial: bool = False) -> list[Path]:
    """Write runs, expectations, effects, scaling, memory and profiles as CSV; returns the files."""
    from mfubench.analysis.findings import Findings

    found = Findings.of(study_folder, partial=partial)
    tables = {
        "runs": runs_table(found.study, found.measures),
        "expectations": expectations_table(found.comparisons),
        "effects": effects_table(found.effects),
        "scaling": scaling_table(found.scaling),
        "memory": memory_table(found.study),
        "profiles": profiles_table(found.profiles[0]),
    }
    paths = []
    for name, table in tables.items():
        path = Path(output_dir) / f"{name}.csv"
        write_text_atomically(path, table.to_csv(index=False))
        paths.append(path)
    return paths


def main(argv: Sequence[str] | None = None) -> int:
    """Run `tabulate_runs.py --study-dir DIR --output-dir DIR`."""
    parser = argparse.ArgumentParser(description="Write a study's tables.")
    parser.add_argument("--study-dir", required=True, type=Path)
    parser.add_argument("--output-dir", required=True, type=Path)
    arguments = parser.parse_args(argv)
    write_tables(arguments.study_dir, arguments.output_dir)
    return 0
