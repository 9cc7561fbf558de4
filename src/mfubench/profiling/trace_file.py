"""The kept trace: one gzipped Chrome trace a run, all ranks in it, readable by ui.perfetto.dev. No torch.

Beside `traceEvents` it holds what the run was (`mfubench`): each rank's step on its time line, what was left out to
keep the file small, or why there is no trace.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from mfubench.config import ConfigError
from mfubench.profiling.chrome_trace import (
    DEVICE_WORK,
    HOST_WORK,
    KEPT_ARGUMENTS,
    LAUNCHES,
    CutStep,
    Event,
    cut_step,
)
from mfubench.run_log import write_bytes_atomically

SCHEMA_VERSION: Final = 1
SIZE_LIMIT_MIB: Final = 16  # of the file; a step of 8 GPUs with 12,000 kernels each takes about 5
OWN_ARGUMENTS = ("launched", "host", "pass", "shape")
# What is left out, in turn, until the file is small enough. A CPU's operators are its trace and stay.
REDUCTIONS = ("nothing", "operators of the host", "and its launches", "and all ranks but the first")


@dataclass
class Trace:
    """A profiled step of all ranks. Without ranks, `reason` says why there is nothing."""

    name: str
    ranks: list[CutStep] = field(default_factory=list)
    reason: str | None = None
    left_out: str = REDUCTIONS[0]
    profiled_step_s: float | None = None  # slowest rank


def trace_of_reason(name: str, reason: str) -> Trace:
    return Trace(name, reason=reason)


def make_trace(name: str, ranks: list[CutStep]) -> Trace:
    longest_us = max(rank.window[1] - rank.window[0] for rank in ranks)
    return Trace(name, ranks, profiled_step_s=longest_us / 1e6)


def write_trace(path: Path | str, trace: Trace, limit_mib: float = SIZE_LIMIT_MIB) -> None:
    """Write the trace, with as much detail as `limit_mib` allows.

    Raises ValueError where even the device's work of one rank is larger.
    """
    for level, left_out in enumerate(REDUCTIONS):
        trace.left_out = left_out
        packed = gzip.compress(json.dumps(document(trace, level), separators=(",", ":")).encode(), mtime=0)
        if len(packed) <= limit_mib * 2**20:
            write_bytes_atomically(path, packed)
            return
    raise ValueError(f"{path}: a trace of {len(packed) / 2**20:.3g} MiB is over the limit of {limit_mib:g} MiB")


def document(trace: Trace, level: int = 0) -> dict[str, Any]:
    """The Chrome trace as plain data. Times count from the first rank's step."""
    ranks = trace.ranks[:1] if level == 3 else trace.ranks
    zero = ranks[0] if ranks else None
    events: list[Event] = []
    facts = []
    for rank in ranks:
        assert zero is not None
        shift_us = (rank.base_ns - zero.base_ns) / 1000 - zero.window[0]
        window = [round(at + shift_us, 3) for at in rank.window]
        facts.append({"rank": rank.rank, "device": rank.device, "window": window, "main_thread": rank.main_thread})
        events += rank_events(rank, shift_us, level)
    about = {"schema_version": SCHEMA_VERSION, "name": trace.name, "ranks": facts, "reason": trace.reason}
    about |= {"left_out": trace.left_out, "profiled_step_s": trace.profiled_step_s}
    return {"schemaVersion": 1, "displayTimeUnit": "ms", "mfubench": about, "traceEvents": events}


def rank_events(rank: CutStep, shift_us: float, level: int) -> list[Event]:
    """One rank's events: the host as process 10 r + 1, the device as 10 r + 2, in this order in the viewer."""
    host, device = 10 * rank.rank + 1, 10 * rank.rank + 2
    events: list[Event] = []
    for process, what in ((host, "host"), (device, "GPU")):
        if process == host or rank.device == "cuda":
            label = f"rank {rank.rank}: {what}"
            events.append({"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": label}})
            events.append(
                {"ph": "M", "name": "process_sort_index", "pid": process, "tid": 0, "args": {"sort_index": process}}
            )
    wanted = set(DEVICE_WORK)
    if level < 2:
        wanted |= set(LAUNCHES)
    if level < 1 or rank.device == "cpu":
        wanted |= set(HOST_WORK)
    for event in rank.events:
        marked = event["name"].startswith("mfubench::")
        if event["cat"] in wanted or marked:
            process = device if event["cat"] in DEVICE_WORK else host
            events.append(kept_event(event, process, shift_us))
    if level < 1:
        for flow in rank.flows:
            process = host if flow["ph"] == "s" else device
            identity = f"{rank.rank}.{flow['id']}"
            events.append({**flow, "ts": round(flow["ts"] + shift_us, 3), "pid": process, "id": identity})
    return events


def kept_event(event: Event, process: int, shift_us: float) -> Event:
    arguments = {key: value for key, value in event.get("args", {}).items() if key in (*KEPT_ARGUMENTS, *OWN_ARGUMENTS)}
    if "launched" in arguments:
        arguments["launched"] = round(arguments["launched"] + shift_us, 3)
    if (sizes := event.get("args", {}).get("Input Dims")) and event["name"].startswith("aten::"):
        arguments["Input Dims"] = sizes
    kept = {"ph": "X", "cat": event["cat"], "name": event["name"], "pid": process, "tid": event["tid"]}
    return kept | {"ts": round(event["ts"] + shift_us, 3), "dur": round(event["dur"], 3), "args": arguments}


def read_trace(path: Path | str) -> Trace:
    """A kept trace, or one as torch.profiler exports it (its last step). Raises ConfigError where it is neither."""
    path = Path(path)
    try:
        packed = path.read_bytes()
        text = gzip.decompress(packed) if packed[:2] == b"\x1f\x8b" else packed
        values = json.loads(text)
    except (OSError, ValueError, EOFError) as error:
        raise ConfigError(f"{path}: is no readable trace ({error})") from None
    if not isinstance(values, dict) or not isinstance(values.get("traceEvents"), list):
        raise ConfigError(f"{path}: holds no traceEvents; give a Chrome trace as torch.profiler exports it")
    about = values.get("mfubench")
    if about is None:
        cut = cut_step(values)
        return make_trace(path.name, [cut]) if cut else trace_of_reason(path.name, "nothing in it took any time")
    if about.get("schema_version") != SCHEMA_VERSION:
        raise ConfigError(f"{path}: is a trace of version {about.get('schema_version')}, not {SCHEMA_VERSION}")
    trace = Trace(about["name"], [], about["reason"], about["left_out"], about["profiled_step_s"])
    by_process: dict[int, list[Event]] = {}
    for event in values["traceEvents"]:
        if event["ph"] == "X":
            by_process.setdefault(event["pid"] // 10, []).append(event)
    for fact in about["ranks"]:
        begins, ends = fact["window"]
        events = by_process.get(fact["rank"], [])
        trace.ranks.append(CutStep(fact["rank"], fact["device"], (begins, ends), fact["main_thread"], 0, events))
    return trace
