"""How a run may end badly: what kind of end it is, and the record that every rank and the launcher can read.

No torch at import, for the launcher's sake.

A rank that fails writes WORK/ranks/failure-RANK.json before it dies. The other ranks' watchdogs see the file within a
second and end their processes, whatever collective they are stuck in; the launcher then reads all records and decides.
"""

from __future__ import annotations

import json
import resource
import shutil
import signal
import sys
import threading
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from mfubench.config import ConfigError
from mfubench.run_log import RunLog, read_run_log, read_steps, write_json, write_run_log
from mfubench.train.arguments import Paths

# oom: out of memory, a result - died: killed from outside or crashed in native code, without a word of its own
# hang: no progress, stacks were written - lost: the launcher is gone - refused: a person must change something first
# error: anything else
Kind = Literal["oom", "hang", "died", "lost", "refused", "error"]

# What out-of-memory looks like when it does not come as an exception of that name. Sources: c10's CPU and CUDA
# allocators, cuBLAS and cuDNN status names, NCCL ("Failed to CUDA calloc"), glibc, C++.
OUT_OF_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "std::bad_alloc",
    "failed to cuda calloc",
    "failed to cuda host alloc",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
    "cuda_error_out_of_memory",
    "cudaerrormemoryallocation",
)
# Errors that often are an out-of-memory in disguise: they count as one where the device is as good as full.
SUSPICIOUS = (
    "cublas_status_not_initialized",
    "cudnn_status_not_initialized",
    "cudnn_status_internal_error",
    "cudnn_status_execution_failed",
    "unable to find an engine to execute this computation",
    "unable to find a valid cudnn algorithm",
    "ncclunhandledcudaerror",
    "ncclsystemerror",
)
# What a thread that could not be started says. Its stack is memory of the process: out of memory where that is limited.
NO_THREAD = ("can't start new thread", "unable to start watchdog thread", "thread creation failed")
# Kinds that are never the consequence of another rank's failure
CAUSES = {"oom": 0, "died": 1}
_one_writer = threading.Lock()  # the main thread and the watchdog's may fail at the same time
FULL_FRACTION = 0.03  # of the device's memory free, or less: as good as full
FULL_DISK = 1 << 20  # bytes free, or less: what was to be written did not fit


@dataclass(frozen=True)
class Failure:
    rank: int
    kind: Kind
    reason: str
    traceback: str
    at: float  # seconds since the epoch: the earliest failure is the cause, later ones follow from it


def classify(error: BaseException) -> Kind:
    """Whether an exception is an out-of-memory, by its type or by what it says, or a complaint about the input."""
    import torch

    if isinstance(error, ConfigError):
        return "refused"
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return "oom"
    if says_out_of_memory(str(error), capped=memory_is_capped()):
        return "oom"
    return "oom" if is_suspicious(str(error)) and device_is_full() else "error"


def says_out_of_memory(text: str, *, capped: bool) -> bool:
    """capped: the process's memory is limited, so that it may have been too little for a thread."""
    phrases = OUT_OF_MEMORY + NO_THREAD if capped else OUT_OF_MEMORY
    return any(phrase in text.lower() for phrase in phrases)


def memory_is_capped() -> bool:
    """Whether this process's data segment is limited, as `memory_cap_gib` does on a CPU."""
    return resource.getrlimit(resource.RLIMIT_DATA)[0] != resource.RLIM_INFINITY


def is_suspicious(text: str) -> bool:
    return any(phrase in text.lower() for phrase in SUSPICIOUS)


def device_is_full() -> bool:
    """Whether hardly any device memory is left, for this process or at all."""
    import torch

    if not torch.cuda.is_available():
        return False
    try:
        free, total = torch.cuda.mem_get_info()
    except RuntimeError:  # the context itself is broken
        return False
    allowed = total * torch.cuda.get_per_process_memory_fraction()
    return min(free, allowed - torch.cuda.memory_reserved()) < FULL_FRACTION * total


def failure_of(rank: int, error: BaseException, work: Path) -> Failure:
    text = "".join(traceback.format_exception(error))
    kind = classify(error)
    told = "; ".join(str(error).splitlines())  # all of a complaint: what differs, what to do
    reason = told if kind == "refused" else f"{type(error).__name__}: {error}".strip().splitlines()[0]
    return Failure(rank, kind, full_disk(work) or reason, text[-8000:], time.time())


def full_disk(folder: Path) -> str | None:
    """A sentence where no room is left on the disk: what fails then hardly ever says so itself."""
    free = shutil.disk_usage(folder).free
    return f"no room is left on the disk of {folder}: make some and start again" if free <= FULL_DISK else None


def how_ended(code: int) -> str:
    """What a process's exit code says of its bad end."""
    return f"ended with exit code {code}" if code > 0 else f"was killed by {signal.Signals(-code).name}"


def ranks_folder(work: Path) -> Path:
    return work / "ranks"


def stop_file(work: Path) -> Path:
    """Exists once the launcher was told to stop: the ranks then write a checkpoint and end."""
    return ranks_folder(work) / "stop"


def remove_stale(paths: Paths) -> None:
    """Remove what an earlier attempt left in WORK and this one could take for its own; its result stays for now."""
    left = [paths.failure, paths.stopped, paths.partial, paths.steps, paths.live, stop_file(paths.work)]
    folder = ranks_folder(paths.work)
    for path in [*left, *folder.glob("failure-*.json"), *folder.glob("rendezvous-*")]:
        path.unlink(missing_ok=True)


def remove_result(paths: Paths) -> None:
    """Remove an earlier attempt's run JSON and trace: once this one has passed its checks, or has another result."""
    for path in (paths.output, paths.trace):
        path.unlink(missing_ok=True)


def record_out_of_memory(paths: Paths, reason: str) -> RunLog:
    """Write the run JSON of a run that ran out of memory, of what there is of it, and return it."""
    log = read_run_log(paths.partial)
    log.status, log.reason = "oom", reason
    log.steps = read_steps(paths.steps)
    remove_result(paths)
    write_run_log(paths.output, log)
    return log


def write_failure(work: Path, failure: Failure) -> None:
    """Record a failure, unless its rank has one already: what a rank says later (a connection closed by a peer that
    ended because of it, say) only follows from the first. Where nothing can be written it is said to the log alone."""
    path = ranks_folder(work) / f"failure-{failure.rank}.json"
    with _one_writer:
        if path.exists():
            return
        try:
            write_json(path, asdict(failure))
        except OSError as error:
            print(f"{path}: {error.strerror}; rank {failure.rank}: {failure.reason}", file=sys.stderr, flush=True)


def read_failures(work: Path) -> list[Failure]:
    """All records, the cause first: an out-of-memory, then a sudden death (its peers often complain before the launcher
    sees it), then the earliest failure."""
    failures = [
        Failure(**json.loads(path.read_text(encoding="utf-8"))) for path in ranks_folder(work).glob("failure-*.json")
    ]
    return sorted(failures, key=lambda failure: (CAUSES.get(failure.kind, len(CAUSES)), failure.at))
