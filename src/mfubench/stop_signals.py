"""SIGTERM and Ctrl-C as a wish to stop, which a process hands on or acts on in order, instead of its end."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def on_stop(act: Callable[[int], object]) -> Iterator[None]:
    """While the block runs, SIGTERM and SIGINT call `act` with their number. Main thread only."""
    previous = {
        number: signal.signal(number, lambda number, frame: act(number)) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
