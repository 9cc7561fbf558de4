"""How many programs a kernel runs as, where each of them works through many rows."""

from __future__ import annotations

import torch

CPU_PROGRAMS = 3  # under Triton's interpreter: enough that their partial sums must be added


def persistent_programs(device: torch.device, rows: int, per_multiprocessor: int) -> int:
    """As many as the card runs at once, and never more than there are rows."""
    if device.type != "cuda":
        return min(rows, CPU_PROGRAMS)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return min(rows, processors * per_multiprocessor)
