"""A thread of each rank that notices what the main thread, stuck in a collective, cannot: other ranks' ends, hangs."""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from mfubench.config import ConfigError
from mfubench.stop_signals import on_stop
from mfubench.train.failures import Failure, ranks_folder, read_failures, stop_file, write_failure

POLL_S = 0.3
PAUSE_S = 2.0  # a poll that comes so much later tells of a process that was stopped
JOB = "MFUBENCH_JOB"  # process that started the launcher and waits for it
STACKS_GRACE_S = 3.0  # time for the other ranks to write their stacks before this process's end ends the run
START_FACTOR = 6  # the first step compiles and warms up: it may take so many timeouts


class Watchdog:
    """Watches over one rank from a daemon thread. `stop_requested` is to be looked at between steps."""

    def __init__(self, work: Path, rank: int, timeout_s: float, last_words: Callable[[], object] | None = None):
        """`last_words` is called before this thread ends the process: by a launcher that shares it."""
        self.work, self.rank, self.timeout_s, self.last_words = work, rank, timeout_s, last_words
        # the launcher, and the job that started that: without it nobody waits for the result
        self.guardians = [int(os.environ[name]) for name in ("MFUBENCH_LAUNCHER", JOB) if name in os.environ]
        self.stop_requested = False
        self.over = threading.Event()
        self.deadline, self.last_resort = math.inf, math.inf
        self.paused_s = 0.0  # that the process was stopped: SIGSTOP, a suspended job
        self.polled_at = time.monotonic()
        self.stacks = open(ranks_folder(work) / f"stacks-{rank}.txt", "w", encoding="utf-8")  # noqa: SIM115
        self.beat(START_FACTOR)
        self.signals = contextlib.ExitStack()
        self.signals.enter_context(on_stop(self.on_signal))
        self.thread = threading.Thread(target=self.watch, name="watchdog", daemon=True)
        self.thread.start()

    def on_signal(self, number: int) -> None:
        """First signal: stop after a checkpoint. Second interrupt from the keyboard: at once."""
        if number == signal.SIGINT and self.stop_requested:
            raise KeyboardInterrupt
        self.stop_requested = True

    def now(self) -> float:
        """A clock that stands still while the process is stopped, as far as `watch` has noticed; seconds."""
        return time.monotonic() - self.paused_s

    def beat(self, factor: float = 1.0) -> None:
        """Progress was made: the next is due within the timeout."""
        now = self.now()
        self.deadline, self.last_resort = now + factor * self.timeout_s, now + 2 * factor * self.timeout_s + 60
        self.arm_last_resort()

    def arm_last_resort(self) -> None:
        """A thread without Python, in case the interpreter's lock is never given back.

        It cannot know that the process was stopped: a pause as long as this is the end, as it is of a collective.
        """
        faulthandler.dump_traceback_later(max(1.0, self.last_resort - self.now()), exit=True, file=self.stacks)

    def close(self) -> None:
        self.over.set()
        self.thread.join()
        faulthandler.cancel_dump_traceback_later()
        self.signals.close()
        self.stacks.close()

    def watch(self) -> None:
        while not self.over.wait(POLL_S):
            if stop_file(self.work).exists():
                self.stop_requested = True
            others = [failure for failure in read_failures(self.work) if failure.rank != self.rank]
            if others:
                self.write_stacks()
                self.end(f"rank {others[0].rank} failed ({others[0].reason}); this rank ends with it")
            self.notice_pause()
            if self.now() > self.deadline:
                self.write_stacks()
                reason = f"no progress for {self.timeout_s:.0f} s (MFUBENCH_TIMEOUT_S): a hung collective or device"
                write_failure(self.work, Failure(self.rank, "hang", reason, self.read_stacks(), time.time()))
                time.sleep(STACKS_GRACE_S)
                self.end(reason)
            if not all(map(alive, self.guardians)):
                reason = "the process that started this run is gone"
                write_failure(self.work, Failure(self.rank, "lost", reason, "", time.time()))
                self.end(reason)

    def notice_pause(self) -> None:
        """Move the deadlines by the time that the process was stopped, which is no lack of progress."""
        before, self.polled_at = self.polled_at, time.monotonic()
        late_s = self.polled_at - before - POLL_S
        if late_s > PAUSE_S:
            self.paused_s += late_s
            self.arm_last_resort()

    def write_stacks(self) -> None:
        faulthandler.dump_traceback(self.stacks, all_threads=True)
        self.stacks.flush()

    def read_stacks(self) -> str:
        return Path(self.stacks.name).read_text(encoding="utf-8")[-8000:]

    def end(self, reason: str) -> None:
        """End the process from this thread: the main thread may never come back."""
        print(reason, file=sys.stderr, flush=True)
        if self.last_words is not None:
            self.last_words()
        os._exit(1)


def read_timeout_s() -> float:
    """MFUBENCH_TIMEOUT_S: seconds without progress after which a run counts as hung. Raises ConfigError."""
    text = os.environ.get("MFUBENCH_TIMEOUT_S", "600")
    try:
        timeout_s = float(text)
    except ValueError:
        timeout_s = math.nan
    if not 0 < timeout_s < math.inf:
        raise ConfigError(f"MFUBENCH_TIMEOUT_S is {text!r}; set it to seconds above 0, or unset it for 600")
    return timeout_s


def alive(pid: int) -> bool:
    """Whether a process of this host exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
