"""The memory limit of a setting: the largest micro-batch that trains.

The candidates are tried in order until one runs out of memory; then the limit is bisected between the last that
trained and the first that did not. Each trial is a process of its own, so that an out-of-memory dies alone. Trials
are kept in the work folder: a search that was interrupted goes on where it ended.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from mfubench.config import ConfigError, MemorySearch
from mfubench.job import add_job_arguments, cards_for_job, write_stamp
from mfubench.run_log import RunLog, read_run_log, write_json
from mfubench.training_job import start_training

Trial = dict[str, Any]


def find_limit(search: MemorySearch, try_micro_batch: Callable[[int], Trial]) -> list[Trial]:
    """Trials in the order they were made. A trial fits when its status is `ok`."""
    trials: list[Trial] = []
    largest, too_large = 0, None
    for micro_batch_size in search.candidates:
        trials.append(try_micro_batch(micro_batch_size))
        if trials[-1]["status"] != "ok":
            too_large = micro_batch_size
            break
        largest = micro_batch_size
    while search.bisect and too_large is not None and too_large - largest > 1:
        middle = (largest + too_large) // 2
        trials.append(try_micro_batch(middle))
        if trials[-1]["status"] == "ok":
            largest = middle
        else:
            too_large = middle
    return trials


def describe_trial(log: RunLog) -> Trial:
    steps = log.measured_steps() or log.steps
    seconds = sum(step.step_time_s for step in steps)
    tokens = sum(step.tokens for step in steps)
    return {
        "micro_batch_size": log.config.micro_batch_size,
        "status": log.status,
        "reason": log.reason,
        "peak_memory_gib": peak_memory_gib(log),
        "tokens_per_s_per_gpu": tokens / seconds / log.config.world_size if seconds else None,
    }


def peak_memory_gib(log: RunLog) -> float | None:
    """Memory that the fullest rank needed: what the CUDA allocator reserved, or the resident set on a CPU."""
    peaks = [memory.peak_reserved_gib or memory.peak_rss_gib for memory in log.memory]
    return max(peaks, default=None)


def memory_gib(log: RunLog) -> float:
    """Memory that a rank may take: the cap, the card's, or the machine's."""
    if log.config.memory_cap_gib is not None:
        return log.config.memory_cap_gib
    if log.environment.gpus:
        return min(gpu.memory_gib for gpu in log.environment.gpus)
    return log.environment.memory_gib / log.config.world_size


def summarize(search: MemorySearch, trials: list[Trial], capacity_gib: float) -> dict[str, Any]:
    fitting = [trial for trial in trials if trial["status"] == "ok"]
    comfortable = [
        trial["micro_batch_size"]
        for trial in fitting
        if trial["peak_memory_gib"] is not None and trial["peak_memory_gib"] <= search.comfort_fraction * capacity_gib
    ]
    limited = any(trial["status"] == "oom" for trial in trials)
    return {
        "name": search.run.name,
        "search": json.loads(search.to_json()),
        "memory_gib": capacity_gib,
        "trials": sorted(trials, key=lambda trial: trial["micro_batch_size"]),
        "largest": max((trial["micro_batch_size"] for trial in fitting), default=None),
        "largest_is_exact": limited and search.bisect,
        "largest_comfortable": max(comfortable, default=None),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run `search_memory.py --search JSON --data DIR --work DIR --output FILE …`; returns the exit code."""
    parser = argparse.ArgumentParser(description="Find the largest micro-batch that trains.")
    parser.add_argument("--search", required=True, help="MemorySearch as JSON")
    add_job_arguments(parser)
    arguments = parser.parse_args(argv)
    search = MemorySearch.model_validate_json(arguments.search)
    capacities: list[float] = []

    def try_micro_batch(micro_batch_size: int) -> Trial:
        log = run_trial(search, micro_batch_size, arguments)
        capacities.append(memory_gib(log))
        trial = describe_trial(log)
        peak = f"{trial['peak_memory_gib']:.2f} GiB" if trial["peak_memory_gib"] is not None else "no peak recorded"
        print(f"micro-batch {micro_batch_size}: {trial['status']}, {peak}", file=sys.stderr, flush=True)
        return trial

    try:
        with cards_for_job(arguments):
            trials = find_limit(search, try_micro_batch)
    except (ConfigError, TimeoutError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    write_json(arguments.output, summarize(search, trials, capacities[0]))
    write_stamp(arguments)
    return 0


def run_trial(search: MemorySearch, micro_batch_size: int, arguments: argparse.Namespace) -> RunLog:
    """One trial in its own process; an earlier one of the same configuration in the work folder is taken as it is."""
    config = search.run.model_copy(update={"micro_batch_size": micro_batch_size})
    work = arguments.work / f"micro-batch{micro_batch_size}"
    output = work / "run.json"
    if output.exists():
        earlier = read_run_log(output)
        if earlier.config == config:
            return earlier
    code = start_training(
        config.to_json(),
        data=arguments.data,
        tokenizer=arguments.tokenizer,
        ceilings=arguments.ceilings,
        work=work,
        output=output,
        resume="never",
    )
    if code != 0:
        raise RuntimeError(f"the trial with micro-batch {micro_batch_size} failed (exit code {code}); see {work}")
    return read_run_log(output)
