"""Is this number possible, and what is the true one? Run JSONs, legacy logs and reported figures, recomputed.

`audit_run` judges one run log, `audit_study` several against each other, `audit_paths` whatever files hold. Every
finding follows from recomputation: tokens = micro-batch x accumulation x world x seq_len, tokens/s x time = tokens,
peak x MFU = achieved, executed FLOPs below the ceiling, parameters from dimensions. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mfubench.audit.figures import audit_reported, audit_reported_runs
from mfubench.audit.findings import CODES, Finding, RunVerdict
from mfubench.audit.readers import read_sources
from mfubench.audit.report import AuditReport
from mfubench.audit.reported import ReportedRun, parse_figures
from mfubench.audit.run import audit_run, judge_run
from mfubench.audit.study import audit_study, group_of, is_compared, weak_scaling
from mfubench.ceilings import Ceilings
from mfubench.run_log import RunLog

__all__ = [
    "CODES",
    "AuditReport",
    "Finding",
    "ReportedRun",
    "RunVerdict",
    "audit_figures",
    "audit_logs",
    "audit_main",
    "audit_paths",
    "audit_reported",
    "audit_reported_runs",
    "audit_run",
    "audit_study",
    "parse_figures",
]


def audit_paths(paths: Sequence[Path | str], ceilings: Ceilings | None = None) -> AuditReport:
    """Judge all runs that these files and folders hold. Raises ConfigError for a file that is none of the known."""
    verdicts: list[RunVerdict] = []
    logs: list[tuple[RunLog, str]] = []
    for source in read_sources([Path(path) for path in paths]):
        if source.log is not None:
            logs.append((source.log, str(source.path)))
        else:
            verdicts += audit_reported_runs(source.reported, str(source.path))
    verdicts += judge_logs(logs, ceilings)
    return AuditReport(runs=verdicts, weak_scaling=weak_scaling(verdicts))


def audit_logs(logs: Sequence[RunLog], ceilings: Ceilings | None = None) -> AuditReport:
    """Judge the run logs of a study, each by itself and against each other."""
    verdicts = judge_logs([(log, log.name) for log in logs], ceilings)
    return AuditReport(runs=verdicts, weak_scaling=weak_scaling(verdicts))


def audit_figures(figures: Sequence[str]) -> AuditReport:
    """Judge one report given as `key=value` words."""
    return AuditReport(runs=[audit_reported(parse_figures(figures), "command line")], weak_scaling=[])


def judge_logs(logs: Sequence[tuple[RunLog, str]], ceilings: Ceilings | None) -> list[RunVerdict]:
    verdicts = [judge_run(log, source, ceilings) for log, source in logs]
    together = audit_study([log for log, _ in logs])
    for (log, _), verdict in zip(logs, verdicts, strict=True):
        verdict.findings += together.get(log.name, [])
        verdict.group = group_of(log) if is_compared(log) else None
    return verdicts


def audit_main(argv: Sequence[str] | None = None) -> int:
    """`audit_study.py --study-dir DIR --output FILE`: see `mfubench.audit.report.main`."""
    from mfubench.audit.main import main

    return main(argv)
