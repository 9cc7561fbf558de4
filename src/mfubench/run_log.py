"""The run JSON: raw facts of one training run, written by `train`, read and judged by `analysis` and `audit`.

Nothing in it is a verdict: MFU is a function of (run log, hardware row, convention) and is computed by whoever reads.
Units stand in the keys. A number that is not finite is written as null, never as NaN. Steps are appended to
`steps.jsonl` in the run's work folder as they happen and assembled into the run JSON once, at the end, atomically: a
run whose process dies leaves no run JSON that later rules would believe.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from mfubench.config import ConfigError, RunConfig
from mfubench.flops import count_parameters
from mfubench.result_files import read_text
from mfubench.telemetry_record import Telemetry

Artifact = TypeVar("Artifact", bound=BaseModel)

SCHEMA_VERSION: Final = 1

# ok: ran as asked (or fell back, as `used` says) - oom: out of memory, a result - diverged: a loss that is not
# finite, a result - skipped: a required setting is not to be had here, nothing was measured - failed: an error
Status = Literal["ok", "oom", "diverged", "skipped", "failed"]


# Settings of which every run says what was used: peaks, comparisons and figures are made of them.
USED = ("attention", "compile", "cuda_graphs", "loader", "loss", "parallelism", "dtype", "tf32", "fp8")
LARGEST = 2**63 - 1  # a whole number of 64 bits; larger ones are no count of anything


def null_unless_finite(value: Any) -> Any:
    """A number that is not finite as None: what a loss that diverged is recorded as."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


Count = Annotated[int, Field(ge=0, le=LARGEST)]
Positive = Annotated[int, Field(ge=1, le=LARGEST)]
Seconds = Annotated[float, Field(ge=0, le=1e10)]  # 300 years
# An optimizer step is many kernels, and none starts and ends within a microsecond.
StepSeconds = Annotated[float, Field(ge=1e-6, le=1e10)]
Size = Annotated[float, Field(ge=0)]
MayDiverge = Annotated[float | None, BeforeValidator(null_unless_finite)]  # null: not finite


class Record(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Choice(Record):
    """A setting that may fall back: what was asked for, what ran, and why (always said where the two differ)."""

    requested: str
    used: str
    reason: str | None = None


class Gpu(Record):
    index: Count
    name: str  # as the driver reports it; hardware rows are matched by it
    uuid: str | None = None
    memory_gib: Size
    power_limit_w: Size | None = None


class Environment(Record):
    """The machine and the software that ran, as found by the ranks themselves."""

    host: str
    device: Literal["cuda", "cpu"]
    gpus: list[Gpu]  # the cards this run used, over all nodes, in rank order; empty on a CPU
    cpu: str
    cpu_count: Positive
    cpu_threads: Positive  # torch intra-op threads per rank
    memory_gib: Size
    driver: str | None = None
    cuda: str | None = None
    nccl: str | None = None
    cudnn: str | None = None
    torch: str
    python: str
    packages: dict[str, str] = {}  # of the kernels: flash-attn, liger-kernel, torchao, triton, ...
    git_commit: str | None = None
    git_dirty: bool | None = None
    slurm_job_id: str | None = None
    variables: dict[str, str] = {}  # environment variables that change speed: OMP_*, NCCL_*, TORCH*, CUDA_*
    command: str


class Parameters(Record):
    """Counted from the module that ran (not from the formula)."""

    total: Positive
    trainable: Positive
    matmul: Positive


class RunFlopTerms(Record):
    """`flops.FlopTerms`, raw: what every MFU convention is made of."""

    parameters: Positive
    matmul_parameters: Positive
    attention_mlp_parameters: Positive
    num_hidden_layers: Positive
    attention_width: Positive
    seq_len: Positive


class Dataset(Record):
    name: str
    train_tokens: Count
    val_tokens: Count
    vocab_size: Positive
    token_dtype: str
    tokenizer_sha256: str
    sha256: str | None = None  # of the token files of all splits; null: written before it was noted
    source: str


class Step(Record):
    """One optimizer step. Times are of rank 0; `rank_step_times_s` of the run log has everyone's."""

    step: Count
    phase: Literal["compile", "warmup", "measured"]
    step_time_s: StepSeconds
    data_time_s: Seconds  # of the host for batches, inside step_time_s; a GPU computes meanwhile
    tokens: Positive  # over all ranks
    loss: MayDiverge  # mean over the global batch
    learning_rate: Size
    grad_norm: MayDiverge  # before clipping


class Phase(Record):
    """Time outside the steps, on rank 0."""

    kind: Literal["setup", "preheat", "evaluation", "checkpoint", "profile", "sample", "logging"]
    after_step: Count
    time_s: Seconds


class Evaluation(Record):
    step: Count
    loss: MayDiverge
    tokens: Positive


class RankMemory(Record):
    """Peaks of one rank over the whole run."""

    rank: Count
    peak_allocated_gib: Size | None = None  # of torch's CUDA allocator and symmetric memory beside it; null on a CPU
    peak_reserved_gib: Size | None = None
    peak_rss_gib: Size
    allocator_retries: Count | None = None

    @model_validator(mode="after")
    def tensors_lie_in_what_is_reserved(self) -> Self:
        if self.peak_allocated_gib is not None and self.peak_reserved_gib is None:
            raise ValueError("peak_reserved_gib: null, where peak_allocated_gib is known")
        return self


class GradientStatistics(Record):
    """Per-layer gradients before clipping and zeroing."""

    step: Count
    layers: dict[str, dict[str, MayDiverge]]  # layer -> {mean, max, std}


class Kernels(Record):
    """Names of the kernels of one profiled, unmeasured step: the proof of what ran."""

    attention: list[str]
    matmul: list[str]
    other_count: Count


class Wall(Record):
    """Clock of rank 0, to reconcile the steps with."""

    started_at: str  # ISO 8601, UTC
    total_s: float  # process start of rank 0 to the end
    training_s: Seconds  # first step's start to last step's end, phases in between included
    training_tokens: Count  # trained on in this process, over all ranks
    joined_s: Seconds | None = None  # of total_s: from the process's start until all ranks had met
    chosen_s: Seconds | None = None  # of total_s: from then until it was known what runs, kernels tried and measured


class Resume(Record):
    step: Count  # steps that were already done
    at: str  # ISO 8601, UTC
    changed: list[str] = []  # what they ran with and on, where it is not the same: they count as warm-up
    telemetry: Telemetry | None = None  # of the process that this one went on from, where this one trained on


class RunLog(Record):
    schema_version: Literal[1] = SCHEMA_VERSION
    name: str
    status: Status
    reason: str | None = None
    config: RunConfig
    environment: Environment
    used: dict[str, Choice]  # USED, and what else may fall back
    parameters: Parameters | None = None  # null where the run ended before the model was built
    flop_terms: RunFlopTerms | None = None
    dataset: Dataset | None = None
    steps: list[Step] = []
    rank_step_times_s: list[list[StepSeconds]] = []  # [rank][position in steps]
    phases: list[Phase] = []
    evaluations: list[Evaluation] = []
    gradient_statistics: list[GradientStatistics] = []
    memory: list[RankMemory] = []
    kernels: Kernels | None = None
    telemetry: Telemetry | None = None  # while the last process that trained took its measured steps
    resumes: list[Resume] = []
    sample: str | None = None
    stopped_early: str | None = None  # adaptive length: why the run ended before max_iters
    wall: Wall | None = None

    @field_validator("used")
    @classmethod
    def holds_all_choices(cls, used: dict[str, Choice]) -> dict[str, Choice]:
        missing = [key for key in USED if key not in used]
        if missing:
            raise ValueError(f"lacks {', '.join(missing)}: every run says what it used of each")
        return used

    @model_validator(mode="after")
    def is_of_this_world(self) -> Self:
        """Sizes that the configuration multiplies up to must be whole numbers that a machine can count."""
        largest = max(self.config.tokens_per_step, self.config.max_iters, count_parameters(self.config.model).total)
        if largest > LARGEST:
            raise ValueError("the configuration's sizes multiply to more than 64 bits hold")
        return self

    def demoted(self) -> str | None:
        """Why steps that were measured count as warm-up since a resume; None where none do."""
        for resume in reversed(self.resumes):
            if resume.changed:
                return (
                    f"the steps before step {resume.step} are warm-up, they ran otherwise: {'; '.join(resume.changed)}"
                )
        return None

    def telemetry_of_measured(self) -> list[Telemetry]:
        """A summary for each process whose steps are measured, the last one first; of none that nobody sampled."""
        found = [self.telemetry]
        for resume in reversed(self.resumes):
            if resume.changed:
                break
            found.append(resume.telemetry)
        return [telemetry for telemetry in found if telemetry is not None]

    def fallbacks(self) -> dict[str, str]:
        """Settings that ran as something else than was asked for, each as "asked → used: reason".

        Not those that make no difference here: TF32 on a CPU, the parallelism of one process.
        """
        idle = {"tf32"} if self.environment.device == "cpu" else set()
        idle |= {"parallelism"} if self.config.world_size == 1 else set()
        return {
            key: f"{choice.requested} → {choice.used}: {choice.reason or 'no reason recorded'}"
            for key, choice in self.used.items()
            if choice.used != choice.requested and choice.requested != "auto" and key not in idle
        }

    def measured_steps(self) -> list[Step]:
        """The steps that count: after compilation and warm-up."""
        return [step for step in self.steps if step.phase == "measured"]


def finite(value: Any) -> Any:
    """The same JSON-like value with each number that is not finite replaced by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


def write_text_atomically(path: Path | str, text: str) -> None:
    """Write a file that is whole or not there: temporary file beside it, fsync, rename."""
    write_bytes_atomically(path, text.encode("utf-8"))


def write_bytes_atomically(path: Path | str, content: bytes) -> None:
    """As `write_text_atomically`, of bytes. An OSError names the file, or the folder of it that cannot be made.

    A link is followed. Raises ConfigError for what is there and no file: a device would be replaced by one.
    """
    path = Path(path)
    check_replaceable(path)
    target = Path(os.path.realpath(path))  # of a link in a circle a link, which is replaced
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        replace_file(target, content)
    except OSError as error:
        error.filename, error.filename2 = str(path), None  # not the temporary one; a full disk's error names none
        raise


def check_replaceable(path: Path) -> None:
    """Raises ConfigError where `path` is a device, a pipe or a folder."""
    if path.exists() and not path.is_file():
        what = "a folder" if path.is_dir() else "no regular file but a device or a pipe"
        raise ConfigError(f"{path}: is {what}; name a file that is to be written")


def replace_file(path: Path, content: bytes) -> None:
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def try_writing(folder: Path) -> None:
    """Raises OSError, of the folder, where no file can be written to it; it is made where it is not there."""
    probe = folder / f".probe-{os.getpid()}"
    try:
        write_bytes_atomically(probe, b"\0" * 4096)
    except OSError as error:
        error.filename = str(folder)
        raise
    probe.unlink(missing_ok=True)


def write_json(path: Path | str, value: Any, indent: int | None = 1) -> None:
    """Write JSON atomically; NaN and infinities become null."""
    write_text_atomically(path, json.dumps(finite(value), indent=indent, allow_nan=False) + "\n")


def write_run_log(path: Path | str, log: RunLog) -> None:
    write_json(path, log.model_dump(mode="json"))


def read_run_log(path: Path | str) -> RunLog:
    """Read and validate a run JSON. Raises ConfigError naming the file and what is wrong with it."""
    return read_artifact(RunLog, path, "is not a run JSON of this version")


def read_artifact(schema: type[Artifact], path: Path | str, complaint: str) -> Artifact:
    """Read a JSON file as `schema`. Raises ConfigError: the file, `complaint`, the first key that does not fit."""
    try:
        return schema.model_validate_json(read_text(path))
    except ValidationError as error:
        fault = error.errors()[0]
        where = "".join(f"{part}: " for part in [".".join(map(str, fault["loc"]))] if part)
        message = fault["msg"].removeprefix("Value error, ")
        raise ConfigError(
            f"{path}: {complaint}: {where}{message}; if it is damaged, remove it and start again"
        ) from None


def append_step(path: Path, step: Step) -> None:
    """Add one line to steps.jsonl; a line cut off by a crash is dropped by `read_steps`."""
    with open(path, "a", encoding="utf-8") as stream:
        stream.write(json.dumps(finite(step.model_dump(mode="json")), allow_nan=False) + "\n")


def read_steps(path: Path) -> list[Step]:
    """The steps recorded so far, without a last line that is incomplete."""
    steps = []
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                steps.append(Step.model_validate_json(line))
            except ValidationError:
                break
    return steps
