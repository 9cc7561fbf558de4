"""Time a training loop that is someone else's: a mark on the device's time line after every optimizer step.

torch calls a hook after each step of any optimizer. It records a CUDA event, which makes nothing wait, so that a system
runs exactly as it would by itself: a step lasts from the end of one optimizer step to the end of the next, with its
data, launches, logging and idle gaps. The hook also ends the loop, by an exception, when enough has been measured.
"""

from __future__ import annotations

import math
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from benchmarks.peers.job import Job

PROBE_STEPS = 4  # after the warm-up, to learn how long a step takes

Mark = float | torch.cuda.Event


class Finished(BaseException):
    """Enough was measured. No Exception: a training loop's own handlers must not catch it."""


class StepClock:
    """Warm-up, probe, preheat and measured steps of a job, counted by the optimizer's steps.

    The numbers of steps are rank 0's choice, made once from the time of the probe: after that the ranks agree without
    a word. `marks` are those of the measured window, its begin included.
    """

    def __init__(self, job: Job, device: torch.device):
        self.job, self.device = job, device
        self.done = 0
        self.first = self.last = math.inf  # optimizer steps at whose end the measured window begins and ends
        self.probe_began = 0.0
        self.marks: list[Mark] = []
        self.ended_at = 0.0
        self.optimizer: torch.optim.Optimizer | None = None
        self.hook = register_optimizer_step_post_hook(self.after_step)

    def after_step(self, optimizer: torch.optim.Optimizer, arguments: Any, options: Any) -> None:
        if type(optimizer) not in (torch.optim.AdamW, torch.optim.Adam):
            return  # a container that steps the optimizers in it
        self.optimizer = optimizer
        self.done += 1
        if self.done == self.job.warmup_steps:
            self.synchronize()
            self.probe_began = time.perf_counter()
        elif self.done == self.job.warmup_steps + PROBE_STEPS:
            self.synchronize()
            self.plan((time.perf_counter() - self.probe_began) / PROBE_STEPS)
        if self.first <= self.done <= self.last:
            self.marks.append(self.mark())
        if self.done >= self.last:
            self.synchronize()
            self.ended_at = time.time()
            self.hook.remove()
            raise Finished

    def plan(self, step_time_s: float) -> None:
        """Decide how many steps to preheat and to measure; rank 0's numbers hold."""
        preheat = math.ceil(self.job.preheat_s / step_time_s)
        measured = max(self.job.min_steps, math.ceil(self.job.measure_s / step_time_s))
        if dist.is_initialized() and dist.get_world_size() > 1:
            numbers = torch.tensor([preheat, measured], device=self.device)
            dist.broadcast(numbers, src=0)
            preheat, measured = numbers.tolist()
        self.first = self.done + preheat
        self.last = self.first + measured

    def mark(self) -> Mark:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def step_times_s(self) -> list[float]:
        return [seconds(before, after) for before, after in zip(self.marks, self.marks[1:], strict=False)]


def seconds(before: Mark, after: Mark) -> float:
    if isinstance(before, float) and isinstance(after, float):
        return after - before
    return before.elapsed_time(after) / 1000  # type: ignore[union-attr,arg-type]  # milliseconds
