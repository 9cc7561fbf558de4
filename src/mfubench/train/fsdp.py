"""fsdp: FSDP2's fully_shard, with float32 masters that are the shards themselves.

Two ways to spend memory, chosen by what fits:

- weights kept (within a step): gathered once, used by all micro-steps, gradients accumulated whole in float32 and
  reduce-scattered once, on the last micro-step. Communication as with zero1; memory 2 + 4 bytes a parameter (bfloat16
  weights, float32 gradients) beside the shards' 16/world_size.
- weights resharded: gathered for each forward and each backward, gradients reduce-scattered in each micro-step. The
  least memory (one block at a time), and accumulation_steps times the communication.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from mfubench.model import Decoder
from mfubench.train.parallel import Fragment, Piece
from mfubench.train.process import Process

KEPT_FRACTION = 0.4  # of the device's memory that whole weights and gradients may take; the rest is for activations


class FsdpEngine:
    """A model whose blocks, and whose remainder, are sharded over all ranks by rows (dimension 0)."""

    sharded = True

    def __init__(
        self,
        model: Decoder,
        *,
        dtype: torch.dtype,
        process: Process,
        gradient_accumulation_steps: int,
    ):
        """`model` is on the meta device, in float32; it is sharded, allocated and initialised here."""
        self.divisor = float(gradient_accumulation_steps)  # fully_shard itself averages over the ranks
        self.keeps_weights = weights_fit(sum(p.numel() for p in model.parameters()), dtype, process)
        mesh = init_device_mesh(process.device.type, (process.world_size,))
        # inputs are not cast: the RoPE tables stay float32, as under every other parallelism
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=not self.keeps_weights)
        self.root: FSDPModule = fully_shard(
            model, mesh=mesh, mp_policy=policy, reshard_after_forward=not self.keeps_weights
        )
        register_fsdp_forward_method(model, "generate")
        model.to_empty(device=process.device)
        model.tie_weights()
        model.build_rope_tables()
        self.parameters = sharded_parameters(model)
        self.fill(model.initial_parameters(process.device))
        local = {name: parameter.detach().to_local() for name, parameter in self.parameters.items()}
        self.owned = [name for name in local if local[name].numel()]  # a rank may own no row of a small tensor
        self.pieces = [Piece(local[name], decay=self.parameters[name].dim() >= 2) for name in self.owned]

    @torch.no_grad()
    def fill(self, initial: Iterable[tuple[str, Tensor]]) -> None:
        """Set the shards from whole float32 parameters, one at a time."""
        for name, value in initial:
            parameter = self.parameters[name]
            shard = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.to_local().copy_(shard.to_local())

    def begin_micro_step(self, first: bool, last: bool) -> None:
        if first:
            for parameter in self.parameters.values():
                parameter.grad = None
        if self.keeps_weights:
            self.root.set_requires_gradient_sync(last)
            self.root.set_reshard_after_backward(last)
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

    def publish(self) -> None:
        """The masters are the parameters: the next forward pass gathers them."""

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


def sharded_parameters(model: Decoder) -> dict[str, Any]:
    """Parameters by name: DTensors, though typed as the plain parameters they were made of."""
    return dict(model.named_parameters())


def weights_fit(parameters: int, dtype: torch.dtype, process: Process) -> bool:
    """Whether whole weights and float32 gradients may stay on each rank within a step."""
    if not process.on_cuda:
        return True
    total = torch.cuda.get_device_properties(process.device).total_memory
    return parameters * (dtype.itemsize + 4) <= KEPT_FRACTION * total
