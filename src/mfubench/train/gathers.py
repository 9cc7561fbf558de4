"""zero1: the updated weights of all ranks, gathered while the forward pass that needs them is already under way.

Gathers are sent off bucket by bucket in forward order at the begin of a step. A hook before each module makes the
stream wait for the buckets of this module's parameters: while one block computes, the next one's weights arrive. All of
it lies within a step, so that a captured step contains it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from mfubench.model import Decoder
from mfubench.train.buckets import Bucket


class WeightGathers:
    """Gathers under way, and the hooks that wait for them."""

    def __init__(self, buckets: Sequence[Bucket], gather: Callable[[Bucket], Any]):
        """`gather` begins a bucket's all-gather and returns what can be waited for."""
        self.buckets, self.gather = buckets, gather
        self.bucket_of = {slot.name: index for index, bucket in enumerate(buckets) for slot in bucket.slots}
        self.pending: dict[int, Any] = {}

    def watch(self, model: Decoder, whole: bool) -> None:
        """Wait before each module's first use or, where the model is compiled as a `whole`, before all of it."""
        for module, names, after in units_of(model, whole):
            needed = sorted({self.bucket_of[name] for name in names if name in self.bucket_of})

            def wait(*_: Any, needed: list[int] = needed) -> None:
                self.wait(needed)

            if after:
                module.register_forward_hook(wait)
            else:
                module.register_forward_pre_hook(wait)

    def begin(self) -> None:
        """Send off the gathers of all buckets, in the order in which the forward pass needs them."""
        for index in reversed(range(len(self.buckets))):
            self.pending[index] = self.gather(self.buckets[index])

    def wait(self, needed: Sequence[int]) -> None:
        for index in needed:
            if (work := self.pending.pop(index, None)) is not None:
                work.wait()

    def check(self) -> None:
        """Raises RuntimeError where a module computed with weights that no hook had waited for."""
        if self.pending:
            names = [self.buckets[index].slots[0].name for index in sorted(self.pending)]
            raise RuntimeError(f"weights were used before they were gathered, in the buckets of: {', '.join(names)}")

    def settle(self) -> None:
        """Gather everything now: for who reads weights outside a step."""
        self.begin()
        self.wait(list(self.pending))


def units_of(model: Decoder, whole: bool) -> list[tuple[nn.Module, list[str], bool]]:
    """Modules in the order of their use, with the names of the parameters that are needed from there on, and whether
    from the module's end (true) or its begin.

    The position table is read beside the token embedding; the last norm's and the head's weights after the last block,
    without a call of a module of their own.
    """
    names = [name for name, _ in model.named_parameters()]
    if whole:
        return [(model, names, False)]

    def below(*prefixes: str) -> list[str]:
        return [name for name in names if name.startswith(tuple(f"{prefix}." for prefix in prefixes))]

    blocks: list[tuple[nn.Module, list[str], bool]] = [
        (block, below(f"blocks.{index}"), False) for index, block in enumerate(model.blocks)
    ]
    return [
        (model.token_embedding, below("token_embedding", "position_embedding"), False),
        *blocks,
        (model.blocks[-1], below("final_norm", "lm_head"), True),
    ]
