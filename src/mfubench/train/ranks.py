"""The processes of a run on this node: one a rank, each with a log of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from mfubench.config import ConfigError, RunConfig
from mfubench.slurm import STEP
from mfubench.train.failures import (
    Failure,
    Kind,
    how_ended,
    ranks_folder,
    read_failures,
    says_out_of_memory,
    write_failure,
)

GRACE_S = 15.0  # for the other ranks to end by themselves after one has failed
OOM_KILLS = (Path("/sys/fs/cgroup/memory.events"), Path("/proc/vmstat"))  # files with a line "oom_kill COUNT"
OUT_OF_MEMORY_KILLER = "the kernel's out-of-memory killer was at work"
NODE_RANKS = ("SLURM_NODEID", "GROUP_RANK")


def node_rank(config: RunConfig) -> int:
    """This node's place among those of the run: SLURM's, or torchrun's name for it; 0 where the run has one node.

    (A run of one node takes no place in its surroundings: a shell within somebody's step has such variables.)
    Raises ConfigError where a run of several nodes is not told the place of this one.
    """
    if config.nnodes == 1:
        return 0
    name = next((name for name in NODE_RANKS if os.environ.get(name)), None)
    if name is None:
        raise ConfigError(f"nnodes is {config.nnodes}: start the run once on each node, under srun")
    place = os.environ[name]
    if not place.isdecimal() or int(place) >= config.nnodes:
        raise ConfigError(
            f"{name} is {place!r}: the nodes of a run with nnodes {config.nnodes} are 0 to {config.nnodes - 1}; start "
            "it once on each node, under srun"
        )
    return int(place)


def rank_environment(config: RunConfig, work: Path, local_rank: int) -> dict[str, str]:
    """The variables that tell a process which rank it is (torchrun's names)."""
    ranks_a_node = config.world_size // config.nnodes
    environment = {key: value for key, value in os.environ.items() if key not in ("MASTER_ADDR", "MASTER_PORT")}
    environment |= {
        "RANK": str(node_rank(config) * ranks_a_node + local_rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(config.world_size),
        "LOCAL_WORLD_SIZE": str(ranks_a_node),
        "MFUBENCH_LAUNCHER": str(os.getpid()),
        "MFUBENCH_RENDEZVOUS": str(rendezvous_file(config, work)),
        "PYTHONUNBUFFERED": "1",
    }
    return environment | threads_of_a_rank(ranks_a_node)


def threads_of_a_rank(ranks_a_node: int) -> dict[str, str]:
    """The rank's share of the cores for OpenMP and MKL, or fewer where the user says so to either of them.

    (snakemake sets these variables to all threads of the rule: those of all ranks together.)
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    given = [os.environ.get(name, "") for name in names]
    wanted = [int(threads) for threads in given if threads.isdigit() and int(threads)]
    return dict.fromkeys(names, str(min([max(1, cores // ranks_a_node), *wanted])))


def rendezvous_file(config: RunConfig, work: Path) -> Path:
    """Where rank 0 writes its address. Several nodes share it (and WORK's file system), earlier runs do not."""
    step = f"{os.environ.get('SLURM_JOB_ID', 'local')}-{os.environ.get('SLURM_STEP_ID', '0')}"
    return ranks_folder(work) / f"rendezvous-{os.environ.get(STEP, step) if config.nnodes > 1 else 'local'}"


class Ranks:
    """This node's ranks, started on construction. They get the `inherited` file descriptors."""

    def __init__(self, config: RunConfig, work: Path, command: Sequence[str], inherited: Sequence[int] = ()):
        self.work, self.capped = work, config.memory_cap_gib is not None
        if node_rank(config) == 0:
            rendezvous_file(config, work).unlink(missing_ok=True)
        self.oom_kills = count_oom_kills()
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.logs: list[BinaryIO] = []
        self.failed_at: float | None = None
        self.noted: set[int] = set()
        for local_rank in range(config.world_size // config.nnodes):
            environment = rank_environment(config, work, local_rank)
            rank = int(environment["RANK"])
            log = open(self.log_file(rank), "wb")  # noqa: SIM115
            self.logs.append(log)
            # own session: a terminal's Ctrl-C reaches the launcher alone, which passes the wish on in order
            self.processes[rank] = subprocess.Popen(
                [sys.executable, *command],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=inherited,
            )

    def log_file(self, rank: int) -> Path:
        return ranks_folder(self.work) / f"rank-{rank}.log"

    def finished(self) -> bool:
        """Whether all ranks have ended. A bad end is recorded, so that every other rank follows."""
        codes = {rank: process.poll() for rank, process in self.processes.items()}
        for rank, code in codes.items():
            if code and rank not in self.noted:
                self.noted.add(rank)
                self.note_end(rank, code)
        if self.failed_at is not None and time.monotonic() > self.failed_at + GRACE_S:
            self.kill()
        return all(code is not None for code in codes.values())

    def note_end(self, rank: int, code: int) -> None:
        """Record the end of a rank that left no record itself, unless it only followed another."""
        first = self.failed_at is None
        self.failed_at = self.failed_at or time.monotonic()
        records = read_failures(self.work)
        if any(record.rank == rank for record in records) or (code > 0 and records):
            return
        tail = self.log_file(rank).read_bytes()[-8000:].decode(errors="replace")
        ended = how_ended(code)
        # an abort is how NCCL and gloo end a process whose peer is gone: a cause only where nothing came before it
        kind: Kind = "error" if code == -signal.SIGABRT and not first else "died"
        if code == -signal.SIGKILL and count_oom_kills() > self.oom_kills:
            kind, ended = "oom", f"{ended}: {OUT_OF_MEMORY_KILLER}"
        elif self.capped and (says_out_of_memory(tail, capped=True) or code in (-signal.SIGABRT, -signal.SIGSEGV)):
            kind, ended = "oom", f"{ended} under a memory cap"
        write_failure(self.work, Failure(rank, kind, f"the process {ended}", tail, time.time()))

    def kill(self) -> None:
        """End what is left, at once."""
        for rank, process in self.processes.items():
            if process.poll() is None:
                self.noted.add(rank)
                process.kill()
                process.wait()
        for log in self.logs:
            log.close()


def count_oom_kills() -> int:
    """Processes of this control group that the kernel has killed for want of memory, or of the machine where the group
    does not tell; 0 where neither does."""
    for source in OOM_KILLS:
        try:
            for line in source.read_text(encoding="utf-8").splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
        except OSError:
            continue
    return 0
