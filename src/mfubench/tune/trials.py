"""Trials of `mfubench tune`: each a short run in a process of its own, whose run JSON is kept and never made twice."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import mfubench
from mfubench.analysis.measures import measure
from mfubench.code_digest import TRAINING, code_digest
from mfubench.config import ConfigError, KernelsConfig, RunConfig
from mfubench.data.meta import DatasetMeta, read_meta
from mfubench.experiments import Overrides, build_run, merge
from mfubench.job import cards_for_job
from mfubench.lease import processes_per_node, visible_cards
from mfubench.machine import IDENTITY, describe_machine
from mfubench.prediction.calibration import shipped_calibration
from mfubench.prediction.memory import estimate_memory
from mfubench.prediction.resolved_settings import resolve_auto
from mfubench.run_log import RunLog, read_run_log, read_steps, try_writing, write_json
from mfubench.train.ranks import threads_of_a_rank
from mfubench.training_job import start_training
from mfubench.tune.search import LARGEST_MICRO_BATCH, BudgetSpent, Search, Setting, Space, Trial

TUNED = ("micro_batch_size", "gradient_accumulation_steps", "parallelism", "activation_checkpointing", "world_size")
SOURCE = Path(mfubench.__file__).parent
# Exit codes of a run that was asked to stop: in order, or before it could listen
STOPPED = (75, -signal.SIGTERM, -signal.SIGINT)
START_ON_CPU = 8  # first micro-batch where memory is the whole machine's and would allow thousands


@dataclass(frozen=True)
class Request:
    """What is asked for."""

    model: str
    data: Path
    folder: Path  # of run JSONs, logs and the result
    minutes: float
    gpus: int  # processes; on a machine without GPUs, processes on its cores
    on_cards: bool
    memory_gib: float | None  # a process may take; None: all there is
    margin: float  # share of the memory that is to stay free
    global_batch_size: int | None  # sequences a step; None: free
    parallelisms: tuple[str, ...]  # (): all that make sense
    checkpointings: tuple[str, ...]
    overrides: Overrides  # RunConfig keys that all trials share


@dataclass(frozen=True)
class Outcome:
    """What was found."""

    best: Trial | None
    config: RunConfig | None  # of the best trial
    trials: list[Trial]
    notes: list[str]
    capacity_gib: float
    seconds: float


def tune(request: Request, say: Callable[[str], None] = print) -> Outcome:
    """Search within the budget. Raises ConfigError for a request that cannot be met, OSError where nothing can be
    written."""
    check_request(request)
    try_writing(request.folder)  # before the trials, each of which would fail by itself
    start = time.monotonic()
    capacity_gib = request.memory_gib or free_memory_gib(request)
    usable_gib = capacity_gib * (1 - request.margin)
    fit = shipped_calibration().memory
    place = fingerprint(request) + read_meta(DatasetMeta, request.data).sha256

    def estimate_gib(setting: Setting) -> float:
        config = resolve_auto(run_of(request, setting))
        return estimate_memory(config, capacity_gib, fit=fit).total_gib

    def seconds_left() -> float:
        return request.minutes * 60 - (time.monotonic() - start)

    def try_setting(setting: Setting) -> Trial:
        trial = run_trial(request, setting, place, seconds_left())
        say(describe(trial, usable_gib))
        return trial

    search = Search(
        space_of(request, usable_gib),
        estimate_gib if request.on_cards else lambda setting: 0.0,  # the count is of a GPU's memory
        try_setting,
        seconds_left,
    )
    with cards_for_job(card_arguments(request)):
        best = search.run()
    config = run_of(request, best.setting) if best else None
    trials = list(search.trials.values())
    outcome = Outcome(best, config, trials, search.notes, capacity_gib, time.monotonic() - start)
    write_json(request.folder / "tune.json", to_dict(outcome))
    return outcome


def check_request(request: Request) -> None:
    """Raises ConfigError where the request contradicts itself or names what is not there."""
    for key in TUNED:
        if key in request.overrides:
            instead = "--gpus" if key == "world_size" else "--parallelism, --checkpointing or --global-batch-size"
            raise ConfigError(f"mfubench tune: {key} is what is tuned; leave it out, or narrow the search by {instead}")
    if "continues" in request.overrides:
        raise ConfigError("mfubench tune: continues: leave it out; trials start anew")
    if request.global_batch_size is not None and request.global_batch_size % request.gpus:
        raise ConfigError(
            f"--global-batch-size {request.global_batch_size} is not a multiple of {request.gpus} GPUs: "
            f"the nearest are {request.global_batch_size // request.gpus * request.gpus} and "
            f"{(request.global_batch_size // request.gpus + 1) * request.gpus}"
        )
    most = len(visible_cards()) if request.on_cards else processes_per_node()
    if request.gpus > most:
        what = "GPUs" if request.on_cards else "processes"
        raise ConfigError(f"--gpus {request.gpus}: this machine holds {most} {what}")
    if not (request.data / "meta.json").exists():
        raise ConfigError(f"--data {request.data}: holds no prepared dataset (no meta.json); prepare one first")
    if request.gpus > 1 and "none" in request.parallelisms:
        raise ConfigError(f"--parallelism none runs one process, but --gpus is {request.gpus}")
    for parallelism in request.parallelisms or ("none" if request.gpus == 1 else "ddp",):
        for checkpointing in request.checkpointings or ("none",):
            run_of(request, Setting(parallelism, checkpointing, 1, 1))  # says what is wrong with any key


def space_of(request: Request, usable_gib: float) -> Space:
    parallelisms = request.parallelisms or (("none",) if request.gpus == 1 else ("ddp", "zero1", "fsdp"))
    sequences = request.global_batch_size and request.global_batch_size // request.gpus
    return Space(
        parallelisms=parallelisms,
        checkpointings=request.checkpointings or ("none", "selective", "full"),
        usable_gib=usable_gib,
        sequences=sequences,
        start_at_most=LARGEST_MICRO_BATCH if request.on_cards else START_ON_CPU,
    )


def free_memory_gib(request: Request) -> float:
    """Memory of the smallest card that may be used; on a machine without cards, each process's share."""
    if request.on_cards:
        return min(card_memory_gib(card) for card in visible_cards())
    import psutil

    return float(psutil.virtual_memory().available / 2**30 / request.gpus)


def card_memory_gib(card: str) -> float:
    """What the driver reports of a card, by its index or UUID, as in CUDA_VISIBLE_DEVICES."""
    with driver_of(card) as (pynvml, handle):
        return float(pynvml.nvmlDeviceGetMemoryInfo(handle).total / 2**30)


def power_limit_w(card: str) -> float | None:
    """As `card_memory_gib`, of its power limit; None where the driver does not tell."""
    with driver_of(card) as (pynvml, handle):
        try:
            return float(pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000)
        except pynvml.NVMLError:
            return None


@contextlib.contextmanager
def driver_of(card: str) -> Iterator[tuple[Any, Any]]:
    """pynvml, and the handle of a card by its index or UUID."""
    import pynvml

    pynvml.nvmlInit()
    try:
        if card.isdigit():
            yield pynvml, pynvml.nvmlDeviceGetHandleByIndex(int(card))
        else:
            yield pynvml, pynvml.nvmlDeviceGetHandleByUUID(card)
    finally:
        pynvml.nvmlShutdown()


def card_arguments(request: Request) -> argparse.Namespace:
    cards = request.gpus if request.on_cards else 0
    return argparse.Namespace(cards=cards, devices=None, when_busy="stop", wait_s=3600.0)


# --- one trial -------------------------------------------------------------------------------------------------------


def run_of(request: Request, setting: Setting) -> RunConfig:
    """The run of a trial: short, and stopped as soon as its median is known to 1 %."""
    defaults: Overrides = {
        "model": request.model,
        "dataset": request.data.resolve().name,
        "seq_len": 2048 if request.on_cards else 256,
        "dtype": "bfloat16" if request.on_cards else "float32",
        "compile": "block" if request.on_cards else "none",
        "kernels": dict.fromkeys(KernelsConfig.model_fields, "auto" if request.on_cards else "plain"),
        "max_iters": 60,
        "memory_cap_gib": request.memory_gib,
        "measurement": {
            "adaptive": True,
            "preheat_s": 3.0 if request.on_cards else 0.0,
            "min_steps": 8,
            "tolerance": 0.01,
            "profile": "none",
        },
    }
    tuned = {"name": f"tune/{setting.name}", "world_size": request.gpus, **asdict(setting)}
    return build_run((merge(defaults, request.overrides), tuned), "mfubench tune")


def fingerprint(request: Request) -> str:
    """This machine, what changes its speed, and the code that trains: a run of others is no answer here, so it is not
    found."""
    machine = describe_machine()
    identity: dict[str, Any] = {key: machine[key] for key in IDENTITY}
    if request.on_cards:
        identity["power_limits_w"] = [power_limit_w(card) for card in visible_cards()]
    else:
        identity["threads"] = threads_of_a_rank(request.gpus)
    return json.dumps(identity, sort_keys=True) + code_digest([SOURCE / name for name in TRAINING])


def run_trial(request: Request, setting: Setting, place: str, seconds_left: float) -> Trial:
    """Take the run of this very configuration from the folder, or make it. `place`: `fingerprint`, and the data's.

    Raises BudgetSpent when it was not done after `seconds_left`, KeyboardInterrupt when somebody else stopped it.
    """
    config = run_of(request, setting)
    digest = hashlib.sha256((place + config.to_json()).encode()).hexdigest()[:12]
    output = request.folder / "runs" / f"{setting.name}-{digest}.json"
    if output.exists():
        return replace(trial_of(setting, read_run_log(output), 0.0), cached=True)
    start = time.monotonic()
    work = request.folder / "work" / f"{setting.name}-{digest}"
    patience_s = max(0.0, seconds_left)
    heard: list[int] = []
    code = start_training(
        config.to_json(),
        data=request.data,
        work=work,
        output=output,
        resume="never",
        patience_s=patience_s,
        heard=heard,
    )
    seconds = time.monotonic() - start
    if code in STOPPED:
        shutil.rmtree(work / "checkpoints", ignore_errors=True)  # as large as the model, and a trial begins anew
        if seconds < patience_s:
            raise KeyboardInterrupt
        done = len(read_steps(work / "steps.jsonl"))
        raise BudgetSpent(f"within {setting.name}, which had done {done} of up to {config.max_iters} steps")
    if heard:  # when the trial was as good as done; its run JSON, if it left one, is found by the next call
        raise KeyboardInterrupt
    if code != 0:
        return Trial(setting, "failed", f"exit code {code}, see {work}", 0.0, None, None, seconds)
    return trial_of(setting, read_run_log(output), seconds)


def trial_of(setting: Setting, log: RunLog, seconds: float) -> Trial:
    measures = measure(log, ceilings=None)
    return Trial(
        setting=setting,
        status=log.status,
        reason=log.reason,
        tokens_per_s=measures.tokens_per_s or 0.0,
        mfu=measures.headline_mfu,
        peak_memory_gib=measures.peak_memory_gib,
        seconds=seconds,
    )


def describe(trial: Trial, usable_gib: float) -> str:
    """One line for who waits."""
    if trial.status != "ok":
        return f"{trial.setting.name}: {trial.status}"
    memory = f"{trial.peak_memory_gib:.2f} GiB" if trial.peak_memory_gib is not None else "memory unknown"
    margin = "" if trial.fits(usable_gib) else ", into the margin"
    known = ", known from an earlier run" if trial.cached else ""
    return f"{trial.setting.name}: {trial.tokens_per_s:,.0f} tokens/s, {memory}{margin}{known}"


def to_dict(outcome: Outcome) -> dict[str, Any]:
    """The outcome as plain data, units in the keys."""
    return {
        "best": asdict(outcome.best) if outcome.best else None,
        "config": json.loads(outcome.config.to_json()) if outcome.config else None,
        "trials": [asdict(trial) for trial in outcome.trials],
        "notes": outcome.notes,
        "capacity_gib": outcome.capacity_gib,
        "seconds": outcome.seconds,
    }
