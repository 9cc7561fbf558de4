"""none, ddp and zero1: parameters, gradients and masters in flat buffers, reduced while the backward pass goes on.

    compute   [total] run's dtype   the module's parameters are views of it
    gradient  [total] float32       main gradient: the sum over micro-batches, and after the reduction over ranks
    masters   float32               ddp: whole; zero1: this rank's piece of each bucket (float32 runs: compute itself)

A bucket is a contiguous range of the buffers whose gradients are reduced together. Parameters stand in the order in
which the backward pass finishes them, those with weight decay first, so that buckets fill one after the other: on the
last micro-step a full bucket is sent off (ddp: all-reduce, zero1: reduce-scatter, or an exchange that comes to the
same) while backward computes the next.
Each bucket is padded so that it divides evenly between the ranks; zero1 keeps 1/world_size of each, and gathers the
updated weights while the next forward pass runs (see gathers.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mfubench.config import CommunicationConfig
from mfubench.model import Decoder
from mfubench.model.weight_gradient import Linear, MainGradient
from mfubench.train.buckets import Bucket, Slot, plan_buckets
from mfubench.train.exchange import Exchange, gather_parts, symmetric_zeros
from mfubench.train.gathers import WeightGathers
from mfubench.train.process import Process


@dataclass(frozen=True)
class Piece:
    """A contiguous piece of master weights that this rank's optimizer owns."""

    master: Tensor  # float32
    decay: bool  # weight decay applies
    compute: Tensor | None = None  # the same weights as the module computes with, where they are not the master itself


@dataclass(frozen=True)
class Fragment:
    """Elements [start, start + length) of a flattened parameter, which are elements of a piece."""

    name: str
    shape: torch.Size  # of the whole parameter
    start: int
    length: int
    piece: int  # index into `pieces`
    piece_start: int


class Engine(Protocol):
    """What the step function, the optimizer and the checkpoint need to know of a parallelism."""

    pieces: list[Piece]
    divisor: float  # the accumulated gradient is `divisor` times the mean over the global batch
    sharded: bool  # pieces of the ranks are parts of a whole (zero1, fsdp), not copies of it (none, ddp)
    copies: int  # where they are parts: ranks that hold the same one (fsdp with shard_ranks)

    def begin_micro_step(self, first: bool, last: bool) -> None: ...
    def finish_backward(self) -> None: ...
    def gradients(self) -> list[Tensor]: ...
    def normed(self) -> list[Tensor]: ...  # what this rank adds to the norm of all gradients
    def publish(self, rounded: bool = False) -> None: ...
    def settle(self) -> None: ...  # collective: after it the weights are whole on every rank

    # one tensor a piece (masters, or a moment of AdamW) as named tensors of a checkpoint, and back
    def fragments(self) -> Iterator[Fragment]: ...
    def export(self, tensors: list[Tensor]) -> dict[str, Tensor]: ...
    def targets(self, tensors: list[Tensor]) -> dict[str, Tensor]: ...
    def take(self, tensors: list[Tensor], loaded: dict[str, Tensor]) -> None: ...


class FlatEngine:
    """none, ddp (`shard=False`) and zero1 (`shard=True`)."""

    def __init__(
        self,
        module: nn.Module,
        initial: Iterable[tuple[str, Tensor]],
        *,
        process: Process,
        gradient_accumulation_steps: int,
        shard: bool,
        communication: CommunicationConfig | None = None,
        exchange: bool = False,
    ):
        """Move the module's parameters into flat buffers; `initial` yields name and float32 value of each.

        exchange: sums over the ranks are made by exchange (see exchange.py), not by a collective that adds.
        """
        self.process = process
        self.sharded, self.copies = shard, 1
        self.divisor = float(gradient_accumulation_steps * process.world_size)
        self.communication = communication or CommunicationConfig()
        self.buckets = plan_buckets(module, process.world_size, self.communication)
        self.slots = {slot.name: slot for bucket in self.buckets for slot in bucket.slots}
        total = self.buckets[-1].end
        dtype = next(module.parameters()).dtype
        make = symmetric_zeros if exchange else torch.zeros
        self.compute = (make if shard else torch.zeros)(total, dtype=dtype, device=process.device)
        self.gradient = make(total, dtype=torch.float32, device=process.device)
        largest = max(bucket.end - bucket.start for bucket in self.buckets)
        self.exchange = Exchange(largest, process.world_size, process.device) if exchange else None
        if dtype == torch.float32:
            self.masters = self.compute
        else:
            owned = total // process.world_size if shard else total
            self.masters = torch.zeros(owned, dtype=torch.float32, device=process.device)
        self.pieces = [Piece(self.master_of(bucket), bucket.decay, self.compute_of(bucket)) for bucket in self.buckets]
        self.fill(initial)
        for bucket in self.buckets:
            for slot in bucket.slots:
                self.adopt(slot, bucket)
        self.first = self.last = True
        self.overwrite = torch.ones((), dtype=torch.bool)  # `first`, for matmuls that accumulate
        self.sent = 0  # buckets whose reduction has begun
        self.works: list[Any] = []
        self.gathers: WeightGathers | None = None  # zero1, where they overlap with the forward pass

    def overlap_gathers(self, model: Decoder, whole: bool) -> None:
        """zero1: from now on gather updated weights while the forward pass runs."""
        self.gathers = WeightGathers(self.buckets, self.gather)
        self.gathers.watch(model, whole)

    # --- layout -------------------------------------------------------------------------------------------------------

    def owned_range(self, bucket: Bucket) -> tuple[int, int]:
        """Start and end, in the flat buffers, of the part of a bucket whose masters this rank keeps."""
        return self.share_of(bucket) if self.sharded else (bucket.start, bucket.end)

    def share_of(self, bucket: Bucket) -> tuple[int, int]:
        """Start and end, in the flat buffers, of this rank's share of a bucket, whether it owns that alone or not."""
        size = (bucket.end - bucket.start) // self.process.world_size
        start = bucket.start + self.process.rank * size
        return start, start + size

    def master_of(self, bucket: Bucket) -> Tensor:
        start, end = self.owned_range(bucket)
        if self.masters is self.compute:
            return self.masters[start:end]
        offset = bucket.start // self.process.world_size if self.sharded else bucket.start
        return self.masters[offset : offset + end - start]

    def compute_of(self, bucket: Bucket) -> Tensor | None:
        start, end = self.owned_range(bucket)
        return None if self.masters is self.compute else self.compute[start:end]

    @torch.no_grad()
    def fill(self, initial: Iterable[tuple[str, Tensor]]) -> None:
        """Set compute weights and masters from whole float32 parameters."""
        fragments: dict[str, list[Fragment]] = {}
        for fragment in self.fragments():
            fragments.setdefault(fragment.name, []).append(fragment)
        for name, value in initial:
            slot, flat = self.slots[name], value.reshape(-1)
            self.compute[slot.start : slot.start + slot.numel].copy_(flat)
            for fragment in fragments.get(name, []):
                master = self.pieces[fragment.piece].master
                master[fragment.piece_start : fragment.piece_start + fragment.length].copy_(
                    flat[fragment.start : fragment.start + fragment.length]
                )

    def adopt(self, slot: Slot, bucket: Bucket) -> None:
        """Make a parameter a view of the compute buffer and catch its gradients."""
        parameter = slot.parameter
        parameter.data = self.compute[slot.start : slot.start + slot.numel].view(parameter.shape)
        gradient = self.gradient_of(slot)

        def accumulate(parameter: Tensor) -> None:
            """Add a micro-batch's gradient to the main gradient and free it. The first one overwrites: no zeroing."""
            if parameter.grad is None:  # a compiled graph in which the matmul itself has accumulated
                return
            if self.first and slot.arrivals == 1:
                gradient.copy_(parameter.grad)
            else:
                gradient.add_(parameter.grad)
            parameter.grad = None
            if self.last:
                self.count_down(bucket)

        parameter.register_post_accumulate_grad_hook(accumulate)

    def gradient_of(self, slot: Slot) -> Tensor:
        return self.gradient[slot.start : slot.start + slot.numel].view(slot.parameter.shape)

    def accumulate_in_matmul(self, layer: Linear, name: str, tied: bool = False) -> None:
        """Let a layer's backward pass add its weight's gradient to the main gradient itself.

        name: of the weight. tied: the weight is also used elsewhere, earlier in the forward pass. That part of its
        gradient comes later, by the parameter's own hook, and is added.
        """
        slot = self.slots[name]
        bucket = next(bucket for bucket in self.buckets if slot in bucket.slots)
        slot.arrivals = 2 if tied else 1
        ticket = torch.empty(0, device=self.gradient.device, requires_grad=True)
        # .data: a version counter of its own, or autograd would take every other layer's gradient for a change of this
        layer.main = MainGradient(self.gradient_of(slot).data, self.overwrite, ticket)

        def arrived(ticket: Tensor) -> None:
            ticket.grad = None
            if self.last:
                self.count_down(bucket)

        ticket.register_post_accumulate_grad_hook(arrived)

    def fragments(self) -> Iterator[Fragment]:
        """The parts of parameters that this rank keeps the masters of."""
        for index, bucket in enumerate(self.buckets):
            owned_start, owned_end = self.owned_range(bucket)
            for slot in bucket.slots:
                start, end = max(slot.start, owned_start), min(slot.start + slot.numel, owned_end)
                if start < end:
                    shape = slot.parameter.shape
                    yield Fragment(slot.name, shape, start - slot.start, end - start, index, start - owned_start)

    # --- one step -----------------------------------------------------------------------------------------------------

    def begin_micro_step(self, first: bool, last: bool) -> None:
        self.first, self.last = first, last
        self.overwrite.fill_(first)
        if first and self.gathers is not None:
            self.gathers.begin()
        if last:
            self.sent = 0
            self.works.clear()  # of a step that was broken off
            if self.exchange is not None:
                self.exchange.begin_step()
            for bucket in self.buckets:
                bucket.missing = sum(slot.arrivals for slot in bucket.slots)

    def count_down(self, bucket: Bucket) -> None:
        """Note one more finished gradient; send off what is complete, always in the order of the buckets."""
        bucket.missing -= 1
        while self.sent < len(self.buckets) and self.buckets[self.sent].missing == 0:
            if self.exchange is not None:
                bucket = self.buckets[self.sent]
                self.exchange.sum(self.gradient[bucket.start : bucket.end], self.part_of(bucket), not self.sharded)
            elif self.process.world_size > 1:
                self.works.append(self.reduce(self.buckets[self.sent]))
            self.sent += 1

    def part_of(self, bucket: Bucket) -> Tensor:
        """The gradients of `share_of`."""
        start, end = self.share_of(bucket)
        return self.gradient[start:end]

    def reduce(self, bucket: Bucket) -> Any:
        """Begin summing a bucket's gradients over the ranks; NCCL does it on a stream of its own."""
        whole = self.gradient[bucket.start : bucket.end]
        start, end = self.owned_range(bucket)
        scatters = self.sharded and self.process.on_cuda  # gloo knows no reduce-scatter in place
        own = self.gradient[start:end] if scatters else whole
        if self.communication.reduce_dtype == "bfloat16":
            sent = whole.to(torch.bfloat16)
            received = sent[start - bucket.start : end - bucket.start] if scatters else sent
            return Rounded(sum_over_ranks(received, sent), own, received)
        return sum_over_ranks(own, whole)

    def finish_backward(self) -> None:
        """Wait (on CUDA: make the stream wait) for the reductions."""
        if self.sent != len(self.buckets):
            idle = [slot.name for bucket in self.buckets for slot in bucket.slots if bucket.missing][:5]
            raise RuntimeError(f"no gradient reached some parameter of these buckets: {', '.join(idle)}")
        if self.gathers is not None:
            self.gathers.check()
        for work in self.works:
            work.wait()
        self.works.clear()
        if self.exchange is not None:
            self.exchange.finish()

    def gradients(self) -> list[Tensor]:
        """The main gradients of `pieces`, in the same order."""
        ranges = [self.owned_range(bucket) for bucket in self.buckets]
        return [self.gradient[start:end] for start, end in ranges]

    def normed(self) -> list[Tensor]:
        """The main gradients of which this rank takes the norm: its part of each bucket, in ddp too."""
        return [self.part_of(bucket) for bucket in self.buckets]

    @torch.no_grad()
    def publish(self, rounded: bool = False) -> None:
        """Masters -> compute weights; zero1 gathers what the other ranks have updated, now or in the next step.

        rounded: the optimizer has written the pieces' own compute weights already.
        """
        stale = self.masters is not self.compute and not rounded
        if not self.sharded:
            if stale:
                self.compute.copy_(self.masters)
            return
        for piece, bucket in zip(self.pieces, self.buckets, strict=True):
            start, end = self.owned_range(bucket)
            if stale:
                self.compute[start:end].copy_(piece.master)
        if self.gathers is None:
            self.settle()

    def gather(self, bucket: Bucket) -> Any:
        """Begin an all-gather of a bucket's updated weights."""
        start, end = self.owned_range(bucket)
        return gather_parts(self.compute[bucket.start : bucket.end], self.compute[start:end])

    @torch.no_grad()
    def settle(self) -> None:
        """zero1: gather all weights, and wait for them."""
        if self.gathers is not None:
            self.gathers.settle()
        elif self.sharded:
            for work in [self.gather(bucket) for bucket in self.buckets]:
                work.wait()

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def export(self, tensors: list[Tensor]) -> dict[str, Tensor]:
        """What this rank writes of one tensor a piece: whole parameters, each of one rank (zero1: on the host)."""
        exported = {}
        for index, bucket in enumerate(self.buckets):
            whole = tensors[index]
            if self.sharded:
                whole = torch.empty(bucket.end - bucket.start, device=tensors[index].device)
                gather_parts(whole, tensors[index]).wait()
            for slot in bucket.slots:
                if slot.start * self.process.world_size // self.buckets[-1].end == self.process.rank:
                    start = slot.start - bucket.start
                    part = whole[start : start + slot.numel].view(slot.parameter.shape)
                    exported[slot.name] = part.cpu() if self.sharded else part
        return exported

    def targets(self, tensors: list[Tensor]) -> dict[str, Tensor]:
        """Whole parameters to read into: views of the pieces, or (zero1) host memory for those with a part here."""
        if self.sharded:
            return {fragment.name: torch.empty(fragment.shape) for fragment in self.fragments()}
        return {
            fragment.name: tensors[fragment.piece][fragment.piece_start :][: fragment.length].view(fragment.shape)
            for fragment in self.fragments()
        }

    def take(self, tensors: list[Tensor], loaded: dict[str, Tensor]) -> None:
        """Copy what was read into the pieces, where `targets` were not views of them."""
        if not self.sharded:
            return
        for fragment in self.fragments():
            part = loaded[fragment.name].view(-1)[fragment.start : fragment.start + fragment.length]
            tensors[fragment.piece][fragment.piece_start : fragment.piece_start + fragment.length].copy_(part)


@dataclass(frozen=True)
class Rounded:
    """A reduction of rounded gradients under way: once it has come, the sum goes back among the float32 ones."""

    work: Any
    target: Tensor
    received: Tensor  # bfloat16

    def wait(self) -> None:
        self.work.wait()
        self.target.copy_(self.received)


def sum_over_ranks(own: Tensor, whole: Tensor) -> Any:
    """Begin summing `whole` over the ranks; `own`, a part of it or all, is what this rank needs of the sum."""
    if own.numel() == whole.numel():
        return dist.all_reduce(whole, async_op=True)
    return dist.reduce_scatter_tensor(own, whole, async_op=True)
