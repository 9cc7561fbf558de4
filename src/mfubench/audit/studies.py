"""Runs of several folders in one audit: their names told apart, which belong together, the ceilings beside them."""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from mfubench.ceilings import read_ceilings
from mfubench.ceilings.schema import Ceilings
from mfubench.result_files import study_of
from mfubench.run_log import RunLog

FoundRun = tuple[RunLog, Path]


def shown(path: Path) -> str:
    """A path as people call it: relative, where it lies below the current folder."""
    absolute = path.absolute()
    return os.path.relpath(absolute) if absolute.is_relative_to(Path.cwd()) else str(path)


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
    environment = log.environment
    devices = {gpu.name for gpu in environment.gpus} or {environment.cpu}
    if (ceilings.device, {ceilings.device_name}) != (environment.device, devices):
        note = f"ceilings of {shown(file)} are another device's ({ceilings.device_name}) and were left alone"
        return None, note
    return ceilings, f"ceilings of {shown(file)} were used, measured on {ceilings.device_name}"


@functools.cache
def read_once(file: Path) -> Ceilings:
    return read_ceilings(file)
