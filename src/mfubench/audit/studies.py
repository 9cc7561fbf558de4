"""Runs of several folders in one audit: their names told apart, which belong together, the ceilings beside them."""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from mfubench.analysis.study import StudyFile, names_of, read_as
from mfubench.ceilings import read_ceilings
from mfubench.ceilings.schema import Ceilings
from mfubench.result_files import study_of
from mfubench.run_log import RunLog

FoundRun = tuple[RunLog, Path]


def shown(path: Path) -> str:
    """A path as people call it: relative, where it lies below the current folder."""
    absolute = path.absolute()
    return os.path.relpath(absolute) if absolute.is_relative_to(Path.cwd()) else str(path)


def without_left_over(runs: Sequence[FoundRun], given: Sequence[Path]) -> tuple[list[FoundRun], list[str]]:
    """The runs without those found in a study's folder that its study.json does not declare (any more), and a note on
    each study that has such; a file that was given itself stays. Raises ConfigError for a damaged study.json.
    """
    studies = {study for _, path in runs if (study := study_of(path)) is not None}
    declared = {study: names_declared(study) for study in studies}
    kept: list[FoundRun] = []
    left_over: dict[Path, list[str]] = {}
    for log, path in runs:
        study = study_of(path)
        names = declared[study] if study is not None else None
        if study is not None and names is not None and log.name not in names and path not in given:
            left_over.setdefault(study, []).append(log.name)
        else:
            kept.append((log, path))
    notes = [
        f"{shown(study)}: left alone, since its study no longer declares them: {', '.join(names)}"
        for study, names in left_over.items()
    ]
    return kept, notes


def names_declared(study: Path) -> set[str] | None:
    """The cases of a study's study.json; None without one."""
    file = study / "study.json"
    return names_of(read_as(StudyFile, file)) if file.is_file() else None


def by_study(runs: Sequence[FoundRun], given: Sequence[Path]) -> list[list[FoundRun]]:
    """Runs that are held against each other: those of each study; of those that lie in none, the ones of each folder,
    and the ones that were given file by file, wherever they lie.
    """
    studies: dict[Path | None, list[FoundRun]] = {}
    for log, path in runs:
        alone = None if path in given else path.absolute().parent
        studies.setdefault(study_of(path) or alone, []).append((log, path))
    return list(studies.values())


def named_apart(studies: Sequence[Sequence[FoundRun]]) -> list[list[FoundRun]]:
    """The runs of each study with names that tell them apart: where they lie, without the suffix.

    So all are called where there are several studies, since a short name would not say which one it is of; in one
    study the runs that share a name with another.
    """
    counts = Counter(log.name for runs in studies for log, _ in runs)

    def called(log: RunLog, path: Path) -> RunLog:
        if len(studies) == 1 and counts[log.name] == 1:
            return log
        return log.model_copy(update={"name": shown(path.with_suffix(""))})

    return [[(called(log, path), path) for log, path in runs] for runs in studies]


def ceilings_for(log: RunLog, path: Path, given: Ceilings | None) -> tuple[Ceilings | None, list[str]]:
    """The ceilings to hold a run against, and notes on them: the given ones or, where there are none or they are of
    another device than the one that ran, those of its study. Raises ConfigError for a damaged file.
    """
    if given is not None and are_of_device(given, log):
        return given, []
    nearby, note = nearby_ceilings(log, path)
    notes = [note] if note else []
    if given is not None:
        notes.insert(0, f"the ceilings given are another device's ({given.device_name}) and were left alone")
    return nearby, notes


def are_of_device(ceilings: Ceilings, log: RunLog) -> bool:
    """Whether ceilings are of what a run ran on."""
    environment = log.environment
    devices = {gpu.name for gpu in environment.gpus} or {environment.cpu}
    return (ceilings.device, {ceilings.device_name}) == (environment.device, devices)


def nearby_ceilings(log: RunLog, path: Path) -> tuple[Ceilings | None, str | None]:
    """The ceilings of a run's study (or of the folder that it lies in), and a note on the file. (None, None): no file.

    Those of another device than the one that ran are left alone. Raises ConfigError for a damaged file.
    """
    study = study_of(path)
    folders = [study] if study is not None else [path.absolute().parent, path.absolute().parent.parent]
    file = next((folder / "ceilings.json" for folder in folders if (folder / "ceilings.json").is_file()), None)
    if file is None:
        return None, None
    ceilings = read_once(file)
    if not are_of_device(ceilings, log):
        note = f"ceilings of {shown(file)} are another device's ({ceilings.device_name}) and were left alone"
        return None, note
    return ceilings, f"ceilings of {shown(file)} were used, measured on {ceilings.device_name}"


@functools.cache
def read_once(file: Path) -> Ceilings:
    return read_ceilings(file)
