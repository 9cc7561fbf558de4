"""Kernel names: sorted into kinds, and matched with the attention backend that is claimed."""

from __future__ import annotations

import pytest
import torch

from mfubench.model.kernels import classify, kernels_match, profile_kernels
from mfubench.run_log import Kernels

# Names as profilers show them, shortened within the template arguments.
SDPA = {
    "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<128, 128, 64, 4>, false, true>",
    "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<pytorch_flash::Flash_bwd_kernel_traits<128>>",
    "void pytorch_flash::flash_bwd_dot_do_o_kernel<true, pytorch_flash::Flash_bwd_kernel_traits<128, 64, 128, 8>>",
}
KERNELS = {
    "sdpa": SDPA,
    "cudnn": {
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_6_128x128x128_4x1x1_cga1x1x1_kernel0_0",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x128x128_4x1x1_cga1x1x1_kernel0_0",
        "void cudnn::fusion::compute_dot_do_o_specialized<true, __nv_bfloat16, 128, 128, 16, 128, false>",
        "void cudnn::fusion::convert_dq_to_16bits<true, __nv_bfloat16, 128, 128, 16, 128>",
    },
    "fa2": {
        "void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, false, false, cutlass::bfloat16_t>>",
        "void flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<128, 64, 128, 8>>",
    },
    "fa3": {
        "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwdSm90<2>>>>",
        "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnBwdSm90<flash::Mainloop>>>",
    },
    "fa4": {
        "kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90_object_at__tensorptrbf16_0",
        "kernel_cutlass_kernel_flash_attncuteflash_bwd_sm90FlashAttentionBackwardSm90_object_at__tensorptrbf16_0",
    },
    "eager": {
        "void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, float, float, float, SoftMaxForwardEpilogue>",
    },
}
OTHERS = {
    "nvjet_tst_192x192_64x4_2x1_v_bz_coopA_NNT",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel",
    # inductor names fused elementwise kernels after neighbours; none of these two is evidence
    "triton_poi_fused__scaled_dot_product_cudnn_attention_cat_view_3",
    "triton_red_fused__fused_rms_norm_mm_pytorch_flash_2",
    "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>",
    "void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, float, float, float, LogSoftMaxForwardEpilogue>",
}


@pytest.mark.parametrize("used", KERNELS)
@pytest.mark.parametrize("ran", KERNELS)
def test_kernels_prove_the_backend(used: str, ran: str) -> None:
    """None where the claim and the kernels agree, a sentence naming both everywhere else."""
    kernels = classify(KERNELS[ran] | OTHERS)
    verdict = kernels_match(used, kernels, "cuda")
    if used == ran:
        assert verdict is None
    else:
        assert verdict is not None and f"attention {used} was claimed" in verdict
        assert ran == "eager" or f"kernels of {ran} ran" in verdict


def test_two_backends_in_one_step_are_named() -> None:
    verdict = kernels_match("sdpa", classify(KERNELS["sdpa"] | KERNELS["cudnn"] | OTHERS), "cuda")
    assert verdict is not None and "cudnn and sdpa" in verdict


def test_float32_sdpa_is_the_memory_efficient_kernel() -> None:
    names = {"fmha_cutlassF_f32_aligned_64x128_rf_sm80(PyTorchMemEffAttention::Params)"}
    assert kernels_match("sdpa", classify(names | OTHERS), "cuda") is None


def test_no_kernels_prove_nothing() -> None:
    verdict = kernels_match("eager", Kernels(attention=[], matmul=[], other_count=0), "cuda")
    assert verdict is not None and "saw no kernels" in verdict


def test_classification() -> None:
    kernels = classify(KERNELS["cudnn"] | OTHERS)
    assert set(kernels.attention) == KERNELS["cudnn"]
    assert [name[:5] for name in kernels.matmul] == ["nvjet", "sm90_"]
    assert kernels.other_count == 4


def test_softmax_of_plain_attention_is_told_from_the_loss() -> None:
    assert set(classify(KERNELS["eager"] | OTHERS).attention) == KERNELS["eager"]
    assert classify({"triton_red_fused__log_softmax_1"} | OTHERS).attention == []


def test_profile_on_a_cpu() -> None:
    x = torch.randn(4, 4, requires_grad=True)
    kernels = profile_kernels(lambda: (x @ x).softmax(-1).relu().log_softmax(-1).sum().backward(), "cpu")
    assert kernels.matmul == ["aten::mm"]
    assert kernels.attention == ["aten::_softmax", "aten::_softmax_backward_data", "aten::softmax"]
    assert kernels.other_count >= 1
