"""Checkpoints: folders WORK/checkpoints/step-XXXXXX that are whole or not there.

A folder is written under another name and renamed once every rank has written its part, so that a process killed at
any instant leaves the previous checkpoint usable. It holds what torch.distributed.checkpoint writes:

    master.NAME, exp_avg.NAME, exp_avg_sq.NAME   float32, one whole tensor a parameter, whatever the parallelism
    step, position, adam_step                    steps done, next unread sequence, AdamW's own count
    loss_scale, growth_tracker                   float16's scaler; of no meaning to a run in another dtype
    rng.cpu.RANK, rng.cuda.RANK                  random states

beside config.json (the RunConfig) and history.json (the run log so far). Since names and shapes do not depend on how
the run was spread over processes, it can be read at another world size and under another parallelism.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from mfubench.config import SAME_TO_CONTINUE, ConfigError, RunConfig, parse
from mfubench.run_log import Resume, RunLog, Step, write_json, write_text_atomically
from mfubench.train.checkpoint_files import SafeReader, damage_told, read_json
from mfubench.train.checkpoint_folders import complete, other_data, remove
from mfubench.train.optimizer import Optimizer
from mfubench.train.parallel import Engine
from mfubench.train.process import Process, host_group

KINDS = ("master", "exp_avg", "exp_avg_sq")
HISTORY = ("steps", "rank_step_times_s", "phases", "evaluations", "gradient_statistics", "resumes")
# Of the process that trained last, which a later one that has nothing to train does not replace
OF_THE_STEPS = ("environment", "used", "kernels", "memory", "telemetry")
# Beside SAME_TO_CONTINUE the last of these must not change, which the others make: steps are counted in it, by the
# schedule and by the run log
BATCH = ("micro_batch_size", "gradient_accumulation_steps", "world_size", "global_batch_size")
# What may change even after the last step: it does not concern the weights
BESIDE = {"name", "repeat", "evaluation", "checkpoint", "measurement", "sample_tokens", "requires"}


@dataclass(frozen=True)
class State:
    """What a checkpoint is made of and restored into."""

    engine: Engine
    optimizer: Optimizer
    process: Process
    config: RunConfig


def save(folder: Path, step: int, position: int, state: State, log: RunLog) -> Path:
    """Write the checkpoint after `step` steps. Collective. Returns its folder."""
    process = state.process
    final, temporary = folder / f"step-{step:06d}", folder / f".writing-{step:06d}"
    if process.is_main:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    process.barrier()
    tensors = scalars(step, position, state) if process.is_main else {}
    for kind in KINDS:
        exported = state.engine.export(pieces(state, kind))
        tensors |= {f"{kind}.{name}": tensor for name, tensor in exported.items()}
    tensors |= random_states(process)
    dcp.save(
        tensors, checkpoint_id=temporary, process_group=host_group(), no_dist=process.world_size == 1
    )  # returns when all ranks have written and synchronised their files
    if process.is_main:
        write_text_atomically(temporary / "config.json", state.config.to_json() + "\n")
        history = log.model_dump(mode="json", include={*HISTORY, *OF_THE_STEPS, "dataset"})
        write_json(temporary / "history.json", history, indent=None)
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        if state.config.checkpoint.keep == "last":
            for other in complete(folder):
                if other != final:
                    remove(other)
    process.barrier()
    return final


def load(path: Path, state: State, log: RunLog, *, is_start: bool) -> tuple[int, int]:
    """Restore a checkpoint; returns steps done and next position. Collective.

    is_start: it is of the run that this one `continues`, whose steps are no history of this one.
    Raises ConfigError where it is another run's, or damaged.
    """
    with damage_told(path):
        check_compatible(path, state.config, log, is_start)
        step, position = restore(path, state)
        resume = Resume(step=step, at=datetime.now(UTC).isoformat())
        if not is_start:
            restore_history(path, resume, state.config, log)
        log.resumes.append(resume)
        return step, position


def restore(path: Path, state: State) -> tuple[int, int]:
    process = state.process
    reader = SafeReader(path)
    known = reader.read_metadata().state_dict_metadata
    tensors = {name: tensor.clone() for name, tensor in scalars(0, 0, state).items()}
    targets = {kind: state.engine.targets(pieces(state, kind)) for kind in KINDS}
    for kind in KINDS:
        tensors |= {f"{kind}.{name}": tensor for name, tensor in targets[kind].items()}
    tensors |= {name: tensor for name, tensor in random_states(process).items() if name in known}
    dcp.load(tensors, storage_reader=reader, process_group=host_group(), no_dist=process.world_size == 1)
    for kind in KINDS:
        state.engine.take(pieces(state, kind), targets[kind])
    state.engine.publish()
    for count in state.optimizer.state("step"):
        count.copy_(tensors["adam_step"])
    if state.optimizer.scales_loss and used_before(path, "dtype") == "float16":
        state.optimizer.scale.copy_(tensors["loss_scale"])
        state.optimizer.growth_tracker.copy_(tensors["growth_tracker"])
    restore_random_states(process, tensors)
    return int(tensors["step"]), int(tensors["position"])


def pieces(state: State, kind: str) -> list[Tensor]:
    if kind == "master":
        return [piece.master for piece in state.engine.pieces]
    return state.optimizer.state(kind)


def scalars(step: int, position: int, state: State) -> dict[str, Tensor]:
    """The same on all ranks; rank 0 writes them."""
    optimizer = state.optimizer
    return {
        "step": torch.tensor(step),
        "position": torch.tensor(position),
        "adam_step": optimizer.state("step")[0].cpu(),
        "loss_scale": optimizer.scale.cpu(),
        "growth_tracker": optimizer.growth_tracker.cpu(),
    }


def random_states(process: Process) -> dict[str, Tensor]:
    states = {f"rng.cpu.{process.rank}": torch.get_rng_state()}
    if process.on_cuda:
        states[f"rng.cuda.{process.rank}"] = torch.cuda.get_rng_state(process.device)
    return states


def restore_random_states(process: Process, tensors: dict[str, Tensor]) -> None:
    """A rank that the checkpoint did not have keeps the state of its seed."""
    if (cpu := tensors.get(f"rng.cpu.{process.rank}")) is not None:
        torch.set_rng_state(cpu)
    if (cuda := tensors.get(f"rng.cuda.{process.rank}")) is not None:
        torch.cuda.set_rng_state(cuda, process.device)


def restore_history(path: Path, resume: Resume, config: RunConfig, log: RunLog) -> None:
    """Take over the log's lists. Other ranks' times are dropped where there were more or fewer ranks.

    Steps that were computed in another way, or on another machine, count as warm-up: their times are no rate of what
    this run says it is; `resume` says what differs. Where nothing is left to train the log says what the steps ran on
    and beside what, not what this process runs on; else `resume` keeps the latter of the steps before it.
    """
    history = read_json(path / "history.json")
    earlier = RunLog.model_validate_json(json.dumps(log.model_dump(mode="json") | history))
    for name in HISTORY:
        setattr(log, name, getattr(earlier, name))
    if len(log.rank_step_times_s) != config.world_size:
        log.rank_step_times_s = []
    if not log.steps:
        return
    resume.changed += differing(computes(saved_config(path)), computes(config))
    if trains(config, resume.step):
        resume.changed += differing(*known_of_both(conditions(earlier), conditions(log)))
        resume.telemetry = earlier.telemetry
    elif not resume.changed:
        for name in OF_THE_STEPS:
            setattr(log, name, getattr(earlier, name))
    if resume.changed:
        count_as_warmup(log.steps)


def count_as_warmup(steps: list[Step]) -> None:
    for step in steps:
        if step.phase == "measured":
            step.phase = "warmup"


def used_before(path: Path, name: str) -> str | None:
    """What the process that wrote a checkpoint used of a choice; None where it does not say (an imported model)."""
    used = read_json(path / "history.json").get("used", {})
    return used[name]["used"] if name in used else None


def compare_graphs(log: RunLog, there: str | None, here: str) -> bool:
    """As `restore_history` does of every other choice, of this one after the first step of a process that goes on.

    there, here: `used` of cuda_graphs in the process before and in this one. `log` holds the steps before this process.
    Returns whether they differ.
    """
    differences = list(differing(*known_of_both({"used.cuda_graphs": there}, {"used.cuda_graphs": here})))
    if differences:
        log.resumes[-1].changed += differences
        count_as_warmup(log.steps)
    return bool(differences)


def trains(config: RunConfig, step: int) -> bool:
    """Whether anything is left to train after `step` steps."""
    return step < config.max_iters and not config.evaluation.only


def saved_config(path: Path) -> RunConfig:
    return parse(RunConfig, read_json(path / "config.json"), f"{path}/config.json")


def computes(config: RunConfig) -> dict[str, Any]:
    """What a step is and how it is computed."""
    return config.model_dump(exclude={*BESIDE, "max_iters"})


def conditions(log: RunLog) -> dict[str, Any]:
    """What else a step's time depends on: the machine, the software, and what was used of each choice; None: not known.

    CUDA graphs are not among them: whether a step can be captured turns out after the first one (`compare_graphs`).
    """
    environment, gpus = log.environment, log.environment.gpus
    return {
        "cards": [gpu.name for gpu in gpus],
        "power_limits_w": None if None in (limits := [gpu.power_limit_w for gpu in gpus]) else limits,
        "cpu": environment.cpu if environment.device == "cpu" else None,
        "cpu_threads": environment.cpu_threads if environment.device == "cpu" else None,
        "driver": environment.driver,
        "nccl": environment.nccl,
        "torch": environment.torch,
        "packages": environment.packages,
        "used": {name: choice.used for name, choice in log.used.items() if name != "cuda_graphs"},
    }


def known_of_both(there: dict[str, Any], here: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    known = [key for key in here if there[key] is not None and here[key] is not None]
    return {key: there[key] for key in known}, {key: here[key] for key in known}


def differing(there: dict[str, Any], here: dict[str, Any], above: str = "") -> Iterator[str]:
    """Every key that two configurations differ in, with both values; keys within keys by their path."""
    for key, value in there.items():
        other = here[key]
        if isinstance(value, dict) and isinstance(other, dict) and value.keys() == other.keys():
            yield from differing(value, other, f"{above}{key}.")
        elif value != other:
            yield f"{above}{key}: {value} there, {other} here"


def check_compatible(path: Path, config: RunConfig, log: RunLog, is_start: bool) -> None:
    """Raises ConfigError naming every difference that makes going on impossible.

    A run that continues another may take another batch: it has no step of the other's in its log.
    """
    saved = saved_config(path)
    if is_start and saved.name != config.continues:
        raise ConfigError(
            f"continues: {config.continues}: {path} is a checkpoint of {saved.name}; name that run, or another folder "
            "(--start-from FOLDER)"
        )
    done = int(path.name.removeprefix("step-"))
    # before the first step (an imported model) there are weights alone
    fixed = set(SAME_TO_CONTINUE) if done else {"model"}
    if done and not is_start and saved.global_batch_size != config.global_batch_size:
        fixed |= set(BATCH)
    there, here = saved.model_dump(include=fixed), config.model_dump(include=fixed)
    if differences := [*differing(there, here), *other_data(path, log.dataset)]:
        way_out = "take `continues` away" if is_start else f"remove {path.parent} (by hand: --anew) to start anew"
        raise ConfigError(
            f"{path}: is a checkpoint of another run than this one: {'; '.join(differences)}. Go on with the settings "
            f"it was made with, or {way_out}"
        )
    if is_start or done < config.max_iters:
        return
    if changed := list(differing(saved.model_dump(exclude=BESIDE), config.model_dump(exclude=BESIDE))):
        raise ConfigError(
            f"{path}: all {config.max_iters} steps are done, but with other settings than this run's: "
            f"{'; '.join(changed)}. What it would report is not what was run. Remove {path.parent} (by hand: --anew) "
            "to start anew"
        )
