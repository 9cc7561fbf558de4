"""Audit across runs: arms that ran the same, work that differs where it is compared, weak-scaling efficiency."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any

from mfubench.analysis.settings import parallel, settings_asked, settings_of_series, settings_that_ran
from mfubench.analysis.study import MOST_EFFICIENT, base_name, machine_of, machine_parts, unlike_conditions
from mfubench.audit.findings import Finding, RunVerdict
from mfubench.host_load import shared_cores
from mfubench.run_log import RunLog
from mfubench.words import plural

ALONE = "one process"
STAGES_WITHOUT_ARMS = ("smoke", "memory", "training")


def audit_study(logs: Sequence[RunLog]) -> dict[str, list[Finding]]:
    """Findings that only several runs together show, by run name.

    no_contrast: two cases of a stage were to differ, and ran the same. workloads_differ: runs of one stage and model
    read other data, or ran on another machine.
    """
    findings: dict[str, list[Finding]] = {}
    by_stage: dict[str, dict[str, RunLog]] = {}
    for log in filter(is_compared, logs):
        by_stage.setdefault(log.config.stage, {}).setdefault(base_name(log.name), log)
    for cases in by_stage.values():
        for a, b in combinations(cases.values(), 2):
            for finding in (*check_contrast(a, b), *check_same_work(a, b)):
                for log in (a, b):
                    known = findings.setdefault(log.name, [])
                    if finding.code not in {other.code for other in known}:
                        known.append(finding)
    return findings


def is_compared(log: RunLog) -> bool:
    """Whether a run is held against others: it ran to its end, in a stage that compares."""
    return log.status == "ok" and log.config.stage not in STAGES_WITHOUT_ARMS


def check_contrast(a: RunLog, b: RunLog) -> list[Finding]:
    """Two arms that were to differ in what may change their speed must differ in what ran, and attention arms in their
    kernels."""
    asked, other = settings_asked(a.config), settings_asked(b.config)
    requests = [key for key in sorted(asked.keys() | other.keys()) if asked.get(key) != other.get(key)]
    if a.config.world_size == b.config.world_size == 1:  # each begins a series of its own: none is an arm of the other
        requests = [key for key in requests if not key.startswith("communication.")]
    if not requests:
        return []
    ran, other_ran = settings_that_ran(a), settings_that_ran(b)
    if ran == other_ran:
        words = ", ".join(f"{key} {asked.get(key)} and {other.get(key)}" for key in requests)
        used = ", ".join(str(ran[key]) for key in requests if key in ran) or "neither"
        sentence = (
            f"{a.name} and {b.name} were to differ in {words}, and both ran {used}: they compare a thing with itself"
        )
        return [Finding("no_contrast", sentence, 0.97)]
    differing = {key for key in ran.keys() | other_ran.keys() if ran.get(key) != other_ran.get(key)}
    if differing == {"attention"} and kernels_of(a) and kernels_of(a) == kernels_of(b):
        sentence = (
            f"{a.name} ({a.used['attention'].used}) and {b.name} ({b.used['attention'].used}) ran the same attention "
            f"kernels ({min(kernels_of(a))[:60]} …): they compare a thing with itself"
        )
        return [Finding("no_contrast", sentence, 0.95)]
    return []


def kernels_of(log: RunLog) -> set[str]:
    """Names of the attention kernels that were seen."""
    return set(log.kernels.attention) if log.kernels else set()


def check_same_work(a: RunLog, b: RunLog) -> list[Finding]:
    """Runs of one stage and model are compared: data and machine must be the same."""
    if a.config.model != b.config.model:
        return []
    if a.dataset and b.dataset:
        one, other = a.dataset, b.dataset
        alike: dict[str, str | None] = {"name": other.name}
        if None in (one.sha256, other.sha256):  # not noted by earlier versions
            alike["sha256"] = other.sha256
        if one.model_copy(update=alike) != other:
            sentence = (
                f"{a.name} and {b.name} are compared, but read other tokens ({one.name}, {one.train_tokens:,}; "
                f"{other.name}, {other.train_tokens:,}): the data change the speed"
            )
            return [Finding("workloads_differ", sentence, 0.9)]
    ours, theirs = machine_parts(a.environment), machine_parts(b.environment)
    if ours != theirs:
        own, others = (", ".join(part for part in x if part not in y) for x, y in ((ours, theirs), (theirs, ours)))
        sentence = f"{a.name} and {b.name} are compared, but ran on different machines or software ({own} and {others})"
        return [Finding("workloads_differ", sentence, 0.9)]
    if unlike := unlike_conditions(a, b):
        words = "; ".join(f"{key} {ours} and {theirs}" for key, (ours, theirs) in unlike.items())
        sentence = f"{a.name} and {b.name} are compared, but ran with {words}: that changes the speed"
        return [Finding("workloads_differ", sentence, 0.9)]
    return []


def group_of(log: RunLog) -> tuple:
    """Runs of one group differ in the number of GPUs alone: same model, same work for each GPU, same settings used.

    Its last part is what they do in parallel, `ALONE` for one process, which is in the groups of all parallelisms.
    """
    settings = settings_of_series(log)
    together = {key: settings.pop(key) for key in list(settings) if parallel(key)}
    words = [json.dumps(values, sort_keys=True) for values in (settings, together)]
    return words[0], machine_of(log.environment), ALONE if log.config.world_size == 1 else words[1]


def weak_scaling(verdicts: Iterable[RunVerdict]) -> list[dict[str, Any]]:
    """Efficiency of each group of runs with several world sizes: tokens/s/GPU of the largest over the smallest's.

    Of several runs of one world size the geometric mean, as in the report. `objection`: why it says nothing of scaling.
    """
    series: dict[tuple, dict[int, list[RunVerdict]]] = {}
    for verdict in verdicts:
        if verdict.group is None or not verdict.true_tokens_per_s:
            continue
        series.setdefault(verdict.group, {}).setdefault(verdict.world_size, []).append(verdict)
    for alone in [group for group in series if group[-1] == ALONE]:
        begun = [group for group in series if group != alone and group[:-1] == alone[:-1]]
        for group in begun:
            for world_size, runs in series[alone].items():
                series[group].setdefault(world_size, []).extend(runs)
    return [compare_ends(by_size) for by_size in series.values() if len(by_size) > 1]


def compare_ends(by_size: dict[int, list[RunVerdict]]) -> dict[str, Any]:
    """The largest world size against the smallest."""
    smallest, largest = min(by_size), max(by_size)
    few, many = by_size[smallest], by_size[largest]
    efficiency = rate_per_gpu(many) / rate_per_gpu(few)
    shared = shared_cores([few[0].cores, many[0].cores])
    busy = [run.name for run in (*few, *many) if "machine_was_busy" in run.codes]
    objection = None
    if busy:
        objection = f"no figure of scaling: {', '.join(busy)} shared the machine with other work"
    elif shared is not None:
        objection = f"no scaling of hardware: {shared}"
    elif efficiency > MOST_EFFICIENT:
        objection = f"more than {MOST_EFFICIENT:.0%} is no scaling: the runs differ in something that no record holds"
    return {
        "from": describe_runs(few),
        "to": describe_runs(many),
        "world_sizes": [smallest, largest],
        "unit": plural(many[-1].unit),
        "efficiency": round(efficiency, 4),
        "objection": objection,
    }


def rate_per_gpu(runs: Sequence[RunVerdict]) -> float:
    """tokens/s/GPU, the geometric mean of runs that have a rate."""
    return statistics.geometric_mean((run.true_tokens_per_s or 0.0) / run.world_size for run in runs)


def describe_runs(runs: Sequence[RunVerdict]) -> str:
    name = runs[0].name
    return name if len(runs) == 1 else f"{name} and {len(runs) - 1} more with its settings"
