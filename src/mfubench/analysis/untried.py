"""Settings that were faster per GPU than the fastest, on fewer GPUs than it had, and never ran on as many."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mfubench.analysis.answer import Answer, Candidate, command_for
from mfubench.analysis.findings import Findings
from mfubench.analysis.scaling import MANY_OF_ONE, begins, series_key
from mfubench.analysis.settings import differing_settings
from mfubench.analysis.statistics import Difference, difference
from mfubench.config import ConfigError, RunConfig, parse
from mfubench.host_load import cores_of_run, shared_cores
from mfubench.run_log import RunLog


@dataclass(frozen=True)
class Untried:
    """A case on fewer GPUs than the fastest, against it."""

    candidate: Candidate
    tokens_per_s_per_gpu: float
    difference: Difference  # of the rate per GPU, over that of the fastest
    differs_in: dict[str, tuple[Any, Any]]  # setting -> (the fastest's, its own), as they ran
    config: RunConfig  # the same settings on as many GPUs as the fastest

    @property
    def command(self) -> str:
        return command_for(self.config)


def untried(found: Findings, answer: Answer) -> Untried | None:
    """The one with the highest rate per GPU; None where no setting is faster by more than both spreads allow.

    A setting that was run on as many GPUs has had its chance, however that run ended.
    """
    fastest = answer.fastest
    world_size = fastest.config.world_size
    tried = [log for log in found.study.runs.values() if log.config.world_size >= world_size]
    faster = []
    for candidate in answer.candidates:
        if candidate.config.world_size >= world_size or any(is_as_many(candidate, log) for log in tried):
            continue
        if shared_cores([cores_of_run(side.runs[0].log) for side in (candidate, fastest)]):
            continue  # one of few processes had more of the cores: its rate says nothing of many
        rates, fastest_rates = ([run.rates for run in side.runs] for side in (candidate, fastest))
        change = difference(rates, fastest_rates, found.spread)
        config = on_as_many(candidate.config, fastest.config)
        if change is None or not change.is_difference or change.change < 0 or config is None:
            continue
        faster.append(
            Untried(
                candidate=candidate,
                tokens_per_s_per_gpu=candidate.tokens_per_s / candidate.config.world_size,
                difference=change,
                differs_in=own_differences(fastest, candidate),
                config=config,
            )
        )
    return max(faster, key=lambda item: item.difference.change, default=None)


def is_as_many(candidate: Candidate, log: RunLog) -> bool:
    """Whether a run on more GPUs is what the candidate becomes there."""
    own, many = series_key(candidate.runs[0].log), series_key(log)
    return own == many or (log.config.parallelism == MANY_OF_ONE and begins(own, many))


def on_as_many(config: RunConfig, fastest: RunConfig) -> RunConfig | None:
    """The settings on the fastest's GPUs; None where they do not allow it, as with shards of three of eight ranks."""
    values = config.model_dump(mode="json", exclude={"global_batch_size"})
    values |= {"world_size": fastest.world_size, "nnodes": fastest.nnodes}
    if config.parallelism == "none":
        values["parallelism"] = MANY_OF_ONE
    try:
        return parse(RunConfig, values, config.name)
    except ConfigError:
        return None


def own_differences(fastest: Candidate, candidate: Candidate) -> dict[str, tuple[Any, Any]]:
    """Settings that would differ on as many GPUs."""
    differing = differing_settings(fastest.runs[0].log, candidate.runs[0].log)
    for key in ("world_size", "nnodes"):
        differing.pop(key, None)
    if "parallelism" in differing:
        theirs, alone = differing.pop("parallelism")
        own = MANY_OF_ONE if alone == "none" else alone
        if own != theirs:
            differing["parallelism"] = (theirs, own)
    return differing
