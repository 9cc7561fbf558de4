"""SIGTERM and Ctrl-C as a wish to stop, which a process hands on or acts on in order, instead of its end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from typing import Any

STOPPED = 75  # exit code of a run that was stopped on request: EX_TEMPFAIL of sysexits.h, try again


def listen_once() -> None:
    """For a process that is there for one run alone: a signal ends it before the run (before `on_stop`), as any
    process, and changes nothing after it. What the run made is made, and how it ended is for the exit code to say.
    """
    signal.signal(signal.SIGTERM, end_at_once)


def end_at_once(number: int, frame: object) -> None:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


@contextlib.contextmanager
def on_stop(act: Callable[[int], object]) -> Iterator[None]:
    """While the block runs, SIGTERM and SIGINT call `act` with their number. Main thread only.

    Afterwards they do what they did before or, in a process that is to `listen_once`, nothing.
    """
    previous = {
        number: signal.signal(number, lambda number, frame: act(number)) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    finally:
        over = previous[signal.SIGTERM] is end_at_once
        for number, handler in previous.items():
            # SIG_IGN and no function: Python gives those up before it has gone down itself
            signal.signal(number, signal.SIG_IGN if over else handler)


def run_handing_on(
    command: Sequence[str],
    hand_on: Callable[[subprocess.Popen[bytes], int], object] = subprocess.Popen.send_signal,
    patience_s: float | None = None,
    heard: list[int] | None = None,
    **options: Any,
) -> int:
    """Run a command to its end and return its exit code; a signal to stop goes to `hand_on`, by default to the command.

    One that comes before the command's process exists is handed on once it does. After `patience_s` seconds the
    command is asked to stop as by SIGTERM. `heard` takes the signals that came: a command that was as good as done may
    have ended well all the same. options: of Popen.
    """
    early: list[int] = []
    process: subprocess.Popen[bytes] | None = None

    def act(number: int) -> None:
        if heard is not None:
            heard.append(number)
        if process is None:
            early.append(number)
        else:
            hand_on(process, number)

    with on_stop(act):
        process = subprocess.Popen(command, **options)
        for number in early:
            hand_on(process, number)
        try:
            return process.wait(patience_s)
        except subprocess.TimeoutExpired:
            hand_on(process, signal.SIGTERM)
            return process.wait()
