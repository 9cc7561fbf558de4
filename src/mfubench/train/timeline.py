"""The step that is kept as a trace: after the measured ones, on all ranks at once, with a learning rate of 0.

Weights stay as they are, and nothing measured is disturbed: step times, memory and telemetry were taken before.
"""

from __future__ import annotations

import gzip
import json
import tempfile
from dataclasses import asdict
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, record_function, schedule

from mfubench.config import RunConfig
from mfubench.model.kernels import quiet_profiler
from mfubench.profiling.chrome_trace import DATA_MARK, STEP_MARK, CutStep, cut_step
from mfubench.profiling.trace_file import Trace, make_trace, trace_of_reason, write_trace
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
    if reason is not None:
        trace = trace_of_reason(log.name, reason)
    else:
        with recorder.phase("profile", log.steps[-1].step + 1):
            training.watchdog.beat(START_FACTOR)
            profiler = profile_steps(training, take_step, batches)
            training.watchdog.beat(START_FACTOR)
            trace = gather_trace(log.name, exported_step(profiler, process.rank), process)
    if process.is_main:
        try:
            write_trace(training.paths.trace, trace)
        except ValueError as error:
            write_trace(training.paths.trace, trace_of_reason(log.name, str(error)))
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


def gather_trace(name: str, own: CutStep | str, process: Process) -> Trace:
    """All ranks' steps as one trace, or the reason why there is none. They travel packed: many and much alike."""
    packed = own if isinstance(own, str) else gzip.compress(json.dumps(asdict(own)).encode(), compresslevel=3)
    parts = process.gather(packed)
    problems = [f"rank {rank}: {part}" for rank, part in enumerate(parts) if isinstance(part, str)]
    if problems or not process.is_main:
        return trace_of_reason(name, "; ".join(problems) or "kept by rank 0")
    ranks = []
    for part in parts:
        values = json.loads(gzip.decompress(part))
        ranks.append(CutStep(**{**values, "window": tuple(values["window"])}))
    if process.on_cuda and any(rank.device != "cuda" for rank in ranks):
        return trace_of_reason(name, "the profiler saw no kernel on the GPU (CUPTI may need more rights here)")
    return make_trace(name, ranks)
