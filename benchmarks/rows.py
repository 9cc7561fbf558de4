"""Records of a system's repeats -> one row of a result file, and the files that are written of the rows. No torch."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.job import Job, Record
from mfubench.config import ConfigError
from mfubench.flops import flop_terms, flops_per_token
from mfubench.hardware import peak_for
from mfubench.run_log import write_json


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile (linear between the values)."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def row_of(job: Job, records: Sequence[Record], tried: dict[str, str] | None = None) -> dict[str, Any]:
    """One row: the system's rate over its finished repeats, or the reason why there is none."""
    good = [record for record in records if record.status == "ok"]
    last = (good or list(records))[-1]
    row: dict[str, Any] = {
        "system": job.system,
        "version": last.version,
        "model": job.run.model.name,
        "world_size": job.run.world_size,
        "micro_batch_size": job.run.micro_batch_size,
        "gradient_accumulation_steps": job.run.gradient_accumulation_steps,
        "master_weights": last.master_weights,
        "card": last.card,
        "torch": last.torch,
        "tokens_per_s_per_gpu": None,
        "status": "ok" if good else last.status,
        "reason": None if good else last.reason,
        "seq_len": job.run.seq_len,
        "parallelism": job.run.parallelism,
        "settings": job.settings,
    }
    if tried:
        row["micro_batch_sizes_tried"] = tried
    if not good:
        return row
    rates = [record.rate for record in good if record.rate]
    q1, median, q3 = quartiles(rates)
    row["tokens_per_s_per_gpu"] = {"median": median, "q1": q1, "q3": q3, "repeats": len(rates), "by_repeat": rates}
    if failed := [record.reason for record in records if record.status != "ok"]:
        row["failed_repeats"] = failed
    row |= {
        "step_time_s": statistics.median(time for record in good for time in record.step_times_s),
        "steps": [record.steps for record in good],
        "measured_s": [record.seconds for record in good],
        "parameters": last.parameters,
        "optimizer": last.optimizer,
        "peak_reserved_gib": last.peak_reserved_gib,
        "clock_and_power": [clock_and_power(record) for record in good],
        "variables": last.variables,
        "notes": last.notes,
        "command": last.command,
        "started_at": [record.started_at for record in good],
    }
    return row


def is_own(row: dict[str, Any]) -> bool:
    return row["system"].startswith("mfubench")


def clock_and_power(record: Record) -> dict[str, Any]:
    """Median SM clock, power and temperature of the cards while steps were measured, and what held them back."""
    telemetry = record.telemetry or {}
    found: dict[str, Any] = {"samples": telemetry.get("samples", 0)}
    for key in ("sm_clock_mhz", "power_w", "temperature_c"):
        spreads = [card.get(key) for card in telemetry.get("gpus", [])]
        medians = [spread["median"] for spread in spreads if spread]
        found[key] = statistics.mean(medians) if medians else None
    throttled = telemetry.get("throttled") or {}
    found["throttled_steps"] = {reason: held["steps"] for reason, held in throttled.items()}
    return found


def palm_mfu(job: Job, card: str | None, rate: float) -> float | None:
    """Share of the card's dense datasheet peak for the job, by the PaLM convention; None without a hardware row."""
    if card is None:
        return None
    try:
        peak = peak_for(card, job.run.dtype, job.run.tf32, fp8=bool(job.settings.get("fp8")))
    except ConfigError:
        return None
    return rate * flops_per_token(flop_terms(job.run.model, job.run.seq_len), "palm") / (peak.tflops * 1e12)


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    write_json(path, list(rows))


def markdown_table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table for README and terminal, columns padded."""
    widths = [max(len(line[i]) for line in [header, *lines]) for i in range(len(header))]

    def formatted(line: Sequence[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"

    rule = "| " + " | ".join("-" * width for width in widths) + " |"
    return "\n".join([formatted(header), rule, *map(formatted, lines)]) + "\n"


def spread_of(rate: dict[str, Any]) -> str:
    """Quartiles; of less than four runs, which have none to speak of, the slowest and the fastest."""
    low, high = (min(rate["by_repeat"]), max(rate["by_repeat"])) if rate["repeats"] < 4 else (rate["q1"], rate["q3"])
    return f"{low:,.0f}–{high:,.0f}" if rate["repeats"] > 1 else "one run"


def peers_table(rows: Sequence[dict[str, Any]], mfu: dict[str, float | None]) -> str:
    """All rows, fastest first, each also as a multiple of the fastest peer with float32 masters."""
    peers = [
        row["tokens_per_s_per_gpu"]["median"]
        for row in rows
        if row["tokens_per_s_per_gpu"] and not is_own(row) and row["master_weights"] == "float32"
    ]
    best = max(peers, default=None)
    lines = []
    for row in sorted(rows, key=lambda row: -(row["tokens_per_s_per_gpu"] or {"median": 0.0})["median"]):
        name = f"{row['system']} {row['version'] or ''}".strip()
        batch = f"{row['micro_batch_size']} × {row['gradient_accumulation_steps']}"
        rate = row["tokens_per_s_per_gpu"]
        if rate is None:
            lines.append([name, batch, f"{row['status']}: {row['reason']}", "", "", "", "", "", ""])
            continue
        conditions = row["clock_and_power"]
        clocks = [c["sm_clock_mhz"] for c in conditions if c["sm_clock_mhz"]]
        powers = [c["power_w"] for c in conditions if c["power_w"]]
        share = mfu.get(row["system"])
        memory = row["peak_reserved_gib"]
        lines.append(
            [
                name,
                batch,
                f"{rate['median']:,.0f} ({spread_of(rate)})",
                f"{rate['repeats']}" + (f", {len(row['failed_repeats'])} failed" if row.get("failed_repeats") else ""),
                f"{share:.1%}" if share is not None else "",
                f"{rate['median'] / best:.3f}" if best else "",
                f"{memory:.1f}" if memory is not None else "",
                f"{statistics.mean(clocks):,.0f}" if clocks else "",
                f"{statistics.mean(powers):,.0f}" if powers else "",
            ]
        )
    header = ["system", "batch", "tokens/s/GPU", "repeats", "MFU palm", "to best peer", "GiB", "MHz", "W"]
    return markdown_table(header, lines)
