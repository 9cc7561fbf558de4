"""Python runs this at its start where this folder is on PYTHONPATH: something happens just before a file gets its name.

KILL_AT: the process is killed. HOLD_AT: it waits for the file HOLD_UNTIL, having written HOLD_UNTIL.held. Both name the
end of a path.
"""

import os
import signal
import sys
import time
from pathlib import Path

kill_at, hold_at = os.environ.get("KILL_AT"), os.environ.get("HOLD_AT")


def on_event(event: str, arguments: tuple) -> None:
    if event != "os.rename":
        return
    target = os.fspath(arguments[1])
    if kill_at and target.endswith(kill_at):
        os.kill(os.getpid(), signal.SIGKILL)
    if hold_at and target.endswith(hold_at):
        go = Path(os.environ["HOLD_UNTIL"])
        go.with_suffix(".held").touch()
        while not go.exists():
            time.sleep(0.1)


if kill_at or hold_at:
    sys.addaudithook(on_event)
