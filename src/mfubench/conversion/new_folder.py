"""A folder of files that appears whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from mfubench.config import ConfigError


@contextlib.contextmanager
def new_folder(out_dir: Path) -> Iterator[Path]:
    """A folder beside `out_dir` to write to, which takes its name at the end; after an error nothing of it is left.

    Raises ConfigError where it cannot be made or written to, as on a full disk; errors of other files as they are.
    """
    temporary = None
    try:
        out_dir.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".writing-{out_dir.name}.", dir=out_dir.parent))
        yield temporary
        temporary.chmod(0o755)  # mkdtemp's folder is for its owner alone
        temporary.replace(out_dir)
    except BaseException as error:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
            if isinstance(error, OSError) and not str(error.filename or temporary).startswith(str(temporary)):
                raise  # of a file that was to be read
        if (why := cause(error)) is None:
            raise
        raise ConfigError(f"{out_dir}: cannot be written there ({why}); make room, or name another folder") from None


def cause(error: BaseException) -> str | None:
    """Why the disk did not take what was written; None for an error that is no such thing."""
    if isinstance(error, CheckpointException):  # torch's own words hide the disk's
        failures = [failure for failure, _ in error.failures.values()]
        return next((why for failure in failures if (why := cause(failure))), f"{failures[0]!r}")
    if isinstance(error, SafetensorError):
        return str(error).rpartition("I/O error: ")[2].partition(" (os error")[0]
    if isinstance(error, FileExistsError):  # where a folder is to be made there is a file
        return os.strerror(errno.ENOTDIR)
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return cause(error.__context__) if isinstance(error, RuntimeError) and error.__context__ is not None else None
