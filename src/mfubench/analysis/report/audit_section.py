"""The audit's verdict: is any of these numbers impossible?"""

from __future__ import annotations

from mfubench.analysis.findings import Findings
from mfubench.analysis.report.blocks import Notice, Section, Table, Text
from mfubench.audit import AuditReport, audit_logs


def audit_of(found: Findings) -> AuditReport:
    return audit_logs(list(found.study.runs.values()), found.study.ceilings)


def verdict_of(report: AuditReport) -> str:
    """In a few words, with counts instead of names."""
    impossible = sum(run.impossible for run in report.runs)
    objected = sum(bool(run.findings) for run in report.runs)
    if impossible:
        return f"impossible numbers in {impossible} of {len(report.runs)} runs"
    if objected:
        return f"no impossible number; objections to {objected} of {len(report.runs)} runs"
    return f"nothing to object to in {len(report.runs)} runs" if report.runs else "no run to judge yet"


def audit_section(found: Findings) -> Section:
    section = Section("audit", "The audit's verdict")
    report = audit_of(found)
    verdict = verdict_of(report)
    tone = "warning" if any(run.findings for run in report.runs) else "good"
    section.blocks.append(Notice(f"**{verdict[:1].upper()}{verdict[1:]}.**", tone))
    if tone == "warning":
        columns = ["finding|", "how sure|", "runs|", "why (of the first)|"]
        section.blocks.append(Table(columns, finding_rows(report)))
    section.blocks.append(
        Text(
            "Each run is recomputed from its log: tokens from micro-batch × accumulation × GPUs × length, rate × time "
            "against tokens, executed FLOPs against the measured ceiling, parameters against the architecture, arms of "
            "a comparison against the kernels that ran."
        )
    )
    return section


def finding_rows(report: AuditReport) -> list[list[str]]:
    """One row a finding, impossible ones first, with the runs that have it."""
    runs: dict[str, list[str]] = {}
    first: dict[str, tuple[bool, str, str]] = {}
    for run in report.runs:
        for finding in run.findings:
            runs.setdefault(finding.code, []).append(f"`{run.name}`")
            first.setdefault(finding.code, (finding.impossible, finding.certainty, finding.sentence))
    codes = sorted(runs, key=lambda code: not first[code][0])
    return [
        [f"**{code}**" if first[code][0] else code, first[code][1], ", ".join(runs[code]), first[code][2]]
        for code in codes
    ]
