"""fsdp: FSDP2's fully_shard, with float32 masters that are the shards themselves.

Two ways to spend memory, chosen by what fits or by communication.reshard_after_forward:

- weights kept (within a step): gathered once, used by all micro-steps, gradients accumulated whole in float32 and
  reduce-scattered once, on the last micro-step. Communication as with zero1; memory 2 + 4 bytes a parameter (bfloat16
  weights, float32 gradients) beside the shards' 18/world_size. Matmuls may write and add to those gradients themselves.
- weights resharded: gathered for each forward and each backward, gradients reduce-scattered in each micro-step. The
  least memory (one block at a time), and accumulation_steps times the communication.

Gathered and reduced together is what a block holds, and beside the blocks the embedding and the head, each by itself; a
weight that both share is gathered first and reduced last.

Where gradients are whole and matmuls write them, they may be summed by exchange, and weights be gathered by copy
engines (exchange.py): neither takes a multiprocessor from the matmuls beside it.

With communication.shard_ranks below the number of ranks, weights are sharded among that many neighbours, and the groups
hold copies: gathers and scatters stay within a group (a node, say), and only the owned part of the gradient is summed
over the groups, on the last micro-step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from mfubench.config import CommunicationConfig, RunConfig
from mfubench.decisions import GIB, fsdp_keeps_weights, fsdp_without_sum
from mfubench.flops import count_parameters
from mfubench.model import Decoder
from mfubench.model.decoder import Head
from mfubench.model.weight_gradient import Linear, MainGradient
from mfubench.train.buckets import ALIGNMENT, round_up
from mfubench.train.exchange import symmetric_zeros
from mfubench.train.fsdp_buffers import (
    Arrivals,
    GatherBuffer,
    ScatterBuffer,
    numel_sent,
    padded_sizes,
    take_over_copies,
)
from mfubench.train.parallel import Fragment, Piece
from mfubench.train.process import Process


class FsdpEngine:
    """A model whose blocks, embedding, head and remainder are sharded over all ranks by rows (dimension 0)."""

    sharded = True

    def __init__(
        self,
        model: Decoder,
        *,
        dtype: torch.dtype,
        process: Process,
        gradient_accumulation_steps: int,
        keeps_weights: bool,
        communication: CommunicationConfig | None = None,
        exchange: bool = False,
    ):
        """`model` is on the meta device, in float32; it is sharded, allocated and initialised here.

        keeps_weights: whole, within a step (the function of that name). exchange: for a run that keeps them, whose
        matmuls accumulate, sharded among all ranks.
        """
        self.divisor = float(gradient_accumulation_steps)  # fully_shard itself averages over the ranks
        self.device = process.device
        communication = communication or CommunicationConfig()
        self.keeps_weights = keeps_weights
        ranks = communication.shard_ranks or process.world_size
        self.copies = process.world_size // ranks  # of each shard, over all ranks
        kept = "kept within a step" if self.keeps_weights else "resharded after each use"
        self.description = f"gathered weights are {kept}, sharded among {ranks} ranks"
        mesh = make_mesh(process, ranks)
        self.group = mesh.get_group(mesh.ndim - 1)
        self.exchanges, self.gathered_ahead = exchange, communication.prefetch_blocks
        take_over_copies()
        # inputs are not cast: the RoPE tables stay float32, as under every other parallelism
        reduce_dtype = getattr(torch, communication.reduce_dtype)
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
        after_forward = not self.keeps_weights
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=after_forward)
        if not model.config.tie_word_embeddings:  # one weight can only be in one place: the root's
            fully_shard(model.token_embedding, mesh=mesh, mp_policy=policy, reshard_after_forward=after_forward)
            shard_head(model.lm_head, mesh, policy)
        self.root: FSDPModule = fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=after_forward)
        if communication.prefetch_blocks > 1:  # one ahead is what fully_shard does by itself
            prefetch(list(model.blocks), communication.prefetch_blocks)
        register_fsdp_forward_method(model, "generate")
        model.to_empty(device=process.device)
        model.tie_weights()
        model.build_rope_tables()
        self.parameters = sharded_parameters(model)
        self.shard_ranks = ranks
        self.gather_buffers: list[GatherBuffer] = []
        rounded = self.round_shards(dtype)
        if exchange:
            self.gather_by_copies(dtype)
        local = {name: parameter.detach().to_local() for name, parameter in self.parameters.items()}
        self.owned = [name for name in local if local[name].numel()]  # a rank may own no row of a small tensor
        self.pieces = [
            Piece(local[name], decay=self.parameters[name].dim() >= 2, compute=rounded.get(self.parameters[name]))
            for name in self.owned
        ]
        self.fill(model.initial_parameters(process.device))
        self.whole_gradients: dict[Any, Tensor] = {}  # FSDPParam -> float32, where matmuls accumulate
        self.summed: list[Tensor] = []  # those of them that fully_shard adds to, so that they begin with zeros
        self.scatter_buffers: dict[FSDPModule, ScatterBuffer] = {}
        self.received: Tensor | None = None  # of an exchange, by one module after the other
        if exchange:
            self.sum_by_exchange()
        self.overwrite = torch.ones((), dtype=torch.bool)  # first micro-step, for matmuls that accumulate

    @torch.no_grad()
    def fill(self, initial: Iterable[tuple[str, Tensor]]) -> None:
        """Set the shards from whole float32 parameters, one at a time."""
        for name, value in initial:
            parameter = self.parameters[name]
            shard = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.to_local().copy_(shard.to_local())
        self.publish()

    def round_shards(self, dtype: torch.dtype) -> dict[Tensor, Tensor]:
        """Parameter -> its shard as it is gathered; none where that is the float32 shard itself."""
        rounded: dict[Tensor, Tensor] = {}
        modules = [sharded_by(module) for module in sharded_modules(self.root)] if dtype != torch.float32 else []
        memory = self.zeros([numel_sent(parameters) for parameters in modules], dtype)
        for parameters, part in zip(modules, memory, strict=True):
            buffer = GatherBuffer(parameters, part)
            self.gather_buffers.append(buffer)
            rounded.update(zip((parameter.sharded_param for parameter in parameters), buffer.shards, strict=True))
        return rounded

    def zeros(self, numbers: Sequence[int], dtype: torch.dtype) -> Sequence[Tensor]:
        """Zeros of their own, or one after the other in memory that the other ranks can write to."""
        if not (self.exchanges and numbers):
            return [torch.zeros(number, dtype=dtype, device=self.device) for number in numbers]
        places = [round_up(number, ALIGNMENT) for number in numbers]
        memory = symmetric_zeros(sum(places), dtype, self.device, self.group)
        return [part[:number] for part, number in zip(memory.split(places), numbers, strict=True)]

    def gather_by_copies(self, dtype: torch.dtype) -> None:
        """Let copy engines gather: modules of one size share a few slots, in which all ranks' shards arrive."""
        by_size: dict[int, list[FSDPModule]] = {}
        for module in sharded_modules(self.root):
            by_size.setdefault(numel_sent(sharded_by(module)), []).append(module)
        slots = [min(len(modules), 1 + self.gathered_ahead) for modules in by_size.values()]
        numbers = [count * self.shard_ranks * sent for count, sent in zip(slots, by_size, strict=True)]
        for count, modules, memory in zip(slots, by_size.values(), self.zeros(numbers, dtype), strict=True):
            arrivals = Arrivals(memory, count)
            for module in modules:
                module.set_custom_all_gather(arrivals)  # type: ignore[arg-type]  # its base class is in a private module

    def sum_by_exchange(self) -> None:
        """Make all modules' buffers of whole gradients where the other ranks can write, and what they receive."""
        modules = list(sharded_modules(self.root))
        numbers = [sum(padded_sizes(shapes_of(module), self.shard_ranks)) for module in modules]
        self.received, *memory = self.zeros([max(numbers), *numbers], torch.float32)
        for module, part in zip(modules, memory, strict=True):
            self.scatter_from(module, part)
            # fully_shard adds up what no matmul does, and lays several parameters out otherwise than they are sent
            if self.divisor > 1 or len(sharded_by(module)) > 1:
                self.keep_whole(module)

    def accumulate_in_matmul(self, layer: Linear, name: str, tied: bool = False) -> None:
        """Let a layer's backward pass add its weight's gradient to a whole one in float32, which is reduced at the end.

        It takes the place of the sum that fully_shard makes of micro-steps without communication: a private attribute,
        which torch has had under this name since 2.4. What autograd brings of a tied weight is added to it there.
        """
        module, sharded = sharded_weight(self.root, layer)
        if sharded not in self.whole_gradients:
            self.keep_whole(module)
        total = self.whole_gradients[sharded]
        ticket = torch.empty(0, device=total.device, requires_grad=True)
        ticket.register_post_accumulate_grad_hook(forget_gradient)
        layer.main = MainGradient(total, self.overwrite, ticket)
        self.summed = [gradient for gradient in self.summed if gradient is not total]

    def scatter_from(self, module: FSDPModule, memory: Tensor) -> None:
        """Let `module` reduce its gradients from a ScatterBuffer in `memory`."""
        buffer = ScatterBuffer(shapes_of(module), self.shard_ranks, memory, self.received)
        module.set_custom_reduce_scatter(buffer)  # type: ignore[arg-type]  # its base class is in a private module
        self.scatter_buffers[module] = buffer

    def keep_whole(self, module: FSDPModule) -> None:
        """Whole float32 gradients, where they are reduced, for all parameters that `module` reduces together."""
        if module not in self.scatter_buffers:
            numel = sum(padded_sizes(shapes_of(module), self.shard_ranks))
            self.scatter_from(module, torch.zeros(numel, device=self.device))
        gradients = self.scatter_buffers[module].gradients
        self.whole_gradients.update(zip(sharded_by(module), gradients, strict=True))
        self.summed += gradients

    def begin_micro_step(self, first: bool, last: bool) -> None:
        self.overwrite.fill_(first)
        if first and self.summed:
            torch._foreach_zero_(self.summed)
        for sharded, gradient in self.whole_gradients.items():
            sharded.unsharded_accumulated_grad = gradient
        if first:
            for parameter in self.parameters.values():
                parameter.grad = None
        if self.keeps_weights:
            self.root.set_requires_gradient_sync(last)
            self.root.set_reshard_after_backward(last)
        elif self.copies > 1:
            self.root.set_requires_all_reduce(last)
        self.root.set_is_last_backward(last)

    def finish_backward(self) -> None:
        """fully_shard has made the stream wait already."""

    def gradients(self) -> list[Tensor]:
        gradients = []
        for name in self.owned:
            gradient = self.parameters[name].grad
            assert isinstance(gradient, DTensor)
            gradients.append(gradient.to_local())
        return gradients

    def normed(self) -> list[Tensor]:
        return self.gradients()

    @torch.no_grad()
    def publish(self, rounded: bool = False) -> None:
        """Masters -> rounded shards, which the next forward pass gathers; rounded: the optimizer has done so."""
        for piece in self.pieces if not rounded else ():
            if piece.compute is not None:
                piece.compute.copy_(piece.master)

    def settle(self) -> None:
        """Whoever calls the model has its weights gathered."""

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def fragments(self) -> Iterator[Fragment]:
        """The parts of parameters that this rank owns. Their `start` is not needed for what they are used for."""
        for index, name in enumerate(self.owned):
            parameter = self.parameters[name]
            yield Fragment(name, parameter.shape, 0, self.pieces[index].master.numel(), index, 0)

    def export(self, tensors: list[Tensor]) -> dict[str, Tensor]:
        """One tensor a piece -> sharded tensors by parameter name, which share memory with them."""
        local = dict(zip(self.owned, tensors, strict=True))
        exported: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            part = local.get(name, parameter.detach().to_local())  # an empty part is as good as any other
            exported[name] = DTensor.from_local(
                part,
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
        return exported

    def targets(self, tensors: list[Tensor]) -> dict[str, Tensor]:
        return self.export(tensors)

    def take(self, tensors: list[Tensor], loaded: dict[str, Tensor]) -> None:
        """Nothing to do: `targets` shares memory with the pieces."""


def shard_head(head: Head, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    """Shard the head by itself: gathered while the last block computes, its gradient reduced while the backward pass
    goes on through the blocks.

    As a part of the root it would be gathered before the first block and reduced after the last gradient, with nothing
    to hide behind; with a vocabulary of 150,000 it is a sixth of a model of 1.8 billion parameters. Its forward pass is
    followed by its backward pass at once, so that it is not resharded in between.
    """
    fully_shard(head, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    register_fsdp_forward_method(head, Head.mean_loss.__name__)


def sharded_parameters(model: Decoder) -> dict[str, Any]:
    """Parameters by name: DTensors, though typed as the plain parameters they were made of."""
    return dict(model.named_parameters())


def make_mesh(process: Process, ranks: int) -> DeviceMesh:
    """Groups of `ranks` neighbours that share one copy of the weights; one group: a mesh of one dimension."""
    if ranks == process.world_size:
        return init_device_mesh(process.device.type, (ranks,))
    return init_device_mesh(
        process.device.type, (process.world_size // ranks, ranks), mesh_dim_names=("copies", "shards")
    )


def prefetch(blocks: list[Any], ahead: int) -> None:
    """Gather the weights of the `ahead` blocks to come, in either pass, while one computes."""
    for index, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 1 + ahead])
        block.set_modules_to_backward_prefetch(blocks[max(0, index - ahead) : index][::-1])


def keeps_weights(config: RunConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether whole weights and float32 gradients stay on each rank within a step of a run that computes in `dtype`."""
    parameters = count_parameters(config.model).total
    return bool(fsdp_keeps_weights(computing_in(config, dtype), parameters, capacity_gib(device)))


def no_whole_gradients(config: RunConfig, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why matmuls of a run that computes in `dtype` have no whole gradient to add to, or None where they have."""
    parameters = count_parameters(config.model).total
    return fsdp_without_sum(computing_in(config, dtype), parameters, capacity_gib(device))


def computing_in(config: RunConfig, dtype: torch.dtype) -> RunConfig:
    return config.model_copy(update={"dtype": str(dtype).removeprefix("torch.")})


def capacity_gib(device: torch.device) -> float:
    """Memory of a card; a CPU has enough for what is sharded on it."""
    return torch.cuda.get_device_properties(device).total_memory / GIB if device.type == "cuda" else math.inf


def forget_gradient(ticket: Tensor) -> None:
    ticket.grad = None


def sharded_modules(root: FSDPModule) -> Iterator[FSDPModule]:
    for module in root.modules():  # type: ignore[attr-defined]
        if isinstance(module, FSDPModule) and sharded_by(module):
            yield module


def sharded_by(module: FSDPModule) -> list[Any]:
    """fully_shard's own objects (FSDPParam) for what `module` gathers and reduces."""
    group = module._get_fsdp_state()._fsdp_param_group
    return group.fsdp_params if group is not None else []


def shapes_of(module: FSDPModule) -> list[torch.Size]:
    """Of the whole parameters that `module` gathers and reduces."""
    return [parameter.sharded_param.shape for parameter in sharded_by(module)]


def sharded_weight(root: FSDPModule, layer: Linear) -> tuple[FSDPModule, Any]:
    """The module with which a layer's weight is reduced, and fully_shard's own object (FSDPParam) for it."""
    for module in sharded_modules(root):
        for sharded in sharded_by(module):
            owners = sharded._module_info
            if owners.param_name == "weight" and layer in (owners.module, *owners.shared_modules):
                return module, sharded
    raise LookupError(f"fully_shard knows no weight of {layer}")
