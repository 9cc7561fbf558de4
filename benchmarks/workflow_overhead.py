"""What the workflow costs beside the work: to plan a study, to start its jobs, to show a page of help. On a CPU.

    python benchmarks/workflow_overhead.py [--repeats 5]

dry run   `snakemake -n` of the largest studies, as on a node of eight GPUs, beside one of a Snakefile with one rule
          (Snakemake's own start)
jobs      each script of a whole small study (tests/workflow/study.yaml), one job at a time: from the end of the job
          before to the first line of Python (nothing for the first job), and in import statements, wherever they
          stand. What trains or measures imports torch, whose own import is given beside
help      `mfubench --help`

Medians and quartiles; what is compared is taken in turn. Prints a table and writes results/workflow_overhead.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mfubench.machine import cpu_name

ROOT = Path(__file__).parents[1]
OUTPUT = Path(__file__).parent / "results" / "workflow_overhead.json"
STUDIES = sorted((ROOT / "config" / "studies").glob("*-beyond.yaml"))
ONE_RULE = 'rule all:\n    output: "x"\n    shell: "touch {output}"\n'
BIN = Path(sys.executable).parent
SNAKEMAKE = (sys.executable, "-m", "snakemake", "--cores", "1")
TRAINING = "mfubench.train.launch"
HELP = (("--help",), ("predict", "--help"), ("plan", "--help"))


def run(*command: str | Path, folder: Path, **variables: str) -> tuple[float, str]:
    """Seconds of a command, and what it printed. Raises CalledProcessError where it fails."""
    environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", **variables}
    t0 = time.perf_counter()
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    return time.perf_counter() - t0, ended.stdout + ended.stderr


def time_dry_runs(folder: Path, seconds: dict[str, list[float]], jobs: dict[str, int]) -> None:
    (folder / "Snakefile").write_text(ONE_RULE, encoding="utf-8")
    seconds["one rule"].append(run(*SNAKEMAKE, "-n", folder=folder)[0])
    project = ("--snakefile", ROOT / "Snakefile", "--directory", folder)
    for study in STUDIES:
        command = (*SNAKEMAKE, "-n", *project, "--configfile", study)
        took_s, printed = run(*command, folder=folder, MFUBENCH_PROCESSES_PER_NODE="8")
        seconds[study.stem].append(took_s)
        jobs[study.stem] = int(re.search(r"^total +(\d+)", printed, re.MULTILINE)[1])  # type: ignore[index]


def time_jobs(folder: Path, overhead: dict[str, list[float]], imports: dict[str, list[float]]) -> None:
    """Run a whole study in an empty folder, and read what its Python processes left on the clock."""
    clock = folder / "clock.jsonl"
    command = (*SNAKEMAKE, "--snakefile", ROOT / "Snakefile", "--configfile", ROOT / "tests/workflow/study.yaml")
    run(*command, folder=folder, PYTHONPATH=str(Path(__file__).parent / "process_clock"), PROCESS_CLOCK=str(clock))
    processes = [json.loads(line) for line in clock.read_text(encoding="utf-8").splitlines()]
    ended = None
    for process in sorted(processes, key=lambda process: process["began"]):
        script, imports_s = script_of(process["command"]), process["imports_s"]
        if script is not None:
            imports[script].append(imports_s)
            overhead[script].append(imports_s + (process["began"] - ended if ended is not None else 0.0))
            ended = process["ended"]
        elif TRAINING in process["command"]:  # that train_model.py starts
            imports[TRAINING].append(imports_s)
            overhead[TRAINING].append(imports_s)


def script_of(command: list[str]) -> str | None:
    """The workflow's script that a Python process runs; None for others, which jobs start in turn."""
    path = Path(command[1]) if len(command) > 1 else Path()
    return path.stem if path.parent == ROOT / "workflow" / "scripts" and path.stem != "lease_cards" else None


def summarize(seconds: list[float]) -> dict[str, Any]:
    low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return {"median_s": round(median, 3), "quartiles_s": [round(low, 3), round(high, 3)], "count": len(seconds)}


def measure(repeats: int) -> dict[str, Any]:
    dry, pages, overhead, imports = (defaultdict[str, list[float]](list) for _ in range(4))
    jobs: dict[str, int] = {}
    torch: list[float] = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            time_dry_runs(folder, dry, jobs)
            for arguments in HELP:
                pages[" ".join(("mfubench", *arguments))].append(run(BIN / "mfubench", *arguments, folder=folder)[0])
            torch.append(run(sys.executable, "-c", "import torch", folder=folder)[0])
        with tempfile.TemporaryDirectory() as temporary:
            time_jobs(Path(temporary), overhead, imports)
    return {
        "dry_run": {name: summarize(seconds) | {"jobs": jobs.get(name, 1)} for name, seconds in dry.items()},
        "help": {name: summarize(seconds) for name, seconds in pages.items()},
        "jobs": {
            script: {"overhead": summarize(overhead[script]), "imports": summarize(imports[script])}
            for script in sorted(imports)
        },
        "import_torch": summarize(torch),
    }


def describe_machine(repeats: int) -> dict[str, Any]:
    """What the figures belong to."""
    return {
        "command": " ".join(["python", "benchmarks/workflow_overhead.py", *sys.argv[1:]]),
        "processor": cpu_name(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "snakemake": version("snakemake"),
        "torch": version("torch"),
        "repeats": repeats,
    }


def show(results: dict[str, Any]) -> None:
    own = results["dry_run"]["one rule"]["median_s"]
    for name, row in results["dry_run"].items():
        line("snakemake -n, " + name, row, f"{row['jobs']} jobs, {row['median_s'] - own:.2f} s beyond one rule's")
    for name, row in results["help"].items():
        line(name, row)
    for script, row in results["jobs"].items():
        line(script, row["overhead"], f"imports {row['imports']['median_s']:.2f} s")
    line("python -c 'import torch'", results["import_torch"])


def line(name: str, row: dict[str, Any], remark: str = "") -> None:
    low, high = row["quartiles_s"]
    print(f"{name:<42} {row['median_s']:6.2f} s ({low:.2f} to {high:.2f}, {row['count']} times) {remark}".rstrip())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="2 at least")
    repeats = parser.parse_args().repeats
    results = measure(repeats)
    show(results)
    OUTPUT.write_text(json.dumps(describe_machine(repeats) | results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
