"""Optional trackers beside the run log: MFUBENCH_TRACKERS="tensorboard,wandb". Rank 0 alone writes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Protocol

from mfubench.config import ConfigError, RunConfig
from mfubench.run_log import Step


class Tracker(Protocol):
    def log(self, values: dict[str, float], step: int) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    def __init__(self, config: RunConfig, folder: Path):
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder / "tensorboard"))
        self.writer.add_text("config", f"```\n{config.to_json()}\n```")

    def log(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    """Project, mode and key come from wandb's own variables (WANDB_PROJECT, WANDB_MODE, ...)."""

    def __init__(self, config: RunConfig, folder: Path):
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        self.run = wandb.init(dir=str(folder), name=config.name, config=config.model_dump(mode="json"), resume="allow")

    def log(self, values: dict[str, float], step: int) -> None:
        self.run.log(values, step=step)

    def close(self) -> None:
        self.run.finish()


KINDS: dict[str, Any] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}


def open_trackers(config: RunConfig, folder: Path) -> list[Tracker]:
    """The trackers that MFUBENCH_TRACKERS names. Raises ConfigError for one that is unknown or not installed."""
    trackers = []
    for name in filter(None, os.environ.get("MFUBENCH_TRACKERS", "").replace(" ", "").split(",")):
        if name not in KINDS:
            raise ConfigError(f"MFUBENCH_TRACKERS: unknown tracker {name!r}; use {' and '.join(KINDS)}")
        try:
            trackers.append(KINDS[name](config, folder))
        except ImportError as error:
            raise ConfigError(f"MFUBENCH_TRACKERS: {name} is not installed ({error}); pip install {name}") from None
    return trackers


def log_steps(trackers: list[Tracker], steps: list[Step]) -> None:
    for step in steps if trackers else []:
        values = {
            "loss": step.loss,
            "grad_norm": step.grad_norm,
            "learning_rate": step.learning_rate,
            "step_time_s": step.step_time_s,
            "tokens_per_s": step.tokens / step.step_time_s,
        }
        for tracker in trackers:
            tracker.log({name: value for name, value in values.items() if value is not None}, step.step)
