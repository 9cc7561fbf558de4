"""The audit as the last step of a workflow."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from mfubench.ceilings import read_ceilings
from mfubench.run_log import write_json


def main(argv: Sequence[str] | None = None) -> int:
    """`--study-dir DIR --output FILE`: judge all runs of a study, write audit.json, print it. Raises ConfigError.

    Impossible numbers do not fail this step: what it writes must outlive them. `check` fails the study.
    """
    from mfubench.audit import audit_paths

    parser = argparse.ArgumentParser(description="Judge the numbers of a study.")
    parser.add_argument("--study-dir", required=True, type=Path, help="results folder of a study")
    parser.add_argument("--ceilings", type=Path, help="default: ceilings.json of the folder, where it is there")
    parser.add_argument("--output", required=True, type=Path, help="audit.json")
    arguments = parser.parse_args(argv)
    ceilings_file = arguments.ceilings or arguments.study_dir / "ceilings.json"
    ceilings = read_ceilings(ceilings_file) if arguments.ceilings or ceilings_file.exists() else None
    report = audit_paths([arguments.study_dir], ceilings)
    write_json(arguments.output, report.to_json())
    print(report.to_text())
    return 0


def verdict_line(audit: Path) -> str:
    """What an audit.json says, in a line: runs that are objected to, and how often for what."""
    runs = json.loads(audit.read_text(encoding="utf-8"))["runs"]
    objected = [run for run in runs if run["findings"]]
    if not objected:
        return f"nothing to object to in {len(runs)} runs"
    counts = Counter(code for run in objected for code in run["findings"])
    codes = ", ".join(f"{code} {count}" for code, count in counts.most_common())
    return f"objections to {len(objected)} of {len(runs)} runs ({codes})"


def check(argv: Sequence[str] | None = None) -> int:
    """`FILE`: 1 where audit.json holds an impossible number, with the runs' names, else 0."""
    parser = argparse.ArgumentParser(description="Fail where a study has an impossible number.")
    parser.add_argument("audit", type=Path, help="audit.json")
    path = parser.parse_args(argv).audit
    runs = json.loads(path.read_text(encoding="utf-8"))["runs"]
    impossible = [run["name"] for run in runs if any(finding["impossible"] for finding in run["details"])]
    if impossible:
        print(
            f"error: impossible numbers in {', '.join(impossible)}. The report and {path} say which and why; mend the "
            "cause and delete these runs' JSON files and their folders in work/, then start again",
            file=sys.stderr,
        )
    return 1 if impossible else 0
