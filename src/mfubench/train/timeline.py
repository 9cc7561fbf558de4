"""The step that is kept as a trace: after the measured ones, on all ranks at once, with a learning rate of 0.

Weights stay as they are, and nothing measured is disturbed: step times, memory and telemetry were taken before.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, record_function, schedule

from mfubench.config import RunConfig
from mfubench.model.kernels import quiet_profiler
from mfubench.profiling.chrome_trace import DATA_MARK, STEP_MARK, CutStep, cut_step
from mfubench.profiling.trace_file import (
    fitting_level,
    make_trace,
    pack_rank,
    trace_of_reason,
    write_packed,
    write_trace,
)
from mfubench.train.loader import Batches
from mfubench.train.process import Process
from mfubench.train.step import StepFunction
from mfubench.train.training import Training
from mfubench.train.watchdog import START_FACTOR

# The profiler warms up in the first step; the second runs up to the third, which is kept: it begins where the device
# has work of the step before, as in training.
WARMUP, RECORDED = 1, 2


def profiled_steps(config: RunConfig) -> int:
    """Batches that a run needs beyond its own steps."""
    return WARMUP + RECORDED if config.measurement.profile == "timeline" else 0


def keep_timeline(training: Training, take_step: StepFunction, batches: Batches) -> None:
    """Write WORK/trace.json.gz: the trace of a step, or why there is none. Collective."""
    log, process, recorder = training.log, training.process, training.recorder
    recorder.note_memory()
    reason = None
    if log.status != "ok":
        reason = f"{log.status}: {log.reason}"
    elif recorder.stepped == 0:
        reason = "an earlier process had done all steps"
    if reason is None:
        with recorder.phase("profile", log.steps[-1].step + 1):
            training.watchdog.beat(START_FACTOR)
            profiler = profile_steps(training, take_step, batches)
            training.watchdog.beat(START_FACTOR)
            reason = write_together(training.paths.trace, log.name, exported_step(profiler, process.rank), process)
    if reason is not None and process.is_main:
        write_trace(training.paths.trace, trace_of_reason(log.name, reason))
    process.barrier()


def profile_steps(training: Training, take_step: StepFunction, batches: Batches) -> profile:
    """Take some steps under the profiler. Collective, as every step is."""
    quiet_profiler()
    process = training.process
    activities = [ProfilerActivity.CPU]
    if process.on_cuda:
        activities.append(ProfilerActivity.CUDA)
    plan = schedule(wait=0, warmup=WARMUP, active=RECORDED, repeat=1)
    with profile(activities=activities, schedule=plan, record_shapes=True) as profiler:
        for step in range(WARMUP + RECORDED):
            if step:
                profiler.step()
            with record_function(STEP_MARK):
                with record_function(DATA_MARK):
                    inputs, labels, _ = batches.next()
                training.optimizer.set_learning_rate(0.0)
                take_step(inputs, labels)
                with record_function(DATA_MARK):
                    batches.prefetch()
        training.engine.settle()
        training.recorder.clock.synchronize()
    return profiler


def exported_step(profiler: profile, rank: int) -> CutStep | str:
    """This rank's last profiled step, or why it cannot be had: that costs the trace, never the run."""
    with tempfile.TemporaryDirectory() as folder:
        exported = Path(folder) / "trace.json"
        try:
            profiler.export_chrome_trace(str(exported))
            step = cut_step(json.loads(exported.read_text(encoding="utf-8", errors="replace")), rank)
        except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
            return f"what the profiler wrote cannot be read ({type(error).__name__}: {error})"
    return step if step is not None else "the profiler saw nothing"


def write_together(path: Path, name: str, own: CutStep | str, process: Process) -> str | None:
    """Write all ranks' steps as one trace, or say why there is none. Collective.

    Each rank makes its own part of the file: all at once that takes as long as one.
    """
    outlines = process.gather(own if isinstance(own, str) else replace(own, events=[], flows=[]))
    if isinstance(own, str) or any(isinstance(outline, str) for outline in outlines):
        problems = [f"rank {rank}: {outline}" for rank, outline in enumerate(outlines) if isinstance(outline, str)]
        return "; ".join(problems)
    if process.on_cuda and any(outline.device != "cuda" for outline in outlines):
        return "the profiler saw no kernel on the GPU (CUPTI may need more rights here)"
    try:
        level, packed = fitting_level(lambda level: process.gather(pack_rank(own, outlines[0], level)))
    except ValueError as error:
        return str(error)  # the same on all ranks, who see the same sizes
    if process.is_main:
        write_packed(path, make_trace(name, outlines), level, packed)
    return None
