"""The command line of a run and the files it names. No torch: the launcher starts the ranks before it loads any."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from mfubench.config import ConfigError, RunConfig, parse

ResumeMode = Literal["auto", "always", "never"]


def work_by_hand(output: Path) -> Path:
    """The work folder of a run by hand, beside its run JSON."""
    return Path(f"{output.with_suffix('')}-work")


def result_of(work: Path, name: str) -> Path | None:
    """The JSON that the run in a work folder has left, if it has ended since it began there."""
    study = next((folder.parent for folder in work.absolute().parents if folder.name == "work"), None)
    by_hand = work.with_name(f"{work.name.removesuffix('-work')}.json")
    of_a_trial = work / "run.json"  # of a memory search: it may have run out of memory without another word
    results = (of_a_trial, study / "runs" / f"{name}.json" if study is not None else by_hand)
    began = (work / "partial.json").stat().st_mtime
    return next((path for path in results if path.is_file() and path.stat().st_mtime >= began), None)


@dataclass(frozen=True)
class Paths:
    """Where a run reads and writes."""

    data: Path
    work: Path
    output: Path
    tokenizer: Path | None = None
    ceilings: Path | None = None
    start_from: Path | None = None  # another run's checkpoints, or its work folder

    @property
    def steps(self) -> Path:
        """One line a step, as they happen."""
        return self.work / "steps.jsonl"

    @property
    def partial(self) -> Path:
        """The run log as it begins, but for the steps: what the record of an out-of-memory is made of."""
        return self.work / "partial.json"

    @property
    def live(self) -> Path:
        """The last values, for who watches."""
        return self.work / "live.json"

    @property
    def failure(self) -> Path:
        return self.work / "failure.json"

    @property
    def stopped(self) -> Path:
        """Written after a stop on request, with the checkpoint to go on from."""
        return self.work / "stopped.json"

    @property
    def trace(self) -> Path:
        """The profiled step, where one was asked for."""
        return self.work / "trace.json.gz"

    @property
    def checkpoints(self) -> Path:
        return self.work / "checkpoints"

    @property
    def trackers(self) -> Path:
        return self.work / "trackers"


def make_parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--config", required=True, help="RunConfig as JSON")
    parser.add_argument("--data", required=True, type=Path, help="folder of a prepared dataset")
    parser.add_argument("--output", required=True, type=Path, help="run JSON to write")
    parser.add_argument("--work", required=True, type=Path, help="folder for logs, checkpoints and live state")
    parser.add_argument("--tokenizer", type=Path, help="folder of the tokenizer, to show sampled tokens as text")
    parser.add_argument("--ceilings", type=Path, help="ceilings.json: the peak of which a CPU shows MFU")
    parser.add_argument("--start-from", type=Path, help="work folder, or checkpoints, of the run that it continues")
    parser.add_argument(
        "--resume",
        choices=get_args(ResumeMode),
        default="auto",
        help="auto: go on from the last checkpoint in WORK, or anew where it was trained on other data; always: refuse "
        "other data; never: start anew and remove WORK's checkpoints",
    )
    return parser


def paths_of(arguments: argparse.Namespace) -> Paths:
    return Paths(
        arguments.data,
        arguments.work,
        arguments.output,
        arguments.tokenizer,
        arguments.ceilings,
        getattr(arguments, "start_from", None),
    )


def read_config(text: str) -> RunConfig:
    """The RunConfig of --config. Raises ConfigError."""
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--config: is no JSON ({error})") from None
    return parse(RunConfig, values, "--config")
