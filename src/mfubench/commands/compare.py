"""`mfubench compare`: two studies side by side, and an exit code for a regression."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

# Exit codes: neither a fault of the input (1) nor of the command line (2)
REGRESSION = 3
NOTHING_COMPARED = 4


def compare(
    first: Annotated[Path, typer.Argument(help="Results folder of the study to compare with, results/<study>.")],
    second: Annotated[Path, typer.Argument(help="Results folder of the study that is judged.")],
    threshold: Annotated[float, typer.Option(help="Loss of rate that counts as a regression: 0.02 is 2 %.")] = 0.02,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Compare two studies case by case: another card, week or commit.

    Exits with 3 where the second lost more than the threshold, beyond the spread, in any case, and with 4 where no case
    could be compared.
    """
    import json

    from mfubench.analysis.compare import compare_studies
    from mfubench.config import ConfigError

    if not 0 <= threshold < 1:
        raise ConfigError(f"--threshold: found {threshold}; give a share between 0 and 1, such as 0.02")
    comparison = compare_studies(first, second, threshold)
    if as_json:
        typer.echo(json.dumps(comparison.to_json(), indent=1))
    else:
        from mfubench.analysis.compare_table import print_comparison

        print_comparison(comparison)
    if comparison.regressions:
        raise typer.Exit(REGRESSION)
    if not comparison.compared:
        raise typer.Exit(NOTHING_COMPARED)
