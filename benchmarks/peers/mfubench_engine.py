"""mfubench's own engine, as `mfubench train` runs it; its run JSON becomes the same record as the peers'.

Settings are keys of RunConfig (`compile`, `attention`, `cuda_graphs`, `optimizer.…`), over the job's run.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
import time
from datetime import datetime
from pathlib import Path

from benchmarks.peers.job import Job, Record, Status, read_job
from mfubench import __version__
from mfubench.config import RunConfig, parse
from mfubench.experiments import merge, nest
from mfubench.run_log import RunLog, read_run_log
from mfubench.train.launch import main as launch

USUAL_STEP_S = 1.0  # of the production cases, where no earlier run tells
STATUS: dict[str, Status] = {"ok": "ok", "oom": "oom", "skipped": "missing"}


def run_config(job: Job) -> RunConfig:
    """The job's run with the settings in it, as long as the job wants to measure."""
    steps = max(job.min_steps, math.ceil(job.measure_s / (job.step_time_s or USUAL_STEP_S)))
    base = job.run.model_dump(mode="json", exclude={"global_batch_size"})
    measurement = {"preheat_s": job.preheat_s, "warmup_steps": job.warmup_steps}
    schedule = {"max_iters": 1 + job.warmup_steps + steps, "measurement": base["measurement"] | measurement}
    return parse(RunConfig, merge(merge(base, schedule), nest(job.settings)), f"settings of {job.system}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Run one job of a benchmark with mfubench's engine.")
    parser.add_argument("--job", required=True, type=Path)
    job = read_job(parser.parse_args().job)
    run, output, failure = run_config(job), job.folder / "run.json", job.folder / "failure.json"
    for path in (output, failure):
        path.unlink(missing_ok=True)
    record = Record("failed", world_size=run.world_size, job=job.identity, command=shlex.join(sys.orig_argv))
    record.version = f"{__version__}, code {job.code[:8]}"
    arguments = ["--config", run.to_json(), "--data", job.data, "--work", job.work, "--output", str(output)]
    launch([*arguments, "--resume", "never"])
    if output.exists():
        describe(record, read_run_log(output))
    else:
        why = json.loads(failure.read_text(encoding="utf-8")) if failure.exists() else {"reason": "its log says why"}
        record.reason = f"the run failed: {why['reason']}"
    record.write(job.output)
    return 0 if record.status == "ok" else 1


def describe(record: Record, log: RunLog) -> None:
    """Fill in what a run JSON tells."""
    record.status, record.reason = STATUS.get(log.status, "failed"), log.reason
    record.torch = log.environment.torch
    record.card = log.environment.gpus[0].name if log.environment.gpus else None
    record.parameters = log.parameters.total if log.parameters else None
    record.master_weights = "float32"
    optimizer = log.config.optimizer
    record.optimizer = (
        f"AdamW, fused, betas {(optimizer.beta1, optimizer.beta2)}, weight decay {[0.0, optimizer.weight_decay]}"
    )
    record.variables = log.environment.variables
    record.telemetry = dict(log.telemetry) if log.telemetry is not None else None
    if log.memory:
        record.peak_allocated_gib = log.memory[0].peak_allocated_gib
        record.peak_reserved_gib = log.memory[0].peak_reserved_gib
    for name, choice in log.used.items():
        reason = f" ({choice.reason})" if choice.reason else ""
        record.notes.append(f"{name}: {choice.used}{reason}")
    steps = log.measured_steps()
    if not steps:
        return
    record.step_times_s = [step.step_time_s for step in steps]
    record.steps, record.tokens = len(steps), sum(step.tokens for step in steps)
    # what the engine does between steps (reading out losses, writing them down) is in a peer's steps: it counts
    between = sum(phase.time_s for phase in log.phases if phase.kind == "logging" and steps[0].step < phase.after_step)
    record.seconds = sum(record.step_times_s) + between
    if log.wall is not None:
        ended_at = datetime.fromisoformat(log.wall.started_at).timestamp() + log.wall.total_s
        record.started_at = min(ended_at, time.time()) - record.seconds


if __name__ == "__main__":
    sys.exit(main())
