"""What the samples of one run say about its steps: pure functions of telemetry.jsonl. No torch."""

from __future__ import annotations

import bisect
import itertools
import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

# Bits of NVML's clocks event reasons (nvml.h, nvmlClocksEventReasons) that mean "slower than it could be". Left out:
# 0x1 idle, 0x2 application clocks and 0x100 display clocks, which are settings.
THROTTLE_REASONS = {
    0x04: "power_cap",
    0x08: "hardware_slowdown",
    0x10: "sync_boost",
    0x20: "software_thermal",
    0x40: "hardware_thermal",
    0x80: "power_brake",
}
POSITIONS_KEPT = 50  # of throttled steps by reason; the count is always whole

BUSY_GPU_PERCENT = 90.0  # NVML's utilisation: share of time in which any kernel ran
BUSY_CORE = 0.9  # cores of one process: its main thread has no time left
BUSY_HOST_PERCENT = 90.0

Interval = tuple[float, float]  # unix seconds: start, end


def read_samples(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Header and samples of telemetry.jsonl; a last line cut off is left out."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return (lines[0], lines[1:]) if lines else ({}, [])


def summarize_samples(header: dict[str, Any], samples: list[dict[str, Any]], steps: Sequence[Interval]) -> dict:
    """Spread of every quantity while steps ran, which steps were throttled and why, and whether the host held them up.

    steps: (start, end) of each step, unix seconds, in order. A step shorter than the sampling interval is judged by
    the nearest sample, where one is no farther away than that interval.
    """
    times = [sample["time"] for sample in samples]
    by_step = [samples_of(step, times, header.get("interval_s", 0.5)) for step in steps]
    positions = sorted({i for found in by_step for i in found})
    during = [samples[i] for i in positions]
    before = samples[positions[0] - 1] if positions and positions[0] > 0 else None
    cards = [summarize_card(position, card, during) for position, card in enumerate(header.get("cards", []))]
    host = summarize_host(during, before)
    limited, reason = judge_host(cards, host)
    return {
        "interval_s": header.get("interval_s"),
        "samples": len(during),
        "sampler_cpu_share": sampler_share(samples),
        "nvml_problem": header.get("nvml_problem"),
        "gpus": cards,
        "throttled": throttled_steps(by_step, samples),
        "steps_sampled": sum(1 for found in by_step if found),
        "steps": len(steps),
        "host": host,
        "host_limited": limited,
        "host_limited_reason": reason,
    }


def samples_of(step: Interval, times: list[float], interval_s: float) -> list[int]:
    """Positions of the samples taken during a step, or of the nearest one."""
    start, end = step
    first, last = bisect.bisect_left(times, start), bisect.bisect_right(times, end)
    if first < last:
        return list(range(first, last))
    middle = (start + end) / 2
    nearest = min(
        (i for i in (first - 1, first) if 0 <= i < len(times)), key=lambda i: abs(times[i] - middle), default=None
    )
    return [nearest] if nearest is not None and abs(times[nearest] - middle) <= interval_s else []


def spread(values: Iterable[float | None]) -> dict[str, float] | None:
    """Median, quartiles and maximum; None where nothing was sampled."""
    found = sorted(value for value in values if value is not None)
    if not found:
        return None
    quarters = statistics.quantiles(found, n=4, method="inclusive") if len(found) > 1 else [found[0]] * 3
    return {"median": quarters[1], "q1": quarters[0], "q3": quarters[2], "max": found[-1]}


def summarize_card(position: int, card: dict[str, Any], samples: list[dict[str, Any]]) -> dict[str, Any]:
    keys = ("power_w", "sm_clock_mhz", "memory_clock_mhz", "temperature_c", "utilization_percent")
    return {**card, **{key: spread(sample["cards"][position][key] for sample in samples) for key in keys}}


def summarize_host(samples: list[dict[str, Any]], before: dict[str, Any] | None = None) -> dict[str, Any]:
    """CPU load of the node, cores used by the run's processes, disk and network rates in MB/s (1e6 bytes).

    before: the sample before the first, which a single sample is compared with: a short run has no other.
    """
    compared = [before, *samples] if before is not None and len(samples) == 1 else samples
    pairs = [(a, b) for a, b in itertools.pairwise(compared) if b["time"] > a["time"]]

    def rate(key: str) -> dict[str, float] | None:
        return spread(
            (b[key] - a[key]) / (b["time"] - a["time"]) / 1e6
            for a, b in pairs
            if a[key] is not None and b[key] is not None
        )

    cores = [cores_used(a, b) for a, b in pairs]
    return {
        "cpu_percent": spread(sample["cpu_percent"] for sample in samples),
        "run_cores": spread(sum(used) for used in cores if used),
        "busiest_process_cores": spread(max(used) for used in cores if used),
        "disk_read_mb_s": rate("disk_read_bytes"),
        "disk_write_mb_s": rate("disk_write_bytes"),
        "network_sent_mb_s": rate("network_sent_bytes"),
        "network_received_mb_s": rate("network_received_bytes"),
    }


def cores_used(a: dict[str, Any], b: dict[str, Any]) -> list[float]:
    """Cores that each of the run's processes used between two samples."""
    seconds = b["time"] - a["time"]
    before = a["process_cpu_s"]
    return [(used - before[pid]) / seconds for pid, used in b["process_cpu_s"].items() if pid in before]


def throttled_steps(by_step: list[list[int]], samples: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Reason -> how many steps, their share of the steps that were sampled, positions of the first of them."""
    found: dict[str, list[int]] = {}
    for step, positions in enumerate(by_step):
        bits = 0
        for position in positions:
            for card in samples[position]["cards"]:
                bits |= card["throttle_bits"] or 0
        for bit, reason in THROTTLE_REASONS.items():
            if bits & bit:
                found.setdefault(reason, []).append(step)
    sampled = sum(1 for positions in by_step if positions)
    return {
        reason: {"steps": len(steps), "share": len(steps) / sampled, "positions": steps[:POSITIONS_KEPT]}
        for reason, steps in found.items()
    }


def judge_host(cards: list[dict[str, Any]], host: dict[str, Any]) -> tuple[bool | None, str]:
    """Whether the cards waited for the host, and how that is known; None where it is not."""
    busy = [card["utilization_percent"]["median"] for card in cards if card["utilization_percent"]]
    if not busy:
        return None, "no GPU utilisation was sampled"
    idlest = min(busy)
    if idlest >= BUSY_GPU_PERCENT:
        return False, f"kernels ran in {idlest:.0f} % of the time on the idlest card"
    waiting = f"kernels ran in only {idlest:.0f} % of the time on the idlest card"
    process, node = host["busiest_process_cores"], host["cpu_percent"]
    if node and node["median"] >= BUSY_HOST_PERCENT:
        return True, f"{waiting}, while all cores of the node were {node['median']:.0f} % busy"
    if process and process["median"] >= BUSY_CORE:
        return True, f"{waiting}, while one process of the run used {process['median']:.2f} cores"
    return None, f"{waiting}, yet the CPU was not busy: waiting for batches, other ranks or the clock's own reading"


def sampler_share(samples: list[dict[str, Any]]) -> float | None:
    """CPU of the sampler itself, in cores."""
    if len(samples) < 2:
        return None
    first, last = samples[0], samples[-1]
    return (last["sampler_cpu_s"] - first["sampler_cpu_s"]) / (last["time"] - first["time"])
