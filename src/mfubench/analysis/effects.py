"""What one setting is worth: the difference of two cases, its interval, and what else differs between them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from mfubench.analysis.expectations import Expectations, expected_change, judged_change, stated_change
from mfubench.analysis.measures import Measures
from mfubench.analysis.settings import differing_settings, settings_that_ran
from mfubench.analysis.statistics import Difference, ProcessSpread, difference, process_spread
from mfubench.analysis.study import Study, base_name
from mfubench.analysis.units import Told, told_of
from mfubench.run_log import RunLog

Verdict = Told | Literal["no contrast", "not measured"]


@dataclass(frozen=True)
class Effect:
    """One declared effect as measured: arm over control, in tokens/s/GPU."""

    name: str
    arm: str
    control: str
    expected: str | None
    verdict: Verdict
    difference: Difference | None
    differs_in: dict[str, tuple[Any, Any]]  # setting -> (control's, arm's), as they ran
    reason: str | None = None  # why it was not measured, or is no contrast
    memory_change: float | None = None  # peak memory, arm over control: 0.1 is 10 % more

    @property
    def is_clean(self) -> bool:
        """One setting differs: the effect has one cause."""
        return len(self.differs_in) == 1


def spread_between_processes(*studies: dict[str, Measures]) -> ProcessSpread | None:
    """Spread of identical runs on this machine: repeats, and cases of other names that turn out the same.

    Of several studies runs are identical within one alone: what changed from study to study is no spread.
    """
    groups: dict[tuple[int, str], list[float]] = {}
    for number, measures in enumerate(studies):
        for judged in measures.values():
            rate = judged.tokens_per_s_per_gpu
            if judged.log.status == "ok" and rate is not None and judged.log.config.stage != "smoke":
                key = (number, json.dumps(settings_that_ran(judged.log), sort_keys=True))
                groups.setdefault(key, []).append(rate.median)
    return process_spread(list(groups.values()))


def judge_effects(
    study: Study, measures: dict[str, Measures], expectations: Expectations | None = None
) -> list[Effect]:
    """Every effect that the study declares, in its order. expectations: of the study, as of its model."""
    spread = spread_between_processes(measures)
    return [
        judge_effect(study, measures, effect.name, effect.arm, effect.control, effect.expected, spread, expectations)
        for effect in study.declared.effects
    ]


def judge_effect(
    study: Study,
    measures: dict[str, Measures],
    name: str,
    arm: str,
    control: str,
    expected: str | None,
    spread: ProcessSpread | None,
    expectations: Expectations | None = None,
) -> Effect:
    arm_runs, control_runs = processes(measures, arm), processes(measures, control)
    for side, runs in ((arm, arm_runs), (control, control_runs)):
        if not runs:
            return Effect(name, arm, control, expected, "not measured", None, {}, why_missing(study, side))
    differs_in = differing_settings(control_runs[0].log, arm_runs[0].log)
    if not differs_in:
        reason = f"both arms ran the same settings{fallback_note(arm_runs[0].log)}"
        return Effect(name, arm, control, expected, "no contrast", None, {}, reason)
    if list(differs_in) == ["attention"] and same_kernels(arm_runs[0].log, control_runs[0].log):
        reason = "both arms ran the same attention kernels"
        return Effect(name, arm, control, expected, "no contrast", None, differs_in, reason)
    measured = difference([run.rates for run in arm_runs], [run.rates for run in control_runs], spread)
    if measured is None:
        reason = "fewer than five measured steps in an arm"
        return Effect(name, arm, control, expected, "not measured", None, differs_in, reason)
    change = expected_change(arm, control, expectations) or stated_change(expected)
    verdict = told_of(measured, judged_change(change) if change is not None else None)
    memory_change = change_of_memory(arm_runs, control_runs)
    return Effect(name, arm, control, expected, verdict, measured, differs_in, memory_change=memory_change)


def change_of_memory(arm: list[Measures], control: list[Measures]) -> float | None:
    """Peak of the arm's fullest process over the control's, minus 1."""
    peaks = [max((run.peak_memory_gib or 0.0 for run in runs), default=0.0) for runs in (arm, control)]
    return peaks[0] / peaks[1] - 1 if all(peaks) else None


def processes(measures: dict[str, Measures], name: str) -> list[Measures]:
    """The runs of a case that ended well: itself and its repeats."""
    base = base_name(name)
    return [judged for key, judged in measures.items() if base_name(key) == base and judged.log.status == "ok"]


def same_kernels(first: RunLog, second: RunLog) -> bool:
    """Whether both profiled the same attention kernels: then the setting changed its name only."""
    if first.kernels is None or second.kernels is None or not first.kernels.attention:
        return False
    return set(first.kernels.attention) == set(second.kernels.attention)


def fallback_note(log: RunLog) -> str:
    notes = [choice.reason for choice in log.used.values() if choice.used != choice.requested and choice.reason]
    return f" ({'; '.join(notes)})" if notes else ""


def why_missing(study: Study, name: str) -> str:
    """Why a case has no figures, in words."""
    return f"{name} {fate_of(study, name)}"


def fate_of(study: Study, name: str) -> str:
    """What became of a case without figures: a sentence's predicate, for where its name stands already."""
    if name in study.declared.skipped:
        return f"was left out: {study.declared.skipped[name]}"
    if name in study.failures:
        return f"failed: {study.failures[name].reason}"
    if name in study.runs:
        log = study.runs[name]
        return f"ended as {log.status}: {log.reason or 'no reason recorded'}"
    return study.why_missing(name)
