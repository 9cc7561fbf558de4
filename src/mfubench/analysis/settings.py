"""The settings of a run that may change its speed: asked for, as they ran, and in which of them two runs differ."""

from __future__ import annotations

from typing import Any

from mfubench.analysis.study import unlike_conditions
from mfubench.config import RunConfig
from mfubench.run_log import RunLog

# What two repeats of one case may differ in. Everything else of a run may change its speed.
OUTSIDE_SPEED = (
    *("name", "repeat", "seed", "requires", "contrast_attention", "max_iters", "sample_tokens", "global_batch_size"),
    "continues",
    *("evaluation", "checkpoint", "measurement", "optimizer", "memory_cap_gib"),
)

# What `communication.reduction: auto` goes by: where they differ, how gradients are summed only follows.
DECIDES_REDUCTION = {
    "parallelism",
    "communication.reduce_dtype",
    "communication.shard_ranks",
    "communication.reshard_after_forward",
    "kernels.weight_gradient",
    "nnodes",
    "world_size",
}


def settings_asked(config: RunConfig) -> dict[str, Any]:
    """Everything that may change a run's speed, flat (`loader.kind`), as it was asked for."""
    return flatten(config.model_dump(mode="json", exclude=set(OUTSIDE_SPEED)))


def settings_that_ran(log: RunLog) -> dict[str, Any]:
    """Everything that may change a run's speed, flat (`loader.kind`), with what ran in place of what was asked."""
    settings = log.config.model_dump(mode="json", exclude=set(OUTSIDE_SPEED))
    if "reduction" not in log.used:  # of a run before there was a choice
        settings["communication"]["reduction"] = "collective"
    for key, choice in log.used.items():
        if key == "loader":
            settings["loader"]["kind"] = choice.used
        elif key in settings["kernels"]:
            settings["kernels"][key] = choice.used
        elif key in settings["communication"]:
            settings["communication"][key] = choice.used
        else:
            settings[key] = choice.used
    if settings["loader"]["kind"] == "memmap":  # which has neither workers nor prefetching
        settings["loader"] = {"kind": "memmap"}
    if settings["compile"] == "none":
        for key in ("compile_mode", "compile_backend"):
            settings.pop(key)
    return flatten(settings)


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def differing_settings(control: RunLog, arm: RunLog) -> dict[str, tuple[Any, Any]]:
    """Settings in which two runs really differ, as (control's, arm's), and what else changes their speed: power limits
    of cards, on CPUs the threads of as many processes.

    A setting that has no meaning in one of them (the compile mode of a run that does not compile) is no difference of
    its own.
    """
    left, right = settings_that_ran(control), settings_that_ran(arm)
    differing = {key: (left[key], right[key]) for key in left if key in right and left[key] != right[key]}
    asked = [log.config.communication.reduction for log in (control, arm)]
    if asked[0] == asked[1] and differing.keys() & DECIDES_REDUCTION:
        differing.pop("communication.reduction", None)
    return differing | unlike_conditions(control, arm)


def parallel(setting: str) -> bool:
    """Whether a setting says what several processes do in parallel: one alone has no use for it."""
    return setting == "parallelism" or setting.startswith("communication.")


def settings_of_series(log: RunLog) -> dict[str, Any]:
    """The settings of a run but for the number of processes: equal for runs that differ in that alone.

    How gradients are summed and whether graphs are captured counts as asked for: `auto` of one series may sum otherwise
    on several nodes than on one, and fsdp captures nothing, which one process with the same settings does.
    """
    settings = settings_that_ran(log)
    settings.pop("world_size")
    settings.pop("nnodes")
    asked = {"communication.reduction": log.config.communication.reduction, "cuda_graphs": log.config.cuda_graphs}
    return settings | asked
