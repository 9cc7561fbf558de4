"""Chrome traces as kineto writes them on CUDA, built by hand: times in microseconds, answers known beforehand."""

from __future__ import annotations

from typing import Any

HOST, MAIN, AUTOGRAD = 4711, 1, 2  # process, its main thread, autograd's
COMPUTE, NCCL_STREAM, COPIES = 7, 20, 14  # streams
BASE_NS = 1_790_000_000_000_000_000

GEMM = "nvjet_sm90_tst_192x192_64x4_2x1_v_bz_coopB_TNN"
CUTLASS = "cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_tn_align8"
XMMA = "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x"
FLASH = "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<128, 128, 64, 4>, false, true>"
CUDNN = "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x128_1x4x1_cga1x1x1_kernel0_0"
SWIGLU = "triton_poi_fused__unsafe_view_mul_silu_split_3"
NORM = "triton_red_fused__fused_rms_norm__unsafe_view_add_2"
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul> >"
ADAM = "void at::native::multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>, FusedAdamMathFunctor<float>>"
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


class Kineto:
    """Collects events; `launch` gives a kernel its call on the host and ties both with a correlation id."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "ts": 0.0, "pid": HOST, "tid": 0, "args": {"name": "python"}}
        ]
        self.correlation = 100

    def host(self, name: str, start: float, end: float, thread: int = MAIN, cat: str = "cpu_op", **args: Any) -> None:
        self.add(cat, name, start, end, HOST, thread, {"External id": len(self.events), **args})

    def step(self, start: float, end: float) -> None:
        self.host("mfubench::step", start, end, cat="user_annotation")

    def launch(
        self,
        name: str,
        at: float,
        start: float,
        end: float,
        stream: int = COMPUTE,
        thread: int = MAIN,
        cat: str = "kernel",
    ) -> None:
        """A kernel from `start` to `end` on a stream, launched by the host at `at`."""
        self.correlation += 1
        tie = {"correlation": self.correlation}
        self.add("cuda_runtime", "cudaLaunchKernelExC", at, at + 2, HOST, thread, dict(tie))
        shape = {"grid": [132, 1, 1], "block": [256, 1, 1]} if cat == "kernel" else {"bytes": 4096}
        self.add(cat, name, start, end, 0, stream, {"device": 0, "stream": stream, **shape, **tie})
        for phase, process, thread_id, time in (("s", HOST, thread, at), ("f", 0, stream, start)):
            self.events.append(
                {"ph": phase, "id": self.correlation, "pid": process, "tid": thread_id, "ts": time, "cat": "ac2g",
                 "name": "ac2g"} | ({"bp": "e"} if phase == "f" else {})
            )  # fmt: skip

    def add(self, cat: str, name: str, start: float, end: float, pid: int, tid: int, args: dict[str, Any]) -> None:
        self.events.append(
            {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": start, "dur": end - start, "args": args}
        )

    def trace(self) -> dict[str, Any]:
        return {"schemaVersion": 1, "baseTimeNanoseconds": BASE_NS, "traceEvents": self.events}


def one_step() -> Kineto:
    """A step of 1,000 us on the device, from 1,000 (the end of the step before) to 2,000.

    matmul 1000-1300, attention 1300-1400, gap 1400-1420 (launched at 1410: host 10, queue 10), activation 1420-1500,
    matmul backward 1500-1700 with an all-reduce 1600-1800 (hidden 100, exposed 100), gap 1800-1850 while the host waits
    for data from 1805 to 1840 and launches at 1845 (host 10, data 35, queue 5), optimizer 1850-2000.
    """
    kineto = Kineto()
    kineto.step(100, 900)
    kineto.launch(GEMM, 500, 700, 1000)  # of the step before
    kineto.step(950, 1900)
    kineto.host("aten::mm", 955, 970, **{"Input Dims": [[4096, 2048], [2048, 6144]]})
    kineto.launch(GEMM, 960, 1000, 1300)
    kineto.launch(FLASH, 980, 1300, 1400)
    kineto.launch(SWIGLU, 1410, 1420, 1500)
    kineto.host("autograd::engine::evaluate_function: MmBackward0", 1420, 1460, AUTOGRAD)
    kineto.launch(CUTLASS, 1430, 1500, 1700, thread=AUTOGRAD)
    kineto.launch(ALL_REDUCE, 1450, 1600, 1800, NCCL_STREAM, AUTOGRAD)
    kineto.host("mfubench::data", 1805, 1840, cat="user_annotation")
    kineto.launch(ADAM, 1845, 1850, 2000)
    return kineto
