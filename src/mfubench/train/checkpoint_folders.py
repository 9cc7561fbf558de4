"""The folders of checkpoints: which are whole, the last one and how to go on from it, room for the next. No torch."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from mfubench.config import ConfigError, RunConfig
from mfubench.run_log import Dataset

BYTES_A_PARAMETER = 12  # three float32 tensors
IDENTITY = ("train_tokens", "tokenizer_sha256", "sha256")  # of the data, as the run log has them


def complete(folder: Path) -> list[Path]:
    """Finished checkpoints, oldest first; what else lies in their folder is somebody's own."""
    found = [path for path in folder.glob("step-*") if path.name.removeprefix("step-").isdecimal() and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def latest(folder: Path) -> Path | None:
    checkpoints = complete(folder)
    return checkpoints[-1] if checkpoints else None


def other_data(checkpoint: Path, here: Dataset | None) -> list[str]:
    """What tells the data that a checkpoint was trained on from those `here`, with both values; as far as it is known:
    an imported model may have been trained on anything."""
    there = json.loads((checkpoint / "history.json").read_text(encoding="utf-8"))["dataset"]
    if there is None or here is None:
        return []
    return [
        f"data.{key}: {str(there[key])[:12]} there, {str(value)[:12]} here"
        for key in IDENTITY
        if there.get(key) not in (None, value := getattr(here, key))
    ]


def trained_on_other_data(checkpoint: Path, here: Dataset | None) -> list[str]:
    """`other_data` of steps that were done on them; [] of an imported model, which no training brings back."""
    return other_data(checkpoint, here) if int(checkpoint.name.removeprefix("step-")) else []


def find_latest(folder: Path) -> Path | None:
    """The last checkpoint in a folder of checkpoints or in a work folder; of attempts with other values or code, each
    in a folder of its own below the work folder, that of the one which was written last."""
    if (found := latest(folder) or latest(folder / "checkpoints")) is not None:
        return found
    attempts = [found for path in folder.glob("*/checkpoints") if (found := latest(path)) is not None]
    return max(attempts, key=lambda path: path.stat().st_mtime, default=None)


def print_way_on(folder: Path) -> None:
    """Tell who sees a run end early which checkpoint it has left, if any, and how it goes on from there."""
    if (last := latest(folder)) is not None:
        print(
            f"checkpoint: {last}; a study's training goes on from it when snakemake is called again, a run by hand "
            "with the same command and --resume",
            file=sys.stderr,
        )


def remove(path: Path) -> None:
    """Take a checkpoint away: out of sight first, so that a half-deleted one is never read."""
    hidden = path.with_name(f".removing-{path.name}")
    path.rename(hidden)
    shutil.rmtree(hidden)


def prepare_folder(folder: Path, resume: bool, config: RunConfig, parameters: int) -> None:
    """Clear what a killed process left half-written, and see to it that there is room for a checkpoint.

    Raises ConfigError where one that the configuration asks for will not fit on the disk. The room of those that are
    there counts where the run starts anew: they go before it writes one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in [*folder.glob(".writing-*"), *folder.glob(".removing-*")]:
        shutil.rmtree(leftover, ignore_errors=True)
    if config.checkpoint.interval is None and not config.checkpoint.at_end:
        return
    size, free = parameters * BYTES_A_PARAMETER, shutil.disk_usage(folder).free
    if not resume:
        free += sum(file.stat().st_size for path in complete(folder) for file in path.iterdir())
    if size > free:
        raise ConfigError(
            f"{folder}: a checkpoint needs {size / 2**30:.1f} GiB, and the disk has {free / 2**30:.1f} GiB free; free "
            "some space, point the results elsewhere, or switch checkpoints off"
        )
