"""Where the steps that were read out go, on rank 0: steps.jsonl, live.json, the display, trackers."""

from __future__ import annotations

from typing import Any

import torch

from mfubench.run_log import RunLog, Step, append_step, write_json
from mfubench.train.arguments import Paths
from mfubench.train.exchange import symmetric_bytes
from mfubench.train.meters import memory_of
from mfubench.train.process import Process
from mfubench.train.progress import Display, live_values, palm_mfu_of
from mfubench.train.trackers import Tracker, log_steps, open_trackers


class Reporter:
    """`display` is given where this process owns the terminal; otherwise the launcher follows live.json."""

    def __init__(self, paths: Paths, log: RunLog, process: Process, display: Display | None):
        self.paths, self.log, self.process, self.display = paths, log, process, display
        self.trackers: list[Tracker] = []
        self.live: dict[str, Any] | None = None
        if process.is_main:
            self.mfu_factor = palm_mfu_of(log, paths.ceilings)
            self.trackers = open_trackers(log.config, paths.trackers)
            self.begin()

    def begin(self) -> None:
        """Write the steps of earlier processes, up to the checkpoint: what was done after it is done again."""
        if self.process.is_main:
            self.paths.steps.unlink(missing_ok=True)
            self.append(self.log.steps)

    def append(self, steps: list[Step]) -> None:
        for step in steps:
            append_step(self.paths.steps, step)

    def report(self, steps: list[Step]) -> None:
        if not self.process.is_main or not steps:
            return
        self.append(steps)
        log_steps(self.trackers, steps)
        allocated_gib = (torch.cuda.memory_allocated() + symmetric_bytes()) / 2**30 if self.process.on_cuda else None
        self.live = live_values(self.log, memory_of(self.process), allocated_gib, self.mfu_factor)
        write_json(self.paths.live, self.live)
        if self.display is not None:
            self.display.update(self.live)

    def close(self) -> None:
        """The steps are over: say so to who watches."""
        if self.live is not None:
            self.live |= {"status": self.log.status, "stopped_early": self.log.stopped_early}
            write_json(self.paths.live, self.live)
            if self.display is not None:
                self.display.update(self.live)
        for tracker in self.trackers:
            tracker.close()
