"""Jobs of a SLURM cluster: how a measured job starts on its nodes, and what an earlier snakemake has left in the queue.

A measured job is a batch script that runs `train_model.py`, which starts itself once on each of its nodes with srun.
The batch script and its `tee` are then no part of the step: the SIGTERM that SLURM sends to steps before the time limit
reaches the launcher alone, which writes a checkpoint.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mfubench.config import ConfigError
from mfubench.stop_signals import run_handing_on

JOB_NAME_PREFIX = "mfubench"  # slurm-jobname-prefix of profiles/slurm
STEP = "MFUBENCH_STEP"  # within a step: its name, another one each time
FIRST_SPECIAL_STEP = 4294967280  # step numbers from here on are batch scripts and interactive shells (slurm.h)
POLL_S = 1.0


@dataclass(frozen=True)
class Job:
    """A job of the queue."""

    number: str
    state: str
    name: str
    folder: str  # where it was submitted

    @property
    def label(self) -> str:
        return f"{self.number} ({self.state.lower()})"


def needs_step() -> bool:
    """Whether this process is the batch script's, and has the job's nodes still to start itself on."""
    step = int(os.environ.get("SLURM_STEP_ID", FIRST_SPECIAL_STEP))
    return "SLURM_JOB_ID" in os.environ and step >= FIRST_SPECIAL_STEP


def run_step(nodes: int, command: Sequence[str]) -> int:
    """Run a command once on each of the job's nodes; returns the highest exit code.

    SIGTERM is not acted on: SLURM sends it to the tasks as well, who write a checkpoint. Passed on by `scancel`, which
    tries again for a while, it would meet the next start of a job that is put back into the queue. An interrupt from a
    terminal becomes a SIGTERM to the tasks: srun would answer it by killing them.
    """
    if shutil.which("srun") is None:
        raise ConfigError("this job is to start on its nodes with srun, which is not to be found (in a container, say)")
    srun = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--cpu-bind=none"]
    if nodes > 1:
        srun += ["--kill-on-bad-exit=1", "--label"]
    # a session of its own: what is sent to the batch script's process group does not reach srun
    name = uuid.uuid4().hex
    environment = {**os.environ, STEP: name}

    def hand_on(process: subprocess.Popen[bytes], number: int) -> None:
        if number == signal.SIGINT:
            subprocess.run(["scancel", "--signal=TERM", os.environ["SLURM_JOB_ID"]], check=False)  # steps alone

    return run_handing_on([*srun, *command], hand_on, env=environment, start_new_session=True)


def jobs_of_folder(folder: Path) -> list[Job]:
    """This user's jobs that a snakemake in `folder` has submitted and that have not ended; [] without a SLURM."""
    if shutil.which("squeue") is None:
        return []
    command = ["squeue", "--me", "--noheader", "--format=%i|%T|%j|%Z"]
    listing = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if listing.returncode != 0:
        raise ConfigError(f"squeue does not answer, so jobs of an earlier run cannot be seen: {listing.stderr.strip()}")
    jobs = [Job(*line.split("|", 3)) for line in listing.stdout.splitlines()]
    here = str(folder.resolve())
    return [job for job in jobs if job.name.startswith(f"{JOB_NAME_PREFIX}_") and job.folder == here]


def refuse_orphans(folder: Path) -> None:
    """Raises ConfigError where jobs of an earlier snakemake go on: submitted again, they would write the same files."""
    orphans = jobs_of_folder(folder)
    if orphans:
        raise ConfigError(
            f"jobs of an earlier snakemake in this folder have not ended: {', '.join(job.label for job in orphans)}. "
            "Wait for them or cancel them (python workflow/scripts/cancel_orphans.py [--wait]), then start again."
        )


def check_status_command(command: str | None) -> None:
    """Raises ConfigError where snakemake would ask sacct for states that nobody records, and wait for ever."""
    if command != "sacct" or shutil.which("scontrol") is None:
        return
    shown = subprocess.run(["scontrol", "show", "config"], capture_output=True, text=True, timeout=60).stdout
    storage = [line.split("=")[1].strip() for line in shown.splitlines() if line.startswith("AccountingStorageType")]
    if storage and storage[0] in ("accounting_storage/none", "(null)"):
        raise ConfigError(
            "this SLURM keeps no accounts, so sacct never tells that a job has ended: add --slurm-status-command squeue"
        )


def end_orphans(folder: Path, cancel: bool) -> int:
    """Wait until no job of the folder is left, cancelling them first if asked to; returns how many there were."""
    found = left = jobs_of_folder(folder)
    if cancel and found:
        subprocess.run(["scancel", *(job.number for job in found)], check=True)
    shown = 0
    while left:
        if len(left) != shown:
            print(f"{'ending' if cancel else 'waiting for'} {', '.join(job.label for job in left)}", file=sys.stderr)
            shown = len(left)
        time.sleep(POLL_S)
        left = jobs_of_folder(folder)
    return len(found)
