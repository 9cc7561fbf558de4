"""Kernel names of a real step on an H100 (torch 2.11, compiled blocks, cuDNN attention), and of other backends."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from mfubench.profiling.categories import (
    CATEGORIES,
    OTHER,
    category_of_kernel,
    category_of_operator,
)

H100_STEP = Path(__file__).parent / "h100_kernels.txt"  # total ms, count, name: 4 micro-steps and the optimizer

FSDP_PACKS = (  # what torch's fully_shard copies before it gathers and reduces, as a trace on an H200 named it
    "TensorListMetadata<2>, CopyFunctor<c10::BFloat16, float, 2, 1, 1>, at::native::Copy<c10::BFloat16, float> >",
    "TensorListMetadata<2>, UnaryOpFunctor<c10::BFloat16, 2, 1, 1>, at::native::Copy<c10::BFloat16, c10::BFloat16> >",
    "TensorListMetadata<1>, at::native::(anonymous namespace)::ZeroFunctor<float, 1, 1, 0>>",
)
KERNELS = {
    "matmul": [
        "nvjet_tst_192x192_64x4_2x1_v_bz_coopA_NNT",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_tn_align8>",
        "ampere_sgemm_128x64_tn",
        "triton_tem_fused_mm_t_0",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>",
    ],
    "attention": [
        "void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, false, false, cutlass::bfloat16_t>>",
        "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwdSm90<2>>>>",
        "kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90_object_at__tensorptrbf16_0",
        "fmha_cutlassF_f32_aligned_64x128_rf_sm80(PyTorchMemEffAttention::Params)",
        "void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, float, float, float, SoftMaxForwardEpilogue>",
    ],
    "norm": [
        "add_norm_forward_kernel",
        "rms_norm_forward_kernel",
        "_rms_norm_forward_kernel",
        "rmsnorm_backward",
        "_layer_norm_forward_kernel",
    ],
    "activation": ["swiglu_forward_kernel", "_swiglu_backward_kernel", "void at::native::silu_backward_kernel"],
    "rope": ["rope_forward_kernel", "rope_in_place_kernel", "_triton_rope", "rotary_kernel"],
    "optimizer": ["adamw_kernel", "fused_adamw_kernel"],
    "loss": ["liger_cross_entropy_kernel", "void cunn_SoftMaxForward<8, float, LogSoftMaxForwardEpilogue>"],
    "communication": [
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)",
        "Memcpy PtoP (Device -> Device)",
    ],
    "copy": [
        "Memcpy DtoD (Device -> Device)",
        "Memcpy HtoD (Pinned -> Device)",
        "Memset (Device)",
        *[f"void at::native::(anonymous namespace)::multi_tensor_apply_kernel<{name}" for name in FSDP_PACKS],
    ],
    "other": ["mysterious_thing_v2"],
}


def h100_kernels() -> list[tuple[float, int, str]]:
    rows = [line.strip().split(None, 2) for line in H100_STEP.read_text(encoding="utf-8").splitlines()]
    return [(float(ms), int(count), name) for ms, count, name in rows]


@pytest.mark.parametrize(("category", "name"), [(key, name) for key, names in KERNELS.items() for name in names])
def test_a_kernel_by_its_name(category: str, name: str):
    assert category_of_kernel(name) == category


def test_every_kernel_of_a_real_step_is_classified():
    names = [name for _, _, name in h100_kernels()]
    assert len(names) == 62
    assert [name for name in names if category_of_kernel(name) == OTHER] == []
    assert {category_of_kernel(name) for name in names} <= set(CATEGORIES)


def test_a_real_step_taken_apart_by_names():
    """Sums by hand from the file: matmuls are the five nvjet rows, attention the four cuDNN rows, and so on."""
    totals: Counter[str] = Counter()
    for milliseconds, _, name in h100_kernels():
        totals[category_of_kernel(name)] += milliseconds
    assert totals["matmul"] == pytest.approx(227.714 + 213.421 + 153.218 + 74.349 + 13.824)
    assert totals["attention"] == pytest.approx(70.536 + 24.703 + 7.588 + 6.047)
    assert totals["activation"] == pytest.approx(35.811 + 14.011)
    assert totals["rope"] == pytest.approx(14.456 + 12.700 + 8.293)
    assert totals["norm"] == pytest.approx(18.293 + 10.293 + 6.330 + 5.257 + 0.350 + 0.314 + 0.240 + 0.201)
    assert totals["residual"] == pytest.approx(6.876)
    assert totals["gradient accumulation"] == pytest.approx(18.047)
    assert totals["loss"] == pytest.approx(3.676 + 3.215 + 0.052 + 0.006)
    assert totals["elementwise"] < 2  # of 980: what a name alone does not tell


def test_the_operators_around_decide_where_a_name_does_not():
    copy = next(name for _, _, name in h100_kernels() if "direct_copy_kernel" in name)
    hook = ("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", "torch::autograd::AccumulateGrad")
    assert category_of_kernel(copy) == "cast"
    assert category_of_kernel(copy, (*hook, "aten::copy_")) == "gradient accumulation"
    multiply = (
        "void at::native::vectorized_elementwise_kernel<4, at::native::BinaryFunctor<float, MulFunctor<float> > >"
    )
    assert category_of_kernel(multiply) == "elementwise"
    assert category_of_kernel(multiply, ("aten::rms_norm", "aten::mul")) == "norm"
    cast = "triton_poi_fused__to_copy_exp_sub_1"
    assert category_of_kernel(cast) == "cast"
    assert category_of_kernel(cast, ("mfubench::chunked_cross_entropy", "Torch-Compiled Region: 1/0")) == "loss"
    assert category_of_kernel("nvjet_tst_192x192", (*hook, "aten::mm")) == "matmul"


@pytest.mark.parametrize(
    ("name", "host", "category"),
    [
        ("aten::mm", (), "matmul"),
        ("aten::addmm", ("aten::linear",), "matmul"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", ("aten::scaled_dot_product_attention",), "attention"),
        ("aten::_fused_rms_norm", ("aten::rms_norm",), "norm"),
        ("aten::rsqrt", ("aten::rms_norm", "aten::_fused_rms_norm"), "norm"),
        ("aten::silu_backward", ("SiluBackward0",), "activation"),
        ("aten::_log_softmax", ("aten::cross_entropy_loss",), "loss"),
        ("aten::exp", ("mfubench::chunked_cross_entropy",), "loss"),
        ("aten::mm", ("mfubench::chunked_cross_entropy",), "matmul"),
        ("aten::_softmax", (), "attention"),
        ("aten::add_", ("torch::autograd::AccumulateGrad",), "gradient accumulation"),
        ("aten::_fused_adamw_", ("Optimizer.step#AdamW.step",), "optimizer"),
        ("aten::copy_", (), "cast"),
        ("aten::mul", (), "elementwise"),
        ("aten::transpose", (), "host"),
        ("autograd::engine::evaluate_function: MulBackward0", (), "host"),
        ("CompiledFunctionBackward", (), "elementwise"),
        ("gloo:all_reduce", (), "communication"),
        ("mfubench::step", (), "host"),
    ],
)
def test_an_operator_of_a_cpu(name: str, host: tuple[str, ...], category: str):
    assert category_of_operator(name, host) == category
