"""Two studies side by side: another card, another week, another commit. Is anything slower than the spread explains?"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from mfubench.analysis.effects import processes, spread_between_processes
from mfubench.analysis.measures import Measures, measure
from mfubench.analysis.scaling import rate_of
from mfubench.analysis.settings import differing_settings
from mfubench.analysis.statistics import Difference, ProcessSpread, difference
from mfubench.analysis.study import Study, base_name, load_study, machine_of
from mfubench.analysis.units import Told, rate_unit, told_of
from mfubench.run_log import RunLog

Verdict = Told | Literal["regression", "broken", "other model", "only in one", "not measured"]
JUDGED: tuple[Verdict, ...] = ("regression", "broken", "slower", "faster", "no difference", "not told apart")


@dataclass(frozen=True)
class Side:
    """One of the two studies, its runs judged."""

    study: Study
    measures: dict[str, Measures]

    @classmethod
    def of(cls, folder: Path | str) -> Side:
        study = load_study(folder, partial=True)
        return cls(study, {name: measure(log, study.ceilings) for name, log in study.runs.items()})


@dataclass(frozen=True)
class CaseChange:
    """One case in both studies; MFU by the palm convention.

    Rates in tokens/s/GPU, of a CPU per process: the geometric mean over its processes, as the difference is of.
    """

    case: str
    verdict: Verdict
    before: float | None
    after: float | None
    before_mfu: float | None
    after_mfu: float | None
    before_memory_gib: float | None
    after_memory_gib: float | None
    difference: Difference | None  # second study over the first
    differs_in: dict[str, tuple[Any, Any]]  # settings that ran otherwise
    reason: str | None = None


@dataclass(frozen=True)
class StudyComparison:
    first: str
    second: str
    threshold: float
    machines: tuple[str, str]
    units: tuple[str, str]  # of their rates
    changes: list[CaseChange]
    spread: ProcessSpread | None  # of both studies together

    @property
    def regressions(self) -> list[CaseChange]:
        """What the second study does worse: slower by more than the threshold and the spread, or no longer at all."""
        return [change for change in self.changes if change.verdict in ("regression", "broken")]

    @property
    def compared(self) -> list[CaseChange]:
        """What has a verdict on its speed, or on its end."""
        return [change for change in self.changes if change.verdict in JUDGED]

    def to_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "compared": [change.case for change in self.compared],
            "regressions": [change.case for change in self.regressions],
        }


def compare_studies(first: Path | str, second: Path | str, threshold: float) -> StudyComparison:
    """Compare results folders case by case; `threshold` is the loss of rate that counts (0.02: 2 %).

    A case is a regression when its rate fell by more than the threshold and the 95 % interval of the change lies
    below zero, and broken when it ended well in the first study and did not in the second. Of smoke tests only that
    is told: their few steps are a gate, no measurement. Rates of two models are not compared.
    Raises ConfigError as `load_study` does.
    """
    before, after = Side.of(first), Side.of(second)
    spread = spread_between_processes(before.measures, after.measures)
    names = dict.fromkeys(base_name(name) for name in [*before.measures, *after.measures, *after.study.failures])
    changes = [compare_case(before, after, name, threshold, spread) for name in names]
    return StudyComparison(
        first=str(first),
        second=str(second),
        threshold=threshold,
        machines=(machine_words(before), machine_words(after)),
        units=(unit_of(before), unit_of(after)),
        changes=[change for change in changes if change.verdict == "broken" or not change.case.startswith("smoke/")],
        spread=spread,
    )


def machine_words(side: Side) -> str:
    return machine_of(side.study.environment) if side.study.environment else "no run yet"


def unit_of(side: Side) -> str:
    environment = side.study.environment
    return rate_unit(environment.device if environment else "cuda")


def compare_case(before: Side, after: Side, name: str, threshold: float, spread: ProcessSpread | None) -> CaseChange:
    old, new = processes(before.measures, name), processes(after.measures, name)
    measured = difference([run.rates for run in new], [run.rates for run in old], spread)
    verdict, reason = verdict_of(before, after, name, measured, threshold)
    return CaseChange(
        case=name,
        verdict=verdict,
        before=rate_if_any(old),
        after=rate_if_any(new),
        before_mfu=old[0].headline_mfu if old else None,
        after_mfu=new[0].headline_mfu if new else None,
        before_memory_gib=old[0].peak_memory_gib if old else None,
        after_memory_gib=new[0].peak_memory_gib if new else None,
        difference=None if verdict == "other model" else measured,
        differs_in=differing_settings(old[0].log, new[0].log) if old and new else {},
        reason=reason,
    )


def verdict_of(
    before: Side, after: Side, name: str, measured: Difference | None, threshold: float
) -> tuple[Verdict, str | None]:
    ended_before = {key: judged.log for key, judged in before.measures.items() if base_name(key) == name}
    ended_after = {key: judged.log for key, judged in after.measures.items() if base_name(key) == name}
    if any(log.status == "ok" for log in ended_before.values()):
        failed = [log for log in ended_after.values() if log.status != "ok"]
        if failed:
            return "broken", f"ended as {failed[0].status}: {failed[0].reason or 'no reason recorded'}"
        for key, failure in after.study.failures.items():
            if base_name(key) == name:
                return "broken", failure.reason
    if not ended_before or not ended_after:
        return "only in one", "not in the first study" if not ended_before else "not in the second study"
    old, new = (next(iter(logs.values())).config.model for logs in (ended_before, ended_after))
    if old != new:
        return "other model", f"{old.name} → {new.name}" if old.name != new.name else f"{old.name}, of another shape"
    if measured is None:
        return "not measured", why_not_measured(ended_before, ended_after)
    told = told_of(measured)
    return "regression" if told == "slower" and measured.change <= -threshold else told, None


def why_not_measured(ended_before: dict[str, RunLog], ended_after: dict[str, RunLog]) -> str:
    """Why there is no rate to compare, of the first study before the second."""
    for ended, study in ((ended_before, "first"), (ended_after, "second")):
        if not any(log.status == "ok" for log in ended.values()):
            log = next(iter(ended.values()))
            return f"ended as {log.status} in the {study} study: {log.reason or 'no reason recorded'}"
    return "fewer than five measured steps in a study"


def rate_if_any(runs: list[Measures]) -> float | None:
    return rate_of(runs) if any(run.tokens_per_s_per_gpu for run in runs) else None
