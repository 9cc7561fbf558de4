"""Where compiled kernels are kept between runs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_root() -> Path:
    """The folder that MFUBENCH_CACHE names, else ~/.cache/mfubench."""
    return Path(os.environ.get("MFUBENCH_CACHE") or Path.home() / ".cache" / "mfubench")
