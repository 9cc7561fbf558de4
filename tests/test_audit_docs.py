"""The page that solves the scaling report says what the tool says."""

from __future__ import annotations

from pathlib import Path

from mfubench.audit import audit_paths

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
