"""How parameters are laid out in flat buffers: in buckets, in the order in which the backward pass finishes them.

Buckets are whole parameters. The matrix that is finished last (the token embedding) has one of its own: what stands
before it is sent off without waiting for it, and it alone has no backward pass left to hide behind.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from mfubench.config import CommunicationConfig

ALIGNMENT = 128  # elements: every parameter starts at a multiple of 256 bytes of bfloat16, as a matmul likes best
BYTES = 4  # an element of a float32 gradient
SMALLEST_SHARE = 8  # a model too small for such buckets is cut into about this many


@dataclass
class Slot:
    """Where one parameter lives in the flat buffers."""

    name: str
    parameter: nn.Parameter
    start: int
    numel: int
    arrivals: int = 1  # parts of its gradient that arrive one after the other


@dataclass
class Bucket:
    start: int
    decay: bool
    slots: list[Slot] = field(default_factory=list)
    end: int = 0
    missing: int = 0  # gradients that are not there yet, in the last micro-step


def plan_buckets(module: nn.Module, world_size: int, sizes: CommunicationConfig | None = None) -> list[Bucket]:
    """Cut the module's parameters into buckets: weight-decayed first, each group in backward order."""
    sizes = sizes or CommunicationConfig()
    named = list(module.named_parameters())[::-1]  # a tied weight appears once, and is finished last
    matrices = [(name, p) for name, p in named if p.dim() >= 2]
    vectors = [(name, p) for name, p in named if p.dim() < 2]
    share = -(-sum(p.numel() for _, p in named) // SMALLEST_SHARE)
    later = min(round(sizes.bucket_mb * 1e6 / BYTES), share)
    first = min(round((sizes.first_bucket_mb or sizes.bucket_mb) * 1e6 / BYTES), share)
    buckets: list[Bucket] = []
    position = 0
    for group, decay in ((matrices, True), (vectors, False)):
        bucket = None
        for name, parameter in group:
            if bucket is not None and decay and parameter is group[-1][1]:
                position, bucket = bucket.end, None
            if bucket is None:
                bucket = Bucket(position, decay)
                buckets.append(bucket)
            bucket.slots.append(Slot(name, parameter, position, parameter.numel()))
            position = round_up(position + parameter.numel(), ALIGNMENT)
            bucket.end = bucket.start + round_up(position - bucket.start, ALIGNMENT * world_size)
            if bucket.end - bucket.start >= (first if len(buckets) == 1 else later):
                position, bucket = bucket.end, None
        if bucket is not None:
            position = bucket.end
    return buckets


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
