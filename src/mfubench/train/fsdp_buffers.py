"""Buffers from which fully_shard gathers weights and scatters gradients, where both are made: nothing is copied there.

By itself fully_shard copies before each collective. Weights: the float32 shards are rounded into one tensor, and that
is copied into the place from which NCCL sends it. Gradients: those of a block, made elsewhere, are copied (and cast)
into a new buffer in which each rank's rows of all of them lie together, while nothing else runs. That is 10 bytes an
element of a shard and 6 or 8 of a whole gradient, in kernels that reach half the rate of memory and less.

`GatherBuffer` holds rounded shards, which the optimizer writes, one after the other as they are sent. `ScatterBuffer`
holds whole float32 gradients, which matmuls write, one after the other; NCCL scatters each by itself, all of them in
one launch. fully_shard's own two copies are operators of torch's, which `take_over_copies` replaces in this process:
what is in its place already stays there.

Both may lie in memory that the other cards can write to (`symmetric_zeros`). Weights are then gathered by the cards'
copy engines into `Arrivals`, and gradients summed by exchange, as under ddp and zero1 (exchange.py says why).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

FEW = 8  # pieces, tensors times ranks, up to which copies of each piece are faster than torch's one kernel, on an H200
library: torch.library.Library | None = None  # what was registered lasts as long as this object
gather_buffers: WeakValueDictionary[int, GatherBuffer] = WeakValueDictionary()  # by the address of their memory


def take_over_copies() -> None:
    """From now on fully_shard's copies in this process are `gathered_from` and `fill_scattered`."""
    global library
    if library is None:
        library = torch.library.Library("fsdp", "IMPL")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Warning only once for all operators")  # that they are replaced
            for device in ("CUDA", "CPU"):
                library.impl("all_gather_copy_in", gathered_from, device, allow_override=True)
                library.impl("chunk_cat", fill_scattered, device, allow_override=True)


# --- weights ----------------------------------------------------------------------------------------------------------


class GatherBuffer:
    """This rank's shards of what one module gathers, in the dtype of its weights, in the order of its parameters."""

    def __init__(self, parameters: Sequence[Any], buffer: Tensor):
        """parameters: fully_shard's own objects (FSDPParam), which from now on are gathered from `buffer`
        [`numel_sent` of them].
        """
        sizes = [parameter.padded_sharded_param_size for parameter in parameters]
        numbers = [math.prod(size) for size in sizes]
        self.buffer = buffer
        self.shards: list[Tensor] = []  # without rows of padding
        for parameter, size, part in zip(parameters, sizes, self.buffer.split(numbers), strict=True):
            local = parameter.sharded_param._local_tensor
            local.fsdp_pre_all_gather = handing_over(part.view(size))
            local.fsdp_post_all_gather = taking_as_it_is
            self.shards.append(part[: local.numel()].view(local.shape))
        gather_buffers[self.buffer.data_ptr()] = self


def numel_sent(parameters: Sequence[Any]) -> int:
    """Elements that a rank sends of what one module gathers."""
    return sum(math.prod(parameter.padded_sharded_param_size) for parameter in parameters)


class Arrivals:
    """Where copy engines put what modules of one size gather, for `FSDPModule.set_custom_all_gather`.

    fully_shard copies weights from there to where they are used, and lets a gather begin once those of the one before
    the last are copied; `slots` is therefore two, and one more for each further module that is gathered ahead.
    """

    def __init__(self, memory: Tensor, slots: int):
        """memory: [slots * what all ranks send], writable by the other ranks."""
        self.slots = memory.chunk(slots)
        self.count = 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        slot = self.slots[self.count % len(self.slots)]
        self.count += 1
        assert math.prod(size) <= slot.numel() and dtype == slot.dtype
        return slot[: math.prod(size)]

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


def handing_over(shard: Tensor) -> Callable[..., Any]:
    """The answer to fully_shard's question to a tensor that is gathered in another form than it is kept in: what to
    send. torch calls for a method of a subclass of Tensor, and looks for it once more before the first gather."""

    def fsdp_pre_all_gather(mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        return (shard,), None

    return fsdp_pre_all_gather


def taking_as_it_is(gathered: tuple[Tensor, ...], metadata: Any, dtype: Any, *, out: Tensor | None = None) -> Any:
    """And to its other one: the weight of what has been gathered, and what must be freed beside that (nothing)."""
    return None if out is not None else (gathered[0], ())


def gathered_from(
    all_gather_inputs: list[Tensor], all_gather_output: Tensor, inp_split_sizes: list[int], count: int, rank: int
) -> tuple[Tensor, Tensor]:
    """What this rank sends ([count]), and where all ranks' parts arrive.

    Shards of a GatherBuffer are sent from there: it keeps what NCCL reads until the optimizer, which waits for it, has
    new ones. Whatever else is handed over may be gone before it is sent, and is copied to where it arrives.
    """
    buffer = gather_buffers.get(all_gather_inputs[0].data_ptr())
    if buffer is not None and buffer.buffer.numel() == count:
        return buffer.buffer, all_gather_output
    own = all_gather_output.narrow(0, count * rank, count)
    torch._foreach_copy_(own.split(inp_split_sizes), all_gather_inputs)
    return own, all_gather_output


# --- gradients --------------------------------------------------------------------------------------------------------


class ScatterBuffer:
    """Whole float32 gradients of what one module reduces, in the order of its parameters, each padded with rows of
    zeros to as many as the ranks share evenly.

    For `FSDPModule.set_custom_reduce_scatter`: `allocate` and the call are what fully_shard asks of a communication.
    """

    def __init__(self, shapes: Sequence[torch.Size], ranks: int, buffer: Tensor, received: Tensor | None = None):
        """shapes: of the whole parameters, which are sharded by rows; buffer: zeros, `padded_sizes` of them in all.

        received: as large as the buffer or larger, writable by the other ranks as the buffer is: what one module after
        the other receives of an exchange. None: NCCL adds up.
        """
        self.ranks = ranks
        self.sizes = padded_sizes(shapes, ranks)
        self.buffer, self.received = buffer, received
        parts = self.buffer.split(self.sizes)
        # .data: a version counter of its own, or autograd would take every other gradient for a change of this one
        self.gradients = [part[: shape.numel()].view(shape).data for part, shape in zip(parts, shapes, strict=True)]

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The buffer itself where fully_shard asks for what it scatters, new memory for what it receives."""
        if math.prod(size) == self.buffer.numel() and dtype == self.buffer.dtype:
            return self.buffer
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Each gradient's rows to their ranks, in `output_tensor` one after the other as well."""
        assert input_tensor.data_ptr() == self.buffer.data_ptr() and not async_op
        received = output_tensor.split([size // self.ranks for size in self.sizes])
        if self.received is not None:
            self.exchange(received, self.received[: self.buffer.numel()], group, op)
            return
        together = dist._coalescing_manager(group) if input_tensor.is_cuda else nullcontext()
        with together:
            for own, whole in zip(received, self.buffer.split(self.sizes), strict=True):
                dist.reduce_scatter_tensor(own, whole, op=op, group=group)

    def exchange(self, sums: Sequence[Tensor], received: Tensor, group: dist.ProcessGroup, op: Any) -> None:
        """Every rank's rows of each gradient arrive in `received` and are added up in `sums`."""
        add = {dist.ReduceOp.SUM: torch.sum, dist.ReduceOp.AVG: torch.mean}[op]
        parts = list(zip(received.split(self.sizes), self.buffer.split(self.sizes), strict=True))
        for part, whole in parts:
            dist.all_to_all_single(part, whole, group=group)
        for own, (part, _) in zip(sums, parts, strict=True):
            add(part.view(self.ranks, -1), dim=0, out=own)


def padded_sizes(shapes: Sequence[torch.Size], ranks: int) -> list[int]:
    """Elements of whole parameters with as many rows as the ranks share evenly."""
    return [rows_a_rank(shape, ranks) * ranks * math.prod(shape[1:]) for shape in shapes]


def rows_a_rank(shape: torch.Size, ranks: int) -> int:
    """With padding: as many on each rank."""
    return math.ceil(shape[0] / ranks)


def fill_scattered(tensors: list[Tensor], dim: int, num_chunks: int, out: Tensor) -> None:
    """`torch._chunk_cat(tensors, dim, num_chunks, out=out)`; what was made in a buffer stays as it lies there.

    tensors: [rows, ...] each. out [num_chunks, …]: of each tensor, one after the other, ceil(rows / num_chunks) rows a
    chunk, zeros below the last. torch's kernel takes a chunk of a tensor for so little work that a single large one, an
    embedding's gradient, goes at a sixth of the rate of memory; of many tensors it makes the fewest launches.
    """
    buffer = out.untyped_storage().data_ptr()
    if all(tensor.untyped_storage().data_ptr() == buffer for tensor in tensors):
        return
    few = len(tensors) * num_chunks <= FEW
    if dim != 0 or not few or not all(tensor.is_contiguous() for tensor in tensors):
        torch._chunk_cat(tensors, dim, num_chunks, out=out)
        return
    sources: list[Tensor] = []
    targets: list[Tensor] = []
    start = 0
    for tensor in tensors:
        numbers = rows_a_rank(tensor.shape, num_chunks) * tensor[0].numel()  # of a chunk
        flat, place = tensor.view(-1), out[:, start : start + numbers]
        start += numbers
        for chunk, target in enumerate(place.unbind(0)):
            source = flat[chunk * numbers : (chunk + 1) * numbers]
            if len(source):
                sources.append(source)
                targets.append(target[: len(source)])
            if len(source) < numbers:
                target[len(source) :].zero_()
    torch._foreach_copy_(targets, sources)  # casts on its way
