"""Scaling efficiency: what a GPU still does when there are more of them, with the same work for each (weak scaling)."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import geometric_mean

from mfubench.analysis.effects import spread_between_processes
from mfubench.analysis.measures import Measures
from mfubench.analysis.settings import parallel, settings_of_series
from mfubench.analysis.statistics import Interval, difference
from mfubench.config import CommunicationConfig, RunConfig
from mfubench.host_load import ProcessCores, cores_of_run, shared_cores
from mfubench.run_log import RunLog

WORLD_SIZE = re.compile(r"-gpus\d+(?=-|$)")
MANY_OF_ONE = "ddp"  # what a run without parallelism becomes on more than one GPU


@dataclass(frozen=True)
class ScalingPoint:
    """One world size of a series, against the series' smallest. Rates are geometric means over the processes."""

    series: str
    case: str
    world_size: int
    tokens_per_s_per_gpu: float
    tokens_per_s: float
    efficiency: float | None  # rate per GPU over that of the smallest world size; None where there is no other size
    interval: Interval | None  # 95 %, of the efficiency; None at the smallest
    reference_world_size: int
    processes: int  # that ran these settings, under whatever case name
    cores: ProcessCores | None  # of a CPU
    shares_cores: bool  # has no more of them than the smallest world size: its efficiency is no scaling of hardware


def scaling_points(measures: dict[str, Measures]) -> list[ScalingPoint]:
    """Series of runs that differ in the world size alone, from all stages, where a scaling case is among them."""
    spread = spread_between_processes(measures)
    points = []
    for series, members in series_of(measures).items():
        smallest = min(members)
        reference = members[smallest]
        cores_at_first = cores_of_run(reference[0].log)
        for world_size, runs in sorted(members.items()):
            rate = rate_of(runs)
            cores = cores_of_run(runs[0].log)
            interval = None
            if world_size != smallest:
                change = difference([run.rates for run in runs], [run.rates for run in reference], spread)
                if change is not None:
                    interval = Interval(1 + change.interval.low, 1 + change.interval.high)
            points.append(
                ScalingPoint(
                    series=series,
                    case=next((run.log.name for run in runs if run.log.config.stage == "scaling"), runs[0].log.name),
                    world_size=world_size,
                    tokens_per_s_per_gpu=rate,
                    tokens_per_s=rate * world_size,
                    efficiency=rate / rate_of(reference) if len(members) > 1 else None,
                    interval=interval,
                    reference_world_size=smallest,
                    processes=len(runs),
                    cores=cores,
                    shares_cores=world_size != smallest and shared_cores([cores_at_first, cores]) is not None,
                )
            )
    return points


def words_of_shared_cores(points: Sequence[ScalingPoint]) -> dict[str, list[str]]:
    """That processes share cores, in words -> the series of which it holds; {} on GPUs."""
    found: dict[str, list[str]] = {}
    for series in dict.fromkeys(point.series for point in points):
        words = shared_cores([point.cores for point in points if point.series == series])
        if words is not None:
            found.setdefault(words, []).append(series)
    return found


def rate_of(runs: Sequence[Measures]) -> float:
    """tokens/s/GPU: geometric mean of the processes' medians, the mean that `difference` compares."""
    return geometric_mean(run.tokens_per_s_per_gpu.median for run in runs if run.tokens_per_s_per_gpu)


def series_of(measures: dict[str, Measures]) -> dict[str, dict[int, list[Measures]]]:
    """series -> world size -> runs. A series is named after its scaling cases.

    One process alone has nothing to do in parallel: it starts the series of every parallelism. Cases of one name that
    ran otherwise (`auto` chose another attention for more GPUs) are series of their own, each with what it ran in its
    name.
    """
    by_settings: dict[str, list[Measures]] = {}
    for judged in measures.values():
        if judged.log.status != "ok" or judged.tokens_per_s_per_gpu is None or judged.log.config.stage == "smoke":
            continue
        by_settings.setdefault(series_key(judged.log), []).append(judged)
    start_with_one_process(by_settings)

    named: dict[str, dict[str, list[Measures]]] = {}  # case name without its world size -> key -> runs
    for key, runs in by_settings.items():
        scaling = [run.log.config for run in runs if run.log.config.stage == "scaling"]
        scaling.sort(key=lambda config: config.world_size == 1)  # what one process is called may stand for several
        if scaling:
            named.setdefault(WORLD_SIZE.sub("", scaling[0].case), {})[key] = runs

    series: dict[str, dict[int, list[Measures]]] = {}
    for name, groups in sorted(named.items()):
        for key, runs in groups.items():
            members = series.setdefault(name + what_differs(key, list(groups)), {})
            for run in runs:
                members.setdefault(run.log.config.world_size, []).append(run)
    return series


def what_differs(key: str, keys: Sequence[str]) -> str:
    """The settings of one series that are not those of all series of its name, as ` (attention fa3)`."""
    own, all_of_them = json.loads(key), [json.loads(other) for other in keys]
    differing = [
        f"{setting} {value}"
        for setting, value in own.items()
        if any(setting in other and other[setting] != value for other in all_of_them)
    ]
    return f" ({', '.join(differing)})" if differing else ""


def start_with_one_process(by_settings: dict[str, list[Measures]]) -> None:
    """Let runs of one process begin every series of several that scaling cases are in, instead of one of their own.

    Where there is none, they begin what they would become on more: data parallel, with the usual communication.
    """
    for alone in [key for key, runs in by_settings.items() if runs[0].log.config.world_size == 1]:
        found = [key for key in by_settings if key != alone and begins(alone, key)]
        begun = [key for key in found if any(run.log.config.stage == "scaling" for run in by_settings[key])]
        begun = begun or [key for key in found if is_usual(by_settings[key][0].log.config)]
        for key in begun:
            by_settings[key] += by_settings[alone]
        if begun:
            del by_settings[alone]


def is_usual(config: RunConfig) -> bool:
    usual = CommunicationConfig(reduction=config.communication.reduction)
    return config.parallelism == MANY_OF_ONE and config.communication == usual


def series_key(log: RunLog) -> str:
    """Equal for runs that differ in the number of processes alone; one has nothing to do in parallel."""
    alone = log.config.world_size == 1
    settings = settings_of_series(log)
    return json.dumps({key: value for key, value in settings.items() if not (alone and parallel(key))}, sort_keys=True)


def begins(alone: str, several: str) -> bool:
    """Whether a run of one process and one of several, by their keys, differ in what several do in parallel alone."""
    return json.loads(alone) == {key: value for key, value in json.loads(several).items() if not parallel(key)}
