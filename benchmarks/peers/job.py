"""What one process of a benchmark is told to run, and what it hands back: two JSON files. No torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from mfubench.config import ConfigError, RunConfig, parse
from mfubench.run_log import write_json

# ok: measured - oom: out of memory, a result - missing: not installed, not pointed to, or has no such model
# failed: anything else. All of them are rows of the result, with their reason.
Status = Literal["ok", "oom", "missing", "failed"]


class MissingPeer(Exception):
    """The system is not to be had here. The message says what to do."""


@dataclass(frozen=True)
class Job:
    """One run of one system. `run` is the work: every system trains this shape, batch and optimizer on these tokens."""

    system: str
    driver: str  # module of benchmarks.peers
    run: RunConfig
    data: str  # folder of a prepared dataset
    work: str
    output: str  # Record to write
    settings: dict[str, Any] = field(default_factory=dict)  # of the driver
    code: str = ""  # digest of what runs, where it is this project's own: another code's runs are not this job's
    checkout: str | None = None  # source tree, of systems that are not installed as a package
    warmup_steps: int = 3
    preheat_s: float = 10.0
    measure_s: float = 20.0
    min_steps: int = 10
    step_time_s: float | None = None  # from an earlier run of the same job, where one is known

    @property
    def folder(self) -> Path:
        return Path(self.work)

    @property
    def identity(self) -> str:
        """What must be equal for a finished run to be one of this job: all but where it lies and what is expected."""
        values = self.to_dict()
        for key in ("data", "work", "output", "checkout", "step_time_s"):
            del values[key]
        return json.dumps(values, sort_keys=True)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"run": self.run.model_dump(mode="json")}


def write_job(path: Path, job: Job) -> None:
    write_json(path, job.to_dict())


def read_job(path: Path) -> Job:
    values = json.loads(path.read_text(encoding="utf-8"))
    return Job(**values | {"run": parse(RunConfig, values["run"], f"{path}: run")})


@dataclass
class Record:
    """What a run of a job measured, as the process saw it itself."""

    status: Status
    reason: str | None = None
    version: str | None = None
    torch: str | None = None
    card: str | None = None
    world_size: int = 1
    parameters: int | None = None
    master_weights: str | None = None  # dtype of what the optimizer updates
    optimizer: str | None = None
    steps: int = 0
    tokens: int = 0  # of the measured steps, over all ranks
    seconds: float | None = None  # from the first measured step's begin to the last one's end
    started_at: float | None = None  # unix seconds of the first measured step's begin
    step_times_s: list[float] = field(default_factory=list)
    peak_allocated_gib: float | None = None
    peak_reserved_gib: float | None = None
    telemetry: dict[str, Any] | None = None
    variables: dict[str, str] = field(default_factory=dict)  # NCCL's and the allocator's settings
    notes: list[str] = field(default_factory=list)
    command: str = ""
    job: str = ""  # identity of the job
    wall_s: float = 0.0  # of the whole process, start and compilation included

    @property
    def rate(self) -> float | None:
        """Tokens per second and GPU over the measured window."""
        return self.tokens / self.seconds / self.world_size if self.seconds else None

    def write(self, path: Path | str) -> None:
        write_json(path, asdict(self))


def read_record(path: Path, job: Job | None = None) -> Record | None:
    """A finished run's record; None where there is none, or where it is another job's."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: is no valid JSON ({error}); delete it and run again") from None
    try:
        record = Record(**values)
    except TypeError as error:
        raise ConfigError(f"{path}: is no record of this version ({error}); delete it and run again") from None
    return None if job is not None and record.job != job.identity else record
