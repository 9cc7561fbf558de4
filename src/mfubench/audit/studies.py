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


def named_apart(runs: Sequence[FoundRun]) -> list[FoundRun]:
    """The runs, those that share a name with another renamed to where they lie, without the suffix."""
    counts = Counter(log.name for log, _ in runs)
    return [
        (log if counts[log.name] == 1 else log.model_copy(update={"name": shown(path.with_suffix(""))}), path)
        for log, path in runs
    ]


def shown(path: Path) -> str:
    """A path as people call it: relative, where it lies below the current folder."""
    absolute = path.absolute()
    return os.path.relpath(absolute) if absolute.is_relative_to(Path.cwd()) else str(path)


def by_study(runs: Sequence[FoundRun]) -> list[list[FoundRun]]:
    """Runs that are held against each other: those of each study, and those that lie in none."""
    studies: dict[Path | None, list[FoundRun]] = {}
    for log, path in runs:
        studies.setdefault(study_of(path), []).append((log, path))
    return list(studies.values())


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
