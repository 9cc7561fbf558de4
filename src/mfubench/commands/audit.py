"""`mfubench audit`: is this number possible, and what is the true one?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

WHAT = "Run JSONs, nanoGPT's JSON logs, JSON files of figures, results folders; with --reported: key=value figures."
REPORTED = "Judge figures from the command line, as in model=llama2-1.36b gpu='NVIDIA B200' gpus=8 tokens_per_s=106809."


def audit(
    what: Annotated[list[str], typer.Argument(help=WHAT)],
    reported: Annotated[bool, typer.Option("--reported", help=REPORTED)] = False,
    ceilings: Annotated[Path | None, typer.Option(help="ceilings.json of the machine that ran")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The answer as JSON.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 where a number is impossible.")] = False,
) -> None:
    """Recompute what must hold between the figures of runs; say what is wrong, why, how sure, and the true value."""
    import json

    from mfubench.audit import audit_figures, audit_paths
    from mfubench.ceilings import read_ceilings
    from mfubench.run_log import finite

    if reported:
        report = audit_figures(what)
    else:
        report = audit_paths([Path(path) for path in what], read_ceilings(ceilings) if ceilings else None)
    typer.echo(json.dumps(finite(report.to_json()), indent=1) if as_json else report.to_text())
    if strict and report.impossible:
        raise typer.Exit(1)
