"""The pages on the audit say what the tool says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from mfubench.audit import ReportedRun, audit_figures, audit_paths
from mfubench.audit.reported import ALIASES

ROOT = Path(__file__).parents[1]


def test_the_page_shows_the_audit_as_it_is() -> None:
    page = (ROOT / "docs" / "scaling-report.md").read_text(encoding="utf-8")
    report = audit_paths([ROOT / "tests" / "audit_cases" / "scaling_report.json"])
    assert report.to_text() in page
    for run in report.runs:
        assert f"{run.true_tokens_per_s:,.0f}" in page
        assert f"**{100 * run.true_mfu_palm:.1f} %**" in page
    assert f"**{report.weak_scaling_efficiency:.2%}**".replace("%", " %") in page
    assert (ROOT / "docs" / "figures" / "scaling-report.png").stat().st_size > 20_000


def test_the_page_on_the_audit_names_every_figure_and_shows_an_answer() -> None:
    page = (ROOT / "docs" / "audit.md").read_text(encoding="utf-8")
    command = re.search(r"^mfubench audit --reported (.*)$", page, re.MULTILINE)
    assert command is not None and audit_figures(shlex.split(command[1])).to_text() in page
    names = {name for row in page.splitlines() if row.startswith("| `") for name in re.findall(r"`(\w+)`", row)}
    assert names >= {*ReportedRun.model_fields, *ALIASES}
