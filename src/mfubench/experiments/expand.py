"""A study's YAML, expanded into named runs and checked."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mfubench.complaints import explain
from mfubench.config import ConfigError, MemorySearch, RunConfig, parse
from mfubench.experiments.checks import (
    check_continuations,
    check_length,
    check_lengths,
    check_model_names,
    check_references,
    leave_out_too_large,
)
from mfubench.experiments.overrides import Overrides, merge, nest
from mfubench.experiments.schema import STAGES, StageConfig, StudyConfig
from mfubench.flops import count_parameters
from mfubench.presets import load_model

LARGE_ON_A_CPU = 100_000_000  # parameters of a model that no CPU trains in minutes

# How a grid's keys are called in case names.
SHORT_KEYS = {
    "world_size": "gpus",
    "micro_batch_size": "micro-batch",
    "gradient_accumulation_steps": "accumulation",
    "activation_checkpointing": "checkpointing",
    "parallelism": "",  # ddp, zero1 and fsdp say it by themselves
}


@dataclass(frozen=True)
class Study:
    """A study, expanded and checked."""

    config: StudyConfig
    runs: dict[str, RunConfig]  # "stage/case" -> run
    searches: dict[str, MemorySearch]  # "memory/case" -> search
    skipped: dict[str, str]  # "stage/case" -> why it is left out on this machine

    def cases(self, stage: str) -> list[str]:
        """Case names of a stage's runs, in the order of the file."""
        return [run.case for run in self.runs.values() if run.stage == stage]

    def smoke_case(self, model: str) -> str | None:
        """The smoke case that gates runs of a model, or None where the study has none."""
        for run in self.runs.values():
            if run.stage == "smoke" and run.model.name == model:
                return run.case
        return None

    def models(self) -> list[str]:
        return list(dict.fromkeys(run.model.name for run in self.runs.values()))

    def to_json(self, config_files: Sequence[str] = ()) -> str:
        """What the analysis needs to know of the study, as one line with sorted keys.

        config_files: those that it was read from, as snakemake was given them.
        """
        return json.dumps(
            {
                "study": self.config.study,
                "config_files": list(config_files),
                "description": self.config.description,
                "models": self.models(),
                "effects": [effect.model_dump() for effect in self.config.effects],
                "expectations": self.config.expectations,
                "price_per_gpu_hour": self.config.price_per_gpu_hour,
                "cases": {name: json.loads(run.to_json()) for name, run in self.runs.items()},
                "searches": {name: json.loads(search.to_json()) for name, search in self.searches.items()},
                "skipped": self.skipped,
            },
            sort_keys=True,
        )


def expand_study(values: dict[str, Any], source: str, gpus_per_node: int) -> Study:
    """Check a study's YAML and expand it into runs.

    values: the YAML as plain data; source: the file it came from, for messages; gpus_per_node: processes that one
    node can hold (GPUs, or CPU processes where there is no GPU).

    Raises ConfigError naming file, key path, what was found and what is allowed.
    """
    config: StudyConfig = parse(StudyConfig, values, source)
    check_base(config.base, f"{source}: base")
    runs: dict[str, RunConfig] = {}
    searches: dict[str, MemorySearch] = {}
    for stage in STAGES:
        declared = config.experiments.get(stage)
        if declared is None:
            continue
        where = f"{source}: experiments.{stage}"
        check_base(declared.base, f"{where}.base")
        for case, overrides, at in expand_stage(declared, where):
            check_length(case, at)
            for repeat in range(declared.repeats):
                name = f"{stage}/{case}" + (f"-repeat{repeat}" if repeat else "")
                if name in runs:
                    raise ConfigError(f"{at}: there is already a case {name}; case names of a stage must differ")
                layers = (config.base, declared.base, overrides, {"name": name, "repeat": repeat})
                runs[name] = build_run(layers, at)
        for case, overrides in declared.search.items():
            check_length(case, f"{where}.search")
            if stage != "memory":
                raise ConfigError(f"{where}.search: only the memory stage has a search")
            search = build_search(config.base, declared.base, overrides, f"memory/{case}", f"{where}.search.{case}")
            if search.run.name in runs or search.run.name in searches:
                raise ConfigError(f"{where}.search.{case}: there is already a case {search.run.name}")
            searches[search.run.name] = search

    check_references(config, runs, searches, source)
    check_model_names({**runs, **{name: search.run for name, search in searches.items()}}, source)
    check_continuations(runs, source)
    check_lengths(runs, source)
    for name, plan in config.plans.items():
        plan.check(f"{source}: plans.{name}")
    skipped = leave_out_too_large(config, runs, searches, source, gpus_per_node)
    return Study(config=config, runs=runs, searches=searches, skipped=skipped)


def warn_of_cpu(study: Study) -> str | None:
    """What to think of before a study that was made for GPUs is run on a machine without one; None for a small one."""
    large = [
        (parameters, run.model.name)
        for run in study.runs.values()
        if run.device != "cpu" and (parameters := count_parameters(run.model).total) >= LARGE_ON_A_CPU
    ]
    if not large:
        return None
    parameters, name = max(large)
    return (
        f"NO GPU WAS FOUND: {len(large)} runs of this study train models of up to {parameters / 1e9:.2g}B parameters "
        f"({name}), which takes a CPU days and tens of GiB. Run it on a machine with GPUs, or the default study here. "
        "On a cluster's login node machine.gpus says how many GPUs a node has."
    )


def check_base(overrides: Overrides, where: str) -> None:
    """What is wrong with a base by itself is said of it, not of the first case that it is under.

    A run's name and repeat cannot be set: they follow from its place in the study.
    """
    try:
        base = nest(overrides)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    for key, value in base.items():
        if key in ("name", "repeat"):
            raise ConfigError(f"{where}.{key}: cannot be set; case names are keys, repeats the stage's `repeats`")
        # global_batch_size may be stated; whether it is right depends on the case
        if key not in {*RunConfig.model_fields, *MemorySearch.model_fields, "global_batch_size"} - {"run"}:
            fault = {"type": "extra_forbidden", "loc": (key,), "input": value, "msg": ""}
            raise ConfigError(explain(fault, where, RunConfig))
    if isinstance(base.get("model"), str):
        resolve_model(base["model"], where)


def expand_stage(declared: StageConfig, where: str) -> list[tuple[str, Overrides, str]]:
    """The cases of a stage as (case name, overrides, key path), in the order of the file."""
    expanded: list[tuple[str, Overrides, str]] = []
    for case, overrides in declared.cases.items():
        expanded.append((case, overrides or {}, f"{where}.cases.{case}"))
    inherited: Overrides = {}
    for case, overrides in declared.ladder.items():
        inherited = merge(inherited, overrides or {})
        expanded.append((case, inherited, f"{where}.ladder.{case}"))
    for prefix, axes in declared.grid.items():
        lists = {key: values for key, values in axes.items() if isinstance(values, list) and key != "requires"}
        fixed = {key: value for key, value in axes.items() if key not in lists}
        if not lists:
            raise ConfigError(f"{where}.grid.{prefix}: no key holds a list; use `cases` for a single run")
        if empty := [key for key, values in lists.items() if not values]:
            raise ConfigError(f"{where}.grid.{prefix}.{empty[0]}: holds no values, so there is no run; give some")
        for point in itertools.product(*lists.values()):
            chosen = dict(zip(lists, point, strict=True))
            suffix = "-".join(in_name(key, value) for key, value in chosen.items())
            overrides = merge(fixed, nest(chosen))
            expanded.append((f"{prefix}-{suffix}", overrides, f"{where}.grid.{prefix}"))
    return expanded


def in_name(key: str, value: Any) -> str:
    """A grid's key and value in a case name: micro-batch8, cuda-graphs-true."""
    short = SHORT_KEYS.get(key, key.replace("_", "-"))
    return f"{short}-{json.dumps(value)}" if value is None or isinstance(value, bool) else f"{short}{value}"


def build_run(layers: tuple[Overrides, ...], where: str) -> RunConfig:
    """Merge the layers, resolve the model preset, validate."""
    merged: Overrides = {}
    try:
        for layer in layers:
            merged = merge(merged, layer)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    merged["model"] = resolve_model(merged.get("model"), where)
    run: RunConfig = parse(RunConfig, merged, where)
    return run


def build_search(base: Overrides, stage_base: Overrides, overrides: Overrides, name: str, where: str) -> MemorySearch:
    """A memory search: keys of MemorySearch stand beside keys of the run it tries."""
    own = {key: value for key, value in overrides.items() if key in MemorySearch.model_fields and key != "run"}
    of_run = {key: value for key, value in overrides.items() if key not in own}
    if "candidates" not in own:
        raise ConfigError(f"{where}.candidates: missing; give the micro-batch sizes to try, such as [8, 16, 32]")
    candidates = own["candidates"]
    if not isinstance(candidates, list) or not candidates:
        raise ConfigError(f"{where}.candidates: found {candidates!r}; give a list of micro-batch sizes")
    layers = (base, stage_base, of_run, {"name": name, "micro_batch_size": candidates[0]})
    run = build_run(layers, where)
    if run.continues is not None:
        raise ConfigError(f"{where}.continues: found {run.continues!r}; a memory search starts anew")
    if run.nnodes > 1:
        raise ConfigError(f"{where}.nnodes: found {run.nnodes}; a search runs on one node")
    search: MemorySearch = parse(MemorySearch, {**own, "run": json.loads(run.to_json())}, where)
    return search


def resolve_model(value: Any, where: str) -> dict[str, Any]:
    """`llama2-1.36b`, or `{preset: llama2-1.36b, num_hidden_layers: 4}`, as the keys of ModelConfig."""
    if isinstance(value, str):
        value = {"preset": value}
    if not isinstance(value, dict) or not isinstance(value.get("preset"), str):
        raise ConfigError(f"{where}.model: found {value!r}; give a preset of config/models.yaml")
    changes = {key: item for key, item in value.items() if key != "preset"}
    try:
        return load_model(value["preset"], changes).model_dump(mode="json")
    except ConfigError as error:
        raise ConfigError(f"{where}.model: {error}") from None
