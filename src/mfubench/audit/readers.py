"""From a path to what it holds: our run JSONs, legacy run logs, files of reported figures, folders of any of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mfubench.audit.reported import ReportedRun, make_reported
from mfubench.config import ConfigError
from mfubench.result_files import find_results, is_run_log, read_json
from mfubench.run_log import RunLog, read_run_log

# What the top-level `source` of a file of reported figures and its runs may hold beside figures.
IGNORED_KEYS = {"source", "note", "notes"}


@dataclass(frozen=True)
class Source:
    """What one file holds: a run of ours, or runs of one system that share its habits."""

    path: Path
    log: RunLog | None = None
    reported: tuple[ReportedRun, ...] = ()


def read_sources(paths: Iterable[Path]) -> list[Source]:
    """Read all files, each once; folders are searched for run JSONs.

    Raises ConfigError naming the file and what is wrong.
    """
    sources: list[Source] = []
    seen: set[Path] = set()
    for path in paths:
        for file in find_results(path) if path.is_dir() else [path]:
            if (resolved := file.resolve()) not in seen:
                seen.add(resolved)
                sources += read_file(file, named=file == path)
    if not sources:
        raise ConfigError("audit: no run found; give run JSONs, legacy logs, files of reported figures, or folders")
    return sources


def read_file(path: Path, named: bool) -> Iterator[Source]:
    """What a file holds; one that only lies in a folder (`named` is false) may hold something else."""
    try:
        values = read_json(path)
    except ConfigError as error:
        if path.suffix == ".json":
            raise
        raise ConfigError(f"{error}; of a text log give the figures it shows: --reported key=value …") from None
    if is_run_log(values):
        yield Source(path, log=read_run_log(path))
    elif not named:
        return
    elif isinstance(values, dict) and "training_iterations" in values:
        yield Source(path, reported=(read_legacy(path, values),))
    elif isinstance(values, dict) and isinstance(values.get("runs"), list):
        yield Source(path, reported=tuple(read_reported(path, values["runs"])))
    elif isinstance(values, dict):
        yield Source(path, reported=tuple(read_reported(path, [values])))
    else:
        raise ConfigError(f"{path}: holds neither a run JSON, nor a legacy log (training_iterations), nor `runs`")


def read_reported(path: Path, runs: list[Any]) -> Iterator[ReportedRun]:
    for position, run in enumerate(runs):
        if not isinstance(run, dict):
            raise ConfigError(f"{path}: runs[{position}] is no mapping of figures")
        figures = {"name": f"run-{position}", **{key: value for key, value in run.items() if key not in IGNORED_KEYS}}
        yield make_reported(figures, f"{path}: {figures['name']}")


def read_legacy(path: Path, log: dict[str, Any]) -> ReportedRun:
    """A log of nanoGPT's family: startup_info, metadata and training_iterations with an `mfu` mapping each.

    Its config holds the accumulation over all ranks, which the trainer divides by their number. Its dimensions are
    what was asked for and its FLOPs a token what the trainer counted; only the latter belong to the model that ran.
    """
    try:
        startup, iterations = log["startup_info"], log["training_iterations"]
        config, hardware = startup["config"], startup["hardware"]
        world_size = int(log.get("metadata", {}).get("world_size") or hardware["num_gpus"])
        rated = [entry for entry in iterations if isinstance(entry.get("mfu"), dict)]
        accumulation = config["gradient_accumulation_steps"]
        return make_reported(
            {
                "name": path.stem,
                "gpu_name": hardware["gpu_name"],
                "num_gpus": world_size,
                "precision": hardware.get("precision") or config["dtype"],
                "parallelism": hardware.get("parallelism"),
                "parameters": startup["model"]["total_params"],
                "num_hidden_layers": config["n_layer"],
                "num_attention_heads": config["n_head"],
                "head_dim": config["n_embd"] // config["n_head"],
                "seq_len": config["block_size"],
                "micro_batch_size": config["batch_size"],
                "gradient_accumulation_steps": max(1, accumulation // world_size),
                "config_gradient_accumulation_steps": accumulation,
                "evaluation_interval": config.get("eval_interval"),
                **legacy_series(rated),
            },
            str(path),
        )
    except ArithmeticError as error:
        raise ConfigError(f"{path}: a legacy log with sizes that cannot be ({error})") from None
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path}: a legacy log without {error}") from None


def legacy_series(rated: list[dict[str, Any]]) -> dict[str, Any]:
    """The iterations that the log gives an MFU, and the medians of what it says of them."""
    whole = [
        entry
        for entry in rated
        if is_number(entry["mfu"]["mfu"]) and all(map(is_positive, (entry["time_ms"], entry["mfu"]["tokens_per_sec"])))
    ]
    if not whole:
        return {}
    last = whole[-1]["mfu"]
    return {
        "step_numbers": [entry["iter"] for entry in whole],
        "step_times_s": [entry["time_ms"] / 1e3 for entry in whole],
        "step_rates": [entry["mfu"]["tokens_per_sec"] for entry in whole],
        "step_time_s": statistics.median(entry["time_ms"] / 1e3 for entry in whole),
        "mfu_percent": 100 * statistics.median(entry["mfu"]["mfu"] for entry in whole),
        "achieved_tflops": statistics.median(entry["mfu"]["flops_achieved"] / 1e12 for entry in whole),
        "hardware_peak_tflops": last["hardware_peak_flops"] / 1e12,
        "flops_per_token": last["flops_per_token"],
    }


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def is_positive(value: Any) -> bool:
    return is_number(value) and value > 0
