"""The audit as the last step of a workflow."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from mfubench.ceilings import read_ceilings
from mfubench.config import ConfigError
from mfubench.run_log import write_json


def main(argv: Sequence[str] | None = None) -> int:
    """`--study-dir DIR --output FILE`: judge all runs of a study, write audit.json, print the verdict.

    Returns 1 where a run has an impossible number (audit.json is written all the same), 2 for bad input, else 0.
    """
    from mfubench.audit import audit_paths

    parser = argparse.ArgumentParser(description="Judge the numbers of a study.")
    parser.add_argument("--study-dir", required=True, type=Path, help="results folder of a study")
    parser.add_argument("--ceilings", type=Path, help="default: ceilings.json of the folder, where it is there")
    parser.add_argument("--output", required=True, type=Path, help="audit.json")
    arguments = parser.parse_args(argv)
    ceilings_file = arguments.ceilings or arguments.study_dir / "ceilings.json"
    try:
        ceilings = read_ceilings(ceilings_file) if arguments.ceilings or ceilings_file.exists() else None
        report = audit_paths([arguments.study_dir], ceilings)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    write_json(arguments.output, report.to_json())
    print(report.to_text())
    return 1 if report.impossible else 0
