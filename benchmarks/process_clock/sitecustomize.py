"""Python loads this at its start wherever PYTHONPATH holds the folder: a line in $PROCESS_CLOCK for each process.

It says when the process began and ended (seconds of the machine's clock) and how long its main thread spent in import
statements, wherever in the code they stand.
"""

import atexit
import builtins
import json
import os
import sys
import threading
import time
from typing import Any

began = time.time()
load = builtins.__import__
main_thread = threading.get_ident()
spent_s = 0.0
inside = False


def load_on_the_clock(*arguments: Any, **options: Any) -> Any:
    """`__import__`, timed where it is not called by another import."""
    global spent_s, inside
    if inside or threading.get_ident() != main_thread:
        return load(*arguments, **options)
    inside, t0 = True, time.perf_counter()
    try:
        return load(*arguments, **options)
    finally:
        inside = False
        spent_s += time.perf_counter() - t0


def write_line(path: str) -> None:
    record = {"command": sys.orig_argv, "began": began, "ended": time.time(), "imports_s": spent_s}
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


if "PROCESS_CLOCK" in os.environ:
    builtins.__import__ = load_on_the_clock
    atexit.register(write_line, os.environ["PROCESS_CLOCK"])
