"""Between the trainer's checkpoints and Hugging Face's format.

A checkpoint of the trainer is a folder of torch.distributed.checkpoint with the float32 masters as master.NAME beside
AdamW's moments, and config.json with the RunConfig; `mfubench.train.checkpoint` describes it whole. Reading one needs
neither its parallelism nor a GPU.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from mfubench.config import ConfigError, RunConfig, parse
from mfubench.conversion.hf import export_hf, import_hf
from mfubench.conversion.new_folder import new_folder
from mfubench.experiments import merge
from mfubench.model.decoder import DTYPES
from mfubench.run_log import write_json, write_text_atomically
from mfubench.train.checkpoint_files import SafeReader, damage_told
from mfubench.train.checkpoint_folders import find_latest

MASTER = "master."


def export_checkpoint(
    source: Path | str, out_dir: Path | str, *, tokenizer_dir: Path | str | None = None, dtype: str = "float32"
) -> Path:
    """Export a checkpoint, or the last one of a run, to Hugging Face's format; returns the checkpoint taken.

    `source`: a checkpoint's folder, a run's work folder, or its run JSON. Raises ConfigError where there is none, and
    where Hugging Face has no architecture for the model.
    """
    checkpoint = find_checkpoint(Path(source))
    config = read_config(checkpoint)
    masters = read_masters(checkpoint)
    export_hf({name: value.to(DTYPES[dtype]) for name, value in masters.items()}, config.model, out_dir, tokenizer_dir)
    return checkpoint


def find_checkpoint(source: Path) -> Path:
    """The checkpoint folder that `source` means: itself, or the last one of the run that it or its folder is of."""
    candidates = [source]
    if source.is_file():  # STUDY/runs/STAGE/CASE.json of a study, FILE.json beside FILE-work by hand
        candidates = [source.with_name(f"{source.stem}-work")]
        if len(source.parents) > 2:
            candidates.append(source.parents[2] / "work" / source.parent.name / source.stem)
    for folder in candidates:
        if (folder / ".metadata").is_file():
            return folder
        if (found := find_latest(folder)) is not None:
            return found
    looked = " and ".join(map(str, candidates))
    raise ConfigError(
        f"{source}: no checkpoint found (looked in {looked}, and one folder below); name the checkpoint or its work "
        "folder if it lies elsewhere. A run keeps one with checkpoint.at_end: true or checkpoint.interval"
    )


def read_config(checkpoint: Path) -> RunConfig:
    """The configuration of the run that wrote a checkpoint."""
    path = checkpoint / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); is this a checkpoint of mfubench?") from None
    return parse(RunConfig, values, str(path))


def read_masters(checkpoint: Path) -> dict[str, Tensor]:
    """The parameters of a checkpoint by name, float32, on the CPU; the moments stay on the disk."""
    with damage_told(checkpoint), one_process():
        reader = SafeReader(checkpoint)
        masters: dict[str, Any] = {
            name: torch.empty(entry.size)
            for name, entry in reader.read_metadata().state_dict_metadata.items()
            if name.startswith(MASTER) and isinstance(entry, TensorStorageMetadata)
        }
        dcp.load(masters, storage_reader=reader, no_dist=True)
    return {name.removeprefix(MASTER): value for name, value in masters.items()}


def import_checkpoint(
    directory: Path | str, out_dir: Path | str, *, settings: dict[str, Any], data: Path | str | None = None
) -> RunConfig:
    """Write Hugging Face's model as a checkpoint after 0 steps, and return the configuration it is for.

    With `data` (folder of a prepared dataset, whose facts the checkpoint then holds) and written to
    WORK/checkpoints/step-000000, a run with the same model, dataset, seq_len and seed goes on from it; `settings` are
    keys of RunConfig. Raises ConfigError for models that the decoder cannot express, and where `out_dir` exists or
    cannot be written.
    """
    out_dir = Path(out_dir)
    if out_dir.exists():
        raise ConfigError(f"{out_dir}: exists already; remove it or name another folder")
    model, parameters = import_hf(directory)
    values = {
        "name": "import/model",
        "model": model.model_dump(),
        "dataset": Path(data).name if data is not None else "none",
        "seq_len": min(2048, model.max_position_embeddings),
        "micro_batch_size": 1,
        "max_iters": 1,
    }
    config = parse(RunConfig, merge(values, settings), "import")
    dataset = None
    if data is not None:
        from mfubench.train.setup import open_data

        dataset = open_data(Path(data), config)[-1].model_dump(mode="json")
    with new_folder(out_dir) as folder:
        with one_process():
            dcp.save(initial_state(parameters), checkpoint_id=folder, no_dist=True)
        write_text_atomically(folder / "config.json", config.to_json() + "\n")
        write_json(folder / "history.json", {"dataset": dataset}, indent=None)
    return config


def initial_state(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the trainer's checkpoint holds, before the first step."""
    state = {
        "step": torch.tensor(0),
        "position": torch.tensor(0),
        "adam_step": torch.tensor(0.0),
        "loss_scale": torch.tensor(1.0),
        "growth_tracker": torch.tensor(0, dtype=torch.int32),
    }
    for name, value in parameters.items():
        state[f"{MASTER}{name}"] = value.float()
        state[f"exp_avg.{name}"] = state[f"exp_avg_sq.{name}"] = torch.zeros_like(value, dtype=torch.float32)
    return state


@contextlib.contextmanager
def one_process() -> Iterator[None]:
    """Without torch's warning that reading and writing in a single process must be meant so: it is."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield
