"""quack's matmuls, with and without SwiGLU in their epilogue, as variants of a case; quack is optional."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mfubench.model.fused.mlp_matmul import unweave, weave

# Without dependencies, since nvidia-cutlass-dsl's are its part for CUDA 12 as well; what else these import
# (cuda-bindings, triton) comes with torch's builds for CUDA 13. Not with --target: gemm_gated and gemm_dgated raise a
# TypeError where no folder above them is called site-packages.
INSTALL = (
    "pip install --no-deps quack-kernels==0.6.5 apache-tvm-ffi==0.1.15.post2 nvidia-cutlass-dsl==4.7.1 "
    "nvidia-cutlass-dsl-libs-base==4.7.1 nvidia-cutlass-dsl-libs-core==4.7.1 nvidia-cutlass-dsl-libs-cu13==4.7.1"
)
# Configurations for Hopper: rows and columns of a tile, whether warp groups take turns, cluster. quack's own choice is
# (128, 192, True, 2, 1).
CONFIG_KEYS = ("tile_m", "tile_n", "pingpong", "cluster_m", "cluster_n")
PLAIN = ((128, 256, False, 2, 1), (256, 128, False, 2, 1), (256, 192, False, 2, 1), (256, 128, False, 1, 2))
GATED = (*PLAIN[:3], (128, 192, True, 1, 2), (128, 128, True, 2, 1))
DGATED = ((128, 128, True, 2, 1), (256, 128, False, 2, 1), (128, 160, True, 2, 1), (256, 160, False, 2, 1))

Results = tuple[Tensor, ...]


@dataclass(frozen=True)
class Variant:
    """One way to do a case's work."""

    system: str
    name: str
    call: Callable[[], Results]
    arrange: Callable[[Results], Results] = lambda results: results  # into the layout of the case's first variant
    prepare: Callable[[], object] = lambda: None  # before a call whose results are compared


class Quack:
    """quack's functions at its own choice of configuration and, on Hopper, at a handful of others.

    interface: quack.gemm_interface, make_config: quack.gemm_config.GemmConfig.
    """

    def __init__(self, interface: Any, make_config: Callable[..., Any], version: str, hopper: bool):
        self.interface, self.make_config, self.version, self.hopper = interface, make_config, version, hopper

    def matmul(
        self, left: Tensor, right: Tensor, out: Tensor, prepare: Callable[[], object], add: bool = False
    ) -> list[Variant]:
        """out [N, M] = left [N, K] @ right [K, M], or += it where `add`."""

        def call(config: Any) -> Results:
            self.interface.gemm_tuned.fn(left, right, out, add_to_output=add, config=config)
            return (out,)

        return self.variants("gemm", PLAIN, call, prepare=prepare)

    def gated(self, inputs: Tensor, weight: Tensor) -> list[Variant]:
        """gate_up [N, 2I] = inputs [N, H] @ weight [2I, H].T, and its product silu(gate) * up [N, I]."""
        right, width = weave(weight, 0).t(), len(weight) // 2
        gate_up, product = inputs.new_empty(len(inputs), 2 * width), inputs.new_empty(len(inputs), width)

        def call(config: Any) -> Results:
            outputs = {"preact_out": gate_up, "postact_out": product}
            return self.interface.gemm_gated(inputs, right, activation="swiglu", **outputs, tuned=False, config=config)

        prepare = functools.partial(forget, gate_up, product)
        return self.variants("gemm_gated", GATED, call, arrange=apart, prepare=prepare)

    def dgated(self, grad: Tensor, weight: Tensor, gate_up: Tensor) -> list[Variant]:
        """Gradient of gate_up [N, 2I] where the product's is grad [N, H] @ weight [H, I]; and the product [N, I]."""
        woven = weave(gate_up)
        gradient, product = torch.empty_like(gate_up), grad.new_empty(len(grad), weight.shape[1])

        def call(config: Any) -> Results:
            outputs = {"dx_out": gradient, "postact_out": product, "dynamic_scheduler": config is None}
            return self.interface.gemm_dgated(
                grad, weight, woven, activation="swiglu", **outputs, tuned=False, config=config
            )

        prepare = functools.partial(forget, gradient, product)
        return self.variants("gemm_dgated", DGATED, call, arrange=apart, prepare=prepare)

    def variants(self, kind: str, choices: Sequence[tuple], call: Callable[..., Results], **more: Any) -> list[Variant]:
        """`call(config)` with None, which is quack's own choice, and with one object for each of the others: quack keys
        its plans by identity."""
        found = [Variant("quack", f"{kind} default", functools.partial(call, None), **more)]
        for choice in choices if self.hopper else ():
            config = self.make_config(**dict(zip(CONFIG_KEYS, choice, strict=True)), is_dynamic_persistent=False)
            m, n, pingpong, cluster_m, cluster_n = choice
            name = f"{kind} {m}x{n} {'pingpong' if pingpong else 'cooperative'} {cluster_m}x{cluster_n}"
            found.append(Variant("quack", name, functools.partial(call, config), **more))
        return found


def forget(*outputs: Tensor) -> None:
    """Fill with NaN, so that what a variant does not write is not another's result."""
    for output in outputs:
        output.fill_(math.nan)


def apart(results: Results) -> Results:
    """(gate_up [N, 2I], product): columns gate and up in turn -> all of gate first."""
    gate_up, product = results
    return unweave(gate_up), product


def load_quack() -> Quack | None:
    """None, and a line that says what to do, where it cannot be had."""
    try:
        import quack
        from quack import gemm_interface
        from quack.gemm_config import GemmConfig
    except Exception as error:  # beside another version of its compiler it raises errors of many kinds
        print(f"without quack ({type(error).__name__}: {' '.join(str(error).split())[:150]}): {INSTALL}", flush=True)
        return None
    return Quack(gemm_interface, GemmConfig, quack.__version__, torch.cuda.get_device_capability()[0] == 9)
