"""Profiled cases of a study, each step taken apart beside what its parts take at best on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mfubench.analysis.effects import fate_of
from mfubench.analysis.ideal import Ideals, ideals_of
from mfubench.analysis.measures import Measures
from mfubench.analysis.study import Study
from mfubench.config import ConfigError
from mfubench.profiling import categories
from mfubench.profiling.breakdown import Breakdown, RankBreakdown, break_down
from mfubench.profiling.trace_file import read_trace

# Rows of a waterfall, in order: key, what it says on a GPU, what on a CPU, categories of the breakdown.
ROWS: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    ("matmul", "matmuls", "matmuls", (categories.MATMUL,)),
    ("attention", "attention", "attention", (categories.ATTENTION,)),
    ("norm", "norms and residual sums", "norms and residual sums", (categories.NORM, categories.RESIDUAL)),
    ("rope", "RoPE and head layout", "RoPE and head layout", (categories.ROPE,)),
    ("activation", "activation", "activation", (categories.ACTIVATION,)),
    ("embedding", "embedding", "embedding", (categories.EMBEDDING,)),
    ("loss", "loss", "loss", (categories.LOSS,)),
    ("accumulation", "gradient accumulation", "gradient accumulation", (categories.ACCUMULATION,)),
    ("optimizer", "optimizer and weight casts", "optimizer and weight casts", (categories.OPTIMIZER, categories.CAST)),
    ("elementwise", "elementwise, purpose unknown", "elementwise, purpose unknown", (categories.ELEMENTWISE,)),
    ("other", "other kernels", "other operators", (categories.OTHER,)),
    ("communication", "communication, exposed", "communication, exposed", (categories.COMMUNICATION,)),
    ("copy", "copies and fills", "copies and fills", (categories.COPY,)),
    ("host", "gaps: the host was behind", "Python between operators", (categories.HOST,)),
    ("queue", "gaps between launched kernels", "nothing ran", (categories.QUEUE,)),
    ("data", "waiting for data", "waiting for data", (categories.DATA,)),
)
ELEMENTWISE_ROWS = ("norm", "rope", "activation", "embedding", "loss", "accumulation", "optimizer")
UNNAMED_SHARE = 0.2  # of elementwise time: with more, its rows cannot be told apart
LEAST_LEFT = 0.05  # of a step: a rate without all but so little of it says nothing
NOT_KEPT = "its trace is not in traces/ (a run's profile is kept there); run the case again"


@dataclass(frozen=True)
class Row:
    """One part of a step. `ideal_s` is what it takes at best on this machine; None: not known."""

    key: str
    label: str
    time_s: float
    ideal_s: float | None
    ideal: str  # what the ideal is, in words

    @property
    def excess_s(self) -> float:
        return 0.0 if self.ideal_s is None else max(0.0, self.time_s - self.ideal_s)


@dataclass(frozen=True)
class Profiled:
    """A case with a trace, judged."""

    case: str
    judged: Measures
    breakdown: Breakdown
    rank: RankBreakdown  # the slowest: the others wait for it
    ideals: Ideals
    rows: list[Row]
    measured_step_s: float  # median of the measured steps, without the profiler

    @property
    def tokens_per_s(self) -> float:
        """Of one GPU, at the median step."""
        config = self.judged.log.config
        return config.tokens_per_step / config.world_size / self.measured_step_s

    @property
    def overhead(self) -> float:
        """How much longer the profiled step took than the measured median: a fraction."""
        return self.rank.step_s / self.measured_step_s - 1

    def rate_won(self, seconds: float) -> float | None:
        """tokens/s of one GPU to win if the profiled step were so much shorter; None where hardly anything is left.

        The measured step is taken to have the profiled one's shares: the two may differ in length.
        """
        left = 1 - seconds / self.rank.step_s
        return self.tokens_per_s * (1 / left - 1) if left >= LEAST_LEFT else None

    @property
    def next_row(self) -> Row | None:
        """The part with the most to win; None where no ideal is known."""
        found = max(self.rows, key=lambda row: row.excess_s)
        return found if found.excess_s > 0 else None


def profiled_cases(study: Study, measures: Mapping[str, Measures]) -> tuple[list[Profiled], dict[str, str]]:
    """Cases with a trace, fastest over all GPUs first; and why others that ask for a profile have none."""
    found: list[Profiled] = []
    missing = {name: why_not_kept(study, name) for name in asked_for(study) if name not in study.traces}
    for case, path in study.traces.items():
        judged = measures.get(case)
        if judged is None:
            continue
        try:
            trace = read_trace(path)
        except ConfigError as error:  # a damaged trace costs its own section, not the report
            missing[case] = str(error)
            continue
        breakdown = break_down(trace)
        if breakdown is None or judged.step_time_s is None:
            missing[case] = trace.reason or "the run has no measured step to compare with"
            continue
        found.append(judge_profile(case, judged, breakdown, study))
    return sorted(found, key=lambda profiled: -(profiled.judged.tokens_per_s or 0.0)), missing


def asked_for(study: Study) -> list[str]:
    """The cases that the study wants profiled."""
    return [
        name
        for name, case in study.declared.cases.items()
        if (case.get("measurement") or {}).get("profile") == "timeline"
    ]


def why_not_kept(study: Study, name: str) -> str:
    """Why a case that asks for a profile has no trace."""
    has_run = name in study.runs and study.runs[name].status == "ok"
    return NOT_KEPT if has_run else fate_of(study, name)


def judge_profile(case: str, judged: Measures, breakdown: Breakdown, study: Study) -> Profiled:
    assert judged.step_time_s is not None
    rank = breakdown.slowest
    ideals = ideals_of(judged, study.ceilings)
    return Profiled(
        case, judged, breakdown, rank, ideals, rows_of(rank, ideals, breakdown.device), judged.step_time_s.median
    )


def rows_of(rank: RankBreakdown, ideals: Ideals, device: str) -> list[Row]:
    """The parts of the step that took time, or should have. They add up to the profiled step."""
    rows = []
    for key, on_gpu, on_cpu, members in ROWS:
        time_s = sum(rank.parts[category] for category in members)
        ideal_s, words = ideals.seconds.get(key), ideals.words.get(key, "")
        if time_s > 0:
            rows.append(Row(key, on_gpu if device == "cuda" else on_cpu, time_s, ideal_s, words))
    return fold_unnamed(rows, ideals)


def fold_unnamed(rows: list[Row], ideals: Ideals) -> list[Row]:
    """One row for all elementwise work where too much of it has no name (eager mode, a CPU's compiled loops)."""
    members = [row for row in rows if row.key in (*ELEMENTWISE_ROWS, "elementwise")]
    unnamed = sum(row.time_s for row in members if row.key == "elementwise")
    total = sum(row.time_s for row in members)
    if unnamed <= UNNAMED_SHARE * total:
        return rows
    known = [ideals.seconds[key] for key in ELEMENTWISE_ROWS if key in ideals.seconds]
    folded = Row(
        "elementwise",
        "elementwise work, loss, optimizer",
        total,
        sum(known) if known else None,
        "bytes of all of it at the measured copy rate; names do not tell its parts apart here",
    )
    first = rows.index(members[0])
    kept = [row for row in rows if row not in members]
    return [*kept[:first], folded, *kept[first:]]
