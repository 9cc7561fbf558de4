"""Measured runs as the step and memory models see them: what ran, what it took, what they say it should take."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mfubench.ceilings import Ceilings, read_ceilings
from mfubench.config import ConfigError, KernelsConfig, MemorySearch, RunConfig
from mfubench.hardware import find_gpu, is_on
from mfubench.prediction.card_rates import card_rates
from mfubench.prediction.resolved_settings import resolve_auto
from mfubench.prediction.step_model import step_terms
from mfubench.presets import CONFIG_DIR
from mfubench.result_files import find_results, is_run_log, read_json
from mfubench.run_log import Choice, RunLog, read_run_log

REFERENCE = CONFIG_DIR.parent / "results" / "reference"  # measured studies that ship with the project


@dataclass(frozen=True)
class Observation:
    """One measured run: what the model says a step takes, term by term, and what it took."""

    name: str
    gpu: str  # key of the hardware row
    config: RunConfig  # as it ran, not as it was asked for
    terms: dict[str, float]  # seconds
    step_s: float  # median of the measured steps

    def repeats(self, other: Observation) -> bool:
        """Whether both runs are predicted alike: what they differ by is noise that no prediction can know."""
        return self.gpu == other.gpu and self.terms == other.terms


@dataclass(frozen=True)
class MemoryObservation:
    """What the allocator of one setting's fullest rank reserved at its peak, and what of it tensors took."""

    name: str
    config: RunConfig
    capacity_gib: float
    peak_reserved_gib: float
    peak_allocated_gib: float | None = None  # searches do not record it


@dataclass(frozen=True)
class MemoryLimit:
    """The result of a memory search that found its limit."""

    name: str
    config: RunConfig
    capacity_gib: float
    largest_micro_batch_size: int


# --- reading ---------------------------------------------------------------------------------------------------------


def json_files(folders: Sequence[Path]) -> Iterator[tuple[Path, Any]]:
    """Every JSON object below some folders that may be a result (`find_results`), in the order of paths.

    Raises ConfigError for a folder that is missing, and for a file that is no JSON.
    """
    for folder in folders:
        if not folder.exists():
            raise ConfigError(f"{folder}: no such folder; give one that holds results of a study")
        for path in find_results(folder) if folder.is_dir() else [folder]:
            value = read_json(path)
            if isinstance(value, dict):
                yield path, value


def hold_runs(folders: Sequence[Path]) -> bool:
    return any(is_run_log(value) for _, value in json_files(folders))


def read_runs(folders: Sequence[Path]) -> list[RunLog]:
    """The run JSONs below some folders; tables, searches and ceilings beside them are left alone.

    Raises ConfigError where there is no run.
    """
    logs = [read_run_log(path) for path, value in json_files(folders) if is_run_log(value)]
    if not logs:
        raise ConfigError(f"{', '.join(map(str, folders))}: no run JSON in here; give a folder with results of a study")
    return logs


def read_all_ceilings(folders: Sequence[Path]) -> list[Ceilings]:
    return [read_ceilings(path) for path, value in json_files(folders) if "matmuls" in value]


def read_memory_searches(folders: Sequence[Path]) -> tuple[list[MemoryObservation], list[MemoryLimit]]:
    """Peaks of the trials of memory searches, and the limits that are exact."""
    observations, limits = [], []
    for _, value in json_files(folders):
        if "trials" not in value or "largest_is_exact" not in value:
            continue
        config = MemorySearch.model_validate_json(json.dumps(value["search"])).run
        if "used" in value:
            config = with_used(config, {key: Choice.model_validate(choice) for key, choice in value["used"].items()})
        else:  # of a search that does not say what ran
            config = resolve_auto(config)
        for trial in value["trials"]:
            if trial["status"] == "ok" and trial["peak_memory_gib"] is not None:
                size = trial["micro_batch_size"]
                trial_config = config.model_copy(update={"micro_batch_size": size})
                name = f"{value['name']}, micro-batch {size}"
                observations.append(
                    MemoryObservation(name, trial_config, value["memory_gib"], trial["peak_memory_gib"])
                )
        if value["largest_is_exact"] and value["largest"]:
            limits.append(MemoryLimit(value["name"], config, value["memory_gib"], value["largest"]))
    return observations, limits


# --- observing -------------------------------------------------------------------------------------------------------


def as_run(log: RunLog) -> RunConfig:
    """The configuration with every setting that fell back replaced by what ran."""
    return with_used(log.config, log.used)


def with_used(config: RunConfig, used: Mapping[str, Choice]) -> RunConfig:
    """`config` with its settings replaced by what was used of them."""
    words = ("attention", "compile", "loss", "dtype", "parallelism")
    changes: dict[str, Any] = {key: used[key].used for key in words if key in used}
    changes |= {key: is_on(used[key]) for key in ("cuda_graphs", "tf32", "fp8") if key in used}
    kernels = {key: used[key].used for key in KernelsConfig.model_fields if key in used}
    changes["kernels"] = config.kernels.model_copy(update=kernels)
    if "reduction" in used:
        changes["communication"] = config.communication.model_copy(update={"reduction": used["reduction"].used})
    return config.model_copy(update=changes)


def observe(logs: Sequence[RunLog], ceilings: Sequence[Ceilings] = ()) -> list[Observation]:
    """The runs that measured steps on GPUs; others (CPU, out of memory, skipped) say nothing about the step's time."""
    observations = []
    for log in logs:
        steps = [step.step_time_s for step in log.measured_steps()]
        if log.status == "ok" and steps and log.environment.gpus:
            config, gpu = as_run(log), log.environment.gpus[0].name
            terms = step_terms(config, card_rates(gpu, config, ceilings))
            observations.append(Observation(log.name, find_gpu(gpu).key, config, terms, float(np.median(steps))))
    return observations


def observe_memory(logs: Sequence[RunLog]) -> list[MemoryObservation]:
    """Peaks of the runs that went well on GPUs."""
    observations = []
    for log in logs:
        reserved = [memory.peak_reserved_gib for memory in log.memory if memory.peak_reserved_gib is not None]
        allocated = [memory.peak_allocated_gib for memory in log.memory if memory.peak_allocated_gib is not None]
        if log.status == "ok" and reserved:
            capacity_gib = min(gpu.memory_gib for gpu in log.environment.gpus)
            tensors = max(allocated, default=None)
            observations.append(MemoryObservation(log.name, as_run(log), capacity_gib, max(reserved), tensors))
    return observations
