"""Power, clocks, temperature, throttling and the host's load beside a run, sampled from a process of its own.

No torch here or in the sampling process. Without NVML (a CPU, no driver, no permission) the host alone is sampled.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from mfubench.telemetry import sampler_process
from mfubench.telemetry.summary import Interval, read_samples, summarize_samples

__all__ = ["OtherProcess", "Sampler", "other_processes_on"]

START_TIMEOUT_S = 20.0


class Sampler:
    """Context manager around the sampling process, which writes work_dir/telemetry.jsonl.

    gpu_indices: cards as CUDA numbers them in this process, so local ranks will do; CUDA_VISIBLE_DEVICES is followed.
    """

    def __init__(self, work_dir: Path | str, gpu_indices: Sequence[int], interval_s: float = 0.5) -> None:
        self.path = Path(work_dir) / "telemetry.jsonl"
        self.request = {
            "output": str(self.path),
            "cards": [physical_card(index) for index in gpu_indices],
            "interval_s": interval_s,
            "pid": root_of_run(),
        }
        self.process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Sampler:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.unlink(missing_ok=True)
        self.process = subprocess.Popen(
            [sys.executable, sampler_process.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert self.process.stdin and self.process.stdout
        with contextlib.suppress(OSError):  # where it died, the run goes on without samples
            self.process.stdin.write(json.dumps(self.request) + "\n")
            self.process.stdin.flush()
            self.process.stdout.readline()  # "ready", or the end of the file
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End the sampling process; what it wrote stays."""
        process, self.process = self.process, None
        if process is None:
            return
        assert process.stdin and process.stdout
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()

    def summarize(self, step_intervals: Sequence[Interval]) -> dict[str, Any]:
        """What the samples say of these steps, (start, end) in unix seconds; may be asked while sampling goes on.

        Keys: gpus (spread of power, clocks, temperature, utilisation by card), throttled (reason -> steps), host,
        host_limited (true, false or null) with host_limited_reason, samples, sampler_cpu_share, nvml_problem.
        """
        if not self.path.exists():
            return {"samples": 0, "problem": "the sampling process did not start"}
        header, samples = read_samples(self.path)
        return summarize_samples(header, samples, step_intervals)


def root_of_run() -> int:
    """The process whose descendants are the run: of several ranks on a node their launcher, else this one."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or 1)
    return os.getppid() if ranks > 1 else os.getpid()


def physical_card(index: int) -> int | str:
    """NVML's name (index over all cards, or UUID) of the card that CUDA calls `index` in this process."""
    visible = [entry.strip() for entry in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if entry.strip()]
    if index >= len(visible):
        return index
    return int(visible[index]) if visible[index].isdigit() else visible[index]


@dataclass(frozen=True)
class OtherProcess:
    """A process of someone else on a card."""

    pid: int
    name: str | None  # None where it lives outside this container
    memory_gib: float | None


def other_processes_on(gpu_index: int) -> list[OtherProcess]:
    """Compute processes on a card (CUDA's number in this process) that are neither this one nor its relatives.

    Empty without NVML. In a container whose process ids differ from the host's, ask before using the card: own
    processes cannot be told apart there.
    """
    nvml, handles, _ = sampler_process.open_cards([physical_card(gpu_index)])
    if not handles:
        return []
    current = psutil.Process()
    own = {current.pid, *(process.pid for process in (*current.parents(), *current.children(recursive=True)))}
    found = sampler_process.ask(nvml.nvmlDeviceGetComputeRunningProcesses, handles[0]) or []
    return [
        OtherProcess(
            pid=process.pid,
            name=process_name(process.pid),
            memory_gib=process.usedGpuMemory / 2**30 if process.usedGpuMemory is not None else None,
        )
        for process in found
        if process.pid not in own
    ]


def process_name(pid: int) -> str | None:
    try:
        return psutil.Process(pid).name()
    except psutil.Error:
        return None
