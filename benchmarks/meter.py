"""Time, energy, power and clock of a call in a steady loop on one device."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.kernels import Clock
from mfubench.telemetry import physical_card
from mfubench.telemetry.sampler_process import ask, describe_card, open_cards

BATCH_S, IN_FLIGHT = 0.02, 3  # of calls launched ahead of the device: the host has time to look at the counter
LOOK_EVERY_S = 0.001


class Mark:
    """A point on the device's time line."""

    def __init__(self, device: torch.device):
        self.event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        if self.event is not None:
            self.event.record()
        self.at = time.perf_counter()
        self.seen_at = math.inf  # when the host found it passed

    def passed(self) -> bool:
        return self.event is None or self.event.query()

    def seconds_since(self, earlier: Mark) -> float:
        if self.event is not None and earlier.event is not None:
            return earlier.event.elapsed_time(self.event) / 1e3
        return self.at - earlier.at


@dataclass(frozen=True)
class Step:
    """The card's energy counter has advanced."""

    at: float
    joules: float
    sm_mhz: int | None


class Meter:
    """Measures on one device; `problem` says why there is no energy, `card` what NVML says of it ({} without NVML)."""

    def __init__(self, device: torch.device, preheat_s: float, measure_s: float):
        self.device, self.clock = device, Clock(device, 1, BATCH_S)
        self.seconds = preheat_s + measure_s
        self.preheat, self.measured = (math.ceil(seconds / BATCH_S) for seconds in (preheat_s, measure_s))  # batches
        cards = [physical_card(0)] if device.type == "cuda" else []
        self.nvml, handles, self.problem = open_cards(cards)
        self.handle = handles[0] if handles else None
        self.card = describe_card(self.nvml, self.handle, cards[0]) if handles else {}

    def joules(self) -> float | None:
        if self.nvml is None:
            return None
        millijoules = ask(self.nvml.nvmlDeviceGetTotalEnergyConsumption, self.handle)
        return None if millijoules is None else millijoules / 1e3

    def measure(self, call: Callable[[], object]) -> dict[str, float | None]:
        """ms a call and `calls`; of NVML's counter joules a call, watts, sm_mhz and counter_steps.

        The loop does not pause between preheat and measurement. The counter advances every so many milliseconds, so
        power is its slope from the first to the last step seen while measuring; None where they were fewer than three.
        """
        for _ in range(2):
            self.clock.once(call, 1)
        batch = max(1, int(BATCH_S / self.clock.once(call, 3)))
        marks, steps = self.loop(call, batch)
        begin, end, calls = marks[self.preheat], marks[-1], batch * self.measured
        seconds = end.seconds_since(begin) / calls
        inside = [step for step in steps if step.at >= begin.seen_at]
        found: dict[str, float | None] = {"ms": seconds * 1e3, "calls": calls, "counter_steps": len(inside)}
        watts = sm_mhz = None
        if len(inside) > 2:
            watts = (inside[-1].joules - inside[0].joules) / (inside[-1].at - inside[0].at)
            clocks = [step.sm_mhz for step in inside if step.sm_mhz is not None]
            sm_mhz = sum(clocks) / len(clocks) if clocks else None
        joules = None if watts is None else watts * seconds
        return found | {"joules": joules, "watts": watts, "sm_mhz": sm_mhz}

    def loop(self, call: Callable[[], object], batch: int) -> tuple[list[Mark], list[Step]]:
        """Marks at the begin and behind every batch of calls, and the steps of the energy counter on the way."""
        marks, steps, latest = [Mark(self.device)], list[Step](), self.joules()
        ahead = deque(marks)
        batches = self.preheat + self.measured
        for i in range(batches):
            for _ in range(batch):
                call()
            marks.append(Mark(self.device))
            ahead.append(marks[-1])
            allowed = IN_FLIGHT if i + 1 < batches else 0
            while len(ahead) > allowed:
                passed, joules, now = ahead[0].passed(), self.joules(), time.perf_counter()
                if joules is not None and joules != latest:
                    clock = ask(self.nvml.nvmlDeviceGetClockInfo, self.handle, self.nvml.NVML_CLOCK_SM)
                    steps.append(Step(now, joules, clock))
                    latest = joules
                if passed:
                    ahead.popleft().seen_at = now
                else:
                    time.sleep(LOOK_EVERY_S)
        return marks, steps
