"""What all drivers share: the device, the tokens, and the record that comes of whatever happens."""

from __future__ import annotations

import argparse
import hashlib
import os
import shlex
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import IterableDataset

from benchmarks.peers.clock import Finished, StepClock
from benchmarks.peers.job import Job, MissingPeer, Record, Status, read_job
from mfubench.data.reader import TokenDataset
from mfubench.telemetry import Sampler
from mfubench.train.failures import classify
from mfubench.train.loader import StepBatches
from mfubench.train.watchdog import JOB, POLL_S, alive

ENDLESS = 1_000_000  # steps
VARIABLES = ("NCCL_", "TORCH_NCCL", "PYTORCH_", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "TORCH_SYMM_MEM")


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def device_of(job: Job) -> torch.device:
    if job.run.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def step_batches(job: Job) -> Iterator[Tensor]:
    """Tokens [A, B, T + 1] int64 of step after step, the very sequences that mfubench trains on, in the same order."""
    dataset = StepBatches(TokenDataset.open(job.data, "train"), job.run, rank(), 0, ENDLESS)
    return (dataset[step] for step in range(ENDLESS))


class MicroBatches(IterableDataset[Tensor]):
    """Tokens [B, T + 1] of micro-step after micro-step."""

    def __init__(self, job: Job):
        self.job = job

    def __iter__(self) -> Iterator[Tensor]:
        return (micro_batch for batch in step_batches(self.job) for micro_batch in batch)


def package_version(name: str) -> str:
    """Version of an installed package; raises MissingPeer where there is none."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        raise MissingPeer(f"the package {name} is not installed: pip install {name}") from None


def checkout_version(folder: Path, *files: str) -> str:
    """Commit of a source tree or, without git, a digest of the files that matter."""
    command = ["git", "-C", str(folder), "log", "-1", "--format=%h"]
    if (folder / ".git").exists():
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        if found.returncode == 0:
            return f"commit {found.stdout.strip()}"
    digest = hashlib.sha256(b"".join((folder / file).read_bytes() for file in files))
    return f"sha256 {digest.hexdigest()[:12]} of {', '.join(files)}"


def end_with_harness() -> None:
    """A thread ends this process once the one that waits for its record is gone, even if that was killed outright."""

    def watch(harness: int) -> None:
        while alive(harness):
            time.sleep(POLL_S)
        print("the benchmark that started this run is gone", file=sys.stderr, flush=True)
        os._exit(1)

    if JOB in os.environ:  # not where a driver was started by hand
        threading.Thread(target=watch, args=(int(os.environ[JOB]),), name="harness", daemon=True).start()


def drive(version: Callable[[Job], str], train: Callable[[Job, torch.device], None]) -> None:
    """The whole of a driver: `train` trains until the clock ends it; rank 0 writes what came of it. Never returns.

    `version` says what is driven; both raise MissingPeer where the system or the model is not to be had.
    """
    parser = argparse.ArgumentParser(description="Run one job of a benchmark in this process.")
    parser.add_argument("--job", required=True, type=Path)
    job = read_job(parser.parse_args().job)
    end_with_harness()
    device = device_of(job)
    clock = StepClock(job, device)
    record = Record("failed", torch=torch.__version__, world_size=job.run.world_size, job=job.identity)
    cards = range(int(os.environ.get("LOCAL_WORLD_SIZE", "1"))) if device.type == "cuda" else ()
    with Sampler(job.folder, cards, interval_s=0.25) if rank() == 0 else nullcontext() as sampler:
        record.status, record.reason = outcome(lambda: attempt(job, device, version, train, record))
        if record.status == "ok":
            describe(record, clock, job, device)
            if sampler is not None:
                record.telemetry = sampler.summarize(intervals(clock))
    if rank() == 0:
        record.write(job.output)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if record.status == "ok" else 1)  # the loop was broken off: nothing in it is to be ended in order


def attempt(
    job: Job,
    device: torch.device,
    version: Callable[[Job], str],
    train: Callable[[Job, torch.device], None],
    record: Record,
) -> None:
    record.version = version(job)
    train(job, device)


def outcome(run: Callable[[], None]) -> tuple[Status, str | None]:
    """Status and reason of a training loop that only `Finished` ends well."""
    try:
        run()
    except Finished:
        return "ok", None
    except MissingPeer as error:
        return "missing", str(error)
    except ImportError as error:
        traceback.print_exc()
        return "missing", f"cannot be imported here: {error}"
    except Exception as error:
        traceback.print_exc()
        first = next(iter(str(error).strip().splitlines()), "")
        if classify(error) == "oom":
            return "oom", first
        return "failed", f"{type(error).__name__}: {first}"
    return "failed", "the training ended before enough was measured"


def describe(record: Record, clock: StepClock, job: Job, device: torch.device) -> None:
    """Fill in what the measured window and the optimizer tell."""
    assert clock.optimizer is not None
    groups = clock.optimizer.param_groups
    parameters = {id(p): p for group in groups for p in group["params"]}
    options = groups[0]
    record.parameters = sum(p.numel() for p in parameters.values())
    record.master_weights = ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in parameters.values()}))
    record.optimizer = (
        f"{type(clock.optimizer).__name__}, {'fused' if options.get('fused') else 'not fused'}, "
        f"betas {tuple(options['betas'])}, weight decay {sorted({group['weight_decay'] for group in groups})}"
    )
    record.step_times_s = clock.step_times_s()
    record.steps = len(record.step_times_s)
    record.tokens = record.steps * job.run.tokens_per_step
    record.seconds = sum(record.step_times_s)
    record.started_at = clock.ended_at - record.seconds
    record.variables = {key: value for key, value in sorted(os.environ.items()) if key.startswith(VARIABLES)}
    record.command = shlex.join(sys.orig_argv)
    if device.type == "cuda":
        record.card = torch.cuda.get_device_name(device)
        record.peak_allocated_gib = torch.cuda.max_memory_allocated() / 2**30
        record.peak_reserved_gib = torch.cuda.max_memory_reserved() / 2**30


def intervals(clock: StepClock) -> list[tuple[float, float]]:
    """(begin, end) of each measured step, unix seconds."""
    end, found = clock.ended_at, []
    for duration in reversed(clock.step_times_s()):
        found.append((end - duration, end))
        end -= duration
    return found[::-1]


def init_process_group(device: torch.device) -> None:
    """torch.distributed for a plain loop; torchrun has set the variables."""
    if device.type == "cuda":
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
