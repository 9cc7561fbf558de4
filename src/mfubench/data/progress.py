"""How far a preparation is: a bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

LINE_INTERVAL_S = 15.0


class PreparationProgress:
    """Context manager; `advance` after each slice. Tokens/s counts what this run itself has done."""

    def __init__(self, name: str, total_bytes: int) -> None:
        self.name = name
        self.total_bytes = total_bytes
        self.done_bytes = 0
        self.tokens = 0
        self._resumed_bytes = 0
        self._t0 = self._last_line = time.monotonic()
        self._bar: Progress | None = None
        if sys.stderr.isatty():
            from rich.console import Console

            columns = (
                TextColumn(name),
                BarColumn(),
                DownloadColumn(),
                TextColumn("{task.fields[rate]}"),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=Console(stderr=True))
            self._task = self._bar.add_task(name, total=total_bytes, rate="")

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / max(time.monotonic() - self._t0, 1e-9)

    def resume(self, size: int) -> None:
        """Bytes that an earlier run has done."""
        self._resumed_bytes += size
        self.done_bytes += size
        self._show()

    def advance(self, size: int, tokens: int) -> None:
        self.done_bytes += size
        self.tokens += tokens
        self._show()

    def _show(self) -> None:
        rate = f"{self.tokens_per_s / 1e6:.2f}M tokens/s"
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done_bytes, rate=rate)
            return
        now = time.monotonic()
        if now - self._last_line < LINE_INTERVAL_S:
            return
        self._last_line = now
        done = self.done_bytes - self._resumed_bytes
        left_s = (self.total_bytes - self.done_bytes) * (now - self._t0) / max(done, 1)
        share = self.done_bytes / max(self.total_bytes, 1)
        self.note(f"{share:.1%} of {self.total_bytes / 1e9:.2f} GB, {rate}, {left_s / 60:.0f} min left")

    def note(self, text: str) -> None:
        if self._bar is not None:
            self._bar.console.print(f"{self.name}: {text}")
        else:
            print(f"{self.name}: {text}", file=sys.stderr, flush=True)
