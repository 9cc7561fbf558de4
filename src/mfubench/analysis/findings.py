"""A study judged: everything that tables, figures and the report say, computed once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from mfubench.analysis.contradictions import Contradiction, contradictions
from mfubench.analysis.effects import Effect, judge_effects, spread_between_processes
from mfubench.analysis.expectations import Expectations, load_expectations
from mfubench.analysis.expected import Comparison, compare_expectations
from mfubench.analysis.measures import Measures, measure
from mfubench.analysis.profiles import Profiled, profiled_cases
from mfubench.analysis.scaling import ScalingPoint, scaling_points
from mfubench.analysis.statistics import ProcessSpread
from mfubench.analysis.study import Study, load_study
from mfubench.host_load import Contention, contention_of_ceilings


@dataclass(frozen=True)
class Findings:
    study: Study
    measures: dict[str, Measures]  # "stage/case" -> the run, judged
    spread: ProcessSpread | None
    effects: list[Effect]
    scaling: list[ScalingPoint]
    expectations: Expectations | None
    comparisons: list[Comparison]
    contradictions: list[Contradiction]

    @classmethod
    def of(cls, study_folder: Path | str, partial: bool = False) -> Findings:
        """Read and judge a study. Raises ConfigError as `load_study` and `load_expectations` do."""
        study = load_study(study_folder, partial=partial)
        measures = {name: measure(log, study.ceilings) for name, log in study.runs.items()}
        expectations = load_expectations(study.declared.expectations) if study.declared.expectations else None
        return cls(
            study=study,
            measures=measures,
            spread=spread_between_processes(measures),
            effects=judge_effects(study, measures, expectations),
            scaling=scaling_points(measures),
            expectations=expectations,
            comparisons=compare_expectations(study, measures, expectations) if expectations else [],
            contradictions=contradictions(expectations) if expectations else [],
        )

    @cached_property
    def profiles(self) -> tuple[list[Profiled], dict[str, str]]:
        """Profiled cases, fastest first, and why others have no profile. Traces are read when somebody asks."""
        return profiled_cases(self.study, self.measures)

    @property
    def ceilings_contention(self) -> Contention | None:
        """What other processes took while the ceilings were measured; None where nothing makes them doubtful."""
        ceilings, environment = self.study.ceilings, self.study.environment
        if ceilings is None or environment is None:
            return None
        return contention_of_ceilings(ceilings, environment.cpu_count)

    @property
    def good(self) -> dict[str, Measures]:
        """Runs that were measured: those with rates, whatever their stage."""
        return {
            name: judged
            for name, judged in self.measures.items()
            if judged.log.status == "ok" and judged.tokens_per_s_per_gpu is not None
        }
