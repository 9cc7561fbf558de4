"""Start the ranks of a run, watch over them, and turn what they did into a record and an exit code.

0: a run JSON with status ok, oom, diverged or skipped was written; 75 (EX_TEMPFAIL): stopped by a signal after writing
a checkpoint, to be resumed; 1: failed, with WORK/failure.json as the record.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from mfubench.banner import banner
from mfubench.ceilings import read_ceilings
from mfubench.config import ConfigError, RunConfig
from mfubench.data.meta import DatasetMeta, read_meta
from mfubench.hardware import measured_cpu_peak, peak_for
from mfubench.machine import describe_cards
from mfubench.run_log import check_replaceable, read_run_log, try_writing, write_json
from mfubench.slurm import STEP
from mfubench.stop_signals import STOPPED, listen_once, on_stop
from mfubench.train.arguments import Paths, ResumeMode, make_parser, paths_of, read_config
from mfubench.train.checkpoint_folders import latest, print_way_on, trained_on_other_data
from mfubench.train.failures import (
    Failure,
    full_disk,
    ranks_folder,
    read_failures,
    record_out_of_memory,
    remove_stale,
    stop_file,
)
from mfubench.train.lock import sole_writer
from mfubench.train.progress import Display, describe_end
from mfubench.train.ranks import Ranks, node_rank, threads_of_a_rank
from mfubench.train.watchdog import read_timeout_s

WORKER = ("-m", "mfubench.train.worker")
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MFUBENCH_LAUNCHER")


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    return launch(make_parser("Train one run and write its run JSON.").parse_args(argv), argv)


def launch(arguments: argparse.Namespace, argv: Sequence[str], worker: Sequence[str] = WORKER) -> int:
    """Run the ranks of this node to their end; `worker` is what Python is told to run as a rank."""
    try:
        return launch_checked(read_config(arguments.config), paths_of(arguments), arguments, argv, worker)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def launch_checked(
    config: RunConfig, paths: Paths, arguments: argparse.Namespace, argv: Sequence[str], worker: Sequence[str]
) -> int:
    read_timeout_s()
    on_first_node = node_rank(config) == 0
    prepare_folders(paths)
    if not on_first_node:
        run_ranks(config, paths, [*worker, *argv], Display(config))
        return 0  # rank 0's node knows how the run ended, and says so: out of memory is a result
    with sole_writer(paths.work) as lock:
        if STEP not in os.environ:  # else the job has done so before it went to its nodes
            remove_stale(paths)
        earlier = version_of(paths.output)
        checkpoint = latest(paths.checkpoints)
        if checkpoint is not None and (why := why_anew(checkpoint, arguments.resume, paths.data)) is not None:
            print(f"starting anew: {checkpoint}, {why}, is removed once this one begins", file=sys.stderr)
        print(describe_run(config, arguments.ceilings), file=sys.stderr)
        display = Display(config)
        # A process that may die inside native code for want of memory must not take the launcher with it.
        if config.world_size == 1 and config.memory_cap_gib is None and worker == WORKER:
            from mfubench.train.worker import run_rank  # loads torch, which the launcher of several ranks does not need

            for name in RANK_VARIABLES:  # this one is alone, whatever it was started from
                os.environ.pop(name, None)
            run_rank(arguments, display, last_words=lambda: conclude(config, paths, earlier))
        else:
            run_ranks(config, paths, [*worker, *argv], display, inherited=(lock,))
        display.close()
        return conclude(config, paths, earlier)


def why_anew(checkpoint: Path, resume: ResumeMode, data: Path) -> str | None:
    """What a checkpoint is that the ranks will not go on from; None for one that they will, or will refuse."""
    if resume == "never":
        return "an earlier run's"
    with contextlib.suppress(ConfigError, OSError, ValueError, KeyError, AttributeError):  # damage is theirs to say
        here = read_meta(DatasetMeta, data).description if resume == "auto" else None
        if differences := trained_on_other_data(checkpoint, here):
            return f"trained on other data ({'; '.join(differences)})"
    return None


def version_of(file: Path) -> tuple[int, int] | None:
    """Tells a file from the one that is put in its place later; None where there is none."""
    try:
        found = file.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def describe_run(config: RunConfig, ceilings: Path | None) -> str:
    """Architecture, arithmetic and what to expect of this node's cards, before anything is loaded."""
    names, _ = describe_cards() if config.device != "cpu" else ([], None)
    if not names and (ceilings is None or not ceilings.exists()):
        how = "; it is measured with the machine's ceilings" if ceilings is not None else ""  # a study does so
        return banner(config, None, f"a CPU has no datasheet peak{how}")
    try:
        if ceilings is not None and not names:
            threads = int(threads_of_a_rank(config.world_size // config.nnodes)["OMP_NUM_THREADS"])
            return banner(config, measured_cpu_peak(config.dtype, threads, read_ceilings(ceilings), config.name))
        return banner(config, peak_for(names[0], config.dtype, config.tf32, config.fp8))
    except ConfigError as error:
        return banner(config, None, str(error).splitlines()[0])


def prepare_folders(paths: Paths) -> None:
    """Make the folders. Raises ConfigError where nothing can be written."""
    check_replaceable(paths.output)
    for folder in (ranks_folder(paths.work), paths.output.parent):  # of every node: the disk may be its own
        try:
            try_writing(folder)
        except OSError as error:
            raise ConfigError(f"{folder}: cannot be written to ({error.strerror}), but results go there") from None


def run_ranks(
    config: RunConfig, paths: Paths, command: Sequence[str], display: Display, inherited: Sequence[int] = ()
) -> None:
    """Start this node's ranks as processes and wait for them; signals become the wish to stop."""
    on_first_node = node_rank(config) == 0
    with on_stop(lambda number: stop_file(paths.work).touch()):
        ranks = Ranks(config, paths.work, command, inherited)
        try:
            while not ranks.finished():
                if on_first_node:
                    display.follow(paths.live)
                time.sleep(0.1)
        finally:
            ranks.kill()


def conclude(config: RunConfig, paths: Paths, earlier: tuple[int, int] | None) -> int:
    """Read what the ranks left behind; write the record of an out-of-memory or of a failure.

    `earlier`: the version of the run JSON that was there before them, which is no result of theirs.
    """
    if version_of(paths.output) not in (None, earlier):
        for line in describe_end(read_run_log(paths.output)):
            print(line, file=sys.stderr)
        return 0
    if paths.stopped.exists():
        print("stopped on request", file=sys.stderr)  # how it goes on is for who asked for the run to say
        return STOPPED
    failures = read_failures(paths.work)
    if failures and failures[0].kind == "oom" and paths.partial.exists():
        log = record_out_of_memory(paths, told(failures[0], config))
        print(f"{log.name}: oom ({log.reason})", file=sys.stderr)
        return 0
    record_failure(config, paths, failures)
    return 1


def told(failure: Failure, config: RunConfig) -> str:
    """The reason, with the rank where there are several."""
    return failure.reason if config.world_size == 1 else f"rank {failure.rank}: {failure.reason}"


def record_failure(config: RunConfig, paths: Paths, failures: list[Failure]) -> None:
    """Write WORK/failure.json: the cause, every rank's own record, and where the logs and stacks are."""
    silence = full_disk(paths.work) or "the ranks ended without a result and without a word"
    reason = failures[0].reason if failures else silence
    stacks = [str(path) for path in sorted(ranks_folder(paths.work).glob("stacks-*.txt")) if path.stat().st_size]
    record = {
        "status": "failed",
        "reason": reason,
        "kind": failures[0].kind if failures else "died",
        "rank": failures[0].rank if failures else None,
        "traceback": failures[0].traceback if failures else "",
        "failures": [asdict(failure) for failure in failures],
        "stacks": stacks,
        "logs": str(ranks_folder(paths.work)),
    }
    cause = told(failures[0], config) if failures else silence
    print(f"error: {cause}\n(record: {paths.failure}, logs: {ranks_folder(paths.work)})", file=sys.stderr)
    try:
        write_json(paths.failure, record)
    except OSError as error:
        print(f"error: the record could not be written ({error.strerror})", file=sys.stderr)
    if record["kind"] != "refused":
        print_way_on(paths.checkpoints)
    if paths.output.exists():
        print(f"({paths.output} is an earlier run's result, which stays)", file=sys.stderr)


if __name__ == "__main__":
    listen_once()
    sys.exit(main())
