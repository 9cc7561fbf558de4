"""Is this number possible, and what is the true one? Run JSONs, legacy logs and reported figures, recomputed.

`audit_run` judges one run log, `audit_study` several against each other, `audit_paths` whatever files hold. Every
finding follows from recomputation: tokens = micro-batch x accumulation x world x seq_len, tokens/s x time = tokens,
peak x MFU = achieved, executed FLOPs below the ceiling, parameters from dimensions. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mfubench.audit.figures import audit_reported, audit_reported_runs, check_auditable
from mfubench.audit.findings import CODES, Finding, RunVerdict
from mfubench.audit.readers import read_sources
from mfubench.audit.report import AuditReport
from mfubench.audit.reported import ReportedRun, parse_figures
from mfubench.audit.run import audit_run, judge_run
from mfubench.audit.studies import by_study, ceilings_for, named_apart, without_left_over
from mfubench.audit.study import audit_study, group_of, is_compared, weak_scaling
from mfubench.ceilings import Ceilings
from mfubench.config import ConfigError
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
    """Judge all runs that these files and folders hold; a study's runs are held against each other, not another's.

    ceilings: of the machine that ran. Without them, and for runs of another device than theirs, those that lie in a
    run's study are used, where they are of the device that ran; notes say so. Raises ConfigError for a file that is
    none of the known, or without figures that can be audited.
    """
    given = [Path(path) for path in paths]
    verdicts: list[RunVerdict] = []
    runs: list[tuple[RunLog, Path]] = []
    for source in read_sources(given):
        if source.log is not None:
            runs.append((source.log, source.path))
        else:
            reported = audit_reported_runs(source.reported, str(source.path))
            check_auditable(reported, str(source.path))
            verdicts += reported
    scaling = weak_scaling(verdicts)
    runs, left_alone = without_left_over(runs, given)
    if left_alone and not runs and not verdicts:
        raise ConfigError(f"audit: {left_alone[0]}; there is no other run")
    notes = dict.fromkeys(left_alone)  # each once, in order
    studies = by_study(runs, given)
    for study, named in zip(studies, named_apart(studies), strict=True):
        judged = []
        for (log, path), (called, _) in zip(study, named, strict=True):
            known, said = ceilings_for(log, path, ceilings)
            notes |= dict.fromkeys(said)
            verdict = judge_run(log, str(path), known)  # by its own name, which its configuration must know
            verdict.name = called.name
            judged.append(verdict)
        verdicts += hold_together([log for log, _ in named], judged)
        scaling += weak_scaling(judged)
    return AuditReport(runs=verdicts, weak_scaling=scaling, notes=list(notes))


def audit_logs(logs: Sequence[RunLog], ceilings: Ceilings | None = None) -> AuditReport:
    """Judge the run logs of a study, each by itself and against each other."""
    verdicts = hold_together(logs, [judge_run(log, log.name, ceilings) for log in logs])
    return AuditReport(runs=verdicts, weak_scaling=weak_scaling(verdicts))


def audit_figures(figures: Sequence[str]) -> AuditReport:
    """Judge one report given as `key=value` words. Raises ConfigError where nothing in it can be audited."""
    verdict = audit_reported(parse_figures(figures), "command line")
    check_auditable([verdict], "--reported")
    return AuditReport(runs=[verdict], weak_scaling=[])


def hold_together(logs: Sequence[RunLog], verdicts: list[RunVerdict]) -> list[RunVerdict]:
    """The verdicts of runs, with what these show together."""
    together = audit_study(logs)
    for log, verdict in zip(logs, verdicts, strict=True):
        verdict.findings += together.get(log.name, [])
        verdict.group = group_of(log) if is_compared(log) else None
    return verdicts


def audit_main(argv: Sequence[str] | None = None) -> int:
    """`audit_study.py --study-dir DIR --output FILE`: see `mfubench.audit.main.main`."""
    from mfubench.audit.main import main

    return main(argv)
