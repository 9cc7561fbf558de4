"""Power, clocks, temperature, throttling and the host's load beside a run, sampled from a process of its own.

No torch here or in the sampling process. Without NVML (a CPU, no driver, no permission) the host alone is sampled.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import cast

from mfubench.telemetry import sampler_process
from mfubench.telemetry.summary import Interval, read_samples, summarize_samples
from mfubench.telemetry_record import Telemetry

START_TIMEOUT_S = 20.0  # a driver that hangs costs the samples, not the run


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
            select.select([self.process.stdout], [], [], START_TIMEOUT_S)  # "ready", or the end of the file
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

    def summarize(self, step_intervals: Sequence[Interval]) -> Telemetry:
        """What the samples say of these steps, (start, end) in unix seconds; may be asked while sampling goes on.

        Keys: gpus (spread of power, clocks, temperature, utilisation by card), throttled (reason -> steps), host,
        host_limited (true, false or null) with host_limited_reason, samples, sampler_cpu_share, nvml_problem.
        """
        if not self.path.exists():
            return {"samples": 0, "problem": "the sampling process did not start"}
        header, samples = read_samples(self.path)
        return cast(Telemetry, summarize_samples(header, samples, step_intervals))


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
