"""Control points: the steps after which the ranks look up from their work, read values and agree how to go on."""

from __future__ import annotations

from mfubench.config import RunConfig
from mfubench.run_log import Step
from mfubench.train.process import Process

PERIOD_S = 5.0  # between control points, at most...
LARGEST_GAP = 10  # ...and at most so many steps: a loss that is not finite is noticed within them


class Control:
    """Which step is the next control point. Rank 0 plans it from its own step times, all ranks follow."""

    def __init__(self, config: RunConfig, process: Process):
        self.config, self.process = config, process
        self.next_step = 0

    def due(self, step: int) -> bool:
        return step >= self.next_step or step == self.config.max_iters - 1

    def plan(self, step: int, steps: list[Step]) -> None:
        """Agree on the next control point. Collective."""
        slowest = max((record.step_time_s for record in steps[-1:]), default=PERIOD_S)
        gap = min(LARGEST_GAP, max(1, round(PERIOD_S / max(slowest, 1e-3))))
        (self.next_step,) = self.process.maximum([step + gap if self.process.is_main else 0])
