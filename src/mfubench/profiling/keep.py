"""The trace of a finished run, moved from its work folder to its place among the results."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from mfubench.profiling.trace_file import trace_of_reason, write_trace
from mfubench.run_log import RunLog, read_run_log, write_bytes_atomically


def keep_trace(run: Path, work: Path, output: Path) -> str:
    """Copy WORK/trace.json.gz, or write why there is none; returns a sentence for the log."""
    log = read_run_log(run)
    source = work / "trace.json.gz"
    if source.exists():
        content = source.read_bytes()
        write_bytes_atomically(output, content)
        return f"{output}: {len(content) / 2**20:.2f} MiB; open it with ui.perfetto.dev"
    reason = reason_without(log)
    write_trace(output, trace_of_reason(log.name, reason))
    return f"{output}: no trace: {reason}"


def reason_without(log: RunLog) -> str:
    """Why a run left no trace."""
    if log.status != "ok":
        return f"the run ended as {log.status} ({log.reason or 'no reason recorded'})"
    if log.config.evaluation.only:
        return "the run only evaluated a checkpoint"
    return "the run's work folder holds none any more; run it again to have one"


def main(argv: Sequence[str] | None = None) -> int:
    """Run `keep_trace.py --run FILE --work DIR --output FILE`."""
    parser = argparse.ArgumentParser(description="Keep the trace of a run's profiled step.")
    parser.add_argument("--run", required=True, type=Path, help="run JSON")
    parser.add_argument("--work", required=True, type=Path, help="work folder of the run")
    parser.add_argument("--output", required=True, type=Path, help="trace to write, .json.gz")
    arguments = parser.parse_args(argv)
    print(keep_trace(arguments.run, arguments.work, arguments.output))
    return 0
