"""Where the machine's time went: the clock of each run, taken apart into steps, what is between them, and the rest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from mfubench.audit.run_numbers import own_phases, own_steps
from mfubench.run_log import RunLog

MEASURED: Final = "measured"
ENDS: Final = "ends"

# part -> what it is called; the order of the table
PARTS: Final = {
    MEASURED: "measured steps",
    "first_steps": "first step (compilation) and warm-up",
    "preheat": "preheat",
    "profile": "profiling",
    "setup": "setup and capture",
    "between": "evaluation, checkpoint, sample, logging",
    "joining": "imports, until the ranks have met",
    "choosing": "choice of what runs: kernels tried and measured",
    ENDS: "start and end of processes",
}
PART_OF_STEP: Final = {"measured": MEASURED, "compile": "first_steps", "warmup": "first_steps"}
PART_OF_PHASE: Final = {
    "setup": "setup",
    "preheat": "preheat",
    "profile": "profile",
    "evaluation": "between",
    "checkpoint": "between",
    "sample": "between",
    "logging": "between",
}


@dataclass(frozen=True)
class MachineTime:
    """The time of some runs. In whole nanoseconds, so that the parts add up to the total and not nearly so."""

    runs: int
    parts_ns: dict[str, int]  # PARTS, by the clock
    gpu_parts_ns: dict[str, int]  # times the run's GPUs (on a CPU: processes)
    total_ns: int
    gpu_total_ns: int

    def share(self, part: str) -> float:
        return self.parts_ns[part] / self.total_ns if self.total_ns else 0.0

    def gpu_share(self, part: str) -> float:
        return self.gpu_parts_ns[part] / self.gpu_total_ns if self.gpu_total_ns else 0.0

    @property
    def largest_overhead(self) -> str:
        """The largest part, by the clock, that is no measured step."""
        return max((part for part in PARTS if part != MEASURED), key=lambda part: self.parts_ns[part])


@dataclass(frozen=True)
class StudyTime:
    total: MachineTime
    stages: dict[str, MachineTime]  # in the study's order
    left_out: dict[str, str]  # run -> why its time is not known


def machine_time(logs: Iterable[RunLog]) -> StudyTime:
    """Time of every run that recorded its clock, whatever became of it; of a resumed run, that of its last process."""
    clocked: list[RunLog] = []
    left_out = {}
    for log in logs:
        if log.wall is None:
            left_out[log.name] = "no clock"
        elif parts_of_run(log)[ENDS] < 0:
            left_out[log.name] = "steps and phases take longer than the clock says"
        else:
            clocked.append(log)
    stages = dict.fromkeys(log.config.stage for log in clocked)
    by_stage = {stage: time_of([log for log in clocked if log.config.stage == stage]) for stage in stages}
    return StudyTime(time_of(clocked), by_stage, left_out)


def time_of(logs: Sequence[RunLog]) -> MachineTime:
    """Sums over runs that have a clock."""
    parts, gpu_parts = dict.fromkeys(PARTS, 0), dict.fromkeys(PARTS, 0)
    total = gpu_total = 0
    for log in logs:
        for part, time_ns in parts_of_run(log).items():
            parts[part] += time_ns
            gpu_parts[part] += time_ns * log.config.world_size
        total += clock_of_run(log)
        gpu_total += clock_of_run(log) * log.config.world_size
    return MachineTime(len(logs), parts, gpu_parts, total, gpu_total)


def parts_of_run(log: RunLog) -> dict[str, int]:
    """Nanoseconds of each of PARTS, by rank 0's clock; they add up to the run's `wall`, which must be there.

    ENDS is what nothing else explains: the last collection of results and, in runs of earlier versions, all of the
    start. It is negative where the log contradicts itself.
    """
    parts = dict.fromkeys(PARTS, 0)
    for step in own_steps(log):
        parts[PART_OF_STEP[step.phase]] += nanoseconds(step.step_time_s)
    for phase in own_phases(log):
        parts[PART_OF_PHASE[phase.kind]] += nanoseconds(phase.time_s)
    assert log.wall is not None
    parts["joining"], parts["choosing"] = nanoseconds(log.wall.joined_s or 0), nanoseconds(log.wall.chosen_s or 0)
    parts[ENDS] = clock_of_run(log) - sum(parts.values())
    return parts


def clock_of_run(log: RunLog) -> int:
    """Nanoseconds from the start of the run's process to its end."""
    assert log.wall is not None
    return nanoseconds(log.wall.total_s)


def nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
