"""`mfubench report`: the report of what a study has measured so far."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    study: Annotated[Path, typer.Argument(help="Results folder of the study, results/<study>.")],
    partial: Annotated[bool, typer.Option("--partial", help="Show failed jobs too, with what failed and why.")] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            help="HTML file; all else goes beside it: Markdown, summary.json, tables/, figures/. "
            "Default: report.html in the study's folder."
        ),
    ] = None,
) -> None:
    """Write report.html, report.md, summary.json, tables and figures of STUDY from the results that exist."""
    from mfubench.analysis.report import write_report
    from mfubench.analysis.tables import write_tables
    from mfubench.config import ConfigError

    html = output or study / "report.html"
    try:
        folder = html.parent
        markdown, summary, figures = html.with_suffix(".md"), folder / "summary.json", folder / "figures"
        write_tables(study, folder / "tables", partial=partial)  # before the report: snakemake makes it of them
        write_report(study, html, markdown, summary, partial=partial, figures=figures)
    except OSError as error:
        raise ConfigError(
            f"{html}: the report cannot be written there ({error.strerror}); make room, or name another file with "
            "--output"
        ) from None
    if not (study / "study.json").exists():
        typer.echo(
            f"{study}/study.json is missing: cases that never ran and effects are not in it; snakemake makes it anew"
        )
    typer.echo(f"report: {html}")
