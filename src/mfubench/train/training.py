"""A run between being built and being over, and what is done to it between steps: evaluate, save, measure, finish."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import psutil
import torch
from torch import Tensor

from mfubench.config import ConfigError, RunConfig
from mfubench.data.reader import TokenDataset, check_tokenizer
from mfubench.model import Decoder
from mfubench.model.kernels import kernels_match, profile_kernels
from mfubench.run_log import RunLog, Wall, read_run_log, write_run_log
from mfubench.telemetry import Sampler
from mfubench.train import checkpoint
from mfubench.train.arguments import Paths, ResumeMode, result_of
from mfubench.train.checkpoint_files import damage_told
from mfubench.train.checkpoint_folders import (
    complete,
    find_latest,
    latest,
    prepare_folder,
    remove,
    trained_on_other_data,
)
from mfubench.train.choices import Resolved
from mfubench.train.evaluation import evaluate, sample
from mfubench.train.failures import classify, remove_result
from mfubench.train.meters import Recorder, memory_of
from mfubench.train.optimizer import Optimizer
from mfubench.train.parallel import Engine
from mfubench.train.process import Process
from mfubench.train.setup import build_engine, count_parameters, open_data, run_flop_terms
from mfubench.train.step import GraphedStep, StepFunction, TrainStep, warm_up
from mfubench.train.watchdog import START_FACTOR, Watchdog


class Skip(Exception):
    """A required setting turned out not to be had here."""


def process_began() -> float:
    """When this process did, by time.perf_counter(): the wall clock may be set while a run lasts."""
    return time.perf_counter() - (time.time() - psutil.Process().create_time())


@dataclass
class Training:
    config: RunConfig
    paths: Paths
    process: Process
    resolved: Resolved
    log: RunLog
    watchdog: Watchdog
    model: Decoder
    engine: Engine
    optimizer: Optimizer
    train_tokens: TokenDataset
    val_tokens: TokenDataset | None
    recorder: Recorder
    sampler: Sampler | None = None  # rank 0 has it
    first_step: int = 0
    keeps_checkpoints: bool = False  # of an earlier process, from the last of which it starts
    goes_on: bool = False  # from a checkpoint of its own, after steps that it did itself
    graphs_before: str | None = None  # what those used of cuda_graphs, "true" or "false", where that is known
    position: int = 0  # the next unread sequence of the endless stream
    began: float = field(default_factory=process_began)  # these three by time.perf_counter()
    joined_at: float = math.nan  # all ranks had met
    chosen_at: float = math.nan  # it was known what runs

    @property
    def nothing_left(self) -> bool:
        """Whether an earlier process did all steps, which the log then tells of."""
        done_before = self.goes_on and not checkpoint.trains(self.config, self.first_step)
        return done_before and not self.log.resumes[-1].changed

    @property
    def state(self) -> checkpoint.State:
        return checkpoint.State(self.engine, self.optimizer, self.process, self.config)


def build(
    config: RunConfig,
    paths: Paths,
    process: Process,
    resolved: Resolved,
    log: RunLog,
    watchdog: Watchdog,
    resume: ResumeMode,
) -> Training:
    """Data, model and optimizer, from the last checkpoint where there is one to go on from."""
    t0 = time.perf_counter()
    train_tokens, val_tokens, log.dataset = open_data(paths.data, config)
    if config.sample_tokens and paths.tokenizer is not None:
        check_tokenizer(train_tokens.meta, paths.tokenizer)
    model, engine = build_engine(config, resolved, process)
    optimizer = Optimizer(
        engine,
        config.optimizer,
        process=process,
        scale_loss=resolved.dtype == torch.float16,
        fused=resolved.used["adamw"].used == "fused",
    )
    log.parameters, log.flop_terms = count_parameters(model), run_flop_terms(config)
    own = own_checkpoint(paths, log, resume)
    if process.is_main:
        prepare_folder(paths.checkpoints, own is not None, config, log.parameters.total)
    process.barrier()
    recorder = Recorder(log, config, process)
    training = Training(
        config, paths, process, resolved, log, watchdog, model, engine, optimizer, train_tokens, val_tokens, recorder
    )
    if (start := own or first_checkpoint(config, paths)) is not None:
        training.first_step, training.position = checkpoint.load(start, training.state, log, is_start=own is None)
        training.keeps_checkpoints = own is not None
        training.goes_on = own is not None and training.first_step > 0
        if training.goes_on:
            training.graphs_before = checkpoint.used_before(start, "cuda_graphs")
        recorder.take_history()
    elif config.evaluation.only:
        raise ConfigError(f"{paths.checkpoints}: evaluation.only needs a checkpoint to go on from, and there is none")
    if process.is_main:
        write_run_log(paths.partial, log)
    recorder.add_phase("setup", training.first_step, time.perf_counter() - t0)
    return training


def own_checkpoint(paths: Paths, log: RunLog, resume: ResumeMode) -> Path | None:
    """The run's own checkpoint to go on from, if there is one that `resume` allows for."""
    own = latest(paths.checkpoints) if resume != "never" else None
    if own is None or resume == "always":
        return own
    with damage_told(own):
        return None if trained_on_other_data(own, log.dataset) else own


def replace_earlier(training: Training) -> None:
    """Remove the result of an earlier attempt and, where the run starts anew, its checkpoints. Collective.

    Not before all ranks have passed their checks: an attempt that is refused costs nothing.
    """
    training.process.barrier()
    if training.process.is_main:
        remove_result(training.paths)
        for earlier in [] if training.keeps_checkpoints else complete(training.paths.checkpoints):
            remove(earlier)


def first_checkpoint(config: RunConfig, paths: Paths) -> Path | None:
    """Where a run that continues another starts; None for any other run. Raises ConfigError where it is not there."""
    if config.continues is None:
        return None
    if paths.start_from is None:
        raise ConfigError(f"continues: {config.continues}: say where its checkpoints are (--start-from FOLDER)")
    found = find_latest(paths.start_from)
    if found is None:
        cause = bad_end(paths.start_from, config.continues)
        raise ConfigError(
            f"{paths.start_from}: no checkpoint of {config.continues} found (looked there and one folder below); "
            + (cause or "name its work folder or the checkpoints in it, or run it again")
        )
    return found


def bad_end(folder: Path, name: str) -> str | None:
    """Why a run left no checkpoint, and what to do, where its result says so; `folder`: of its work or checkpoints."""
    work = folder.parent if folder.name == "checkpoints" else folder
    if not (work / "partial.json").exists() or (result := result_of(work, name)) is None:
        return None
    log = read_run_log(result)
    if log.status == "ok":
        return None
    return f"that run ended as {log.status} ({log.reason}): change its settings, or take `continues` away"


def prepare_measurement(training: Training, step: TrainStep, inputs: Tensor, labels: Tensor) -> None:
    """After the first step: name the kernels of one more forward and backward pass, then let the clocks settle.

    Neither changes weights or optimizer: the losses are those of a run without.
    """
    process, recorder, measurement = training.process, training.recorder, training.config.measurement
    done = training.first_step + 1

    def once() -> None:
        step.forward_backward(inputs[:1], labels[:1])

    if measurement.profile != "none":
        with recorder.phase("profile", done):
            if process.is_main:
                training.log.kernels = profile_kernels(once, process.device)
                used = training.resolved.used["attention"].used
                if (mismatch := kernels_match(used, training.log.kernels, process.device)) is not None:
                    raise RuntimeError(mismatch)
            else:
                once()
    if measurement.preheat_s > 0:
        with recorder.phase("preheat", done):
            t0 = time.perf_counter()
            hot = False
            while not hot:
                step.forward_backward(inputs, labels)
                recorder.clock.synchronize()
                training.watchdog.beat(START_FACTOR)
                seconds = time.perf_counter() - t0 if process.is_main else 0.0
                hot = process.maximum([int(seconds >= measurement.preheat_s)]) == [1]


def capture(training: Training, step: TrainStep, inputs: Tensor, labels: Tensor) -> StepFunction:
    """The step as a CUDA graph or, where some rank cannot capture it, as it is. Collective.

    Raises Skip where the run requires graphs.
    """
    graphed, problem = None, None
    with training.recorder.phase("setup", training.first_step + 1):
        warm_up(step, inputs, labels)  # its sums over the ranks are real: a rank that fails alone in them has to say so
        try:
            graphed = GraphedStep(step, inputs, labels)
        except RuntimeError as error:
            if classify(error) == "oom":
                raise
            first = error.__context__ or error  # the end of a broken capture complains once more, of less
            problem = f"the capture failed: {(str(first) or repr(first)).splitlines()[0]}"
        failed = training.process.maximum([int(graphed is None)]) == [1]
    if graphed is not None and not failed:
        return graphed
    training.resolved.fall_back("cuda_graphs", "false", problem or "the capture failed on another rank")
    if (reason := training.resolved.missing(training.config)) is not None:
        raise Skip(reason)
    return step


def note_graphs(training: Training) -> bool:
    """After the first step, when it is known whether steps are captured: say so in the record of an out-of-memory too.

    Returns whether steps of an earlier process differ in that, and therefore count as warm-up from now on.
    """
    log, used = training.log, training.resolved.used
    fell_back = log.used["cuda_graphs"] != used["cuda_graphs"]
    changed = training.goes_on and checkpoint.compare_graphs(log, training.graphs_before, used["cuda_graphs"].used)
    log.used = used
    if (fell_back or changed) and training.process.is_main:
        write_run_log(training.paths.partial, log)
    return changed


def evaluate_now(training: Training, done: int) -> None:
    """Loss on the validation tokens after `done` steps."""
    assert training.val_tokens is not None  # open_data has seen to it
    training.watchdog.beat(START_FACTOR)
    with training.recorder.phase("evaluation", done):
        training.engine.settle()
        training.log.evaluations.append(
            evaluate(training.model, training.val_tokens, training.config, training.process, done)
        )


def save_now(training: Training, done: int) -> Path:
    """Write the checkpoint after `done` steps; returns its folder."""
    training.watchdog.beat(START_FACTOR)
    with training.recorder.phase("checkpoint", done):
        note_what_ran(training)
        return checkpoint.save(training.paths.checkpoints, done, training.position, training.state, training.log)


def note_what_ran(training: Training) -> None:
    """The ranks' step times, their memory, the choices that ran and what ran beside them. Collective."""
    log, process, recorder = training.log, training.process, training.recorder
    log.rank_step_times_s = process.gather(recorder.rank_times)
    memory = process.gather(recorder.memory or memory_of(process))
    if not training.nothing_left:
        log.memory = memory
        log.used = training.resolved.used  # one may have fallen back since the log was begun
        if training.sampler is not None:
            log.telemetry = training.sampler.summarize(recorder.measured_intervals())


def finish(training: Training) -> None:
    """Complete the run log. Collective."""
    log, process, recorder = training.log, training.process, training.recorder
    if training.config.sample_tokens and log.status == "ok":
        training.watchdog.beat(START_FACTOR)
        with recorder.phase("sample", training.config.max_iters):
            log.sample = sample(
                training.model, training.train_tokens, training.config, process, training.paths.tokenizer
            )
    note_what_ran(training)
    log.wall = Wall(
        started_at=datetime.fromtimestamp(psutil.Process().create_time(), UTC).isoformat(),
        total_s=time.perf_counter() - training.began,
        training_s=recorder.training_s,
        training_tokens=recorder.tokens_here,
        joined_s=training.joined_at - training.began,
        chosen_s=training.chosen_at - training.joined_at,
    )
