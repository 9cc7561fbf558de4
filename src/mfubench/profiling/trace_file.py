"""The kept trace: one gzipped Chrome trace a run, all ranks in it, readable by ui.perfetto.dev. No torch.

Beside `traceEvents` it holds what the run was (`mfubench`): each rank's step on its time line, what was left out to
keep the file small, or why there is no trace.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

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
from mfubench.result_files import is_run_log
from mfubench.run_log import write_bytes_atomically

SCHEMA_VERSION: Final = 1
SIZE_LIMIT_MIB: Final = 16  # of the file; a step of 8 GPUs with 12,000 kernels each takes about 5
FILE_ARGUMENTS = {*KEPT_ARGUMENTS, "launched", "host", "pass", "shape"}
COMPRESSION: Final = 6  # of gzip: a twentieth more than its best, in a third of the time
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
    level, packed = fitting_level(
        lambda level: [pack_rank(rank, trace.ranks[0], level) for rank in trace.ranks], limit_mib
    )
    write_packed(path, trace, level, packed)


def fitting_level(pack: Callable[[int], list[bytes]], limit_mib: float = SIZE_LIMIT_MIB) -> tuple[int, list[bytes]]:
    """How much must be left out (an index of REDUCTIONS), and what `pack` makes of all ranks then.

    Raises ValueError where the last reduction is still larger than `limit_mib`.
    """
    for level in range(len(REDUCTIONS)):
        packed = pack(level)
        size_mib = sum(map(len, packed)) / 2**20
        if size_mib <= limit_mib:
            return level, packed
    raise ValueError(f"a trace of {size_mib:.3g} MiB is over the limit of {limit_mib:g} MiB")


def pack_rank(rank: CutStep, zero: CutStep, level: int) -> bytes:
    """One rank's events as the file holds them, gzipped; empty where the level leaves the rank out.

    zero: the first rank (its events may be missing), from whose step times count.
    """
    if level == len(REDUCTIONS) - 1 and rank.rank != zero.rank:
        return b""
    events = json.dumps(rank_events(rank, shift_us(rank, zero), level), separators=(",", ":"))
    return gzip.compress(events.encode(), COMPRESSION, mtime=0)


def write_packed(path: Path | str, trace: Trace, level: int, packed: list[bytes]) -> None:
    """Write the file from what `pack_rank` made of each of trace.ranks, whose own events are not looked at."""
    trace.left_out = REDUCTIONS[level]
    facts, lists = [], []
    for rank, events in zip(trace.ranks, packed, strict=True):
        if events:
            window = [round(at + shift_us(rank, trace.ranks[0]), 3) for at in rank.window]
            facts.append({"rank": rank.rank, "device": rank.device, "window": window, "main_thread": rank.main_thread})
            lists.append(gzip.decompress(events)[1:-1])  # without its brackets
    about = {"schema_version": SCHEMA_VERSION, "name": trace.name, "ranks": facts, "reason": trace.reason}
    about |= {"left_out": trace.left_out, "profiled_step_s": trace.profiled_step_s}
    head = json.dumps({"schemaVersion": 1, "displayTimeUnit": "ms", "mfubench": about}, separators=(",", ":"))
    text = b"".join((head[:-1].encode(), b',"traceEvents":[', b",".join(lists), b"]}"))
    write_bytes_atomically(path, gzip.compress(text, COMPRESSION, mtime=0))


def shift_us(rank: CutStep, zero: CutStep) -> float:
    """What to add to a rank's times, so that they count from the first rank's step."""
    return (rank.base_ns - zero.base_ns) / 1000 - zero.window[0]


def rank_events(rank: CutStep, shift: float, level: int) -> list[Event]:
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
            events.append(kept_event(event, process, shift))
    if level < 1:
        for flow in rank.flows:
            process = host if flow["ph"] == "s" else device
            identity = f"{rank.rank}.{flow['id']}"
            events.append({**flow, "ts": round(flow["ts"] + shift, 3), "pid": process, "id": identity})
    return events


def kept_event(event: Event, process: int, shift: float) -> Event:
    given = event.get("args", {})
    arguments = {key: given[key] for key in given if key in FILE_ARGUMENTS}
    if "launched" in arguments:
        arguments["launched"] = round(arguments["launched"] + shift, 3)
    if (sizes := given.get("Input Dims")) and event["name"].startswith("aten::"):
        arguments["Input Dims"] = sizes
    kept = {"ph": "X", "cat": event["cat"], "name": event["name"], "pid": process, "tid": event["tid"]}
    return kept | {"ts": round(event["ts"] + shift, 3), "dur": round(event["dur"], 3), "args": arguments}


def read_trace(path: Path | str) -> Trace:
    """A kept trace, or one as torch.profiler exports it (its last step). Raises ConfigError where it is neither."""
    path = Path(path)
    try:
        packed = path.read_bytes()
        text = gzip.decompress(packed) if packed[:2] == b"\x1f\x8b" else packed
        values = json.loads(text)
    except (OSError, ValueError, EOFError) as error:
        raise ConfigError(f"{path}: is no readable trace ({error})") from None
    if is_run_log(values):
        raise ConfigError(
            f"{path}: this run was made without a profile; run it again with measurement.profile=timeline"
        )
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
