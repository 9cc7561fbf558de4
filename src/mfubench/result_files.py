"""Reading JSON that may be anything, and finding a study's results in a folder. No torch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mfubench.config import ConfigError

RESULTS = ("runs", "memory")  # of a study's folder; what else is JSON there is work in progress, tables, verdicts


def read_text(path: Path | str) -> str:
    """The text of a regular file. Raises ConfigError where there is none, and for a pipe, which may never end."""
    path = Path(path)
    try:
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path}: is a {'folder' if path.is_dir() else 'pipe or device'}, not a file")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is no text in UTF-8 ({error.reason})") from None


def read_json(path: Path | str) -> Any:
    """The JSON of a file; NaN and infinities, which logs of other systems hold, become None. Raises ConfigError."""
    text = read_text(path)
    try:
        return json.loads(text, parse_constant=lambda _: None)
    except RecursionError:
        raise ConfigError(f"{path}: is nested too deeply to be read") from None
    except ValueError as error:  # also a number of thousands of digits
        raise ConfigError(f"{path}: is no valid JSON ({error})") from None


def is_run_log(values: Any) -> bool:
    """Whether a JSON value is meant to be a run JSON; a checkpoint's history has steps, too, and is none."""
    return isinstance(values, dict) and {"schema_version", "status", "config", "environment"} <= values.keys()


def find_results(folder: Path) -> Iterator[Path]:
    """The JSON files below a folder that may hold results, in the order of paths; links to folders are not followed.

    Of a study's folder, wherever it is met, those below runs/ and memory/ and its ceilings.json: its work folder holds
    checkpoints and unfinished runs. Of other folders all files but partial.json, the beginning of a run; other file
    systems are not entered.
    """
    device = folder.stat().st_dev
    for name, folders, files in os.walk(folder):
        here = Path(name)
        if is_study(here):
            folders[:] = RESULTS
            files = [file for file in files if file == "ceilings.json"]
        folders[:] = sorted(child for child in folders if is_on_device(here / child, device))
        for file in sorted(files):
            if file.endswith(".json") and file != "partial.json" and (here / file).is_file():
                yield here / file


def is_study(folder: Path) -> bool:
    """Whether a folder is a study's, results/<study>."""
    return (folder / "runs").is_dir() or (folder / "study.json").is_file()


def is_on_device(folder: Path, device: int) -> bool:
    try:
        return folder.stat().st_dev == device
    except OSError:  # gone meanwhile, or not ours to read
        return False


def study_of(file: Path) -> Path | None:
    """The study's folder that a run lies in: of runs/<stage>/<case>.json the folder above; None for another file."""
    above = list(file.absolute().parents)[:3]
    return above[2] if len(above) == 3 and above[1].name == "runs" else None
