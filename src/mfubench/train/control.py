"""Control points: the steps after which the ranks look up from their work, read values and agree how to go on."""

from __future__ import annotations

import math

from mfubench.config import RunConfig
from mfubench.run_log import RunLog, Step
from mfubench.train.adaptive import enough
from mfubench.train.process import Process

PERIOD_S = 5.0  # between control points, at most...
LARGEST_GAP = 10  # ...and at most so many steps: a loss that is not finite is noticed within them


class Control:
    """When the next control point is, and whether the run is over. Rank 0's step times decide, for all ranks."""

    def __init__(self, config: RunConfig, process: Process, log: RunLog):
        self.config, self.process, self.log = config, process, log
        self.next_step = 0

    def due(self, step: int) -> bool:
        """Whether the ranks look up after `step`: as planned, or because something else interrupts the steps."""
        evaluation, checkpoint = self.config.evaluation.interval, self.config.checkpoint.interval
        return (
            step >= self.next_step
            or step == self.config.max_iters - 1
            or (evaluation is not None and (step + 1) % evaluation == 0)
            or (checkpoint is not None and (step + 1) % checkpoint == 0)
        )

    def agree(self, step: int, stop_requested: bool) -> tuple[bool, bool]:
        """Whether some rank was asked to stop, and whether the measurement has seen enough. Collective.

        Also plans the next control point.
        """
        known = self.process.is_main and self.measurement_is_over()
        next_step = step + self.gap() if self.process.is_main else 0
        answers = self.process.maximum([int(stop_requested), int(known), next_step])
        self.next_step = answers[2]
        return bool(answers[0]), bool(answers[1])

    def gap(self) -> int:
        step_time_s = max(self.log.steps[-1].step_time_s, 1e-3)
        return min(LARGEST_GAP, max(1, round(PERIOD_S / step_time_s)))

    def measurement_is_over(self) -> bool:
        """Adaptive length: mark the warm-up that was found and say why the run ends, once it may."""
        measurement = self.config.measurement
        if not measurement.adaptive:
            return False
        settled = [step for step in self.log.steps if step.phase == "measured"]
        verdict = enough([step.step_time_s for step in settled], measurement.min_steps, measurement.tolerance)
        if verdict is None:
            return False
        warmup, self.log.stopped_early = verdict
        for step in settled[:warmup]:
            step.phase = "warmup"
        return True


def first_lost(steps: list[Step]) -> Step | None:
    """The first step whose loss is not finite."""
    return next((step for step in steps if step.loss is None or not math.isfinite(step.loss)), None)
