"""The report of a study: one HTML file that needs nothing else, the same as Markdown, and summary.json."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

__all__ = ["main", "write_report"]


def write_report(
    study_folder: Path | str,
    html: Path | str,
    markdown: Path | str | None = None,
    summary: Path | str | None = None,
    partial: bool = False,
    figures: Path | str | None = None,
) -> None:
    """Judge results/<study> and write what is asked for; see `mfubench.analysis.report.render.write_report`."""
    from mfubench.analysis.report.render import write_report as write

    write(study_folder, html, markdown=markdown, summary=summary, partial=partial, figures=figures)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `write_report.py --study-dir DIR --html FILE --markdown FILE --summary FILE [--partial]`."""
    from mfubench.analysis.report.render import main as render_main

    return render_main(argv)
