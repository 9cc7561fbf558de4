"""How programs end that met a fault of their input: in one line that says what to do, with exit code 1."""

from __future__ import annotations

import contextlib
import errno
import sys
from collections.abc import Iterator

from mfubench.config import ConfigError

# What to do about a file, by what the system says of it.
MAKE_ROOM, ELSEWHERE = "make room, or name another folder", "name another file or folder"
WAYS_OUT = dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), MAKE_ROOM) | dict.fromkeys(
    (
        errno.EACCES,
        errno.EPERM,
        errno.EROFS,
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.EEXIST,
        errno.ENAMETOOLONG,
        errno.ELOOP,
    ),
    ELSEWHERE,
)


@contextlib.contextmanager
def faults_told() -> Iterator[None]:
    """A fault of the input, or of a file's place, ends the program with a sentence instead of a traceback."""
    try:
        yield
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except OSError as error:
        if error.filename is None or error.errno not in WAYS_OUT:
            raise
        print(f"error: {error.filename}: {error.strerror}; {WAYS_OUT[error.errno]}", file=sys.stderr)
        sys.exit(1)
