"""What an expanded study is refused for, and which of its runs this machine leaves out."""

from __future__ import annotations

from mfubench.config import SAME_TO_CONTINUE, ConfigError, MemorySearch, RunConfig
from mfubench.experiments.schema import LONGEST_NAME, Stage, StudyConfig
from mfubench.presets import CONFIG_DIR

MEASURED: tuple[Stage, ...] = ("baseline", "scaling", "tiers", "ablations")  # their runs are made for their rate


def check_length(case: str, where: str) -> None:
    if len(case) > LONGEST_NAME:
        raise ConfigError(f"{where}: the case name {case} has {len(case)} characters; {LONGEST_NAME} at most")


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


def leaves_checkpoint(run: RunConfig, runs: dict[str, RunConfig]) -> bool:
    """Whether a run that does all its steps writes a checkpoint. `runs`: those of the study, by name."""
    if run.evaluation.only:
        return False
    done = last_checkpoint(runs[run.continues]) if run.continues in runs else 0
    interval = run.checkpoint.interval
    return run.checkpoint.at_end or (interval is not None and run.max_iters // interval > done // interval)


def last_checkpoint(run: RunConfig) -> int:
    """Steps done at the last checkpoint of a run that leaves one, from which what continues it goes on."""
    interval = run.checkpoint.interval
    return run.max_iters if run.checkpoint.at_end or interval is None else run.max_iters // interval * interval


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
            leaving = [other for other, run in runs.items() if leaves_checkpoint(run, runs)]
            raise ConfigError(
                f"{where}: found {run.continues!r}; runs of this study that leave a checkpoint: "
                f"{', '.join(leaving) or 'none'}"
            )
        chain = [name]
        while (earlier := runs[chain[-1]].continues) is not None and earlier in runs:
            if earlier in chain:
                raise ConfigError(f"{where}: {' -> '.join([*chain, earlier])} is a circle")
            chain.append(earlier)
        if before.evaluation.only:
            raise ConfigError(
                f"{where}: {run.continues} only evaluates and leaves no checkpoint; name the run that it continues, "
                f"{before.continues}"
            )
        if not leaves_checkpoint(before, runs):
            interval = before.checkpoint.interval
            why = f" (checkpoint.interval {interval}, max_iters {before.max_iters})" if interval is not None else ""
            raise ConfigError(
                f"{where}: {run.continues} leaves no checkpoint{why}; set checkpoint: {{at_end: true}} there"
            )
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
