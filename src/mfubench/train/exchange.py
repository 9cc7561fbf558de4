"""Sums over ranks by exchange: every rank is sent its part of all ranks' gradients, adds it up, and hands it round.

A reduction by NCCL is a kernel that holds some multiprocessors (24 of 132 on an H200) as long as it lasts. A matmul
whose tiles are dealt out to all of them beforehand then waits for those few and takes twice as long, however few they
are. An exchange is copies alone, which the cards' copy engines make, and a short sum. NCCL (2.28 and newer) leaves an
all-to-all and an all-gather between the cards of one node to them where the communicator's policy is to take no thread
block and all memory involved is registered as symmetric.

One rank adds up a part in float32, and all ranks take over what it has found: they hold the same bits.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from mfubench.config import ConfigError, RunConfig
from mfubench.decisions import EXCHANGE_SLOTS, EXCHANGES_BY_ITSELF, GIB
from mfubench.hardware import find_gpu

if TYPE_CHECKING:
    from mfubench.train.process import Process

NO_THREAD_BLOCK = ("2", "ZERO")  # what NCCL_CTA_POLICY calls it
OLDEST_NCCL, OLDEST_DRIVER = (2, 28), 12050
TRIAL_S = 60.0  # from the end of a trial on one rank to that on all: they wait for each other in it
FAILURES = (RuntimeError, AttributeError, TypeError, AssertionError, ImportError)  # of what torch or NCCL cannot do
# All symmetric memory, kept to the end: NCCL does not forget what is freed, and new memory may lie in its place.
_symmetric: list[Tensor] = []


def not_by_itself(config: RunConfig, device: torch.device) -> str | None:
    """Why `auto` does not choose an exchange here: it takes one for what was measured to be faster."""
    if config.parallelism not in EXCHANGES_BY_ITSELF:
        return f"{config.parallelism} sums by exchange where it is asked to"
    if device.type != "cuda":
        return "no CUDA"
    name = torch.cuda.get_device_name(device)
    try:
        linked = find_gpu(name).joins_all
    except ConfigError:
        return f"config/hardware.yaml does not know how cards of the kind {name} are linked"
    return None if linked else f"{name}: nobody has measured whether it is faster over PCIe and bridges"


def take_no_thread_blocks() -> None:
    """Let NCCL communicators that are made from now on move data by copy engines wherever they can."""
    if torch.cuda.nccl.version() >= OLDEST_NCCL:
        os.environ.setdefault("NCCL_CTA_POLICY", NO_THREAD_BLOCK[0])
        os.environ.setdefault("TORCH_SYMMMEM_IMPLICIT_POOL", "0")  # torch 2.11 has no pool of NCCL's memory


def missing_on(process: Process, complaint: str | None = None) -> str | None:
    """What the ranks lack for an exchange, the same words on all ranks; `complaint`: what this one knows of.

    Collective. What a rank may lack alone is told before anything that waits for all of them. Raises RuntimeError on a
    rank that fails alone all the same, see `try_together`.
    """
    for attempt in (lambda: complaint or missing_here(process), lambda: no_room(process)):
        if (words := first_of(process.gather(attempt()))) is not None:
            return words
    return first_of(try_together(process))


def first_of(complaints: list[str | None]) -> str | None:
    return next((words for words in complaints if words), None)


def missing_here(process: Process) -> str | None:
    if os.environ.get("LOCAL_WORLD_SIZE", str(process.world_size)) != str(process.world_size):
        return "an exchange stays within a node"
    version = torch.cuda.nccl.version()
    if version < OLDEST_NCCL:
        return f"NCCL {'.'.join(map(str, version))} has no collectives of copy engines; 2.28 and newer have"
    try:
        driver = driver_version()
    except Exception as error:  # each release of pynvml raises classes of its own
        return f"which CUDA the driver is of cannot be read: {words_of(error)}"
    if driver < OLDEST_DRIVER:
        return f"the driver is of CUDA {driver // 1000}.{driver % 1000 // 10}; copy engines need 12.5"
    if (policy := os.environ.get("NCCL_CTA_POLICY")) not in NO_THREAD_BLOCK:
        return f"NCCL_CTA_POLICY is {policy}, and copy engines need {NO_THREAD_BLOCK[0]}"
    others = (card for card in range(process.world_size) if card != process.local_rank)
    if not all(torch.cuda.can_device_access_peer(process.local_rank, card) for card in others):
        return "the cards cannot write to each other's memory"
    return None


def driver_version() -> int:
    """The CUDA that the driver is of, 12050 for 12.5."""
    import pynvml

    pynvml.nvmlInit()
    try:
        return pynvml.nvmlSystemGetCudaDriverVersion()
    finally:
        pynvml.nvmlShutdown()


def no_room(process: Process) -> str | None:
    try:
        symmetric_empty(1, torch.float32, process.device)
    except FAILURES as error:
        return words_of(error)
    return None


def try_together(process: Process) -> list[str | None]:
    """`wrong_sum` of every rank, in rank order. Collective.

    A rank that fails alone leaves the others waiting in it, where nobody can tell them so. It raises RuntimeError after
    TRIAL_S: the run ends with that cause, for the others' watchdogs see it.
    """
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=TRIAL_S))
    own = wrong_sum(process)
    found: list[str | None] = [None] * process.world_size
    try:
        dist.all_gather_object(found, own, group=group)
    except RuntimeError as error:
        raise RuntimeError(
            f"a trial of the exchange ended on rank {process.rank} ({own or 'with the right sum'}), and within "
            f"{TRIAL_S:.0f} s not on all others; communication.reduction: collective goes without"
        ) from error
    return found


def wrong_sum(process: Process) -> str | None:
    """What comes of a small exchange: None where it is the sum, else words."""
    numel = 1024 * process.world_size
    try:
        whole = symmetric_zeros(numel, torch.float32, process.device).fill_(process.rank + 1)
        exchange = Exchange(numel, process.world_size, process.device)
        exchange.sum(whole, whole.chunk(process.world_size)[process.rank], everywhere=True)
        exchange.finish()
        expected = process.world_size * (process.world_size + 1) / 2
        return None if bool((whole == expected).all()) else "a trial of it found a wrong sum"
    except FAILURES as error:
        return words_of(error)


def words_of(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def symmetric_empty(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[numel] of memory that may become symmetric; not of torch's allocator, not freed before the process ends."""
    import torch.distributed._symmetric_memory as symmetric

    size = numel * dtype.itemsize
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    if size > free:
        raise torch.OutOfMemoryError(f"CUDA out of memory: {size / GIB:.2f} GiB of {free / GIB:.2f} GiB that are free")
    symmetric.set_backend("NCCL")
    _symmetric.append(symmetric.empty(numel, dtype=dtype, device=device))
    return _symmetric[-1]


def symmetric_zeros(
    numel: int, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup | None = None
) -> Tensor:
    """[numel] zeros that, on CUDA, the cards of `group` (of all ranks) can write to. Collective. Only communication
    within that group finds it."""
    if device.type != "cuda":
        return torch.zeros(numel, dtype=dtype, device=device)
    import torch.distributed._symmetric_memory as symmetric

    tensor = symmetric_empty(numel, dtype, device)
    group = group or dist.group.WORLD
    assert group is not None
    symmetric.rendezvous(tensor, group)
    return tensor.zero_()


def symmetric_bytes() -> int:
    """Device memory of this process that torch's allocator does not count."""
    return sum(tensor.nbytes for tensor in _symmetric)


class Exchange:
    """Sums under way. For a bucket of n ranks x k elements:

        whole    [n * k] this rank's gradients; part r of it is added up by rank r
        received [n, k]  part `rank` of every rank
        own      [k]     their sum, in place of part `rank` of `whole`

    The parts of the next bucket set out before a sum is handed round: links do not wait for an addition, which itself
    waits for room between matmuls.
    """

    def __init__(self, largest: int, world_size: int, device: torch.device):
        """largest: elements of the largest bucket. Collective."""
        self.world_size, self.on_cuda = world_size, device.type == "cuda"
        self.received = [symmetric_zeros(largest, torch.float32, device) for _ in range(EXCHANGE_SLOTS)]
        if self.on_cuda:
            self.sending, self.adding = (torch.cuda.Stream(device, priority=-1) for _ in range(2))
        self.begin_step()

    def begin_step(self) -> None:
        """Forget what a step that was broken off has left."""
        self.added: list[Any] = []  # of each sum, on CUDA: when its slot was free again
        self.summed: tuple[Tensor, Tensor] | None = None  # to be handed round: whole, own
        self.works: list[Any] = []

    def sum(self, whole: Tensor, own: Tensor, everywhere: bool) -> None:
        """Begin summing `whole` over the ranks: into `own`, and with `everywhere` all sums into all of `whole`."""
        slot = len(self.added) % EXCHANGE_SLOTS
        received = self.received[slot][: whole.numel()]
        if self.on_cuda:
            self.sending.wait_stream(torch.cuda.current_stream())
            if len(self.added) >= EXCHANGE_SLOTS:
                self.sending.wait_event(self.added[-EXCHANGE_SLOTS])
        with self.on("sending"):
            exchanged = dist.all_to_all_single(received, whole, async_op=True)
        self.hand_round()
        with self.on("adding"):
            exchanged.wait()
            torch.sum(received.view(self.world_size, -1), dim=0, out=own)
            self.added.append(self.adding.record_event() if self.on_cuda else None)
        if everywhere:
            self.summed = whole, own

    def hand_round(self) -> None:
        """Begin sending the last sum to all ranks."""
        if self.summed is not None:
            whole, own = self.summed
            with self.on("adding"):
                self.works.append(gather_parts(whole, own))
            self.summed = None

    def finish(self) -> None:
        """Wait (on CUDA: make the stream wait) for all sums of this step."""
        self.hand_round()
        for work in self.works:
            work.wait()
        if self.on_cuda:
            torch.cuda.current_stream().wait_stream(self.adding)
            torch.cuda.current_stream().wait_stream(self.sending)
        self.begin_step()

    def on(self, stream: str) -> AbstractContextManager[Any]:
        return torch.cuda.stream(getattr(self, stream)) if self.on_cuda else nullcontext()


def gather_parts(whole: Tensor, own: Tensor) -> Any:
    """Begin an all-gather of every rank's part of `whole`; `own` is this rank's part of it."""
    if not own.is_cuda:
        own = own.clone()  # gloo reads its input while it writes the output
    return dist.all_gather_into_tensor(whole, own, async_op=True)
