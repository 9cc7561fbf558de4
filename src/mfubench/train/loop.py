"""The training loop, top to bottom: choose, build, resume, train, finish."""

from __future__ import annotations

import gc
import math
import signal
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import psutil
import torch

from mfubench.config import RunConfig
from mfubench.run_log import RunLog, Wall, append_step, write_run_log
from mfubench.train.choices import resolve
from mfubench.train.control import Control
from mfubench.train.environment import capture_environment
from mfubench.train.loader import Batches
from mfubench.train.meters import Recorder, memory_of
from mfubench.train.optimizer import Optimizer, learning_rate_at
from mfubench.train.process import Process
from mfubench.train.setup import build_engine, count_parameters, open_data, run_flop_terms, set_flags
from mfubench.train.step import GraphedStep, StepFunction, TrainStep


@dataclass(frozen=True)
class Paths:
    """Where a run reads and writes."""

    data: Path
    work: Path
    output: Path
    tokenizer: Path | None = None

    @property
    def steps(self) -> Path:
        return self.work / "steps.jsonl"

    @property
    def partial(self) -> Path:
        """The run log so far, without steps: what the record of an out-of-memory is made of."""
        return self.work / "partial.json"


def train(config: RunConfig, paths: Paths, process: Process) -> RunLog:
    """Train one run on this rank and return its log (complete on rank 0)."""
    t0 = time.perf_counter()

    # 1. What is used here
    resolved = resolve(config, process)
    set_flags(config, resolved, process)
    log = RunLog(
        name=config.name,
        status="failed",
        reason="did not finish",
        config=config,
        environment=capture_environment(process),
        used=resolved.used,
    )
    if reason := resolved.missing(config):
        log.status, log.reason = "skipped", reason
        return log

    # 2. Data, model, optimizer
    train_tokens, _val_tokens, log.dataset = open_data(paths.data, config)
    model, engine = build_engine(config, resolved, process)
    log.parameters, log.flop_terms = count_parameters(model, config), run_flop_terms(config)
    optimizer = Optimizer(engine, config.optimizer, process=process, scale_loss=resolved.dtype == torch.float16)
    if process.is_main:
        write_run_log(paths.partial, log)
        paths.steps.unlink(missing_ok=True)
    batches = Batches(train_tokens, config, process, first_position=0, steps=config.max_iters)
    take_step: StepFunction = TrainStep(model, engine, optimizer)
    recorder = Recorder(log, config, process)
    control = Control(config, process)

    # 3. Train
    training_t0 = time.perf_counter()
    recorder.begin()
    for step in range(config.max_iters):
        inputs, labels, data_time_s = batches.next()
        learning_rate = learning_rate_at(step, config.optimizer)
        optimizer.set_learning_rate(learning_rate)
        loss, grad_norm = take_step(inputs, labels)
        data_time_s += batches.prefetch()
        recorder.add(step, "measured", loss, grad_norm, data_time_s, learning_rate)

        if control.due(step):
            steps = recorder.collect()
            if process.is_main:
                for record in steps:
                    append_step(paths.steps, record)
            lost = next((record for record in steps if record.loss is None or not math.isfinite(record.loss)), None)
            if lost is not None:
                log.status, log.reason = "diverged", f"the loss of step {lost.step} is not finite"
                break
            control.plan(step, steps)
    else:
        log.status, log.reason = "ok", None
    training_s = time.perf_counter() - training_t0

    # 4. Finish
    log.rank_step_times_s = process.gather(recorder.rank_times)
    log.memory = process.gather(memory_of(process))
    started_at = psutil.Process().create_time()
    log.wall = Wall(
        started_at=datetime.fromtimestamp(started_at, UTC).isoformat(),
        total_s=time.time() - started_at,
        training_s=training_s,
        training_tokens=recorder.tokens_here,
    )
    return log
