"""One measured run as a job: cards of its own, then the training engine in a fresh process."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from mfubench.config import ConfigError
from mfubench.job import add_job_arguments, cards_for_job, write_stamp
from mfubench.slurm import needs_step, run_step
from mfubench.stop_signals import STOPPED, run_handing_on
from mfubench.train.arguments import Paths, ResumeMode, paths_of, read_config
from mfubench.train.checkpoint_folders import print_way_on
from mfubench.train.failures import how_ended, record_out_of_memory, remove_stale
from mfubench.train.ranks import OUT_OF_MEMORY_KILLER, count_oom_kills
from mfubench.train.watchdog import JOB

KILLED = " (on a CPU mostly by the kernel for want of memory: with memory_cap_gib that is a result and no failure)"


def main(argv: Sequence[str] | None = None) -> int:
    """Run `train_model.py --config JSON --data DIR --work DIR --output FILE …`; returns the exit code.

    As the batch script of a SLURM job it starts itself once on each node.
    """
    parser = argparse.ArgumentParser(description="Train one run and write its run JSON.")
    parser.add_argument("--config", required=True, help="RunConfig as JSON")
    parser.add_argument(
        "--start-from", type=Path, default=None, help="work folder, or checkpoints, of the run that it continues"
    )
    add_job_arguments(parser)
    argv = list(sys.argv[1:] if argv is None else argv)
    arguments = parser.parse_args(argv)
    try:
        if needs_step():
            config = read_config(arguments.config)
            remove_stale(paths_of(arguments))  # here, before one node could take the other's first words for old ones
            return run_step(config.nnodes, [sys.executable, sys.argv[0], *argv])
        with cards_for_job(arguments):
            code = start_training(
                arguments.config,
                data=arguments.data,
                tokenizer=arguments.tokenizer,
                ceilings=arguments.ceilings,
                work=arguments.work,
                output=arguments.output,
                resume=arguments.resume,
                start_from=arguments.start_from,
            )
        if code == 0:
            write_stamp(arguments)
        if code < 0:  # else the launcher itself has said how the run ended
            advice = KILLED if code == -signal.SIGKILL else ""
            print(f"error: the training process {how_ended(code)}{advice}", file=sys.stderr)
        if code < 0 or code == STOPPED:
            print_way_on(paths_of(arguments).checkpoints)
        return code
    except (ConfigError, TimeoutError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def start_training(
    config: str,
    *,
    data: Path,
    work: Path,
    output: Path,
    resume: ResumeMode,
    tokenizer: Path | None = None,
    ceilings: Path | None = None,
    start_from: Path | None = None,
    patience_s: float | None = None,
    heard: list[int] | None = None,
) -> int:
    """Run the engine in a process of its own, pass signals on to it, and return its exit code.

    0: a run JSON was written (ok, oom, diverged or skipped); 75: stopped with a checkpoint, by SIGTERM or after
    `patience_s` seconds; else failed. `heard` takes the signals to stop that came, whatever the code.

    A lone rank shares the launcher's process: where the kernel killed that for want of memory, nobody but this process
    is left to write the result.
    """
    oom_kills = count_oom_kills()
    command = [sys.executable, "-m", "mfubench.train.launch", "--config", config, "--data", str(data)]
    command += ["--work", str(work), "--output", str(output), "--resume", resume]
    if tokenizer is not None:
        command += ["--tokenizer", str(tokenizer)]
    if ceilings is not None:
        command += ["--ceilings", str(ceilings)]
    if start_from is not None:
        command += ["--start-from", str(start_from)]
    # own session: a terminal's Ctrl-C reaches this process alone, which hands it on once
    environment = os.environ | {JOB: str(os.getpid())}
    code = run_handing_on(command, patience_s=patience_s, heard=heard, env=environment, start_new_session=True)
    paths = Paths(data, work, output)
    alone = code == -signal.SIGKILL and read_config(config).world_size == 1
    if alone and count_oom_kills() > oom_kills and paths.partial.exists():
        log = record_out_of_memory(paths, f"the process {how_ended(code)}: {OUT_OF_MEMORY_KILLER}")
        print(f"{log.name}: oom ({log.reason})", file=sys.stderr)
        return 0
    return code
