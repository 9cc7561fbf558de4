"""Start a job in processes of its own, with its own compile cache and cards, and see that it ends."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.peers.job import Job, Record, read_record, write_job
from mfubench.train.failures import says_out_of_memory
from mfubench.train.watchdog import JOB

ROOT = Path(__file__).parents[1]


@dataclass
class Started:
    job: Job
    process: subprocess.Popen[bytes]
    began: float
    log: Path


def job_environment(job: Job, cache: Path, extra: dict[str, str], cards: Sequence[int] | None) -> dict[str, str]:
    """This process's environment with a compile cache of the job's own, no hub, and the cards it may see."""
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    paths = [str(ROOT), str(ROOT / "src"), *filter(None, [environment.get("PYTHONPATH")])]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // max(1, len(cards or [0])))))
    environment |= {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "MFUBENCH_CACHE": str(cache / "mfubench"),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        JOB: str(os.getpid()),  # engine and drivers end themselves where this process was killed
        **extra,
    }
    if cards is not None:
        visible = [entry for entry in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if entry.strip()]
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible[card] if visible else str(card) for card in cards)
    return environment


def start(job: Job, cache: Path, extra: dict[str, str] | None = None, cards: Sequence[int] | None = None) -> Started:
    """Start a job; several ranks of a peer under torchrun, mfubench's by its own launcher."""
    job.folder.mkdir(parents=True, exist_ok=True)
    Path(job.output).unlink(missing_ok=True)
    file, log = job.folder / "job.json", job.folder / "log.txt"
    write_job(file, job)
    command = [sys.executable]
    if job.run.world_size > 1 and job.driver != "mfubench_engine":
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={job.run.world_size}"]
    command += ["-m", f"benchmarks.peers.{job.driver}", "--job", str(file)]
    environment = job_environment(job, cache, extra or {}, cards)
    with open(log, "wb") as stream:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Started(job, process, time.monotonic(), log)


def finish(started: Sequence[Started], timeout_s: float) -> list[Record | None]:
    """Wait for jobs that run at the same time. None: the time was up first, and the job was ended without a result."""
    deadline = time.monotonic() + timeout_s
    records: list[Record | None] = []
    try:
        for one in started:
            try:
                one.process.wait(timeout=max(0.0, deadline - time.monotonic()))
                records.append(conclude(one))
            except subprocess.TimeoutExpired:
                records.append(None)
    finally:
        for one in started:
            end(one.process)
    return records


def end(process: subprocess.Popen[bytes]) -> None:
    """End what is left of a job, its descendants too: some of them lead sessions of their own."""
    if process.poll() is not None:
        return
    parent = psutil.Process(process.pid)
    for one in [parent, *parent.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()


def conclude(started: Started) -> Record:
    """The record of a job that has ended, also where its processes died without writing one."""
    job, path = started.job, Path(started.job.output)
    record = read_record(path)
    if record is None:
        tail = started.log.read_bytes()[-20_000:].decode(errors="replace")
        oom = says_out_of_memory(tail, capped=False)
        ended = f"ended with code {started.process.returncode} and no record"
        record = Record("oom" if oom else "failed", reason="out of memory" if oom else ended, job=job.identity)
        record.world_size = job.run.world_size
    record.wall_s = time.monotonic() - started.began
    record.write(path)
    return record
