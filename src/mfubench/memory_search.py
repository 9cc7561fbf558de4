"""The memory limit of a setting: the largest micro-batch that trains.

The candidates are tried in order until one runs out of memory; then the limit is sought between the last that trained
and the first that did not: at the limit that the memory model predicts, beside it, then by bisection. Each trial is a
process of its own, so that an out-of-memory dies alone. Trials are kept in the work folder: a search that was
interrupted goes on where it ended.

On a GPU that limit is exact: the allocator is asked for the same bytes in every run. What a process takes on a CPU is
not: threads, malloc and imported libraries take some MB more or less each time, and the limit moves with them, by one
micro-batch as a rule.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from mfubench.config import ConfigError, MemorySearch, parse
from mfubench.data.meta import DatasetMeta, read_meta
from mfubench.host_load import contention_of_run
from mfubench.job import add_job_arguments, cards_for_job, write_stamp
from mfubench.prediction.memory import largest_micro_batch
from mfubench.run_log import RunLog, read_run_log, write_json
from mfubench.training_job import start_training

Trial = dict[str, Any]
FITS = ("ok", "diverged")  # a loss that is not finite takes as much memory as any other


def find_limit(
    search: MemorySearch, try_micro_batch: Callable[[int], Trial], predicted: Callable[[], int | None] = lambda: None
) -> list[Trial]:
    """Trials in the order they were made. A trial fits when its status is one of FITS.

    One that is skipped ends the search: what was asked for is not to be had here, with any micro-batch.

    `predicted` is asked after the candidates: the largest micro-batch that is expected to train, if anything is.
    """
    trials: list[Trial] = []
    largest, too_large = 0, None
    for micro_batch_size in search.candidates:
        trials.append(try_micro_batch(micro_batch_size))
        if trials[-1]["status"] == "skipped":
            return trials
        if trials[-1]["status"] not in FITS:
            too_large = micro_batch_size
            break
        largest = micro_batch_size
    expected = predicted() if too_large is not None else None
    while search.bisect and too_large is not None and too_large - largest > 1:
        chosen = choose_between(largest, too_large, expected)
        trials.append(try_micro_batch(chosen))
        if trials[-1]["status"] in FITS:
            largest = chosen
        else:
            too_large = chosen
    return trials


def choose_between(largest: int, too_large: int, predicted: int | None) -> int:
    """What to try next, between a micro-batch that trained and one that did not: a right prediction takes two trials,
    itself and the next one, and a wrong one costs no more than these two."""
    if predicted is not None and largest <= predicted <= too_large:
        return min(max(predicted, largest + 1), too_large - 1)
    return (largest + too_large) // 2


def predict_limit(log: RunLog) -> int | None:
    """The largest micro-batch by the memory model, with the settings that `log` used; None on a CPU, which it does not
    describe."""
    if not log.environment.gpus:
        return None
    from mfubench.prediction.calibration import shipped_calibration
    from mfubench.prediction.measured_runs import as_run

    return largest_micro_batch(as_run(log), memory_gib(log), shipped_calibration().memory)


def one_that_ran(logs: Sequence[RunLog]) -> RunLog:
    """A trial that trained, or else any: what one that ran out of memory used, it says as far as it came."""
    return next((log for log in logs if log.status in FITS), logs[0])


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
        "contention": asdict(taken) if (taken := contention_of_run(log)) is not None else None,
    }


def peak_memory_gib(log: RunLog) -> float | None:
    """Memory that the fullest rank needed: what was reserved on its card, or the resident set on a CPU."""
    peaks = [memory.peak_reserved_gib or memory.peak_rss_gib for memory in log.memory]
    return max(peaks, default=None)


def memory_gib(log: RunLog) -> float:
    """Memory that a rank may take: the cap, the card's, or the machine's."""
    if log.config.memory_cap_gib is not None:
        return log.config.memory_cap_gib
    if log.environment.gpus:
        return min(gpu.memory_gib for gpu in log.environment.gpus)
    return log.environment.memory_gib / log.config.world_size


def summarize(search: MemorySearch, trials: list[Trial], log: RunLog, predicted: int | None = None) -> dict[str, Any]:
    """What the search found, as it is written. `log`: of a trial, which says what ran and where.

    `largest_is_exact`: the next larger micro-batch ran out of memory, and would do so again: never on a CPU.
    """
    capacity_gib, on_gpu = memory_gib(log), bool(log.environment.gpus)
    fitting = [trial for trial in trials if trial["status"] in FITS]
    comfortable = [
        trial["micro_batch_size"]
        for trial in fitting
        if trial["peak_memory_gib"] is not None and trial["peak_memory_gib"] <= search.comfort_fraction * capacity_gib
    ]
    largest = max((trial["micro_batch_size"] for trial in fitting), default=None)
    too_large = min((trial["micro_batch_size"] for trial in trials if trial["status"] == "oom"), default=None)
    return {
        "name": search.run.name,
        "search": json.loads(search.to_json()),
        "used": {key: choice.model_dump() for key, choice in log.used.items()},
        "memory_gib": capacity_gib,
        "trials": sorted(trials, key=lambda trial: trial["micro_batch_size"]),
        "largest": largest,
        "largest_is_exact": on_gpu and too_large is not None and too_large - (largest or 0) == 1,
        "largest_comfortable": max(comfortable, default=None),
        "largest_predicted": predicted,
    }


def limit_words(result: dict[str, Any]) -> str:
    """The limit in a line, and how sure it is. `result`: as `summarize` gives it."""
    if skipped := [trial["reason"] for trial in result["trials"] if trial["status"] == "skipped"]:
        return f"not searched: {skipped[0]}"
    if result["largest"] is None:
        return "no micro-batch of those tried trains"
    oom = [trial["micro_batch_size"] for trial in result["trials"] if trial["status"] == "oom"]
    words = f"largest micro-batch that trained: {result['largest']}"
    if not oom:
        return f"{words}; none of those tried ran out of memory"
    if result["largest_is_exact"]:
        return f"{words}, exactly; {min(oom)} ran out of memory"
    if min(oom) - result["largest"] > 1:
        return f"{words}; {min(oom)} ran out of memory, and none between the two was tried"
    return (
        f"{words}; {min(oom)} ran out of memory. Not exact: a process's memory on a CPU differs from run to run, and "
        "the limit with it"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run `search_memory.py --search JSON --data DIR --work DIR --output FILE …`; returns the exit code."""
    parser = argparse.ArgumentParser(description="Find the largest micro-batch that trains.")
    parser.add_argument("--search", required=True, help="MemorySearch as JSON")
    add_job_arguments(parser)
    arguments = parser.parse_args(argv)
    try:
        search = parse(MemorySearch, json.loads(arguments.search), "--search")
    except (ConfigError, json.JSONDecodeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    logs: list[RunLog] = []

    def predicted() -> int | None:
        return predict_limit(one_that_ran(logs))

    def try_micro_batch(micro_batch_size: int) -> Trial:
        log = run_trial(search, micro_batch_size, arguments)
        logs.append(log)
        trial = describe_trial(log)
        peak = f"{trial['peak_memory_gib']:.2f} GiB" if trial["peak_memory_gib"] is not None else "no peak recorded"
        print(f"micro-batch {micro_batch_size}: {trial['status']}, {peak}", file=sys.stderr, flush=True)
        return trial

    try:
        with cards_for_job(arguments):
            trials = find_limit(search, try_micro_batch, predicted)
    except (ConfigError, TimeoutError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    result = summarize(search, trials, one_that_ran(logs), predicted())
    print(limit_words(result), file=sys.stderr, flush=True)
    write_json(arguments.output, result)
    write_stamp(arguments)
    return 0


def run_trial(search: MemorySearch, micro_batch_size: int, arguments: argparse.Namespace) -> RunLog:
    """One trial in its own process; an earlier one of the same configuration and data in the work folder is taken as it
    is."""
    config = search.run.model_copy(update={"micro_batch_size": micro_batch_size})
    work = arguments.work / f"micro-batch{micro_batch_size}"
    output = work / "run.json"
    if output.exists():
        earlier = read_run_log(output)
        data = earlier.dataset  # not known of one that ran out of memory before its first step
        if earlier.config == config and (data is None or data.sha256 == read_meta(DatasetMeta, arguments.data).sha256):
            return earlier
    heard: list[int] = []
    code = start_training(
        config.to_json(),
        data=arguments.data,
        tokenizer=arguments.tokenizer,
        ceilings=arguments.ceilings,
        work=work,
        output=output,
        resume="never",
        heard=heard,
    )
    if code != 0:
        raise RuntimeError(f"the trial with micro-batch {micro_batch_size} failed (exit code {code}); see {work}")
    if heard:  # when that trial was as good as done
        raise RuntimeError(f"stopped on request after the trial with micro-batch {micro_batch_size}, which is kept")
    return read_run_log(output)
