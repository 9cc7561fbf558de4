"""The audit's answer, as JSON and as text."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mfubench.audit.findings import RunVerdict


@dataclass(frozen=True)
class AuditReport:
    """All runs that were judged."""

    runs: list[RunVerdict]
    weak_scaling: list[dict[str, Any]]
    notes: list[str] = field(default_factory=list)  # what was read beside the runs

    @property
    def impossible(self) -> bool:
        """Whether some run has a number that cannot be."""
        return any(run.impossible for run in self.runs)

    @property
    def weak_scaling_efficiency(self) -> float | None:
        """Of the one series of runs that differ in the number of GPUs alone; None where there are none or several."""
        return self.weak_scaling[0]["efficiency"] if len(self.weak_scaling) == 1 else None

    def to_json(self) -> dict[str, Any]:
        """runs: name, micro_steps_per_gpu, true_tokens_per_s, true_mfu_palm_percent (of the dense peak of `precision`),
        findings (codes), details.
        """
        return {
            "impossible": self.impossible,
            "runs": [run_to_json(run) for run in self.runs],
            "weak_scaling_efficiency": self.weak_scaling_efficiency,
            "weak_scaling": self.weak_scaling,
            "notes": self.notes,
        }

    def to_text(self) -> str:
        """The same for a person: good runs in one line, the others with each finding in a sentence."""
        lines = list(self.notes)
        for run in self.runs:
            lines.append(f"{run.name}: {figures_of(run)}" + ("" if run.findings else f"; {no_objection([run])}"))
            texts = []
            for finding in run.findings:
                true = f" True: {true_value(finding.true_value)}." if finding.true_value is not None else ""
                texts.append(f"{finding.code} ({finding.certainty}): {finding.sentence}.{true}")
            texts += [f"not checked: {check}" for check in run.not_checked]
            for text in texts:
                lines += textwrap.wrap(
                    text, 110, initial_indent="  - ", subsequent_indent="    ", break_on_hyphens=False
                )
        for series in self.weak_scaling:
            a, b = series["world_sizes"]
            objection = f" ({series['objection']})" if series["objection"] else ""
            lines.append(
                f"weak scaling, {series['from']} → {series['to']} ({a} → {b} {series['unit']}): "
                f"{series['efficiency']:.2%}{objection}"
            )
        return "\n".join([*lines, self.verdict()])

    def verdict(self) -> str:
        impossible = [run.name for run in self.runs if run.impossible]
        if impossible:
            return f"verdict: IMPOSSIBLE numbers in {', '.join(impossible)} (--strict exits with 1)"
        objected = [run.name for run in self.runs if run.findings]
        if objected:
            return f"verdict: possible, with objections to {', '.join(objected)}"
        return f"verdict: {len(self.runs)} run{'s' if len(self.runs) != 1 else ''}, {no_objection(self.runs)}"


def no_objection(runs: Sequence[RunVerdict]) -> str:
    """Praise only of what was looked at."""
    return "nothing to object to" + (" in what could be checked" if any(run.not_checked for run in runs) else "")


def run_to_json(run: RunVerdict) -> dict[str, Any]:
    values: dict[str, Any] = {
        "name": run.name,
        "source": run.source,
        "micro_steps_per_gpu": round(run.micro_steps_per_gpu, 2) if run.micro_steps_per_gpu is not None else None,
        "true_tokens_per_s": round(run.true_tokens_per_s) if run.true_tokens_per_s is not None else None,
        "true_mfu_palm_percent": round(100 * run.true_mfu_palm, 1) if run.true_mfu_palm is not None else None,
        "precision": run.precision,
        "findings": run.codes,
        "details": [
            {
                "code": finding.code,
                "sentence": finding.sentence,
                "confidence": finding.confidence,
                "true_value": finding.true_value,
                "impossible": finding.impossible,
            }
            for finding in run.findings
        ],
        "not_checked": run.not_checked,
    }
    if run.stated_mfu is not None:
        values["logged_mfu_percent"] = round(100 * run.stated_mfu, 1)
    return values


def figures_of(run: RunVerdict) -> str:
    parts = []
    if run.micro_steps_per_gpu is not None:
        count = f"{run.micro_steps_per_gpu:.4g}"
        parts.append(f"{count} micro-step{'' if count == '1' else 's'} per {run.unit}")
    if run.true_tokens_per_s is not None:
        parts.append(f"{run.true_tokens_per_s:,.0f} tokens/s")
    if run.true_mfu_palm is not None:
        stated = f" (stated: {run.stated_mfu:.1%})" if run.stated_mfu is not None else ""
        peak = "" if run.precision == "bf16" else f" of the {run.precision} peak"
        parts.append(f"MFU {run.true_mfu_palm:.1%} palm{peak}{stated}")
    return ", ".join(parts) or "no rate to judge"


def true_value(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:,.10g}"
