"""From a study's YAML to named runs. Three verbs declare every experiment:

- `cases`: each differs from the base.
- `ladder`: each inherits the one before.
- `grid`: the product of the keys that hold lists.

and `search` (in the memory stage) declares a memory limit to be found. The key is the file name:
results/<study>/runs/tiers/tier3.json exists because `experiments.tiers.ladder.tier3` does. No torch here.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import Field, field_validator, model_validator

from mfubench.complaints import explain
from mfubench.config import ConfigError, MemorySearch, RunConfig, Strict, parse
from mfubench.data.config import DatasetConfig, TokenizerConfig
from mfubench.flops import count_parameters
from mfubench.machine_config import MachineConfig
from mfubench.planner_study import PlanRequest
from mfubench.presets import CONFIG_DIR, load_model
from mfubench.yaml_files import load_yaml

Stage = Literal["smoke", "baseline", "scaling", "tiers", "ablations", "memory", "training"]
STAGES: tuple[Stage, ...] = get_args(Stage)

LARGE_ON_A_CPU = 100_000_000  # parameters of a model that no CPU trains in minutes

MEASURED: tuple[Stage, ...] = ("baseline", "scaling", "tiers", "ablations")  # their runs are made for their rate
LONGEST_CASE = 100  # characters: a name becomes files, beside endings, of a length that every file system takes

# What a study's files must not come to lie in: the folders of this project itself, and the results that it ships.
OWN_FOLDERS = ("benchmarks", "config", "docs", "envs", "profiles", "rules", "src", "tests", "workflow")
SHIPPED_RESULTS = "results/reference"

# How a grid's keys are called in case names.
SHORT_KEYS = {
    "world_size": "gpus",
    "micro_batch_size": "micro-batch",
    "gradient_accumulation_steps": "accumulation",
    "activation_checkpointing": "checkpointing",
}

# What a run has in common with the one whose checkpoint it starts from (train.checkpoint checks it again).
SAME_TO_CONTINUE = ("model", "dataset", "seq_len", "seed", "optimizer")

Overrides = dict[str, Any]  # values by RunConfig key, nested like RunConfig

# Names become files, and folders are written to and named in shell commands: of a stranger's study too.
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
FOLDER = r"^[A-Za-z0-9_-][A-Za-z0-9_.-]*(/[A-Za-z0-9_-][A-Za-z0-9_.-]*)*$"
Name = Annotated[str, Field(pattern=NAME)]
PlanName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]*$")]


class CeilingsConfig(Strict):
    """How long the card's own limits are measured."""

    seconds: float = Field(2.0, gt=0, description="hot time per measured kernel")
    micro_batch_size: int = Field(8, ge=1)


class StageConfig(Strict):
    base: Overrides = {}
    cases: dict[str, Overrides | None] = {}
    ladder: dict[str, Overrides | None] = {}
    grid: dict[str, Overrides] = {}
    search: dict[str, Overrides] = {}
    repeats: int = Field(1, ge=1, description="whole processes per case, interleaved, to tell differences from noise")


class EffectConfig(Strict):
    """What one setting is worth: two cases that differ in it alone."""

    name: str
    arm: str
    control: str
    expected: str | None = None


class StudyConfig(Strict):
    """A study file. `extends: NAME` (not part of the schema: resolved before) takes another one as its base."""

    study: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")
    description: str = ""
    results_dir: str = Field(
        "results", pattern=FOLDER, description="below the project's folder; a link leads elsewhere"
    )
    resources_dir: str = Field("resources", pattern=FOLDER, description="likewise")
    machine: MachineConfig = MachineConfig()
    tokenizers: dict[Name, TokenizerConfig]
    datasets: dict[Name, DatasetConfig]
    ceilings: CeilingsConfig = CeilingsConfig()
    base: Overrides
    experiments: dict[Stage, StageConfig]
    plans: dict[PlanName, PlanRequest] = {}
    effects: tuple[EffectConfig, ...] = Field((), strict=False)
    expectations: str | None = Field(None, pattern=NAME, description="a file of config/expectations, without .yaml")
    price_per_gpu_hour: float | None = Field(None, ge=0)

    @field_validator("results_dir", "resources_dir")
    @classmethod
    def check_folder(cls, folder: str) -> str:
        if folder.split("/")[0] in OWN_FOLDERS:
            raise ValueError(f"found {folder!r}, where this project's own files are; name another folder")
        return folder

    @model_validator(mode="after")
    def check_results(self) -> StudyConfig:
        if f"{self.results_dir}/{self.study}/".startswith(f"{SHIPPED_RESULTS}/"):
            raise ValueError(
                f"study: found {self.study!r} in results_dir {self.results_dir!r}, but {SHIPPED_RESULTS} holds the "
                "results that come with this project; give the study another name"
            )
        return self


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

    def to_json(self) -> str:
        """What the analysis needs to know of the study, as one line with sorted keys."""
        return json.dumps(
            {
                "study": self.config.study,
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
        f"({name}), which takes a CPU days and tens of GiB. Run it on a machine with GPUs, or the default study here."
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


def check_length(case: str, where: str) -> None:
    if len(case) > LONGEST_CASE:
        raise ConfigError(f"{where}: the case name {case} has {len(case)} characters; {LONGEST_CASE} at most")


def resolve_extends(values: dict[str, Any], folder: Path, source: str) -> dict[str, Any]:
    """A study that names another in `extends` is that one, with its own keys merged over it.

    folder: where studies are found as NAME.yaml. Raises ConfigError for an unknown name or a circle.
    """
    layers = [values]
    seen: list[str] = []
    while (name := layers[-1].get("extends")) is not None:
        path = folder / f"{name}.yaml"
        if not isinstance(name, str) or not path.is_file():
            known = ", ".join(sorted(path.stem for path in folder.glob("*.yaml")))
            raise ConfigError(f"{source}: extends: found {name!r}; studies in {folder}: {known}")
        if name in seen:
            raise ConfigError(f"{source}: extends: {' -> '.join([*seen, name])} is a circle")
        seen.append(name)
        extended = load_yaml(path)
        if not isinstance(extended, dict):
            raise ConfigError(f"{path}: must be a study, a mapping of keys")
        layers.append(extended)
    merged: dict[str, Any] = {}
    for layer in reversed(layers):
        merged = merge_plain(merged, {key: value for key, value in layer.items() if key != "extends"})
    return merged


def merge_plain(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Nested mappings key by key; a null takes a key away; anything else is replaced."""
    merged = dict(under)
    for key, value in over.items():
        if value is None and key in merged:
            del merged[key]
        elif isinstance(merged.get(key), dict) and isinstance(value, dict):
            merged[key] = merge_plain(merged[key], value)
        else:
            merged[key] = value
    return merged


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
            suffix = "-".join(f"{SHORT_KEYS.get(key, key.replace('_', '-'))}{value}" for key, value in chosen.items())
            overrides = merge(fixed, nest(chosen))
            expanded.append((f"{prefix}-{suffix}", overrides, f"{where}.grid.{prefix}"))
    return expanded


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


def check_references(
    config: StudyConfig, runs: dict[str, RunConfig], searches: dict[str, MemorySearch], source: str
) -> None:
    """Datasets, tokenizers and effect arms that are named must exist, and a model must hold its tokenizer's ids."""
    for name, dataset in config.datasets.items():
        if dataset.tokenizer not in config.tokenizers:
            raise ConfigError(
                f"{source}: datasets.{name}.tokenizer: found {dataset.tokenizer!r}; "
                f"tokenizers of this study: {', '.join(config.tokenizers)}"
            )
    for name, run in {**runs, **{name: search.run for name, search in searches.items()}}.items():
        if run.dataset not in config.datasets:
            raise ConfigError(
                f"{source}: {name}: dataset: found {run.dataset!r}; "
                f"datasets of this study: {', '.join(config.datasets)}"
            )
        name_of_tokenizer = config.datasets[run.dataset].tokenizer
        ids = config.tokenizers[name_of_tokenizer].vocab_size
        if ids is not None and ids > run.model.vocab_size:
            raise ConfigError(
                f"{source}: {name}: model.vocab_size: found {run.model.vocab_size}, but "
                f"tokenizers.{name_of_tokenizer}.vocab_size is {ids}; raise the one or lower the other"
            )
    for position, effect in enumerate(config.effects):
        for side in (effect.arm, effect.control):
            if side not in runs:
                raise ConfigError(f"{source}: effects.{position}: there is no case {side!r} in this study")
        if effect.arm == effect.control:
            raise ConfigError(f"{source}: effects.{position}: arm and control are both {effect.arm}; name two cases")
    known = {path.stem for path in (CONFIG_DIR / "expectations").glob("*.yaml")}
    if config.expectations is not None and config.expectations not in known:
        raise ConfigError(
            f"{source}: expectations: found {config.expectations!r}; in {CONFIG_DIR / 'expectations'}: "
            f"{', '.join(sorted(known))}"
        )


def check_model_names(runs: dict[str, RunConfig], source: str) -> None:
    """Gates, ceilings and answers know a model by its name: two that differ need two names."""
    first: dict[str, str] = {}
    for name, run in runs.items():
        other = first.setdefault(run.model.name, name)
        model, same_name = (runs[case].model.model_dump() for case in (name, other))
        if different := [key for key in model if model[key] != same_name[key]]:
            key = different[0]
            raise ConfigError(
                f"{source}: {name}: model.{key}: found {model[key]!r}, which is {same_name[key]!r} in {other}, and "
                f"both models are called {run.model.name!r}; give this one another model.name"
            )


def check_continuations(runs: dict[str, RunConfig], source: str) -> None:
    """A run that continues another needs one that exists, leaves a checkpoint, trains the same model, in no circle."""
    for name, run in runs.items():
        if run.continues is None:
            if run.evaluation.only:
                raise ConfigError(
                    f"{source}: {name}: evaluation.only: needs `continues`, the run whose checkpoint is evaluated"
                )
            continue
        where = f"{source}: {name}: continues"
        before = runs.get(run.continues)
        if before is None:
            leaving = [other for other, log in runs.items() if log.checkpoint.at_end or log.checkpoint.interval]
            raise ConfigError(
                f"{where}: found {run.continues!r}; runs of this study that leave a checkpoint: "
                f"{', '.join(leaving) or 'none'}"
            )
        chain = [name]
        while (earlier := runs[chain[-1]].continues) is not None and earlier in runs:
            if earlier in chain:
                raise ConfigError(f"{where}: {' -> '.join([*chain, earlier])} is a circle")
            chain.append(earlier)
        if not (before.checkpoint.at_end or before.checkpoint.interval):
            raise ConfigError(f"{where}: {run.continues} leaves no checkpoint; set checkpoint: {{at_end: true}} there")
        different = [key for key in SAME_TO_CONTINUE if getattr(run, key) != getattr(before, key)]
        if different:
            raise ConfigError(f"{where}: {run.continues} differs in {', '.join(different)}; give both the same")
        if not run.evaluation.only and run.max_iters <= before.max_iters:
            raise ConfigError(
                f"{where}: {run.continues} does {before.max_iters} steps, so max_iters {run.max_iters} leaves none to "
                "do; raise it, or set evaluation: {only: true}"
            )


def check_lengths(runs: dict[str, RunConfig], source: str) -> None:
    """A run that is made for its rate needs a step that counts: neither the first one, nor one of the warm-up."""
    for name, run in runs.items():
        if run.stage not in MEASURED or run.evaluation.only:
            continue
        measurement = run.measurement
        done = runs[run.continues].max_iters if run.continues is not None else 0
        if run.max_iters - done <= 1 + measurement.warmup_steps:
            raise ConfigError(
                f"{source}: {name}: max_iters: found {run.max_iters}, which leaves no step to measure after "
                f"{f'the {done} that are done, ' if done else ''}the first one and measurement.warmup_steps "
                f"{measurement.warmup_steps}; raise it to {done + measurement.warmup_steps + 2} or more"
            )
        most = run.max_iters - done - 1 - measurement.warmup_steps
        if measurement.adaptive and measurement.min_steps > most:
            raise ConfigError(
                f"{source}: {name}: measurement.min_steps: found {measurement.min_steps}, but max_iters "
                f"{run.max_iters} leaves {most} to measure; lower min_steps, raise max_iters, or set "
                "measurement.adaptive: false"
            )


def leave_out_too_large(
    config: StudyConfig,
    runs: dict[str, RunConfig],
    searches: dict[str, MemorySearch],
    source: str,
    gpus_per_node: int,
) -> dict[str, str]:
    """Refuse runs that this machine cannot hold, or take them out and say why."""
    skipped: dict[str, str] = {}
    for name, run in {**runs, **{name: search.run for name, search in searches.items()}}.items():
        per_node = run.world_size // run.nnodes
        reason = None
        if per_node > gpus_per_node:
            reason = f"needs {per_node} processes a node, this machine holds {gpus_per_node}"
        elif run.nnodes > config.machine.max_nodes:
            reason = f"needs {run.nnodes} nodes, machine.max_nodes is {config.machine.max_nodes}"
        if reason is None:
            continue
        if config.machine.when_too_small == "stop":
            raise ConfigError(
                f"{source}: experiments.{name.replace('/', '.')}: world_size {run.world_size} {reason}; "
                "lower world_size, or set machine.when_too_small: skip to leave such runs out"
            )
        skipped[name] = reason
    while lost := [name for name, run in runs.items() if run.continues in skipped and name not in skipped]:
        skipped |= {name: f"continues {runs[name].continues}, which is left out" for name in lost}
    for name in skipped:
        runs.pop(name, None)
        searches.pop(name, None)
    if skipped and not runs and not searches:
        name, reason = next(iter(skipped.items()))
        raise ConfigError(
            f"{source}: experiments: nothing can be measured here, since machine.when_too_small: skip leaves out every "
            f"run ({name} {reason}); add one that fits, or run the study on a larger machine"
        )
    return skipped


def merge(under: Overrides, over: Overrides) -> Overrides:
    """Nested mappings key by key, anything else replaced. Dotted keys are nested first; a model preset replaces."""
    merged = dict(under)
    for key, value in nest(over).items():
        below = merged.get(key)
        if key == "model" and isinstance(below, str):
            below = {"preset": below}
        replaces = key == "model" and isinstance(value, dict) and "preset" in value
        if isinstance(below, dict) and isinstance(value, dict) and not replaces:
            merged[key] = merge(below, value)
        else:
            merged[key] = value
    return merged


def nest(overrides: Overrides) -> Overrides:
    """`{"loader.kind": "memmap"}` as `{"loader": {"kind": "memmap"}}`."""
    nested: Overrides = {}
    for key, value in overrides.items():
        head, _, tail = str(key).partition(".")
        if tail and head in overrides:
            raise ConfigError(f"{head} and {key} are both given; write one mapping, or dotted keys alone")
        nested[head] = merge(nested.get(head, {}), {tail: value}) if tail else value
    return nested


def parse_overrides(pairs: list[str]) -> Overrides:
    """`key=value` words of a command line as overrides; values are YAML. Raises ConfigError on another form."""
    overrides: Overrides = {}
    for pair in pairs:
        key, sign, text = pair.partition("=")
        if not sign or not key:
            raise ConfigError(f"{pair!r}: write key=value, such as micro_batch_size=8 or loader.kind=memmap")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"{pair!r}: the value is not YAML ({error})") from None
        overrides = merge(overrides, {key: value})
    return overrides
