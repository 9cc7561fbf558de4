"""Times of attention kernels, kept from one process to the next.

`auto` takes the fastest kernel by a short measurement. Two kernels that are about as fast would be told apart by its
noise, in each process anew, and the arms of a comparison would differ in their attention too. What one process has
measured therefore holds for all later ones of this user on the same kind of card, with the same packages, for the same
shape and kernels: cache_root()/attention/DIGEST.json, which says in words what it is about. Without it `auto` measures.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from pathlib import Path

import torch
from pydantic import ValidationError

from mfubench.cache import cache_root
from mfubench.config import Strict
from mfubench.machine import KERNEL_PACKAGES, installed_version
from mfubench.run_log import write_json


class AttentionTimes(Strict):
    """Seconds of a forward and backward pass of each kernel, and what they hold for."""

    holds_for: dict[str, str]
    times_s: dict[str, float]
    measured_at: str


def holds_for(shape: str, device: torch.device, names: Collection[str]) -> dict[str, str]:
    """What decides over the times of the kernels `names` at `shape`."""
    cudnn = torch.backends.cudnn.version()
    packages = [f"{package} {version}" for package in KERNEL_PACKAGES if (version := installed_version(package))]
    return {
        "card": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "packages": ", ".join([*packages, f"torch's build {torch.__version__}", f"cuDNN {cudnn}"]),
        "shape": shape,
        "kernels": ", ".join(sorted(names)),
    }


def file_of(about: Mapping[str, str]) -> Path:
    return cache_root() / "attention" / f"{hashlib.sha256(repr(sorted(about.items())).encode()).hexdigest()[:16]}.json"


def read_times(about: dict[str, str]) -> AttentionTimes | None:
    """What an earlier process has measured; None where there is nothing, or nothing that can be read."""
    try:
        kept = AttentionTimes.model_validate(json.loads(file_of(about).read_text(encoding="utf-8")))
    except (OSError, ValueError, ValidationError):
        return None
    return kept if kept.holds_for == about and kept.times_s else None


def keep_times(about: dict[str, str], times_s: dict[str, float]) -> None:
    """Keep them, unless another process has by now; where the cache cannot be written, each process measures."""
    if read_times(about) is None:
        now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
        kept = AttentionTimes(holds_for=about, times_s=times_s, measured_at=now)
        with contextlib.suppress(OSError):
            file_of(about).parent.mkdir(parents=True, exist_ok=True)
            write_json(file_of(about), kept.model_dump(mode="json"))
