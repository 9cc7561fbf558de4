"""The training loop, top to bottom."""

from __future__ import annotations

import gc
import os
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from mfubench.config import RunConfig
from mfubench.run_log import RunLog, write_run_log
from mfubench.telemetry import Sampler
from mfubench.train.arguments import Paths, ResumeMode
from mfubench.train.choices import Resolved, refuse_unlike, resolve
from mfubench.train.control import Control, first_lost
from mfubench.train.environment import capture_environment
from mfubench.train.failures import remove_result
from mfubench.train.gradients import GradientMeter
from mfubench.train.loader import Batches
from mfubench.train.optimizer import learning_rate_at
from mfubench.train.process import Process
from mfubench.train.progress import Display
from mfubench.train.reporter import Reporter
from mfubench.train.setup import cap_memory, keep_kernels, set_flags
from mfubench.train.step import StepFunction, TrainStep
from mfubench.train.timeline import keep_timeline, profiled_steps
from mfubench.train.training import (
    Skip,
    Training,
    build,
    capture,
    evaluate_now,
    finish,
    note_graphs,
    prepare_measurement,
    replace_earlier,
    save_now,
)
from mfubench.train.watchdog import Watchdog


class Stopped(Exception):
    """The run was asked to stop, and a checkpoint was written after `done` steps."""

    def __init__(self, done: int, folder: Path):
        super().__init__(f"stopped after {done} steps, checkpoint {folder}")
        self.done, self.folder = done, folder


def train(
    config: RunConfig,
    paths: Paths,
    process: Process,
    watchdog: Watchdog,
    *,
    resume: ResumeMode,
    display: Display | None,
) -> RunLog:
    """Train one run as this rank and return its log, complete on rank 0.

    Raises ConfigError for what a person must change, and Stopped after a checkpoint on request.
    """
    joined_at = time.perf_counter()
    keep_kernels(process)
    resolved = resolve(config, process)
    refuse_unlike(resolved, process)
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
        if process.is_main:
            remove_result(paths)
        return log
    if process.is_main:
        write_run_log(paths.partial, log)
    if config.memory_cap_gib is not None:
        process.barrier()  # an out-of-memory of any rank is a result from here on, made of that record
        cap_memory(config.memory_cap_gib, process)
    chosen_at = time.perf_counter()
    with sample_telemetry(paths, process) as sampler, stream_of_the_run(resolved):
        training = build(config, paths, process, resolved, log, watchdog, resume)
        training.sampler, training.joined_at, training.chosen_at = sampler, joined_at, chosen_at
        reporter = None if config.evaluation.only else Reporter(paths, log, process, display)
        replace_earlier(training)
        if reporter is None:
            evaluate_now(training, training.first_step)
            log.status, log.reason = "ok", None
        else:
            try:
                run_steps(training, reporter)
            except Skip as skip:
                log.status, log.reason = "skipped", str(skip)
        finish(training)
    return log


def sample_telemetry(paths: Paths, process: Process) -> AbstractContextManager[Sampler | None]:
    """Power, clocks and load of rank 0's node, sampled by a process of its own."""
    if not process.is_main:
        return nullcontext()
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", process.world_size))
    return Sampler(paths.work, gpu_indices=range(ranks_here) if process.on_cuda else ())


def stream_of_the_run(resolved: Resolved) -> AbstractContextManager[object]:
    """A graph is captured on a stream that is not the default one: all work is on it, so that none waits."""
    return torch.cuda.stream(torch.cuda.Stream()) if resolved.is_on("cuda_graphs") else nullcontext()


def run_steps(training: Training, reporter: Reporter) -> None:
    """Steps first_step ... max_iters - 1, and what is done between them."""
    config, log, recorder, optimizer = training.config, training.log, training.recorder, training.optimizer
    first_step, process, measurement = training.first_step, training.process, config.measurement
    count = config.max_iters - first_step + profiled_steps(config)
    batches = Batches(training.train_tokens, config, process, training.position, count)
    eager_step = TrainStep(training.model, training.engine, optimizer)
    take_step: StepFunction = eager_step
    gradients = GradientMeter(training.engine, optimizer, process)
    control = Control(config, process, log)

    if config.evaluation.at_start and not training.goes_on:
        evaluate_now(training, done=first_step)
    gc.collect()
    gc.freeze()  # what lives now stays; what dies later is collected at control points, not within a step
    gc.disable()
    t0 = time.perf_counter()
    recorder.begin()
    for step in range(first_step, config.max_iters):
        done = step + 1
        inputs, labels, data_time_s = batches.next()
        learning_rate = learning_rate_at(step, config.optimizer)
        optimizer.set_learning_rate(learning_rate)
        loss, grad_norm = take_step(inputs, labels)
        data_time_s += batches.prefetch()  # while the device computes
        training.position += config.global_batch_size
        recorder.add(step, loss, grad_norm, data_time_s, learning_rate)

        if measurement.gradient_interval and step % measurement.gradient_interval == 0:
            with recorder.phase("logging", done):
                gradients.measure(step)
        if step == first_step:
            prepare_measurement(training, eager_step, inputs, labels)
            if training.resolved.is_on("cuda_graphs"):
                take_step = capture(training, eager_step, inputs, labels)
            if note_graphs(training):
                reporter.begin()
        if not control.due(step):
            continue

        steps = recorder.collect()
        with recorder.phase("logging", done):
            log.gradient_statistics += gradients.collect()
            reporter.report(steps)
            gc.collect(1)
            stop, enough = control.agree(step, training.watchdog.stop_requested)
            training.watchdog.beat()
        if (lost := first_lost(steps)) is not None:
            log.status, log.reason = "diverged", f"the loss of step {lost.step} is not finite"
            break
        over = enough or done == config.max_iters
        if due(done, config.evaluation.interval) or (over and config.evaluation.at_end):
            evaluate_now(training, done)
        if due(done, config.checkpoint.interval) or (config.checkpoint.at_end if over else stop):
            folder = save_now(training, done)
            if stop and not over:
                raise Stopped(done, folder)
        if over:
            break
    training.engine.settle()
    if log.status == "failed":
        log.status, log.reason = "ok", None
    recorder.training_s = time.perf_counter() - t0
    if measurement.profile == "timeline":
        keep_timeline(training, take_step, batches)
    gc.enable()
    gc.unfreeze()
    reporter.close()


def due(done: int, interval: int | None) -> bool:
    return interval is not None and done % interval == 0
