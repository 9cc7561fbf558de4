"""Where compiled kernels are kept between runs."""

from __future__ import annotations

import os
from pathlib import Path

from mfubench.config import ConfigError
from mfubench.run_log import try_writing

DEFAULT = "~/.cache/mfubench"


def cache_root() -> Path:
    """The folder that MFUBENCH_CACHE names, else ~/.cache/mfubench. Raises ConfigError where ~ is no folder's name."""
    named = os.environ.get("MFUBENCH_CACHE") or DEFAULT
    try:
        return Path(named).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{named}: {error}; set MFUBENCH_CACHE to a folder for compiled kernels") from None


def writable_folder(folder: Path) -> Path:
    """A folder of the cache, made where it is not there. Raises ConfigError where nothing can be written to it."""
    try:
        try_writing(folder)
    except OSError as error:
        now = os.environ.get("MFUBENCH_CACHE") or f"unset, which means {DEFAULT}"
        raise ConfigError(
            f"{folder}: cannot be written to ({error.strerror}), but compiled kernels are kept there: set "
            f"MFUBENCH_CACHE (now {now}) to a folder on a disk with room"
        ) from None
    return folder
