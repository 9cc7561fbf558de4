"""Traces for the example studies: made up, in kineto's form, as long as the step of the run that they go with."""

from __future__ import annotations

from pathlib import Path

from profiling.kineto import (
    ADAM,
    ADD,
    ALL_REDUCE,
    AUTOGRAD,
    CUDNN,
    CUTLASS,
    FLASH,
    GEMM,
    NCCL_STREAM,
    NORM,
    SWIGLU,
    Kineto,
)

from mfubench.profiling.chrome_trace import CutStep, cut_step
from mfubench.profiling.trace_file import make_trace, write_trace

ROPE = "triton_poi_fused__to_copy_add_cat_mul_neg_slice_transpose_unsqueeze_2"
LOSS = "triton_red_fused__log_softmax__to_copy_prepare_softmax_online_0"
SWIGLU_BACKWARD = "triton_poi_fused__unsafe_view_cat_mul_silu_silu_backward_split_view_0"
HOOK = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"

# One micro-step: kernel, share of it, in the backward pass.
MICRO_STEP = (
    (NORM, 0.016, False), (GEMM, 0.248, False), (ROPE, 0.012, False), (FLASH, 0.026, False), (SWIGLU, 0.015, False),
    (LOSS, 0.007, False), (CUTLASS, 0.49, True), (CUDNN, 0.085, True), (SWIGLU_BACKWARD, 0.038, True),
    (ROPE, 0.024, True), (NORM, 0.03, True), (ADD, 0.009, True),
)  # fmt: skip
GAP = 0.0025  # between kernels, as a share of a micro-step


def example_step(step_us: float, micro_steps: int, rank: int = 0, world_size: int = 1) -> CutStep:
    """A step of about `step_us`: micro-steps, the last one's all-reduce in pieces, the optimizer."""
    kineto = Kineto()
    kineto.step(0, 90)
    kineto.launch(GEMM, 50, 100, 1000)  # of the step before
    kineto.step(95, 95 + step_us / 2)
    micro_us = 0.955 * step_us / micro_steps
    now, launch = 1000.0, 100.0
    for micro in range(micro_steps):
        for name, share, backward in MICRO_STEP:
            launch += 5
            if name == ADD:
                kineto.host(HOOK, launch - 1, launch + 3, AUTOGRAD)
            thread = AUTOGRAD if backward else 1
            kineto.host("MmBackward0" if backward else "aten::mm", launch - 0.5, launch + 2.5, thread)
            if backward and name != ADD:
                kineto.host("autograd::engine::evaluate_function: MmBackward0", launch - 0.8, launch + 2.8, AUTOGRAD)
            now += GAP * micro_us
            kineto.launch(name, launch, now, now + share * micro_us, thread=thread)
            now += share * micro_us
            if world_size > 1 and micro == micro_steps - 1 and backward and name in (CUTLASS, CUDNN, NORM):
                late = 0.01 * micro_us * rank
                kineto.launch(ALL_REDUCE, launch + 2, now - 0.05 * micro_us + late, now + 0.06 * micro_us, NCCL_STREAM)
    now += 0.03 * micro_us
    kineto.launch(ADAM, launch + 50, now, now + 0.012 * step_us)
    step = cut_step(kineto.trace(), rank)
    assert step is not None
    return step


def write_example_trace(folder: Path, case: str, step_s: float, micro_steps: int, world_size: int) -> None:
    """results/<study>/traces/<case>.json.gz; of two ranks at most, which is enough to be compared."""
    ranks = [example_step(1e6 * step_s, micro_steps, rank, world_size) for rank in range(min(world_size, 2))]
    write_trace(folder / "traces" / f"{case}.json.gz", make_trace(case, ranks))
