"""A run has one launcher at a time: a lock on its work folder, which ends with the launcher and its ranks."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from mfubench.config import ConfigError


@contextlib.contextmanager
def sole_writer(work: Path) -> Iterator[int]:
    """Hold a work folder; yields the lock's file descriptor, which ranks inherit: they may outlive their launcher.

    Raises ConfigError where another launcher or its ranks are at work there. On a file system without locks nothing
    is held.
    """
    handle = os.open(work / "lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(handle, 1000).decode(errors="replace") or "it has just begun"
            raise ConfigError(
                f"{work}: another process is making this run ({holder}), such as a job that a killed snakemake left "
                "behind. Wait until it has ended, or end it, then start again"
            ) from None
        except OSError:
            pass
        os.ftruncate(handle, 0)
        os.write(handle, f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield handle
    finally:
        os.close(handle)
