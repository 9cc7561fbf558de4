"""A study's results folder, read whole: run logs, memory searches, failures, the machine. Never of two machines."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from mfubench import result_files
from mfubench.ceilings import Ceilings, read_ceilings
from mfubench.config import ConfigError, MemorySearch
from mfubench.experiments import STAGES, EffectConfig
from mfubench.host_load import Contention
from mfubench.run_log import Environment, RunLog, read_run_log

REPEAT = re.compile(r"-repeat\d+$")
MEASURED = ("runs", "memory", "work", "ceilings.json")  # of a study's folder
MOST_EFFICIENT = 1.05  # of weak scaling: memory that is sharded, or cards that differ, explain some percent at the most


class Results(BaseModel):
    """A file of the results folder; keys of a later version are passed over."""

    model_config = ConfigDict(extra="ignore")


class StudyFile(Results):
    """study.json: what was to be measured."""

    study: str
    config_files: list[str] = []  # that it was read from; [] of a study that was declared before they were recorded
    description: str = ""
    models: list[str] = []
    effects: list[EffectConfig] = []
    expectations: str | None = None
    price_per_gpu_hour: float | None = None
    cases: dict[str, dict[str, Any]] = {}
    searches: dict[str, dict[str, Any]] = {}
    skipped: dict[str, str] = {}


class Trial(Results):
    """One micro-batch size tried in a process of its own."""

    micro_batch_size: int
    status: str
    peak_memory_gib: float | None = None
    tokens_per_s_per_gpu: float | None = None
    reason: str | None = None
    contention: Contention | None = None  # what other processes took from it


class MemoryLimit(Results):
    """memory/<case>.json: what a search for the largest micro-batch found."""

    name: str
    search: MemorySearch
    memory_gib: float | None = None
    trials: list[Trial]
    largest: int | None = None
    largest_comfortable: int | None = None


@dataclass(frozen=True)
class Failure:
    """A job that died: the record it left beside its log."""

    name: str
    reason: str


@dataclass(frozen=True)
class Study:
    """Everything a study left behind. Cases are keyed "stage/case", in the order of the stages."""

    folder: Path
    declared: StudyFile
    machine: dict[str, Any] | None  # machine.json
    ceilings: Ceilings | None
    runs: dict[str, RunLog] = field(default_factory=dict)
    limits: dict[str, MemoryLimit] = field(default_factory=dict)
    failures: dict[str, Failure] = field(default_factory=dict)
    traces: dict[str, Path] = field(default_factory=dict)
    left_over: list[str] = field(default_factory=list)  # results of cases that the study no longer declares, not read

    @property
    def name(self) -> str:
        return self.declared.study

    @property
    def environment(self) -> Environment | None:
        """Of the run on the most cards: what the report calls the machine."""
        logs = sorted(self.runs.values(), key=lambda log: log.config.world_size)
        return logs[-1].environment if logs else None

    def declared_names(self) -> list[str]:
        """All cases and searches that the study asks for, those too that it leaves out on this machine."""
        return list(dict.fromkeys([*self.declared.cases, *self.declared.searches, *self.declared.skipped]))

    def left_out(self) -> list[str]:
        """Cases that were left out on this machine before anything ran; `declared.skipped` holds why."""
        return [name for name in self.declared.skipped if name not in self.runs and name not in self.limits]

    def missing(self) -> list[str]:
        """Cases that were declared and left neither a result nor a reason."""
        known = self.runs.keys() | self.limits.keys() | self.failures.keys() | self.declared.skipped.keys()
        return [name for name in self.declared_names() if name not in known]

    def snakemake(self, target: str = "") -> str:
        """The command that makes a target of this study (all of it without one), where snakemake was called before."""
        files = " ".join(shlex.quote(file) for file in self.declared.config_files) or "…"
        return f"snakemake --cores all {f'{target} ' if target else ''}--configfile {files}"

    def measure_anew(self, *names: str) -> str:
        """The command that removes what there is of these in the folder, all that was measured without any, and
        makes it anew: a checkpoint or a trial that stays in work/ would be gone on from."""
        here = Path.cwd()
        folder = self.folder.relative_to(here) if self.folder.is_relative_to(here) else self.folder
        paths = [folder / name for name in names or MEASURED if (self.folder / name).exists()]
        return f"rm -r {' '.join(shlex.quote(str(path)) for path in paths)} && {self.snakemake()}"

    def why_missing(self, name: str) -> str:
        """Of such a case, whether it began: a killed process leaves a work folder and no reason."""
        if not (self.folder / "work" / name).is_dir():
            return "has not been run"
        logs = (Path("logs") / f"{name}{ending}" for ending in (".log", ".search.log"))
        log = next((path for path in logs if (self.folder / path).is_file()), None)
        return f"began and left no result{f'; see {log}' if log is not None else ''}"


def base_name(name: str) -> str:
    """`tiers/tier1-repeat2` is a repeat of `tiers/tier1`."""
    return REPEAT.sub("", name)


def load_study(folder: Path | str, partial: bool = False) -> Study:
    """Read what exists under results/<study>.

    partial: read the records of failed jobs too, and accept a study that was stopped before its first run or before
    study.json was written (what was declared and never ran is then unknown).
    Results of cases that study.json does not know (any more) are left aside: a ranking, a spread or an efficiency must
    not be of another study. Raises ConfigError where the folder is none of a study's, a file is damaged, or runs are of
    two machines.
    """
    folder = Path(folder)
    declaration = folder / "study.json"
    interrupted = partial and ((folder / "runs").is_dir() or (folder / "work").is_dir())
    if not declaration.exists() and not interrupted:
        raise ConfigError(f"{folder}: holds no study.json; give the results folder of a study, results/<study>")
    declared = read_as(StudyFile, declaration) if declaration.exists() else None
    runs = dict(in_stage_order(read_runs(folder / "runs")))
    limits = dict(in_stage_order(read_limits(folder / "memory")))
    left_over = undeclared(declared, [*runs, *limits]) if declared is not None else []
    for name in left_over:
        runs.pop(name, None), limits.pop(name, None)
    failures = dict(in_stage_order(read_failures(folder / "work"))) if partial else {}
    if declared is not None:
        failures = {name: failure for name, failure in failures.items() if name in names_of(declared)}
    study = Study(
        folder=folder,
        declared=declared or StudyFile(study=folder.name),
        machine=read_json(folder / "machine.json"),
        ceilings=read_ceilings(folder / "ceilings.json") if (folder / "ceilings.json").exists() else None,
        runs=runs,
        limits=limits,
        traces=dict(in_stage_order(find_traces(folder, partial))),
        failures={name: failure for name, failure in failures.items() if name not in runs and name not in limits},
        left_over=left_over,
    )
    if left_over and not study.runs and not study.limits:
        raise ConfigError(
            f"{folder}: holds no result of a case that its study declares, only of others: {', '.join(left_over)}; run "
            "`snakemake --cores all`"
        )
    if not study.runs and not study.limits and not partial:
        raise ConfigError(
            f"{folder}: holds no runs yet; run `snakemake --cores all`, or look at what there is with "
            f"`mfubench report {folder} --partial`"
        )
    check_one_machine(study)
    return study


def undeclared(declared: StudyFile, names: list[str]) -> list[str]:
    """Those of the names that are no case and no search of the study."""
    known = names_of(declared)
    return [name for name in names if name not in known]


def names_of(declared: StudyFile) -> set[str]:
    """All cases and searches of a study, those too that it leaves out on its machine."""
    return {*declared.cases, *declared.searches, *declared.skipped}


def read_runs(folder: Path) -> Iterator[tuple[str, RunLog]]:
    for path in folder.glob("*/*.json"):
        log = read_run_log(path)
        name = f"{path.parent.name}/{path.stem}"
        if log.name != name:
            raise ConfigError(f"{path}: holds the run {log.name}; a run log's place is runs/<stage>/<case>.json")
        yield name, log


def find_traces(folder: Path, partial: bool) -> Iterator[tuple[str, Path]]:
    """Traces as the workflow keeps them; before it has, of a part of a study, those in the runs' work folders."""
    if partial:
        for path in (folder / "work").glob("*/*/**/trace.json.gz"):
            yield "/".join(path.relative_to(folder / "work").parts[:2]), path
    for path in (folder / "traces").glob("*/*.json.gz"):
        yield f"{path.parent.name}/{path.name.removesuffix('.json.gz')}", path


def read_limits(folder: Path) -> Iterator[tuple[str, MemoryLimit]]:
    for path in folder.glob("*.json"):
        limit = read_as(MemoryLimit, path)
        yield limit.name, limit


def read_failures(folder: Path) -> Iterator[tuple[str, Failure]]:
    for path in folder.glob("*/*/**/failure.json"):  # a trial of a memory search stands a folder deeper
        name = "/".join(path.relative_to(folder).parts[:2])
        record = read_json(path) or {}
        yield name, Failure(name, str(record.get("reason") or "no reason recorded"))


def in_stage_order(items: Iterator[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Sorted as the workflow runs: by stage, then by name with numbers in numeric order (gpus2 before gpus10)."""

    def key(item: tuple[str, Any]) -> tuple[int, list[Any]]:
        stage, _, case = item[0].partition("/")
        words = [(0, int(word), "") if word.isdigit() else (1, 0, word) for word in re.split(r"(\d+)", case) if word]
        return (STAGES.index(stage) if stage in STAGES else len(STAGES), words)

    return sorted(items, key=key)


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object, or None where there is no such file."""
    if not path.exists():
        return None
    try:
        values = result_files.read_json(path)
    except ConfigError as error:
        raise ConfigError(f"{error}; delete it and run the workflow again") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: holds {type(values).__name__}, not a JSON object")
    return values


def read_as(schema: type[Any], path: Path) -> Any:
    try:
        return schema.model_validate_json(json.dumps(read_json(path)))
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(str(part) for part in fault["loc"])
        raise ConfigError(f"{path}: {where}: {fault['msg']}; delete it and run the workflow again") from None


def machine_of(environment: Environment) -> str:
    """What makes two runs comparable, in words."""
    return ", ".join(machine_parts(environment))


def machine_parts(environment: Environment) -> tuple[str, ...]:
    """What makes two runs comparable: cards and driver, or the CPU, and torch."""
    if environment.device == "cuda":
        cards = " and ".join(sorted({gpu.name for gpu in environment.gpus}))
        return cards, f"driver {environment.driver}", f"torch {environment.torch}"
    return f"{environment.cpu} ({environment.cpu_count} CPUs)", f"torch {environment.torch}"


def unlike_conditions(one: RunLog, other: RunLog) -> dict[str, tuple[Any, Any]]:
    """What changes the speed of machines of one kind, as (one's, other's), where both logs know it.

    Power limits of the cards in W; on CPUs the threads of a process, where as many processes share a node.
    """
    unlike: dict[str, tuple[Any, Any]] = {}
    limits = tuple(sorted({gpu.power_limit_w or 0 for gpu in log.environment.gpus}) for log in (one, other))
    if all(each and each[0] for each in limits) and limits[0] != limits[1]:
        ours, theirs = (" and ".join(f"{limit:g} W" for limit in each) for each in limits)
        unlike["environment.power_limit_w"] = ours, theirs
    threads = one.environment.cpu_threads, other.environment.cpu_threads
    a_node = [log.config.world_size / log.config.nnodes for log in (one, other)]
    on_cpu = one.environment.device == other.environment.device == "cpu"
    if on_cpu and a_node[0] == a_node[1] and threads[0] != threads[1]:
        unlike["environment.cpu_threads"] = threads
    return unlike


def check_one_machine(study: Study) -> None:
    """Tables never mix machines. Raises ConfigError naming both and a run of each."""
    seen: dict[str, str] = {}
    for name, log in study.runs.items():
        seen.setdefault(machine_of(log.environment), name)
    if len(seen) > 1:
        (first, first_run), (second, second_run) = list(seen.items())[:2]
        raise ConfigError(
            f"{study.folder}: holds runs of two machines: {first_run} on {first}; {second_run} on {second}. "
            "Keep one results folder per machine (results_dir), or measure the runs of one of them again"
        )
