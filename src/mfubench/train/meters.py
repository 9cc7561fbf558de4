"""Honest time: marks on the device's own time line, and the records made from them.

On CUDA a mark is an event: the device writes down when it passed, and nothing waits. A step lasts from the mark before
it to the mark after it, with everything in between that is not a phase of its own (data, launches, idle gaps). At
control points, every few seconds, the device is synchronised once and the steps since the last one are read out.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import psutil
import torch
import torch._dynamo.utils
from torch import Tensor

from mfubench.config import RunConfig
from mfubench.run_log import Phase, RankMemory, RunLog, Step
from mfubench.train.exchange import symmetric_bytes
from mfubench.train.process import Process

Mark = float | torch.cuda.Event
StepPhase = Literal["compile", "warmup", "measured"]
PhaseKind = Literal["setup", "preheat", "evaluation", "checkpoint", "profile", "sample", "logging"]


class Clock:
    """Time as the device sees it: CUDA events, or the monotonic clock where the CPU computes."""

    def __init__(self, on_cuda: bool):
        self.on_cuda = on_cuda

    def mark(self) -> Mark:
        if not self.on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def synchronize(self) -> None:
        if self.on_cuda:
            torch.cuda.synchronize()

    def seconds(self, before: Mark, after: Mark) -> float:
        """Time between two marks that the device has passed."""
        if isinstance(before, float) and isinstance(after, float):
            return after - before
        return before.elapsed_time(after) / 1000  # type: ignore[union-attr,arg-type]  # milliseconds


@dataclass
class PendingStep:
    """A step that was launched and not read out yet."""

    step: int
    phase: StepPhase
    values: Tensor  # [2] on the device: this rank's mean loss, the global gradient norm
    before: Mark
    after: Mark
    data_time_s: float
    learning_rate: float


class Recorder:
    """Turns launched steps into `Step` records of a run log, and times what happens between them."""

    def __init__(self, log: RunLog, config: RunConfig, process: Process):
        self.log, self.config, self.process = log, config, process
        self.clock = Clock(process.on_cuda)
        self.rank_times: list[float] = []  # of this rank, position by position as log.steps
        self.pending: list[PendingStep] = []
        self.tokens_here = 0  # trained on since this process started, over all ranks
        self.training_s = 0.0
        self.stepped = 0  # steps launched by this process
        self.memory: RankMemory | None = None  # of the run proper, where a profile follows it
        self.begin()
        self.intervals: dict[int, tuple[float, float]] = {}  # step -> (start, end) in unix seconds, of this process

    def begin(self) -> None:
        """The next step starts now; what was compiled before it is not its own."""
        self.graphs_compiled = graphs_compiled()
        self.last_mark = self.clock.mark()

    def add(self, step: int, loss: Tensor, grad_norm: Tensor, data_time_s: float, learning_rate: float) -> None:
        """Note a step that was just launched; its values stay on the device."""
        values = torch.stack((loss, grad_norm))
        after = self.clock.mark()
        phase = self.phase_of_step()
        self.pending.append(PendingStep(step, phase, values, self.last_mark, after, data_time_s, learning_rate))
        self.last_mark = after
        self.stepped += 1

    def phase_of_step(self) -> StepPhase:
        """What the step just launched counts as. One that compiled something is never measured, whenever it comes."""
        before, self.graphs_compiled = self.graphs_compiled, graphs_compiled()
        if self.graphs_compiled != before:
            return "compile"
        return "warmup" if self.stepped <= self.config.measurement.warmup_steps else "measured"

    def note_memory(self) -> None:
        """Keep the peaks so far: the profiler's own memory is not the run's."""
        self.memory = memory_of(self.process)

    def take_history(self) -> None:
        """Go on from the steps of earlier processes. Where there were more or fewer ranks, every rank's time of those
        steps is taken to be rank 0's: the ranks of a step end together."""
        known = self.log.rank_step_times_s
        own = known[self.process.rank] if known else [step.step_time_s for step in self.log.steps]
        self.rank_times = list(own)

    def add_phase(self, kind: PhaseKind, after_step: int, time_s: float) -> None:
        self.log.phases.append(Phase(kind=kind, after_step=after_step, time_s=time_s))

    def collect(self) -> list[Step]:
        """Synchronise, and read out the steps since the last call. Collective: losses are averaged over the ranks."""
        self.clock.synchronize()
        now = time.time()  # the end of the last step, give or take what the host takes to notice it
        if not self.pending:
            return []
        last_mark = self.pending[-1].after
        values = torch.stack([pending.values for pending in self.pending])  # [steps, 2]
        losses = self.process.sum_(values[:, 0].contiguous()) / self.process.world_size
        steps = []
        for pending, loss, grad_norm in zip(self.pending, losses.tolist(), values[:, 1].tolist(), strict=True):
            seconds = self.clock.seconds(pending.before, pending.after)
            self.rank_times.append(seconds)
            if pending.phase == "measured":
                end = now - self.clock.seconds(pending.after, last_mark)
                self.intervals[pending.step] = end - seconds, end
            steps.append(
                Step(
                    step=pending.step,
                    phase=pending.phase,
                    step_time_s=seconds,
                    data_time_s=pending.data_time_s,
                    tokens=self.config.tokens_per_step,
                    loss=loss,
                    learning_rate=pending.learning_rate,
                    grad_norm=grad_norm,
                )
            )
        self.log.steps.extend(steps)
        self.tokens_here += len(steps) * self.config.tokens_per_step
        self.pending.clear()
        return steps

    def measured_intervals(self) -> list[tuple[float, float]]:
        """When this process did the steps that count, in order: without warm-up that was found later."""
        steps = [step.step for step in self.log.measured_steps()]
        return [self.intervals[step] for step in steps if step in self.intervals]

    @contextmanager
    def phase(self, kind: PhaseKind, after_step: int) -> Iterator[None]:
        """Time something outside the steps, with the device idle before and after it."""
        self.clock.synchronize()
        t0 = time.perf_counter()
        yield
        self.clock.synchronize()
        self.add_phase(kind, after_step, time.perf_counter() - t0)
        self.begin()


def graphs_compiled() -> int:
    """Graphs that torch.compile has made in this process so far."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def memory_of(process: Process) -> RankMemory:
    """Peaks of this rank so far."""
    peak_rss_gib = peak_rss_bytes() / 2**30
    if not process.on_cuda:
        return RankMemory(rank=process.rank, peak_rss_gib=peak_rss_gib)
    statistics = torch.cuda.memory_stats(process.device)
    return RankMemory(
        rank=process.rank,
        peak_allocated_gib=(statistics["allocated_bytes.all.peak"] + symmetric_bytes()) / 2**30,
        peak_reserved_gib=(statistics["reserved_bytes.all.peak"] + symmetric_bytes()) / 2**30,
        peak_rss_gib=peak_rss_gib,
        allocator_retries=statistics["num_alloc_retries"],
    )


def peak_rss_bytes() -> int:
    """Largest resident set of this process (Linux keeps it; elsewhere the current one stands in)."""
    try:
        with open("/proc/self/status", encoding="utf-8") as status:
            for line in status:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return psutil.Process().memory_info().rss
